"""KFAC as an optimizer: a thin shell around the update rule (`rule`), with curvature from the passes of training."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from kfs import waiting
from kfs.data import MaskSource
from kfs.distributed import Group
from kfs.errors import KfsWarning, ModelError
from kfs.kfac.block import Block
from kfs.kfac.coverage import listed, warn_of_wide
from kfs.kfac.layout import Key
from kfs.kfac.settings import Fisher, Settings, Sharing
from kfs.kfac.structures import Method, Relative
from kfs.losses import describe
from kfs.optim.announcement import Announcement
from kfs.optim.averages import Unit
from kfs.optim.call import check_call
from kfs.optim.coverage import lost_parameters
from kfs.optim.curvature import Curvature, Interval, interval_at
from kfs.optim.divergence import Fine, LastFine, LossTrend, UsualSizes
from kfs.optim.exchange import Exchange, made_by_all
from kfs.optim.fully_sharded import is_fully_sharded, part_of
from kfs.optim.inverses import Inverses
from kfs.optim.options import check_numbers, check_options, more_often_at_first, number_and_unit
from kfs.optim.outstanding import Outstanding
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic import QuadraticModel
from kfs.optim.report import Reported
from kfs.optim.rule import total_size
from kfs.optim.saving import Saved
from kfs.optim.step_scale import StepScale
from kfs.optim.step_sums import Bases, StepSums
from kfs.optim.trials import BatchLoss
from kfs.optim.updates import Taken, Updates, tried_updates
from kfs.optim.watch import Watch

# Gradients that are larger than this many times the largest so far are not used.
_GRADIENTS_LIMIT = 100.0


class KFAC(Reported, Saved):
    """Natural gradient descent with Kronecker-factored curvature. It is used like any optimizer of `torch.optim`.

    Args:
        model: The model. Train it by calling it: `loss_function(model(x), y).backward()`. With several processes, pass
            the `DistributedDataParallel` model, or one that `fully_shard` has sharded.
        loss: The loss that is minimized: a loss module of `torch.nn`, or a `kfs.losses.Loss`. It defines the curvature;
            gradients come from your backward pass. In the first steps the gradient at the predictions is compared with
            it: another loss, or another reduction, is an error, a factor in front a warning. For losses other than
            cross-entropies, reduction and factor are noticed only if targets are known (see `targets`).
        params: Parameters or parameter groups, as for other optimizers. By default, all parameters of the model.
        lr: Learning rate. One is the whole natural gradient step, inside of the trust region.
        damping: Added to eigenvalues of the curvature, in units of their mean, as `kfs.Relative` is.
        momentum: How much of the average over gradients is kept in every step.
        weight_decay: Decoupled weight decay.
        trust: Limits each layer's step before it is multiplied by `lr`, in every direction: how much it may change
            outputs. `None` for no limit.
        noise: Steps get shorter while their overshoot, be it because of noise or of curvature, is more than this share
            of the loss: see `step_scale`. `None` for steps that never do.
        kl_clip: Limits the whole step: how much it may change predictions according to the curvature. `None` for no
            limit.
        fisher: Which curvature matrix: `"mc"` (one more backward pass, for labels drawn from the model's likelihood),
            `"empirical"` (costs no pass), `"type-2"` (exact; one pass per class), `"ggn"` (likewise, for losses without
            likelihood), or `"forward-only"` (inputs alone).
        sharing: As in `kfs.KFAC`.
        eigen: Whether to correct eigenvalues, as in `kfs.EKFAC`, by running averages in the eigenbasis.
        decay: How much of the averages over factors is kept when new factors are added.
        factors_every: Recompute factors every this many steps: a number, or a function of the step. By default every
            step at first, and later every 10; with a quadratic model, which needs every batch, every step.
        inverses_every: Recompute each inverse every this many steps, likewise. The work is spread over all steps.
        damping_method: `"factored"` (the default), `"exact"` (the default for corrected eigenvalues; takes longer), or
            `"per-factor"`, as in `kfs.KFAC.inverse`.
        damping_unit: `"relative"` to each block's mean eigenvalue, or `"absolute"`.
        quadratic_model: Whether learning rate and momentum come from a quadratic model of the loss, and damping from
            how well it predicts the loss (Martens & Grosse, 2015). Then `step` needs a closure.
        adamw_lr: Learning rate of AdamW, relative to `lr`, for parameters that KFAC does not cover, and for groups with
            `"method": "adamw"`.
        patience: Damping rises after this many events in a row (see `events`).
        max_dim: Factors wider than this keep their diagonal only.
        batch_axis: As in `kfs.KFAC`.
        mask: Which positions of the inputs are there, and which ones are padding: the name of a keyword argument
            `[N, S]` of the model, or a function of its arguments, `mask(*args, **kwargs)`. It is zero, or `False`, at
            padding. By default `attention_mask`, if there is one. Factors leave out what no prediction that counts
            depends on; what no mask says is measured.
        seed: Seed for drawing labels with `fisher="mc"`.
        audit: Whether to check, on a few data, that watching the model changes nothing and sees all uses of parameters.
            The model is called some more times for it; buffers, random state and attributes of modules are restored.
        replay: On a GPU, whether updates of parameters, and passes for factors, are recorded once and then repeated as
            CUDA graphs. They take memory: about four times the parameters, and as much as a pass does.
        group: Processes that train the model together, each with data of its own, if you average gradients over them
            between `backward()` and `step()`. That of a `DistributedDataParallel` or sharded model is known.

    Attributes:
        steps: Number of steps that were taken.
        uncovered: Parameters that KFAC does not cover, and why. They are trained by AdamW.

    Raises:
        ModelError: If a setting is out of range, a parameter is not one of the model, or a KFAC optimizer of another
            model has it.
        LossError: If no loss is passed, or one that is not supported.

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
        """Check everything, then put hooks on the model."""
        check_call(model, loss)
        model, self._exchange = Exchange.of(model, group)
        ranks = self._exchange.ranks
        self._loss = describe(loss)
        self._settings = Settings(fisher, sharing, seed=seed, max_dim=max_dim, batch_axis=batch_axis, audit=audit)
        damping, damping_unit = number_and_unit(damping, damping_unit)
        check_options(locals())
        replay = replay and not is_fully_sharded(model)  # Graphs exchange nothing.
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
        self._factors_every = factors_every or (1 if quadratic_model else more_often_at_first)
        inverses = Inverses(damping_method or ("exact" if eigen else "factored"), damping_unit, eigen, replay)
        self._curvature = Curvature(decay, inverses, inverses_every, patience, ranks)
        self._curvature.at_owners = is_fully_sharded(model) and not eigen  # Eigenvectors are needed everywhere.
        self._last_fine = LastFine(patience)
        self._gradient_sizes = UsualSizes(_GRADIENTS_LIMIT, patience)
        self.steps = 0
        self.uncovered: dict[str, str] = {}
        self._announcement = Announcement(self._loss, ranks.size)
        self._unit = 1.0  # The loss is this many times the average over examples.
        self._tracked: frozenset[str] = frozenset()  # parameters whose factors were computed last
        self._announced: set[Key] = set()  # blocks that were checked for wide factors
        self._paused = False
        self._whole = None
        self._params = Parameters(model, self.param_groups, self.close)
        self._scale = None if noise is None or quadratic_model else StepScale(noise)
        self._trend = LossTrend()
        self._updates = Updates(self._params, self._curvature, kl_clip, replay, self._scale)
        self._outstanding = Outstanding(self._curvature, self._last_fine, self._params)
        module = loss if isinstance(loss, nn.Module) else None
        # What the model is called with comes as positional and keyword arguments.
        masks = MaskSource((lambda called: mask(*called[0], **called[1])) if callable(mask) else mask)
        watched = (self._loss, self._settings, quadratic_model, self._curvature.costs, replay, self._exchange, masks)
        self._watch = Watch(model, module, self._wanted, *watched)

    def close(self) -> None:
        """Remove all hooks from the model, so that another optimizer can have it. Afterwards, `step()` raises."""
        self._outstanding.settle(self.state)
        self._watch.close()
        self._params.closed = True

    def targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass, before `backward()`, if the optimizer cannot see them.

        It sees them if the loss is computed by calling the module that was passed as `loss=`. Otherwise, targets are
        needed for losses whose curvature depends on them, and for all losses but cross-entropy with
        `fisher="empirical"`, where the scale of gradients has to be known. An error asks for them.
        """
        self._watch.set_targets(y)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as those of a layer that was added to it."""
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
        """Forget gradients, and the statistics of passes since the last step."""
        self._watch.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Computes the loss and its gradients, as for `torch.optim.LBFGS`. With `quadratic_model=True` it is
                needed, and called again after the step, and after each time that the step is shortened.

        Returns:
            What the closure returned.

        Raises:
            ModelError: If there are no gradients, or if factors are due but no pass of the model was seen.
            LossError: If gradients are not those of the announced loss.
            SolverError: If the run has diverged: parameters are not finite, or very many steps were skipped.
        """
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
            batch = None if closure is None else BatchLoss(closure, self._model, self._device, self._exchange.mean)
            result = None if batch is None else batch.result
            self._params.check_model()
            grads = {n: part_of(p.grad).to_dense() for n, p in self._params.tensors.items() if p.grad is not None}
            sums = self._merged(self._watch.collect(), grads)
            if sums is not None and sums.has_factors:
                self._outstanding.settle(self.state)
                self._last_fine.check(self._params.tensors)
            self._check(sums, grads, result)
            size = total_size(list(grads.values())).reshape(1)
            learn = sums is not None and sums.has_factors
            finite, good = self._gradient_sizes.check(self._exchange.ranks, ("gradients",), size, learn=learn)
            fine = Fine.of(self.steps, result, self.param_groups[0], self.damping_scale)
            lost = self._lost(sums, grads)
            self._note_loss(sums)
            # Reading a value from a GPU waits for it. Where nothing new begins, the device looks at flags itself.
            waits = not waiting.runs_behind(good.device) or not self._is_steady(sums, lost)
            if waits:
                is_fine = self._quadratic is None or batch is None or isfinite(batch.value)
                if not good or not is_fine:
                    self._outstanding.note_skipped(is_fine and bool(finite))
                    self._last_fine.check(self._params.tensors)
                    return result
                self._last_fine.note(fine)
            if sums is not None:
                self._add_sums(sums, lost, None if waits else good)
            # The quadratic model wants the curvature of this very step.
            self._curvature.update_inverses(self.steps, self._params.groups, force=self._quadratic is not None)
            taken = self._update(sums, grads, good, batch)
            if taken is not None:
                self._outstanding.add(self.state, fine, finite, good, taken)
            self._curvature.costs.end_step()
            self._keep_place_for_carrier()
            self.steps += 1
            return result

    def _update(
        self, sums: StepSums | None, grads: dict[str, Tensor], good: Tensor, batch: BatchLoss | None
    ) -> Taken | None:
        """Change parameters: those that have curvature by the natural gradient, others by AdamW.

        Returns:
            What an accelerator decides about it; `None` if all is known.
        """
        taken = None
        covered = self._curvature.covered
        natural = {n: g for n, g in grads.items() if n in covered}
        rest = {n: g for n, g in grads.items() if n in self.uncovered or self._params.groups[n]["method"] == "adamw"}
        # Parameters that were used for the first time. New factors are due until a step with factors uses them again.
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
                # The quadratic model finds out itself how long steps should be.
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
        """Take note of the loss of a step with new factors, and warn if the run gets worse."""
        if sums is None or not sums.has_factors or not sums.examples:
            return
        loss = sums.deviance / sums.examples
        if not isfinite(loss):
            # Without targets, residuals are those of a square loss: gradients over the reduction factor.
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
        """Return the change of the loss on a batch since the last step. Passes for it give no factors."""
        self._paused = True
        try:
            with self._curvature.costs.timed("trials"):
                self._curvature.costs.add("trials", 0.0)
                return (batch.evaluate() - batch.value) / self._unit
        finally:
            self._paused = False
            self._watch.collect()

    def _wanted(self) -> tuple[dict[str, Tensor], Bases] | None:
        """Return parameters to track in the forward pass that begins, and bases; `None` if factors are not needed."""
        if self._exchange.finds_wrapper(self._model):
            self._announcement.ranks = self._exchange.ranks.size
            self._curvature.train_with(self._exchange.ranks)
        due = self._due()
        if self._paused or not due or not self._params.are_the_models():
            return None
        for average in islice(self._curvature.averages.values(), 1):
            self._params.check_device(average.factors.like.device)
        return due, self._curvature.bases()

    def _due(self) -> dict[str, Tensor]:
        """Return all tracked parameters if factors are due: by schedule, or because other parameters are trained."""
        tracked = self._tracked_now()
        by_schedule = self.steps % interval_at(self._factors_every, self.steps) == 0
        others = tracked.keys() != self._tracked or not self._curvature.awaited.isdisjoint(tracked)
        return tracked if by_schedule or others else {}

    def _has_statistics(self) -> bool:
        """Whether the step that is running needs to know about its passes."""
        return self._loss.reduction == "sum" or bool(self._due())

    def _merged(self, sums: StepSums | None, grads: Mapping[str, Tensor]) -> StepSums | None:
        """Return what the passes of all processes gave."""
        averages, products = self._curvature.averages, self._settings.products
        return self._exchange.merged(sums, self._facts, self._params.tensors, grads, averages, products)

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return what must be the same in all processes at this step, by kind and name."""
        numbers = {"steps": self.steps, "data": self._watch.first_datum, "unit": self._unit}
        later = range(self.steps + 1, self.steps + 1000)
        next_due = next((step for step in later if step % interval_at(self._factors_every, step) == 0), -1)
        # Steps without factors exchange nothing on a GPU, and are looked at now.
        inverses = [interval_at(self._curvature.every, step) for step in range(self.steps, next_due)]
        due = {
            "next step with factors": next_due,
            "inverses_every": inverses,
            "parameters": sorted(self._tracked_now()),
        }
        with waiting.waiting_allowed():  # A learning rate may be a tensor.
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
        """Refuse a step without gradients, without curvature, or for another loss."""
        if not grads:
            raise ModelError("No parameter has a gradient.", "Call backward() of the loss before step().")
        if sums is None and self._has_statistics():
            raise ModelError(
                "No forward and backward pass through the model was seen since the last step.",
                "Call the model itself, model(x), not its parts or a copy, and backward() of a loss of its output. "
                "torch.autograd.grad does not count.",
            )
        if sums is not None:
            # What a closure returns is the loss on the data of this process.
            self._announcement.check(sums, value if self._exchange.ranks.size == 1 else None)
            self._watch.compare = self._announcement.steps_left > 0

    def _lost(self, sums: StepSums | None, grads: Mapping[str, Tensor]) -> dict[str, str]:
        """Return parameters that turn out not to be covered, and why."""
        if sums is None:
            return {}
        return lost_parameters(sums, self._params.trainable(), grads, self._curvature.averages, self._exchange.ranks)

    def _is_steady(self, sums: StepSums | None, lost: Mapping[str, str]) -> bool:
        """Whether a step changes nothing but numbers: nobody has to decide anything before it is taken."""
        if self._quadratic is not None or lost:
            return False
        return sums is None or (sums.finite and (not sums.has_factors or self._curvature.knows(sums)))

    def _add_sums(self, sums: StepSums, lost: dict[str, str], good: Tensor | None) -> None:
        """Add the statistics of a step to the averages, and warn about parameters and factors that are left out.

        If nobody has looked whether gradients are `good`, averages change only if they are.
        """
        if sums.examples and sums.finite:
            mean = self._loss.reduction == "mean"
            # Gradients are averages over processes, also those of a sum.
            self._unit = self._loss.scale * sums.examples / (sums.count if mean else self._exchange.ranks.size)
        if not sums.has_factors:
            return  # Examples were only counted, or no target counts.
        if not self._curvature.add(sums, lost, good):
            return
        # Labels are never drawn with the same numbers twice, so this stays even if a device does not add the sums.
        self._watch.first_datum += sums.num_data
        self.uncovered |= lost
        self._tracked = frozenset(self._tracked_now())
        new = [block for key, block in sums.blocks.items() if key not in self._announced]
        self._announced |= sums.blocks.keys()
        if lost:
            text = f"KFAC does not cover some parameters, which are trained by AdamW ({listed(lost)})."
            warnings.warn(text, KfsWarning, stacklevel=4)
        warn_of_wide(map(Block, new), self._settings, stacklevel=5)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.tensors.values())).device
