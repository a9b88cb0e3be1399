"""In-place updates of parameters and optimizer state.

The update rule lives in `kfs.optim.update_rule`, the recording of CUDA graphs in `kfs.runtime.cuda_graphs`.

On an accelerator, a flag says whether a step is taken (see `kfs.optim.preconditioner`). If it is false, nothing
changes.

The *age* of a parameter is the number of gradients that have entered its averages. Parameters with a common history
share one tensor, so that the host can update them together without knowing their age.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfs.optim.across_ranks import ReplicatedInverses
from kfs.optim.averages import copied_to
from kfs.optim.curvature import StepNotFiniteError
from kfs.optim.fsdp import local_part
from kfs.optim.options import Parameters
from kfs.optim.preconditioner import Preconditioner
from kfs.optim.quadratic_model import Trial, try_step
from kfs.optim.step_scale import displacement_factor, inner_product, next_numbers
from kfs.optim.update_rule import ParameterGroup, Scalar, Tensors, adamw_step, correction, natural_step
from kfs.problem.whole_parameters import is_sharded, sharded_like, whole
from kfs.runtime import sync
from kfs.runtime.cuda_graphs import NO_GUARD, Guard, Replayer, RunKey
from kfs.runtime.precision import at_least_float32, tf32, uses_tf32

log = logging.getLogger("kfs.optim")
State = MutableMapping[Tensor, dict[str, Any]]
_BETAS = (0.9, 0.95)
# Names of averages in the state of a parameter, by whether AdamW trains it.
_AVERAGES = {True: ("exp_avg", "exp_avg_sq"), False: ("average",)}


@dataclass(frozen=True)
class UpdateBatch:
    """Parameters of one group with the same age, which are updated with the same hyperparameters.

    Attributes:
        names: Their names.
        params: The parameters.
        states: Their state.
        numbers: Learning rate and decay factor, as in `ParameterGroup`.
        momentum: Fraction of the averages that is kept.
        decays: Whether weights decay.
        age: Their age, shared by all of them.
    """

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    states: tuple[dict[str, Any], ...]
    numbers: tuple[float, float]
    momentum: float
    decays: bool
    age: Tensor

    def part_of(self, name: str) -> list[Tensor]:
        """Return an entry of the state of all parameters; for sharded ones, the part of this process."""
        return [local_part(mine[name]) for mine in self.states]

    def add_to_age(self, taken: Tensor) -> None:
        """Increment the age if a step was taken. Other parameters that share it keep the old one."""
        age = self.age + taken
        for mine in self.states:
            mine["age"] = age

    def group(
        self, average: str, numbers: Iterator[Scalar], grads: Mapping[str, Tensor], corrected: Scalar
    ) -> ParameterGroup:
        """Return parameters with gradients, averages and numbers; for sharded ones, the part of this process."""
        averages = self.part_of(average)
        own = [grads[n].to(m.dtype) for n, m in zip(self.names, averages, strict=True)]
        lr, kept = next(numbers), next(numbers)
        # The host knows which weights do not decay, and skips their multiplication by one.
        left = kept if self.decays else 1.0
        return ParameterGroup([local_part(p) for p in self.params], own, averages, self.momentum, lr, left, corrected)


def update_batches(params: Parameters, state: State, names: Iterable[str], adamw: bool) -> list[UpdateBatch]:
    """Divide parameters into batches that are updated with the same hyperparameters."""
    found: dict[tuple[int, int], list[str]] = {}
    fresh: Tensor | None = None
    for name in names:
        p = params.tensors[name]
        mine = state[p]
        if _AVERAGES[adamw][-1] not in mine:
            fresh = new_age(p.device) if fresh is None else fresh
            start_averages(state, p, adamw, fresh)
        found.setdefault((id(params.groups[name]), id(mine["age"])), []).append(name)
    result = []
    for same in found.values():
        group = params.groups[same[0]]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        # Weights decay relative to lr, as for all parameters.
        numbers = (lr * float(group["adamw_lr"]) if adamw else lr, 1 - lr * decay)
        momentum = _BETAS[0] if adamw else float(group["momentum"])
        tensors = tuple(params.tensors[name] for name in same)
        states = tuple(state[p] for p in tensors)
        result.append(UpdateBatch(tuple(same), tensors, states, numbers, momentum, decay != 0, states[0]["age"]))
    return result


def all_numbers(parts: Iterable[UpdateBatch]) -> list[float]:
    """Return the numbers of all batches in one list."""
    return [number for part in parts for number in part.numbers]


def natural_updates(
    parts: Sequence[UpdateBatch],
    ages: Sequence[Tensor],
    numbers: Iterator[Scalar],
    grads: Mapping[str, Tensor],
    preconditioner: Preconditioner,
    taken: Tensor,
    scale: Tensor | None,
) -> None:
    """Update parameters that have curvature, given gradients of the average over examples, and the ages of batches.

    On an accelerator, the host does not check whether steps are finite: `preconditioner` sets the flag `taken`, and
    nothing changes if it is false. The numbers of the step scale, if given as `scale`, change in place.

    Raises:
        StepNotFiniteError: If steps are not finite, on a CPU; nothing has changed then.
    """
    if not parts:
        return
    params, curvature = preconditioner.params, preconditioner.curvature
    allowed = None if scale is None else next(numbers)
    groups = [
        part.group("average", numbers, grads, correction(part.momentum, age + 2))
        for part, age in zip(parts, ages, strict=True)
    ]
    if sync.is_asynchronous(taken.device):
        groups = [group._replace(taken=taken) for group in groups]
    scaled = scale
    if scale is not None and allowed is not None:
        pairs = zip(groups, parts, strict=True)
        groups = [group._replace(mean_steps=part.part_of("mean_step")) for group, part in pairs]
        scaled = _scaled(scale, groups, parts, curvature.communication(params), allowed, taken)
        groups = [_with_scale(group, scaled[2].exp()) for group in groups]
    names = [name for part in parts for name in part.names]

    def multiplied(u: Tensors) -> Tensors:
        lrs = dict(zip(names, (group.lr for group in groups for _ in group.params), strict=True))
        ahead = dict(zip(names, u, strict=True))
        half = preconditioner.watch.in_half_precision
        return list(curvature.natural_gradient(ahead, params, lrs, taken, half).values())

    natural_step(groups, multiplied)
    if scale is not None and scaled is not None:
        scale.copy_(torch.where(taken, scaled, scale))


def _scaled(
    scale: Tensor,
    groups: Iterable[ParameterGroup],
    parts: Iterable[UpdateBatch],
    communication: ReplicatedInverses,
    allowed: Scalar,
    taken: Tensor,
) -> Tensor:
    """Return the numbers of the step scale, updated with the overshoot of the latest steps unless it is not finite."""
    overshoot = 0.5 * scale[2].exp() * communication.sum_of_parts(_slope(groups, parts, communication))
    return torch.where(taken & overshoot.isfinite(), next_numbers(scale, overshoot, allowed), scale)


def _with_scale(group: ParameterGroup, factor: Tensor) -> ParameterGroup:
    """Multiply the learning rate of a group by a factor, for steps and for weight decay."""
    decays = not (isinstance(group.kept, float) and group.kept == 1)
    return group._replace(lr=group.lr * factor, kept=1 - (1 - group.kept) * factor if decays else 1.0)


def _slope(groups: Iterable[ParameterGroup], parts: Iterable[UpdateBatch], communication: ReplicatedInverses) -> Tensor:
    """Return the slope of the loss from averaged to current parameters, over the parts of this process.

    A part that several processes hold is divided by their number.
    """
    slopes = []
    for group, part in zip(groups, parts, strict=True):
        alike: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name, g, step in zip(part.names, group.grads, group.mean_steps or (), strict=True):
            alike.setdefault(communication.copies(name), []).append((g, step))
        for copies, pairs in alike.items():
            slopes.append(displacement_factor(group.lr) * inner_product(*zip(*pairs, strict=True)) / copies)
    return torch.stack(slopes).sum()


def adamw_updates(
    parts: Sequence[UpdateBatch],
    ages: Sequence[Tensor],
    numbers: Iterator[Scalar],
    grads: Mapping[str, Tensor],
    taken: Tensor,
) -> None:
    """Update other parameters by AdamW. On an accelerator, nothing changes unless the step is `taken`."""
    on_device = sync.is_asynchronous(taken.device)
    for part, age in zip(parts, ages, strict=True):
        of_gradients, of_squares = (correction(beta, age + 1) for beta in _BETAS)
        group = part.group("exp_avg", numbers, grads, of_gradients)
        squares = part.part_of("exp_avg_sq")
        adamw_step(group._replace(taken=taken if on_device else None), squares, _BETAS[1], of_squares)


class Updates:
    """Takes steps with the natural gradient, and with AdamW for parameters that are not covered.

    Args:
        preconditioner: Multiplies with inverses.
    """

    def __init__(self, preconditioner: Preconditioner) -> None:
        self._preconditioner = preconditioner
        self._replayer: Replayer | None = None
        self._taken: Tensor | None = None  # flag of the last step, in memory that recordings write

    def close(self) -> None:
        """Free recordings."""
        if self._replayer is not None:
            self._replayer.close()

    def take(self, state: State, natural: dict[str, Tensor], rest: dict[str, Tensor], good: Tensor) -> Tensor:
        """Take a step.

        Args:
            state: State of the optimizer.
            natural: Gradients of covered parameters.
            rest: Gradients of parameters that AdamW trains.
            good: Flag: whether all gradients are usable. Only a GPU evaluates it; otherwise, the host has checked it.

        Returns:
            The flag whether the step was taken. The next step overwrites it.
        """
        preconditioner, params = self._preconditioner, self._preconditioner.params
        step_scale, trend = preconditioner.scale, preconditioner.trend
        allowed = step_scale.allowed(trend.mean, trend.progress, preconditioner.param_groups)
        scale = None if step_scale.noise is None else step_scale.numbers_on(good.device)
        parts = update_batches(params, state, natural, adamw=False)
        others = update_batches(params, state, rest, adamw=True)
        grads = {**natural, **rest}
        for name in natural if scale is not None else ():
            keep_mean_step(state, params.tensors[name])

        if self._replayer is None or self._taken is None or self._taken.device != good.device:
            self._replayer = Replayer("Updates", log, good.device, preconditioner.replay)
            self._taken = torch.empty_like(good)
        taken = self._taken
        unit = preconditioner.unit  # The loss is this many times the average over examples.
        half = preconditioner.watch.in_half_precision  # If so, a GPU multiplies in TF32.

        # An accelerator sets `taken` to false if the step is not finite. Parameters and state do not change then.
        def update(inputs: tuple[list[Tensor], Tensor, list[Tensor]], numbers: Sequence[Scalar]) -> None:
            given, are_good, ages = inputs
            own_ages, other_ages = ages[: len(parts)], ages[len(parts) :]
            taken.copy_(are_good)
            values = iter(numbers)
            mine = dict(zip(grads, given, strict=True))
            share = next(values)
            if unit != 1:
                mine |= {n: mine[n] * share for n in natural}
            with tf32(True if half else None):
                natural_updates(parts, own_ages, values, mine, preconditioner, taken, scale)
            adamw_updates(others, other_ages, values, mine, taken)

        is_enabled = self._replayer.is_enabled
        guard = Guard(place=self._place([*parts, *others], grads, unit, half)) if is_enabled else NO_GUARD
        numbers = [1 / unit, *([] if scale is None or not parts else [allowed])]
        numbers += all_numbers([*parts, *others])
        ages = [part.age for part in (*parts, *others)]
        try:
            self._replayer.run(RunKey(), update, (list(grads.values()), good, ages), guard, numbers)
        except StepNotFiniteError:
            preconditioner.curvature.damping.note_overflow()
            return taken.fill_(False)
        # Autograd does not notice that a CUDA graph changes parameters.
        torch.autograd.graph.increment_version([params.tensors[n] for n in grads])
        for part in (*parts, *others):
            part.add_to_age(taken)
        return taken

    def _place(self, parts: Sequence[UpdateBatch], grads: Mapping[str, Tensor], unit: float, half: bool) -> Hashable:
        """Return everything that a recording depends on: updates at the same place perform the same operations."""
        params, curvature = self._preconditioner.params, self._preconditioner.curvature
        stacks = curvature.inverses.stacks(curvature.averages.values())
        pairs = [(p, mine) for part in parts for p, mine in zip(part.params, part.states, strict=True)]
        return (
            tuple((part.names, part.momentum, part.decays) for part in parts),
            tuple(params.groups[n]["trust"] for n in grads),
            tuple(t.data_ptr() for p, mine in pairs for t in (p, *_tensors_in(mine))),
            tuple((g.dtype, g.stride()) for g in grads.values()),
            tuple(one.stack.structure.like.data_ptr() for one in stacks),  # A recording keeps them alive.
            (unit == 1, half, uses_tf32()),
        )


def _tensors_in(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a state that change in place."""
    return [value for name, value in state.items() if isinstance(value, Tensor) and name != "age"]


def tried_updates(
    params: Parameters,
    state: State,
    steps: dict[str, Tensor],
    grads: dict[str, Tensor],
    rest: dict[str, Tensor],
    step_rest: Callable[[], None] | None,
    beside: Sequence[Tensor],
    change: Callable[[], float],
    noise: float,
) -> Trial:
    """Take given steps, and steps for other parameters, and shorten them until the loss falls.

    If a step is taken, weights decay by the full amount, even if the step was shortened. This may increase the loss.

    Args:
        params: All parameters.
        state: State of the optimizer.
        steps: Steps, to be multiplied by learning rates.
        grads: Gradients of the loss for these parameters.
        rest: Gradients of other parameters. The averages for them change even if the step is taken back.
        step_rest: Takes the step for these; `None` for AdamW.
        beside: Parameters that `step_rest` changes beside these.
        change: Evaluates the change of the loss since the call.
        noise: Round-off of the loss.
    """
    old = {n: params.tensors[n].clone() for n in (*steps, *rest)}
    before = [p.clone() for p in beside]
    lrs = {n: float(params.groups[n]["lr"]) for n in steps}
    slope = sum(lrs[n] * float((grads[n] * s).sum()) for n, s in steps.items())
    for n, s in steps.items():
        params.tensors[n].add_(s, alpha=lrs[n])
    if step_rest is None:
        parts = update_batches(params, state, rest, adamw=True)
        taken = torch.tensor(True)
        adamw_updates(parts, [part.age for part in parts], iter(all_numbers(parts)), rest, taken)
        for part in parts:
            part.add_to_age(taken)
    else:
        step_rest()
    moved = [*(params.tensors[n] for n in old), *beside]
    trial = try_step(moved, [*old.values(), *before], change, slope, noise)
    for n in steps if trial.share else ():
        params.tensors[n].sub_(old[n], alpha=lrs[n] * params.groups[n]["weight_decay"])
    return trial


def read_state(state: State, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Copy the state of parameters from a saved state, in its own precision.

    PyTorch has already converted it to the precision of the parameters, but averages may be more precise.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    ages: dict[tuple[torch.device, int], Tensor] = {}
    for i, p in zip(ids, (p for group in groups for p in group["params"]), strict=True):
        mine = saved["state"].get(i, {})
        # For a sharded parameter, only the part of this process is copied.
        if mine:
            mine = {name: _sharded_like(p, t) if isinstance(t, Tensor) and t.ndim else t for name, t in mine.items()}
            state[p] = copied_to(p.device, mine)
            if "age" in mine:  # Parameters of the same age are updated together.
                state[p]["age"] = ages.setdefault((p.device, int(mine["age"])), state[p]["age"])
        else:
            state.pop(p, None)


def _sharded_like(p: Tensor, t: Tensor) -> Tensor:
    """Return a tensor of a state, sharded in any way, with the sharding of a parameter."""
    return sharded_like(whole(t), p) if is_sharded(p) else t


def keep_mean_step(state: State, p: Tensor) -> None:
    """Add a moving average of steps to the state of a parameter: zeros in float32 or better."""
    if "mean_step" not in state[p]:
        state[p]["mean_step"] = torch.zeros_like(p, dtype=at_least_float32(p.dtype))


def new_age(device: torch.device) -> Tensor:
    """Return the age of parameters whose averages start now."""
    return torch.zeros((), dtype=torch.float64, device=device)


def start_averages(state: State, p: Tensor, adamw: bool, age: Tensor) -> None:
    """Add missing averages to the state of a parameter: zeros in float32 or better, with a new age."""
    mine = state[p]
    for name in _AVERAGES[adamw]:
        if name not in mine:
            mine[name] = torch.zeros_like(p, dtype=at_least_float32(p.dtype))
            mine["age"] = age
