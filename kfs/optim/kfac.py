"""The KFAC optimizer: its options, state, report and checkpoints. The update rule lives in `kfs.optim.update_rule`.

The functions of `torch.distributed.checkpoint` identify state by parameter only, and use the state of a new optimizer
as a template for reading. All ranks call these functions, so averages are added up over ranks at this point. The
template comes from an optimizer that has not seen the model run, but must have all entries of a later state: momentum
by parameter, and one number at the first parameter that carries everything else (`Carrier`).
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfs.display.describe import Described, Description, number
from kfs.distributed import Group, Ranks, all_true
from kfs.errors import DistributedError, KfsWarning, ModelError, StorageError
from kfs.factors.accumulate import BlockSums
from kfs.factors.audit import Audit
from kfs.factors.blocks import Method, Relative
from kfs.factors.compute import listed, shared_with, warn_of_wide
from kfs.factors.layout import Key
from kfs.factors.settings import Fisher, Settings, Sharing
from kfs.losses import describe
from kfs.optim.across_ranks import Exchange, agreed, made_by_all, sum_over_ranks
from kfs.optim.apply import PendingChecks, Updates, keep_mean_step, new_age, read_state, start_averages, tried_updates
from kfs.optim.averages import Average, Unit, copied_to
from kfs.optim.costs import PARTS
from kfs.optim.curvature import Curvature, Events, Interval, interval_at
from kfs.optim.fsdp import is_fully_sharded, local_part
from kfs.optim.inverses import Inverses
from kfs.optim.last_good_step import GoodStep, LastGoodStep, LossTrend, UsualSizes
from kfs.optim.loss_check import LossCheck
from kfs.optim.options import check_call, check_numbers, check_options, number_and_unit, warmup_interval
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic_model import BatchLoss, QuadraticModel
from kfs.optim.report import Report, block_row
from kfs.optim.step_scale import StepScale
from kfs.optim.step_sums import Bases, StepSums
from kfs.optim.update_rule import total_size
from kfs.optim.watch import Watch
from kfs.problem.data import MaskSource
from kfs.problem.whole_parameters import is_sharded, whole
from kfs.runtime import sync
from kfs.runtime.nested import mapped


def lost_parameters(
    sums: StepSums, trained: Collection[str], grads: Mapping[str, Tensor], known: Collection[Key], ranks: Ranks
) -> dict[str, str]:
    """Return the parameters that turn out not to be covered by curvature, each with the reason.

    A parameter whose gradient is missing or zero is not reported: this step does not train it, but other steps may.

    Args:
        sums: Sums from the passes of a step.
        trained: Names of parameters that should be covered.
        grads: Gradients by name.
        known: Blocks that already have averages.
        ranks: Processes that train together. Each has a part of the sums, and possibly of the gradients.
    """
    new = [block for key, block in sorted(sums.blocks.items()) if key not in known and block.terms]
    # For example, the blocks of a second head whose output has a separate loss.
    flat = _without_curvature([block for block in new if not block.forward_only], ranks)
    if flat:
        # If no block has any curvature, the loss itself is flat here, such as a Huber loss far from its targets.
        used = [block for _, block in sorted(sums.blocks.items()) if block.terms and not block.forward_only]
        everywhere = _without_curvature(used, ranks)
        if len(everywhere) == sum(len(block.layout.params) for block in used):
            flat = []
    beside = dict.fromkeys(flat, "the loss depends on it, but predictions do not")
    reasons = {n: why for n, why in (beside | sums.uncovered).items() if n in trained and n in grads}
    unused = _all_vanish([[grads[n]] for n in reasons], ranks)
    lost = {n: why for (n, why), is_unused in zip(reasons.items(), unused, strict=True) if not is_unused}
    return lost | shared_with(lost, sums.blocks.values())


def _without_curvature(blocks: Collection[BlockSums], ranks: Ranks) -> list[str]:
    """Return the parameters of blocks whose sums over backpropagated vectors are zero on all ranks."""
    totals = [[role.gradient.total for role in block.roles.values()] for block in blocks]
    vanish = _all_vanish(totals, ranks)
    return [name for block, gone in zip(blocks, vanish, strict=True) if gone for name in block.layout.params]


def _all_vanish(groups: Iterable[Iterable[Tensor]], ranks: Ranks) -> list[bool]:
    """Return, for each group of tensors, whether all entries are zero on all ranks. Synchronizes with the device."""
    flags = [~torch.stack([t.any() for t in tensors]).any() for tensors in groups]
    return all_true(ranks, torch.stack(flags)).tolist() if flags else []


# Key in the state of the first parameter. Its value carries all state that does not belong to a single parameter.
_CARRIER = "kfac"


class Carrier(int):
    """An integer zero with a state attached: checkpoints accept numbers, but tensors only of known shapes."""

    carried: Any

    def __new__(cls, carried: Any = None) -> "Carrier":
        """Return a zero with `carried` attached."""
        result = super().__new__(cls, 0)
        result.carried = carried
        return result

    def __reduce__(self) -> Any:
        return Carrier, (self.carried,)


torch.serialization.add_safe_globals([Carrier])


class Consolidated(NamedTuple):
    """The state of all processes, available on each of them.

    Attributes:
        averages: Averages over the data of all processes.
        tensors: Unsharded tensors on the CPU, by `id` of the sharded tensors.
    """

    averages: list[Average]
    tensors: dict[int, Tensor]


def _is_for_checkpoint() -> bool:
    """Whether a function of `torch.distributed.checkpoint` requests the state, maybe through a wrapping optimizer."""
    frame = sys._getframe()
    for _ in range(5):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
    return False


# A step is skipped if its gradients are more than this many times larger than the largest so far.
_GRADIENTS_LIMIT = 100.0


class KFAC(Described, Optimizer):
    """Natural gradient descent with Kronecker-factored curvature. It is used like any optimizer of `torch.optim`.

    Args:
        model: The model. Train it by calling it: `loss_function(model(x), y).backward()`. With several processes, pass
            the `DistributedDataParallel` model, or a model that `fully_shard` has sharded.
        loss: The loss that is minimized: a loss module of `torch.nn`, or a `kfs.losses.Loss`. It defines the curvature;
            gradients come from your backward pass. In the first steps, the gradient at the predictions is compared with
            the gradient of this loss: a different loss or reduction raises an error, and a constant factor causes a
            warning. Except for cross-entropies, reduction and factor are checked only if targets are known (see
            `targets`).
        params: Parameters or parameter groups, as for other optimizers. By default, all parameters of the model.
        lr: Learning rate. With 1, the whole natural gradient step is taken, within the trust region.
        damping: Added to the eigenvalues of each block. By default it is relative to their mean (see `damping_unit`);
            `kfs.Relative` is always relative.
        momentum: Fraction of the moving average of gradients that is kept in each step.
        weight_decay: Decoupled weight decay.
        trust: Limits how much each layer's step, before it is multiplied by `lr`, may change the layer's outputs in any
            direction. `None` for no limit.
        noise: Steps are shortened while their overshoot, caused by noise or by curvature, exceeds this fraction of the
            loss (see `step_scale`). If `None`, steps are never shortened for this reason.
        kl_clip: Limits how much the whole step may change predictions, as measured by the curvature. `None` for no
            limit.
        fisher: Which curvature matrix: `"mc"`, also called `"type-1"` (one more backward pass, for labels drawn from
            the model's likelihood), `"empirical"` (no additional pass), `"type-2"` (exact; one pass per class),
            `"ggn"` (likewise, for losses without a likelihood), or `"forward-only"` (inputs only).
        sharing: As in `kfs.KFAC`.
        eigen: Whether to correct eigenvalues, as in `kfs.EKFAC`, with moving averages in the eigenbasis.
        decay: Fraction of the moving averages of factors that is kept when new factors are added.
        factors_every: Recompute factors every this many steps: an integer, or a function of the step. By default, every
            step at first and every 10 steps later; with a quadratic model, which needs every batch, every step.
        inverses_every: Recompute each inverse every this many steps: an integer, or a function of the step. The work is
            spread over all steps.
        damping_method: `"factored"` (the default), `"exact"` (the default for corrected eigenvalues; slower), or
            `"per-factor"`, as in `kfs.KFAC.inverse`.
        damping_unit: `"relative"` to each block's mean eigenvalue, or `"absolute"`.
        quadratic_model: Whether a quadratic model of the loss chooses learning rate and momentum, and the quality of
            its predictions sets the damping (Martens & Grosse, 2015). `step` then requires a closure.
        adamw_lr: Learning rate of AdamW, relative to `lr`, for parameters that KFAC does not cover, and for groups with
            `"method": "adamw"`.
        patience: Raise damping after this many events in a row (see `events`).
        max_dim: Keep only the diagonal of factors that are wider than this.
        batch_axis: As in `kfs.KFAC`.
        mask: Which positions of the inputs are padding: the name of a keyword argument of the model with shape
            `[N, S]`, or a function of the model's arguments, `mask(*args, **kwargs)`. The mask is zero or `False` at
            padding. By default `attention_mask`, if there is one. Factors exclude positions that no counted prediction
            depends on; positions that no mask describes are measured.
        seed: Seed for drawing labels with `fisher="mc"`.
        audit: Whether to check, on a few examples, that watching the model changes nothing and captures all uses of
            the parameters. This calls the model a few more times; buffers, random state and attributes of modules are
            restored.
        replay: Whether to record parameter updates and factor passes as CUDA graphs on a GPU, and to replay them. The
            graphs need memory: about four times the size of the parameters, and as much as one pass.
        group: Processes that train the model together, each with its own data, if you average gradients over them
            between `backward()` and `step()`. For a `DistributedDataParallel` or sharded model, leave it out: its group
            is known.

    Attributes:
        steps: Number of steps taken.
        uncovered: Parameters that KFAC does not cover, with reasons. They are trained by AdamW.

    Raises:
        ModelError: If a setting is out of range, a parameter does not belong to the model, or a KFAC optimizer of
            another model already has it.
        LossError: If no loss is passed, or the loss is not supported.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> x, criterion = torch.randn(64, 4), nn.CrossEntropyLoss()
        >>> y = x[:, :3].argmax(1)
        >>> optimizer = KFAC(model, criterion)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
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
        lr: float = 1.0,
        damping: float | Relative = 0.003,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 0.03,
        noise: float | None = 0.05,
        kl_clip: float | None = None,
        fisher: Fisher = "mc",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        eigen: bool = False,
        decay: float = 0.7,
        factors_every: Interval | None = None,
        inverses_every: Interval = 20,
        damping_method: Method | None = None,
        damping_unit: Unit = "relative",
        quadratic_model: bool = False,
        adamw_lr: float = 0.001,
        patience: int = 3,
        max_dim: int | None = 4096,
        batch_axis: int | None = None,
        mask: str | Callable[..., Tensor] | None = None,
        seed: int = 0,
        audit: bool = True,
        replay: bool = True,
        group: Group | None = None,
    ) -> None:
        """Validate all options, then register hooks on the model."""
        check_call(model, loss)
        model, self._exchange = Exchange.of(model, group)
        ranks = self._exchange.ranks
        self._loss = describe(loss)
        self._settings = Settings(fisher, sharing, seed=seed, max_dim=max_dim, batch_axis=batch_axis, audit=audit)
        damping, damping_unit = number_and_unit(damping, damping_unit)
        check_options(locals())
        replay = replay and not is_fully_sharded(model)  # CUDA graphs contain no communication.
        defaults = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adamw_lr": adamw_lr,
            "method": "kfac",
        }
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self._model = model
        self._quadratic = QuadraticModel(model, self._loss, self._exchange) if quadratic_model else None
        self._factors_every = factors_every or (1 if quadratic_model else warmup_interval)
        inverses = Inverses(damping_method or ("exact" if eigen else "factored"), damping_unit, eigen, replay)
        self._curvature = Curvature(decay, inverses, inverses_every, patience, ranks)
        self._curvature.at_owners = is_fully_sharded(model) and not eigen  # All ranks need eigenvectors.
        self._last_good_step = LastGoodStep(patience)
        self._gradient_sizes = UsualSizes(_GRADIENTS_LIMIT, patience)
        self.steps = 0
        self.uncovered: dict[str, str] = {}
        self._loss_check = LossCheck(self._loss, ranks.size)
        self._unit = 1.0  # The loss is this many times the average over examples.
        self._tracked: frozenset[str] = frozenset()  # parameters that were tracked when factors were last added
        self._declared: set[Key] = set()  # blocks that were already checked for wide factors
        self._paused = False
        self._whole: Consolidated | None = None  # set by `consolidate_state_dict`, valid until the next step
        self._params = Parameters(model, self.param_groups, self.close)
        self._scale = None if noise is None or quadratic_model else StepScale(noise)
        self._trend = LossTrend()
        self._updates = Updates(self._params, self._curvature, kl_clip, replay, self._scale)
        self._pending = PendingChecks(self._curvature, self._last_good_step)
        module = loss if isinstance(loss, nn.Module) else None
        # `called` is a pair: positional and keyword arguments of the model.
        masks = MaskSource((lambda called: mask(*called[0], **called[1])) if callable(mask) else mask)
        watched = (self._loss, self._settings, quadratic_model, self._curvature.costs, replay, self._exchange, masks)
        self._watch = Watch(model, module, self._wanted, *watched)

    def close(self) -> None:
        """Remove all hooks from the model, so that another optimizer can watch it. Afterwards, `step()` raises."""
        self._pending.read_all()
        self._watch.close()
        self._params.closed = True

    def targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass, before `backward()`, if the optimizer cannot see them.

        The optimizer sees them if the loss is computed by calling the module that was passed as `loss=`. Otherwise,
        targets are required for losses whose curvature depends on them. With `fisher="empirical"`, they are required
        for all losses except cross-entropy, because the scale of gradients must be known. Missing targets raise an
        error.
        """
        self._watch.set_targets(y)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model, such as the parameters of a new layer."""
        super().add_param_group(param_group)
        if not hasattr(self, "_params"):  # called by the constructor
            return
        try:
            self._params.read(self.param_groups)
        except ModelError:
            self.param_groups.pop()
            raise
        names = {n for a in self._curvature.averages.values() for n in a.layout.params}
        self._curvature.forget(names - self._params.tensors.keys())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and discard the statistics of passes since the last step."""
        self._watch.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimization step.

        Args:
            closure: Computes the loss and its gradients, as for `torch.optim.LBFGS`. It is required with
                `quadratic_model=True`, and is then called again after the step, and after each time the step is
                shortened.

        Returns:
            The return value of the closure.

        Raises:
            ModelError: If there are no gradients, or if factors must be recomputed but no pass through the model was
                seen.
            LossError: If the gradients do not belong to the declared loss.
            SolverError: If the run has diverged: parameters are not finite, or very many steps in a row were skipped.
        """
        # `torch.distributed.checkpoint` takes an empty step to create the state before it saves or loads one.
        if closure is None and self._is_first_step_of_checkpoint():
            self._fill_state()
            return None
        self._exchange.check()
        self._whole = None
        with self._exchange.step(self._device, self._has_statistics):
            self._params.check_open()
            check_numbers(self.param_groups)
            if self._quadratic is not None and closure is None:
                raise ModelError(
                    "A quadratic model needs to evaluate the loss.",
                    "Call step(closure), with a closure that zeroes gradients, calls backward() and returns the loss.",
                )
            # Collect gradients, and the statistics of the passes of all ranks.
            batch = None if closure is None else BatchLoss(closure, self._model, self._device, self._exchange.mean)
            result = None if batch is None else batch.result
            self._params.check_model()
            grads = {n: local_part(p.grad).to_dense() for n, p in self._params.tensors.items() if p.grad is not None}
            sums = self._merged(self._watch.collect(), grads)
            # Adding factors requires the outcomes of earlier steps, which may still be on the device.
            if sums is not None and sums.has_factors:
                self._pending.read_all()
                self._last_good_step.check(self._params.tensors)
            self._check(sums, grads, result)
            # Gradients are usable if they are finite and not far larger than before. The result stays on the device.
            size = total_size(list(grads.values())).reshape(1)
            learn = sums is not None and sums.has_factors
            finite, good = self._gradient_sizes.check(self._exchange.ranks, ("gradients",), size, learn=learn)
            fine = GoodStep.of(self.steps, result, self.param_groups[0], self.damping_scale)
            lost = self._lost(sums, grads)
            self._note_loss(sums)
            # Reading a flag from a GPU synchronizes. In a steady step, the device evaluates the flags itself.
            waits = not sync.is_asynchronous(good.device) or not self._is_steady(sums, lost)
            # If the host decides, it skips the step here.
            if waits:
                is_fine = self._quadratic is None or batch is None or isfinite(batch.value)
                if not good or not is_fine:
                    self._pending.note_skipped(is_fine and bool(finite))
                    self._last_good_step.check(self._params.tensors)
                    return result
                self._last_good_step.note(fine)
            added = None if sums is None else self._add_sums(sums, lost, None if waits else good)
            # The quadratic model needs the curvature of the current step.
            self._curvature.update_inverses(self.steps, self._params.groups, force=self._quadratic is not None)
            taken = self._update(sums, grads, good, batch)
            # Flags that are still on the device are read in a later step.
            if taken is not None:
                self._pending.add(fine, [good, finite, taken, *([] if added is None else [added])])
            self._curvature.costs.end_step()
            self._keep_place_for_carrier()
            self.steps += 1
            return result

    def _update(
        self, sums: StepSums | None, grads: dict[str, Tensor], good: Tensor, batch: BatchLoss | None
    ) -> Tensor | None:
        """Update parameters: with curvature by the natural gradient, others by AdamW.

        Returns:
            The flag whether the step was taken, on an accelerator; `None` if the host knows it.
        """
        taken = None
        covered = self._curvature.covered
        natural = {n: g for n, g in grads.items() if n in covered}
        rest = {n: g for n, g in grads.items() if n in self.uncovered or self._params.groups[n]["method"] == "adamw"}
        # Parameters that have a gradient but no factors yet. Every step computes factors until they have some.
        unused = {} if sums is None else sums.uncovered
        self._curvature.awaited |= grads.keys() - natural.keys() - rest.keys() - unused.keys()
        if self._quadratic is None or batch is None:
            with self._curvature.costs.timed("products"):
                half = self._watch.in_half_precision
                trend = self._trend
                allowed = inf
                if self._scale is not None:
                    allowed = self._scale.allowed(trend.mean, trend.progress, self.param_groups)
                taken = self._updates.take(self.state, natural, rest, good, self._unit, half, allowed)
        else:
            natural = {n: g / self._unit for n, g in natural.items()}
            with self._curvature.costs.timed("products"):
                # No trust region: the quadratic model chooses the length of the step.
                D = self._curvature.precondition(natural, self._params.tensors, self._params.groups, limit=False)
            steps = self._quadratic.steps(natural, D, self._curvature.dampings(), sums)
            noise = batch.round_off / self._unit
            change = partial(self._change, batch)
            trial = tried_updates(self._params, self.state, steps, natural, rest, change, noise)
            factor = self._quadratic.finish(steps, trial, float(self.param_groups[0]["lr"]), noise)
            self._curvature.note_trial(trial, factor)
        self._curvature.note_products()
        return taken

    def _note_loss(self, sums: StepSums | None) -> None:
        """Record the loss of a step with new factors, and warn if the run is getting worse."""
        if sums is None or not sums.has_factors or not sums.examples:
            return
        loss = sums.deviance / sums.examples
        if not isfinite(loss):
            # Without targets, assume a square loss: its residuals are the gradients over the reduction factor.
            R = self._loss.reduction_factor(sums.count) * (
                self._exchange.ranks.size if self._loss.reduction == "mean" else 1
            )
            loss = 0.5 * sums.square / (R**2 * sums.examples)
        trouble = self._trend.note(self.steps, loss, self.step_scale)
        if trouble:
            if not self._curvature.events.rising_losses:
                way_out = "Use a smaller lr, warm-up, a larger damping or a smaller trust, or go back to a checkpoint."
                warnings.warn(f"{trouble[0].upper()}{trouble[1:]}. {way_out}", KfsWarning, stacklevel=3)
            self._curvature.events.note("rising_losses", trouble)

    def _change(self, batch: BatchLoss) -> float:
        """Return the change of the batch loss since its first evaluation. The passes for it compute no factors."""
        self._paused = True
        try:
            with self._curvature.costs.timed("trials"):
                self._curvature.costs.add("trials", 0.0)
                return (batch.evaluate() - batch.value) / self._unit
        finally:
            self._paused = False
            self._watch.collect()

    def _wanted(self) -> tuple[dict[str, Tensor], Bases] | None:
        """Return the parameters to track in the starting forward pass, and bases; `None` if factors are not needed."""
        if self._exchange.finds_wrapper(self._model):
            self._loss_check.ranks = self._exchange.ranks.size
            self._curvature.train_with(self._exchange.ranks)
        due = self._due()
        if self._paused or not due or not self._params.are_the_models():
            return None
        for average in islice(self._curvature.averages.values(), 1):
            self._params.check_device(average.factors.like.device)
        return due, self._curvature.bases()

    def _due(self) -> dict[str, Tensor]:
        """Return all tracked parameters if factors must be recomputed: by schedule, or because parameters are new."""
        tracked = self._tracked_now()
        by_schedule = self.steps % interval_at(self._factors_every, self.steps) == 0
        others = tracked.keys() != self._tracked or not self._curvature.awaited.isdisjoint(tracked)
        return tracked if by_schedule or others else {}

    def _has_statistics(self) -> bool:
        """Whether the current step needs statistics of its passes."""
        return self._loss.reduction == "sum" or bool(self._due())

    def _merged(self, sums: StepSums | None, grads: Mapping[str, Tensor]) -> StepSums | None:
        """Return the statistics of the passes of all processes."""
        averages, products = self._curvature.averages, self._settings.products
        return self._exchange.merged(sums, self._facts, self._params.tensors, grads, averages, products)

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return values that must agree between processes at this step, by kind and name."""
        numbers = {"steps": self.steps, "data": self._watch.first_datum, "unit": self._unit}
        later = range(self.steps + 1, self.steps + 1000)
        next_due = next((step for step in later if step % interval_at(self._factors_every, step) == 0), -1)
        # On a GPU, steps without factors do not communicate. Their schedule is compared in advance.
        inverses = [interval_at(self._curvature.every, step) for step in range(self.steps, next_due)]
        due = {
            "next step with factors": next_due,
            "inverses_every": inverses,
            "parameters": sorted(self._tracked_now()),
        }
        with sync.allow_sync():  # A learning rate may be a tensor.
            options = {
                f"{name} of group {place}": float(value) if isinstance(value := group.get(name), Tensor) else value
                for place, group in enumerate(self.param_groups)
                for name in self.defaults
            }
        return {
            "Numbers of steps and data": numbers
            | {"damping_scale": self.damping_scale, "step_scale": round(self.step_scale, 6)},
            "Options of parameter groups": options,
            "Schedules": due,
        }

    def _tracked_now(self) -> dict[str, Tensor]:
        return {n: p for n, p in self._params.trainable().items() if n not in self.uncovered}

    def _check(self, sums: StepSums | None, grads: Mapping[str, Tensor], value: Any) -> None:
        """Raise if there are no gradients or no watched passes, or if another loss is minimized."""
        if not grads:
            raise ModelError("No parameter has a gradient.", "Call backward() of the loss before step().")
        if sums is None and self._has_statistics():
            raise ModelError(
                "No forward and backward pass through the model was seen since the last step.",
                "Call the model itself, model(x), not its parts or a copy, and backward() of a loss of its output. "
                "torch.autograd.grad does not count.",
            )
        if sums is not None:
            # The closure returns the loss on the data of this process only.
            self._loss_check.check(sums, value if self._exchange.ranks.size == 1 else None)
            self._watch.compare = self._loss_check.steps_left > 0

    def _lost(self, sums: StepSums | None, grads: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the parameters that turn out not to be covered, each with the reason."""
        if sums is None:
            return {}
        return lost_parameters(sums, self._params.trainable(), grads, self._curvature.averages, self._exchange.ranks)

    def _is_steady(self, sums: StepSums | None, lost: Mapping[str, str]) -> bool:
        """Whether the step changes only tensor values, so that the host need not read a flag before it is taken."""
        if self._quadratic is not None or lost:
            return False
        return sums is None or (sums.finite and (not sums.has_factors or self._curvature.knows(sums)))

    def _add_sums(self, sums: StepSums, lost: dict[str, str], good: Tensor | None) -> Tensor | None:
        """Add the statistics of a step to the averages, and warn about parameters and factors that are left out.

        If `good`, a flag on the device, is given, averages change only if it is true.

        Returns:
            If the device decides, its flag: whether statistics were added.
        """
        if sums.examples and sums.finite:
            mean = self._loss.reduction == "mean"
            # Gradients are averaged over processes, even if the loss is a sum.
            self._unit = self._loss.scale * sums.examples / (sums.count if mean else self._exchange.ranks.size)
        if not sums.has_factors:
            return None  # Examples were only counted, or all targets are ignored.
        added = self._curvature.add(sums, lost, good)
        if added is False:
            return None
        # The counter advances even if the device rejects the sums: random numbers for labels are never used twice.
        self._watch.first_datum += sums.num_data
        self.uncovered |= lost
        self._tracked = frozenset(self._tracked_now())
        new = [block for key, block in sums.blocks.items() if key not in self._declared]
        self._declared |= sums.blocks.keys()
        if lost:
            text = f"KFAC does not cover some parameters, which are trained by AdamW ({listed(lost)})."
            warnings.warn(text, KfsWarning, stacklevel=4)
        warn_of_wide(new, self._settings, stacklevel=5)
        return added if isinstance(added, Tensor) else None

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.tensors.values())).device

    @property
    def events(self) -> Events:
        """Counts of handled problems: skipped steps, refused statistics, failed inverses. Synchronizes with a GPU."""
        self._pending.read_all()
        return self._curvature.events

    @property
    def audit(self) -> Audit | None:
        """Report of the audit of the last watched pass: checks and errors. `None` if there was no audit."""
        return self._watch.audit

    @property
    def damping_scale(self) -> float:
        """The factor that currently multiplies all dampings."""
        return self._curvature.damping_scale

    @property
    def step_scale(self) -> float:
        """The factor that currently multiplies learning rates. Reading it synchronizes with a GPU."""
        return 1.0 if self._scale is None else self._scale.value()

    def report(self) -> Report:
        """Return a report of covered parameters, costs of recent steps, and events; `print` shows it as a table.

        Example:
            >>> from kfs.optim import KFAC
            >>> report = KFAC(nn.Linear(3, 2), nn.CrossEntropyLoss()).report()
            >>> report.waiting  # until the first step
            ('weight', 'bias')
            >>> KFAC(nn.Linear(3, 2), nn.CrossEntropyLoss(), lr=0.1)
            KFAC for Linear (2 parameters, 8 numbers), CrossEntropyLoss
              lr=0.1, damping=0.003, momentum=0.9, weight_decay=0, trust=0.03
              fisher='mc', eigen=False, quadratic_model=False
              steps=0, blocks=0, not covered=0, step_scale=1, damping_scale=1, events: none
        """
        self._pending.read_all()
        curvature = self._curvature
        place = {name: i for i, name in enumerate(self._params.tensors)}
        averages = sorted(curvature.averages.values(), key=lambda a: (place[a.layout.weight], a.layout.rows))
        blocks = tuple(map(block_row, averages))
        covered = {name for row in blocks for name in row.params}
        adamw = [n for n, group in self._params.groups.items() if group["method"] == "adamw"]
        rest = [n for n in self._params.tensors if n not in {*covered, *adamw, *self.uncovered}]
        return Report(
            summary=repr(self),
            blocks=blocks,
            uncovered=dict(self.uncovered),
            adamw=tuple(adamw),
            waiting=tuple(rest),
            costs={part: curvature.costs.mean(part) for part in PARTS},
            num_steps=len(curvature.costs.last),
            on_host=any(p.device.type != "cpu" for p in self._params.tensors.values()),
            events=Events(**asdict(curvature.events)),
            lr=tuple(float(group["lr"]) for group in self.param_groups),
            damping=tuple(float(group["damping"]) * curvature.damping_scale for group in self.param_groups),
            damping_scale=curvature.damping_scale,
            step_scale=self.step_scale,
            history=tuple(self._trend.history),
        )

    def describe(self) -> Description:
        """Describe model, loss, settings and progress of training."""
        tensors, curvature = self._params.tensors.values(), self._curvature
        size = sum(p.numel() for p in tensors)
        names = ("lr", "damping", "momentum", "weight_decay", "trust")
        groups = "; ".join(", ".join(f"{n}={number(g[n])}" for n in names) for g in self.param_groups)
        kind = f"fisher={self._settings.fisher!r}, eigen={curvature.inverses.eigen}"
        kind += f", quadratic_model={self._quadratic is not None}"
        happened = ", ".join(f"{name} {count}" for name, count in asdict(curvature.events).items() if count)
        progress = (
            f"steps={self.steps}, blocks={len(curvature.averages)}, not covered={len(self.uncovered)}, "
            f"step_scale={self.step_scale:.3g}, damping_scale={curvature.damping_scale:.3g}, "
            f"events: {happened or 'none'}"
        )
        title = (
            f"KFAC for {type(self._model).__name__} ({len(tensors)} parameters, {size:,} numbers), {self._loss.name}"
        )
        return Description(title, (groups, kind, progress))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: training that resumes from it is identical to training without interruption.

        With several processes, call `consolidate_state_dict()` in all of them first. For a sharded model, tensors are
        unsharded: the state is the same as for an unsharded model in one process. `get_optimizer_state_dict` and
        related functions of `torch.distributed.checkpoint` do not need that call, and leave tensors sharded.

        Raises:
            DistributedError: If there are several processes, and `consolidate_state_dict()` was not called since the
                last step.
        """
        if _is_for_checkpoint():
            return self._state_by_parameter()
        averages: Iterable[Average] = self._curvature.averages.values()
        self._pending.read_all()
        if self._exchange.ranks.size == 1:
            tensors = self._whole_tensors()
        elif self._whole is not None:
            averages, tensors = self._whole
        elif averages:
            raise DistributedError(
                "Each process has a part of the optimizer's state.",
                "Call consolidate_state_dict() of the optimizer in all processes, then state_dict() in one.",
            )
        else:
            tensors = {}  # Before the first step, there is no state.
        state = super().state_dict()
        state["state"] = {
            i: {name: tensors.get(id(value), value) for name, value in one.items() if name != _CARRIER}
            for i, one in state["state"].items()
        }
        state["kfac"] = self._own_state(averages)
        return state

    def _own_state(self, averages: Iterable[Average]) -> dict[str, Any]:
        """Return all state that does not belong to one parameter, given averages over all processes."""
        return {
            "curvature": self._curvature.state(averages),
            "steps": self.steps,
            "first_datum": self._watch.first_datum,
            "unit": self._unit,
            "gradient_sizes": self._gradient_sizes.state(),
            "losses": self._trend.state(),
            "step_scale": None if self._scale is None else self._scale.state(),
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
            "previous": {} if self._quadratic is None else dict(self._quadratic.previous),
        }

    def _is_first_step_of_checkpoint(self) -> bool:
        """Whether this step only creates state: the first one, without passes, with gradients and rates of zero."""
        if self.state or self.steps or self._watch.has_passes or any(group["lr"] for group in self.param_groups):
            return False
        grads = [local_part(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(bool(g.any()) for g in grads)

    def _fill_state(self) -> None:
        """Create missing state for all trainable parameters, and an entry for the carrier."""
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        age = new_age(self._device)
        for p, group in trained:
            adamw = group["method"] == "adamw" or "exp_avg" in self.state[p]
            start_averages(self.state, p, adamw, age)
            if self._scale is not None and not adamw:
                keep_mean_step(self.state, p)
        self._keep_place_for_carrier()

    def _keep_place_for_carrier(self) -> None:
        """Add an entry for the carrier to the first trainable parameter: checkpoints restore existing entries only."""
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        for p in islice(trained, 1):
            self.state[p].setdefault(_CARRIER, Carrier())

    def _state_by_parameter(self) -> dict[str, Any]:
        """Return the state for a distributed checkpoint. All ranks call this. Sharded state stays sharded."""
        self._pending.read_all()
        self._fill_state()
        averages = sum_over_ranks(self._exchange.ranks, self._curvature.averages.values())
        state = super().state_dict()
        adamw: dict[str, Any] = {}  # AdamW state of parameters in KFAC groups that are not covered
        packed = [i for group in state["param_groups"] for i in group["params"]]
        for i, name in zip(packed, self._params.ordered(self.param_groups), strict=True):
            mine = dict(state["state"].get(i, {}))
            if "age" in mine:
                mine["age"] = mine["age"].clone()  # A checkpoint is read into these tensors, one by one.
            if "exp_avg" in mine and self._params.groups[name]["method"] == "kfac":
                adamw[name] = {key: mine[key] for key in ("exp_avg", "exp_avg_sq", "age")}
                # Replace it by the entries of a new optimizer.
                mine = {key: value for key, value in mine.items() if key == _CARRIER}
                names = ("average",) if self._scale is None else ("average", "mean_step")
                mine |= {"age": new_age(self._device)} | {
                    key: torch.zeros_like(adamw[name]["exp_avg"]) for key in names
                }
            if mine:
                state["state"][i] = mine
        carried = {"kfac": self._own_state(averages), "adamw": mapped(adamw, whole)}
        carriers = (one for one in state["state"].values() if _CARRIER in one)
        for one in islice(carriers, 1):
            one[_CARRIER] = Carrier(copied_to(torch.device("cpu"), carried))  # Copied: the file may be written later.
        return state

    def _from_checkpoint(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Invert `_state_by_parameter`; other states are returned unchanged."""
        found = [one[_CARRIER] for one in state.get("state", {}).values() if _CARRIER in one]
        carried = next((one.carried for one in found if isinstance(one, Carrier) and one.carried), None)
        if "kfac" in state or carried is None:
            return dict(state)
        result: dict[Any, Any] = {}
        packed = [i for group in state["param_groups"] for i in group["params"]]
        for i, name in zip(packed, self._params.ordered(self.param_groups), strict=False):
            mine = carried["adamw"].get(name, state["state"].get(i, {}))
            result[i] = {key: value for key, value in mine.items() if key != _CARRIER}
        return {**state, "state": result, "kfac": carried["kfac"]}

    @torch.no_grad()
    @agreed("consolidate_state_dict()")
    def consolidate_state_dict(self) -> None:
        """Sum the state over all processes, so that each of them can call `state_dict()` before the next step.

        All processes must call it. In a single process, it is not needed.
        `torch.distributed.optim.ZeroRedundancyOptimizer` has a method of the same name.

        Example:
            >>> from kfs.optim import KFAC
            >>> optimizer = KFAC(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss())
            >>> optimizer.consolidate_state_dict()
            >>> state = optimizer.state_dict()
        """
        self._pending.read_all()
        averages = sum_over_ranks(self._exchange.ranks, self._curvature.averages.values())
        self._whole = Consolidated(averages, self._whole_tensors())

    def _whole_tensors(self) -> dict[int, Tensor]:
        """Return unsharded copies of all sharded state tensors on the CPU, by `id` of the sharded tensor."""
        sharded = [t for one in self.state.values() for t in one.values() if is_sharded(t)]
        return {id(t): whole(t).cpu() for t in sharded}

    def __reduce__(self) -> Any:
        """Raise: a copy would be a second optimizer that watches the same model."""
        raise ModelError(
            "An optimizer that watches a model cannot be copied or pickled.",
            "Copy its state: KFAC(other_model, ...).load_state_dict(optimizer.state_dict()).",
        )

    def _check_complete(self, mine: Mapping[str, Any]) -> None:
        """Raise if the state lacks entries, before anything is changed."""
        own = self._own_state(())
        missing = (own.keys() - mine.keys()) | (own["curvature"].keys() - mine["curvature"].keys())
        for average in mine["curvature"]["averages"]:
            missing |= Average.stored() - average.keys()
        if missing:
            raise StorageError(
                f"The state has no {', '.join(sorted(missing))}: another version of kfs has written it.",
                "Load it with that version, or train on without it: averages are known again after a few steps.",
            )

    @torch.no_grad()
    @agreed("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned. With several processes, load the same state in all of them.

        The number of processes may differ from the run that saved the state, and the model may be sharded or not.
        Tensors of the state may be sharded in any way.

        Raises:
            StorageError: If the state belongs to another optimizer, another model, or another version of kfs.
        """
        self._params.check_open()
        state_dict = self._from_checkpoint(state_dict)
        self._params.check_state(state_dict)
        mine = state_dict["kfac"]
        self._check_complete(mine)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        read_state(self.state, self.param_groups, state_dict)
        device = next(iter(self._params.tensors.values())).device
        self._curvature.restore(mine["curvature"], device)
        self._pending.forget()
        self._exchange.start_again()
        self._whole = None
        self.steps = mine["steps"]
        self.uncovered = dict(mine["uncovered"])
        self._watch.first_datum = mine["first_datum"]
        self._unit = mine["unit"]
        self._gradient_sizes.restore(mine["gradient_sizes"])
        self._trend = LossTrend.from_state(mine["losses"])
        if self._scale is not None and mine["step_scale"] is not None:
            self._scale.restore(mine["step_scale"])
        self._tracked = frozenset(mine["tracked"])
        if self._quadratic is not None:
            self._quadratic.previous = copied_to(device, mine["previous"])
        self._params.read(self.param_groups)
        if self.state:
            self._keep_place_for_carrier()
