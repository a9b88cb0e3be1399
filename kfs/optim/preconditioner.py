"""The preconditioner, which turns gradients into natural gradients for any optimizer. `KFAC` is built on it.

It watches the passes of a model (`kfs.optim.watch`), adds their sums to moving averages (`kfs.optim.averages`), inverts
these (`kfs.optim.inverses`), and multiplies gradients by the inverses. What happens with the products, such as momentum
and learning rates, is up to optimizers (`kfs.optim.kfac`).

On an accelerator, flags say whether gradients are finite and of a usual size, and whether products with inverses are
finite. The host does not wait for these flags. The device applies them: if a flag is false, nothing changes. All
numbers that depend on flags are on the device. When the host reads flags later (`PendingChecks`), they have long
arrived. It only counts failures then. Flags are read at the start of the next step with new factors, and whenever
states, reports or events are requested.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfs.display.describe import Described, Description
from kfs.distributed import Group
from kfs.errors import DistributedError, KfsWarning, ModelError, StorageError
from kfs.factors.audit import Audit
from kfs.factors.blocks import Method, Relative
from kfs.factors.compute import listed, warn_of_wide
from kfs.factors.layout import Key
from kfs.factors.settings import Fisher, Sharing
from kfs.losses import describe
from kfs.optim.across_ranks import Exchange, agreed, made_by_all, sum_over_ranks
from kfs.optim.averages import Average, Bases, StepSums, Unit
from kfs.optim.curvature import Curvature, StepNotFiniteError, lost_parameters
from kfs.optim.fsdp import is_fully_sharded, local_part
from kfs.optim.inverses import Inverses
from kfs.optim.loss_check import LossCheck
from kfs.optim.options import (
    IN_GROUPS,
    Interval,
    Options,
    Parameters,
    check_call,
    check_numbers,
    grouped,
    interval_at,
    warmup_interval,
)
from kfs.optim.quadratic_model import BatchLoss
from kfs.optim.report import Report, description_of, report_of, user_stacklevel
from kfs.optim.safety import Events, GoodStep, PendingChecks, UsualSizes
from kfs.optim.step_scale import LossTrend, StepScale
from kfs.optim.update_rule import total_size
from kfs.optim.watch import Watch
from kfs.problem.data import MaskSource
from kfs.runtime import sync
from kfs.runtime.precision import at_least_float32, tf32

# Gradients are not used if they are more than this many times larger than the largest so far.
_GRADIENTS_LIMIT = 100.0


class StepGradients(NamedTuple):
    """The gradients of a step, from which the curvature has learned.

    Attributes:
        natural: Gradients of parameters with inverses, by name; for a sharded parameter, the part of this process.
        others: Gradients of parameters that will never have an inverse.
        sums: Sums from the passes of the step; `None` if there was no pass that counts.
        good: Flag: whether gradients are finite and of a usual size.
        finite: Flag: whether they are finite.
        added: Flag: whether new factors were added to averages; `None` if there are none, or if the host has decided.
        fine: Describes the step.
    """

    natural: dict[str, Tensor]
    others: dict[str, Tensor]
    sums: StepSums | None
    good: Tensor
    finite: Tensor
    added: Tensor | None
    fine: GoodStep


@dataclass(frozen=True)
class Purpose:
    """The purpose of a preconditioner: use on its own, or by an optimizer such as `KFAC`.

    Attributes:
        kind: Name of what the user has, for messages.
        groups: Parameter groups of the optimizer, which schedules change.
        others: What happens to parameters that turn out not to be covered, for a warning.
        check: Raises an error if nothing trains some parameters, given by name; `None` if there is always something.
        close: Weak reference to a method that closes the optimizer, for another one that takes the model over.
        noise: Setting of the scale of steps (see `StepScale`).
        keep_inputs: Whether the inputs of all passes of a step are needed.
    """

    kind: str = "preconditioner"
    groups: list[dict[str, Any]] | None = None
    others: str = "whose gradients are left as they are"
    check: Callable[[Mapping[str, Tensor]], None] | None = None
    close: "weakref.WeakMethod[Callable[[], None]] | None" = None
    noise: float | None = None
    keep_inputs: bool = False


class Preconditioner(Described):
    """Turns gradients into natural gradients, in place, so that any optimizer can take the step.

    Call `step` between `backward()` and the step of your optimizer. It multiplies the gradients of all covered
    parameters by the inverse of a Kronecker-factored curvature, and leaves all other gradients as they are. The
    optimizer sees natural gradients in place of gradients: learning rate, momentum, weight decay and schedules are its
    own. `kfs.optim.KFAC` does the same, with an update rule that is made for natural gradients.

    Args:
        model: As in `kfs.optim.KFAC`.
        loss: As in `kfs.optim.KFAC`.
        params: Parameters whose gradients are multiplied, by default all parameters of the model; or groups of them as
            dictionaries, which may have their own `damping` and `trust`.
        damping: As in `kfs.optim.KFAC`, like all options below.
        trust: Limits how much each layer's natural gradient, as a step with a learning rate of one, may change the
            layer's outputs in any direction. `None` for no limit.
        kl_clip: Limits how much the whole natural gradient, as a step with a learning rate of one, may change
            predictions, as measured by the curvature. `None` for no limit.
        fisher: Which curvature matrix.
        sharing: Whether positions count as further examples, or are summed first.
        eigen: Whether to correct eigenvalues.
        decay: Fraction of the moving averages of factors that is kept when new factors are added.
        factors_every: Recompute factors every this many steps.
        inverses_every: Recompute each inverse every this many steps.
        damping_method: How damping is split between factors.
        damping_unit: Unit of damping.
        patience: Raise damping after this many events in a row.
        max_dim: Keep only the diagonal of factors that are wider than this.
        batch_axis: The batch axis of inputs.
        mask: Which positions of the inputs are padding.
        seed: Seed for drawing labels with `fisher="mc"`.
        audit: Whether to check, on a few examples, that all uses of the parameters are captured.
        replay: Whether to record inverses and factor passes as CUDA graphs on a GPU, and to replay them.
        group: Processes that train the model together, each with its own data.

    Attributes:
        steps: Number of steps taken.
        uncovered: Parameters whose gradients are left as they are, with reasons.
        param_groups: Groups of parameters, with `damping` and `trust`, which schedules may change.

    Raises:
        ModelError: If a setting is out of range, a parameter does not belong to the model, or another preconditioner or
            KFAC optimizer already has it.
        LossError: If no loss is passed, or the loss is not supported.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> x, criterion = torch.randn(64, 4), nn.CrossEntropyLoss()
        >>> y = x[:, :3].argmax(1)
        >>> preconditioner = Preconditioner(model, criterion)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     preconditioner.step()
        ...     optimizer.step()
        >>> bool(loss < 0.5)
        True
    """

    @made_by_all
    def __init__(
        self,
        model: nn.Module,
        loss: object = None,
        params: Iterable[Any] | None = None,
        *,
        damping: float | Relative = 0.003,
        trust: float | None = 0.03,
        kl_clip: float | None = None,
        fisher: Fisher = "mc",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        eigen: bool = False,
        decay: float = 0.7,
        factors_every: Interval | None = None,
        inverses_every: Interval = 20,
        damping_method: Method | None = None,
        damping_unit: Unit = "relative",
        patience: int = 3,
        max_dim: int | None = 4096,
        batch_axis: int | None = None,
        mask: str | Callable[..., Tensor] | None = None,
        seed: int = 0,
        audit: bool = True,
        replay: bool = True,
        group: Group | None = None,
        _purpose: Purpose | None = None,
    ) -> None:
        """Validate all options, then register hooks on the model. `KFAC` passes its own groups, and a purpose."""
        check_call(model, loss, "Preconditioner")
        options = Options(
            damping=damping,
            trust=trust,
            kl_clip=kl_clip,
            fisher=fisher,
            sharing=sharing,
            eigen=eigen,
            decay=decay,
            factors_every=factors_every,
            inverses_every=inverses_every,
            damping_method=damping_method,
            damping_unit=damping_unit,
            patience=patience,
            max_dim=max_dim,
            batch_axis=batch_axis,
            mask=mask,
            seed=seed,
            audit=audit,
            replay=replay,
        )
        model, self.exchange = Exchange.of(model, group)
        ranks = self.exchange.ranks
        self.model = model
        self.loss = describe(loss)
        self.settings = options.settings
        options.check()
        number, unit = options.number_and_unit()
        self._purpose = purpose = _purpose or Purpose()
        self.scale = StepScale(purpose.noise)
        defaults = {"damping": number, "trust": trust, "method": "kfac"}
        given = model.parameters() if params is None else params
        self.param_groups = grouped(given, defaults) if purpose.groups is None else purpose.groups
        # CUDA graphs contain no communication.
        self.replay = replay and not is_fully_sharded(model)
        inverses = Inverses(damping_method or ("exact" if eigen else "factored"), unit, eigen, self.replay)
        at_owners = is_fully_sharded(model) and not eigen  # All ranks need eigenvectors.
        self.curvature = Curvature(decay, inverses, inverses_every, patience, kl_clip, ranks, at_owners)
        self.pending = PendingChecks(self.curvature.damping)
        self.trend = LossTrend()
        self.steps = 0
        self.uncovered: dict[str, str] = {}
        self.unit = 1.0  # The loss is this many times the average over examples.
        self._factors_every = factors_every or warmup_interval
        self._gradient_sizes = UsualSizes(_GRADIENTS_LIMIT, patience)
        self._loss_check = LossCheck(self.loss, ranks.size)
        self._tracked: frozenset[str] = frozenset()  # parameters that were tracked when factors were last added
        self._declared: set[Key] = set()  # blocks that were already checked for wide factors
        self._paused = False
        self._whole: list[Average] | None = None  # set by `consolidate_state_dict`, valid until the next step
        # The natural gradients of the last step: references to the tensors, and their versions.
        self._written: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        close = purpose.close or weakref.WeakMethod(self.close)
        self.params = Parameters(model, self.param_groups, close, purpose.kind)
        # `called` is a pair: positional and keyword arguments of the model.
        masks = MaskSource((lambda called: mask(*called[0], **called[1])) if callable(mask) else mask)
        self.watch = Watch(
            model,
            loss if isinstance(loss, nn.Module) else None,
            self._wanted,
            self.loss,
            self.settings,
            self.curvature.costs,
            self.replay,
            self.exchange,
            self._loss_check,
            masks,
            keep_inputs=purpose.keep_inputs,
            notes_sizes=purpose.groups is None,  # A scaler calls the step of an optimizer itself.
        )

    def close(self) -> None:
        """Remove all hooks from the model, and free recordings. Afterwards, `step()` raises."""
        self._read_flags()
        self.watch.close()
        self.curvature.inverses.forget()
        self.params.closed = True

    def targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass, before `backward()`, as in `kfs.optim.KFAC.targets`."""
        self.watch.set_targets(y)

    @torch.no_grad()
    def step(self) -> None:
        """Replace the gradients of covered parameters by natural gradients, in place.

        Call it after `backward()`, and before the step of your optimizer. Divide gradients by the scale of a
        `GradScaler` before (`scaler.unscale_(optimizer)`), and clip them, if necessary, afterwards. If gradients are
        not finite, or far too large, they stay as they are, and nothing is learned from them. Call `zero_grad()` before
        the next backward pass: otherwise, its gradients are added to natural gradients, and the sum is multiplied.

        Raises:
            ModelError: If there are no gradients, if they are natural gradients already, or if factors must be
                recomputed but no pass through the model was seen.
            LossError: If the gradients do not belong to the declared loss, or are scaled.
            SolverError: If the run has diverged: parameters are not finite, or very many steps in a row were bad.
        """
        with self.in_step():
            self._refuse_natural_gradients()
            found = self.learn(are_scaled=self.watch.gradients_are_untouched())
            self._written.clear()
            if found is None:
                return
            taken = self._replace(found)
            self.finish(found, taken)

    def _refuse_natural_gradients(self) -> None:
        """Raise if gradients were multiplied already."""
        for name, (gradient, version) in self._written.items():
            now = self.params.tensors[name].grad
            if now is None or gradient() is not now:
                continue
            if local_part(now)._version == version or not self.watch.was_called:
                raise ModelError(
                    f"The gradient of {name!r} is a natural gradient already: step() was called twice.",
                    "Call step() once per backward pass, and zero_grad() of the optimizer before the next one.",
                )

    def _replace(self, found: StepGradients) -> Tensor | None:
        """Replace gradients by natural gradients if all of them are finite.

        Returns:
            The flag whether they are; `None` if the host knows that they are not.
        """
        taken = found.good.clone()
        share = 1 / self.unit
        u = {n: (g if share == 1 else share * g).to(at_least_float32(g.dtype)) for n, g in found.natural.items()}
        try:
            half = self.watch.in_half_precision
            with self.curvature.costs.timed("products"), tf32(True if half else None):
                steps = self.curvature.natural_gradient(u, self.params, dict.fromkeys(u, 1.0), taken, half)
        except StepNotFiniteError:
            self.curvature.damping.note_overflow()
            return None
        on_device = sync.is_asynchronous(taken.device)
        for name, step in steps.items():
            p, g = self.params.tensors[name], found.natural[name]
            new = torch.where(taken, step.to(g.dtype), g) if on_device else step.to(g.dtype)
            assert p.grad is not None  # noqa: S101 (these parameters have gradients)
            # Neither a sparse tensor nor an expanded one, whose entries share memory, can be overwritten.
            if p.grad.is_sparse or 0 in p.grad.stride():
                p.grad = new
            else:
                local_part(p.grad).copy_(new)
            self._written[name] = weakref.ref(p.grad), local_part(p.grad)._version
        self.curvature.note_products()
        return taken

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step: an error on one rank ends the step on all of them.

        Raises:
            ModelError: If the optimizer was closed, or does not know which processes train together.
        """
        self.exchange.check()
        self._whole = None
        with self.exchange.step(self.params.device, self._has_statistics):
            self.params.check_open()
            check_numbers(self.param_groups)
            yield

    def learn(
        self,
        result: Any = None,
        batch: BatchLoss | None = None,
        are_scaled: bool | None = None,
        of_rest: Sequence[Tensor] = (),
    ) -> StepGradients | None:
        """Add the statistics of a step to the curvature, if its gradients are good, and recompute inverses.

        Args:
            result: Return value of the closure.
            batch: The loss on the batch, for a quadratic model. It must be finite, and all inverses are recomputed.
            are_scaled: As in `LossCheck.check`.
            of_rest: Gradients of parameters that only another optimizer has. They must be good, too.

        Returns:
            The gradients; `None` if the host has found that they are not good, so that the step must be skipped.
        """
        # Collect gradients, and the statistics of the passes of all ranks.
        self.params.check_model()
        grads = {n: local_part(p.grad).to_dense() for n, p in self.params.tensors.items() if p.grad is not None}
        # Gradients are usable if they are finite and not far larger than before. The result stays on the device.
        measured = [*grads.values(), *of_rest]
        size = total_size(measured).reshape(1) if measured else torch.zeros(1, device=self.params.device)
        mine = self.watch.collect(), self._facts, self.params.tensors, grads
        sums, size = self.exchange.merged(*mine, self.curvature.averages, self.settings.products, size)
        # Adding factors requires the outcomes of earlier steps, which may still be on the device.
        has_factors = sums is not None and sums.has_factors
        if has_factors:
            self._read_flags()
            self.pending.check(self.params.tensors)
        if not grads and not of_rest:
            raise ModelError("No parameter has a gradient.", "Call backward() of the loss before step().")
        self._check(sums, result, are_scaled)
        finite, good = self._gradient_sizes.check(("gradients",), size, learn=has_factors)
        fine = GoodStep.of(self.steps, result, self.param_groups[0], self.curvature.damping.scale)
        lost: dict[str, str] = {}
        if sums is not None:
            known, ranks = self.curvature.averages, self.exchange.ranks
            lost = lost_parameters(sums, self.params.trainable(), grads, known, ranks)
        if lost and self._purpose.check is not None:
            self._purpose.check({n: self.params.tensors[n] for n in lost})
        self._note_loss(sums)
        # Reading a flag from a GPU synchronizes. In a steady step, the device evaluates the flags itself.
        waits = not sync.is_asynchronous(good.device) or batch is not None or not self._is_steady(sums, lost)
        # If the host decides, it skips the step here.
        if waits:
            is_fine = batch is None or isfinite(batch.value)
            if not good or not is_fine:
                self.pending.note_skipped(is_fine and bool(finite))
                self.pending.check(self.params.tensors)
                return None
            self.pending.note_good(fine)
        costs = self.curvature.costs
        with costs.timed("factors"):
            added = None if sums is None else self._add_sums(sums, lost, None if waits else good)
        # A quadratic model needs the curvature of the current step.
        with costs.timed("inverses"):
            until = self._next_with_factors() if has_factors and self.exchange.ranks.size > 1 else 0
            self.curvature.update_inverses(self.steps, self.params.groups, force=batch is not None, until=until)
        covered = self.curvature.covered
        natural = {n: g for n, g in grads.items() if n in covered}
        others = {n: g for n, g in grads.items() if not self.will_cover(n)}
        # Parameters that have a gradient but no factors yet. Every step computes factors until they have some.
        unused = {} if sums is None else sums.uncovered
        self.curvature.awaited |= grads.keys() - natural.keys() - others.keys() - unused.keys()
        return StepGradients(natural, others, sums, good, finite, added, fine)

    def will_cover(self, name: str) -> bool:
        """Whether gradients of a parameter are multiplied by an inverse, as soon as it has one."""
        return name not in self.uncovered and self.params.groups[name]["method"] == "kfac"

    def finish(self, found: StepGradients, taken: Tensor | None) -> None:
        """End a step.

        Args:
            found: The result of `learn`.
            taken: The flag whether the step was taken; `None` if the host knows it. From an accelerator, it is read in
                a later step.
        """
        if taken is not None and sync.is_asynchronous(taken.device):
            flags = [found.good, found.finite, taken, *([] if found.added is None else [found.added])]
            self.pending.add(found.fine, flags)
        self.curvature.costs.end_step()
        self.steps += 1

    def _read_flags(self) -> None:
        """Read all flags from the device, and count failures."""
        self.pending.read_all()
        self.curvature.note_failures()

    def read_groups(self, groups: list[dict[str, Any]]) -> None:
        """Use other parameter groups of the same model from now on."""
        self.params.read(groups)
        self.param_groups = groups
        names = {n for a in self.curvature.averages.values() for n in a.layout.params}
        self.curvature.forget(names - self.params.tensors.keys())

    def evaluated(self, loss: Callable[[], float]) -> float:
        """Return a loss whose passes compute no factors."""
        self._paused = True
        try:
            return loss()
        finally:
            self._paused = False
            self.watch.collect()

    def _note_loss(self, sums: StepSums | None) -> None:
        """Record the loss of a step with new factors, and warn if the run is getting worse."""
        if sums is None or not sums.has_factors or not sums.examples:
            return
        loss = sums.deviance / sums.examples
        if not isfinite(loss):
            # Without targets, assume a square loss: its residuals are the gradients over the reduction factor.
            ranks = self.exchange.ranks.size if self.loss.reduction == "mean" else 1
            R = self.loss.reduction_factor(sums.count) * ranks
            loss = 0.5 * sums.square / (R**2 * sums.examples)
        trouble = self.trend.note(self.steps, loss, self.scale.value())
        if trouble:
            if not self.curvature.damping.events.rising_losses:
                way_out = "Use a smaller lr, warm-up, a larger damping or a smaller trust, or go back to a checkpoint."
                text = f"{trouble[0].upper()}{trouble[1:]}. {way_out}"
                warnings.warn(text, KfsWarning, stacklevel=user_stacklevel())
            self.curvature.damping.events.note("rising_losses", trouble)

    def _wanted(self) -> tuple[dict[str, Tensor], Bases] | None:
        """Return the parameters to track in the starting forward pass, and bases; `None` if factors are not needed."""
        if self.exchange.finds_wrapper(self.model):
            self._loss_check.ranks = self.exchange.ranks.size
            self.curvature.train_with(self.exchange.ranks)
        due = self._due()
        if self._paused or not due or not self.params.are_the_models():
            return None
        for average in islice(self.curvature.averages.values(), 1):
            self.params.check_device(average.factors.like.device)
        return due, self.curvature.bases()

    def _due(self) -> dict[str, Tensor]:
        """Return all tracked parameters if factors must be recomputed: by schedule, or because parameters are new."""
        tracked = self._tracked_now()
        by_schedule = self.steps % interval_at(self._factors_every, self.steps) == 0
        others = tracked.keys() != self._tracked or not self.curvature.awaited.isdisjoint(tracked)
        return tracked if by_schedule or others else {}

    def _has_statistics(self) -> bool:
        """Whether the current step needs statistics of its passes."""
        return self.loss.reduction == "sum" or bool(self._due())

    def _next_with_factors(self) -> int:
        """Return the next step after this one that computes factors by schedule; -1 if there is none soon."""
        later = range(self.steps + 1, self.steps + 1000)
        return next((step for step in later if step % interval_at(self._factors_every, step) == 0), -1)

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return values that must agree between processes at this step, by kind and name."""
        next_due = self._next_with_factors()
        # On a GPU, steps without factors do not communicate. Their schedule is compared in advance.
        inverses = [interval_at(self.curvature.every, step) for step in range(self.steps, next_due)]
        due = {
            "next step with factors": next_due,
            "inverses_every": inverses,
            "parameters": sorted(self._tracked_now()),
        }
        with sync.allow_sync():  # A learning rate may be a tensor.
            options = {
                f"{name} of group {place}": float(value) if isinstance(value, Tensor) else value
                for place, group in enumerate(self.param_groups)
                for name, value in group.items()
                if name in IN_GROUPS
            }
        numbers = {
            "steps": self.steps,
            "data": self.watch.first_datum,
            "unit": self.unit,
            "damping_scale": self.curvature.damping.scale,
            "step_scale": round(self.scale.value(), 6),
        }
        return {"Numbers of steps and data": numbers, "Options of parameter groups": options, "Schedules": due}

    def _tracked_now(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.params.trainable().items() if n not in self.uncovered}

    def _check(self, sums: StepSums | None, value: Any, are_scaled: bool | None) -> None:
        """Raise if there are no watched passes, or if another loss is minimized."""
        if sums is None and self._has_statistics():
            raise ModelError(
                "No forward and backward pass through the model was seen since the last step.",
                "Call the model itself, model(x), not its parts or a copy, and backward() of a loss of its output. "
                "torch.autograd.grad does not count.",
            )
        if sums is not None:
            # The closure returns the loss on the data of this process only.
            self._loss_check.check(sums, value if self.exchange.ranks.size == 1 else None, are_scaled)

    def _is_steady(self, sums: StepSums | None, lost: Mapping[str, str]) -> bool:
        """Whether the step changes only tensor values, so that the host need not read a flag before it is taken."""
        if lost:
            return False
        return sums is None or (sums.finite and (not sums.has_factors or self.curvature.knows(sums)))

    def _add_sums(self, sums: StepSums, lost: dict[str, str], good: Tensor | None) -> Tensor | None:
        """Add the statistics of a step to the averages, and warn about parameters and factors that are left out.

        If `good`, a flag on the device, is given, averages change only if it is true.

        Returns:
            If the device decides, its flag: whether statistics were added.
        """
        if sums.examples and sums.finite:
            mean = self.loss.reduction == "mean"
            # Gradients are averaged over processes, even if the loss is a sum.
            self.unit = self.loss.scale * sums.examples / (sums.count if mean else self.exchange.ranks.size)
        if not sums.has_factors:
            return None  # Examples were only counted, or all targets are ignored.
        added = self.curvature.add(sums, lost, good)
        if added is False:
            return None
        # The counter advances even if the device rejects the sums: random numbers for labels are never used twice.
        self.watch.first_datum += sums.num_data
        self.uncovered |= lost
        self._tracked = frozenset(self._tracked_now())
        new = [block for key, block in sums.blocks.items() if key not in self._declared]
        self._declared |= sums.blocks.keys()
        if lost:
            text = f"KFAC does not cover some parameters, {self._purpose.others} ({listed(lost)})."
            warnings.warn(text, KfsWarning, stacklevel=user_stacklevel())
        if new:
            warn_of_wide(new, self.settings, stacklevel=user_stacklevel() + 1)
        return added if isinstance(added, Tensor) else None

    @property
    def events(self) -> Events:
        """Counts of handled problems: bad gradients, refused statistics, failed inverses. Synchronizes with a GPU."""
        self._read_flags()
        return self.curvature.damping.events

    @property
    def audit(self) -> Audit | None:
        """Report of the audit of the last watched pass: checks and errors. `None` if there was no audit."""
        return self.watch.audit

    @property
    def damping_scale(self) -> float:
        """The factor that currently multiplies all dampings."""
        return self.curvature.damping.scale

    def report(self) -> Report:
        """Return a report of covered parameters, costs of recent steps, and events; `print` shows it as a table.

        Example:
            >>> from kfs.optim import Preconditioner
            >>> report = Preconditioner(nn.Linear(3, 2), nn.CrossEntropyLoss()).report()
            >>> report.waiting  # until the first step
            ('weight', 'bias')
            >>> Preconditioner(nn.Linear(3, 2), nn.CrossEntropyLoss(), trust=None)
            Preconditioner for Linear (2 parameters, 8 numbers), CrossEntropyLoss
              damping=0.003, trust=None
              fisher='mc', eigen=False
              steps=0, blocks=0, not covered=0, damping_scale=1, events: none
        """
        return report_of(self, repr(self))

    def describe(self) -> Description:
        """Describe model, loss, settings and progress of training."""
        return description_of(self, "Preconditioner", ("damping", "trust"))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state. Training that resumes from it is identical to training without interruption.

        With several processes, call `consolidate_state_dict()` in all of them first.

        Raises:
            DistributedError: If there are several processes, and `consolidate_state_dict()` was not called since the
                last step.
        """
        return self.state(self.whole_averages()) | {"param_groups": self._settings_of_groups()}

    def _settings_of_groups(self) -> list[dict[str, Any]]:
        """Return the numbers in parameter groups, which schedules may change."""
        return [{name: group[name] for name in ("damping", "trust")} for group in self.param_groups]

    def whole_averages(self) -> Iterable[Average]:
        """Return averages over the data of all processes.

        Raises:
            DistributedError: If `consolidate_state_dict()` was not called since the last step.
        """
        self._read_flags()
        if self._whole is not None:
            return self._whole
        if self.exchange.ranks.size > 1 and self.curvature.averages:
            raise DistributedError(
                "Each process has a part of the optimizer's state.",
                "Call consolidate_state_dict() of the optimizer in all processes, then state_dict() in one.",
            )
        return self.curvature.averages.values()

    @torch.no_grad()
    @agreed("consolidate_state_dict()")
    def consolidate_state_dict(self) -> None:
        """Sum the state over all processes, so that each of them can call `state_dict()` before the next step.

        All processes must call it. In a single process, it is not needed.
        """
        self._whole = self.summed_averages()

    def summed_averages(self) -> list[Average]:
        """Return averages over the data of all processes. All processes must call this."""
        self._read_flags()
        return sum_over_ranks(self.exchange.ranks, self.curvature.averages.values())

    def state(self, averages: Iterable[Average]) -> dict[str, Any]:
        """Return the state, given averages over the data of all processes."""
        return {
            "curvature": self.curvature.state(averages),
            "steps": self.steps,
            "first_datum": self.watch.first_datum,
            "unit": self.unit,
            "gradient_sizes": self._gradient_sizes.state(),
            "losses": self.trend.state(),
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
        }

    @torch.no_grad()
    @agreed("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned. With several processes, load the same state in all of them.

        The number of processes may differ from the run that saved the state.

        Raises:
            StorageError: If the state belongs to another model, other parameter groups, another version of kfs, or not
                to a preconditioner.
        """
        self.params.check_open()
        own = self._settings_of_groups()
        self.check_state(state_dict, self.state(()) | {"param_groups": own})
        given = state_dict["param_groups"]
        if len(given) != len(own):
            raise StorageError(
                f"The state has {len(given)} parameter groups, but this preconditioner has {len(own)}.",
                "Pass params= with the same groups as for the preconditioner that was saved.",
            )
        self.restore(state_dict)
        for group, settings in zip(self.param_groups, given, strict=True):
            group.update(settings)

    def check_state(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise if a state lacks entries or belongs to another model, before anything is changed.

        Args:
            given: The state.
            own: A state without averages, as this version of kfs writes it.
        """
        if not isinstance(given, Mapping) or "curvature" not in given:
            raise StorageError(
                "The state is not one of kfs.optim.Preconditioner.",
                "Load what state_dict() of a preconditioner returned.",
            )
        missing = (own.keys() - given.keys()) | (own["curvature"].keys() - given["curvature"].keys())
        averages = given["curvature"].get("averages", ())
        for average in averages:
            missing |= Average.stored() - average.keys()
        if missing:
            raise StorageError(
                f"The state has no {', '.join(sorted(missing))}: another version of kfs has written it.",
                "Load it with that version, or train on without it: averages are known again after a few steps.",
            )
        self.params.check_blocks(averages)
        factors = [factor for average in averages for factor in average["factors"]["blocks"].values()]
        widest = max((factor["values"].shape[-1] for factor in factors if factor["kind"] == "dense"), default=0)
        if self.settings.is_diagonal(widest):
            raise StorageError(
                f"The state has dense factors of width {widest}, wider than max_dim={self.settings.max_dim}.",
                "Pass the same max_dim= as for the run that saved the state.",
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.curvature.restore(state["curvature"], self.params.device)
        self.pending.forget()
        self.exchange.start_again()
        self._whole = None
        self.steps = state["steps"]
        self.uncovered = dict(state["uncovered"])
        self.watch.first_datum = state["first_datum"]
        self.unit = state["unit"]
        self._gradient_sizes.restore(state["gradient_sizes"])
        self.trend = LossTrend.from_state(state["losses"])
        self._tracked = frozenset(state["tracked"])

    def __reduce__(self) -> Any:
        """Raise: a copy would watch the same model."""
        raise ModelError(
            "A preconditioner that watches a model cannot be copied or pickled.",
            "Copy its state: Preconditioner(other_model, ...).load_state_dict(preconditioner.state_dict()).",
        )
