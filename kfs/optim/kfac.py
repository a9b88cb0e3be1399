"""The KFAC optimizer: its options, state, report and checkpoints. The update rule lives in `kfs.optim.update_rule`.

The functions of `torch.distributed.checkpoint` identify state by parameter only, and use the state of a new optimizer
as a template for reading. All ranks call these functions, so averages are added up over ranks at this point. The
template comes from an optimizer that has not seen the model run, but must have all entries of a later state: momentum
by parameter, and one number at the first parameter that carries everything else (`Carrier`).
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfs.display.describe import Described, Description
from kfs.distributed import Group
from kfs.errors import ModelError, StorageError
from kfs.factors.audit import Audit
from kfs.factors.blocks import Method, Relative
from kfs.factors.settings import Fisher, Sharing
from kfs.optim.across_ranks import agreed, made_by_all
from kfs.optim.apply import Updates, keep_mean_step, new_age, read_state, start_averages, tried_updates
from kfs.optim.averages import Average, Unit, copied_to
from kfs.optim.fsdp import local_part
from kfs.optim.loss_check import called_by_scaler
from kfs.optim.options import Interval, check_call, check_number, check_quadratic_model
from kfs.optim.preconditioner import Preconditioner, Purpose, StepGradients
from kfs.optim.quadratic_model import BatchLoss, QuadraticModel
from kfs.optim.report import Report, callers, description_of, report_of
from kfs.optim.safety import Events
from kfs.problem.whole_parameters import is_sharded, model_to_run, whole
from kfs.runtime import sync
from kfs.runtime.nested import mapped

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


def _is_for_checkpoint() -> bool:
    """Whether a function of `torch.distributed.checkpoint` requests the state, maybe through a wrapping optimizer."""
    names = [frame.f_globals.get("__name__") for frame in islice(callers(sys._getframe(1)), 5)]
    return "torch.distributed.checkpoint.state_dict" in names


class Rest:
    """The optimizer of the parameters that KFAC does not train: the user's, or AdamW.

    Args:
        optimizer: The user's optimizer; `None` for AdamW.

    Raises:
        ModelError: If it is not an optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        if optimizer is not None and (
            not isinstance(optimizer, Optimizer) or isinstance(optimizer, KFAC | torch.optim.LBFGS)
        ):
            raise ModelError(
                f"rest is a {type(optimizer).__name__}, not another optimizer of torch.optim whose step needs no "
                "closure.",
                "Pass an optimizer that trains what KFAC does not: rest=torch.optim.AdamW(model.parameters()).",
            )
        self.optimizer: Any = optimizer
        self.name = "AdamW" if optimizer is None else type(optimizer).__name__

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raise if the optimizer lacks some parameters, given by name."""
        if self.optimizer is None:
            return
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in params.items() if id(p) not in mine]
        if missing:
            raise ModelError(
                f"KFAC does not train {', '.join(map(repr, missing))}, and the optimizer rest= does not have them.",
                f"Make it with them, {self.name}(model.parameters()), or call add_param_group() "
                "of it, or leave rest= out: then AdamW trains them.",
            )

    def beside(self, known: Iterable[Tensor]) -> list[Tensor]:
        """Return its parameters with gradients, except some known ones."""
        others = {id(p) for p in known}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        mine = [p for group in groups for p in group["params"]]
        return [p for p in mine if p.grad is not None and id(p) not in others]

    def step(self, hidden: Iterable[Tensor]) -> None:
        """Let the user's optimizer take a step without the gradients of some parameters."""
        before = [(p, p.grad) for p in hidden]
        try:
            for p, _ in before:
                p.grad = None
            self.optimizer.step()
        finally:
            for p, g in before:
                p.grad = g


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
        rest: Your own optimizer for these parameters, in place of AdamW; it may have other parameters, too. When KFAC
            takes a step, it calls `rest.step()`, which sees no gradients of parameters that KFAC trains. Its learning
            rate, schedule and checkpoints are up to you. On a GPU, such a step synchronizes.
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
        preconditioner: Turns gradients into natural gradients. It has the curvature.

    Raises:
        ModelError: If a setting is out of range, a parameter does not belong to the model, or a KFAC optimizer of
            another model already has it; or if `rest` is not an optimizer, or lacks a parameter that it has to train.
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
        rest: Optimizer | None = None,
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
        check_number("noise", noise)
        if quadratic_model:
            check_quadratic_model(model, factors_every)
            factors_every = 1
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adamw_lr": adamw_lr}
        number = damping.fraction if isinstance(damping, Relative) else damping
        defaults |= {"damping": number, "trust": trust, "method": "kfac"}
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self._rest = Rest(rest)
        self._rest.check(self._asked_for(model_to_run(model)))
        purpose = Purpose(
            kind="optimizer",
            groups=self.param_groups,
            others=f"which are trained by {self._rest.name}",
            check=self._rest.check,
            close=weakref.WeakMethod(self.close),
            noise=None if quadratic_model else noise,
            keep_inputs=quadratic_model,
        )
        self.preconditioner = Preconditioner(
            model,
            loss,
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
            group=group,
            _purpose=purpose,
        )
        self.exchange = self.preconditioner.exchange
        self._params = self.preconditioner.params
        self._scale = self.preconditioner.scale
        self._quadratic: QuadraticModel | None = None
        if quadratic_model:
            self._quadratic = QuadraticModel(self.preconditioner.model, self.preconditioner.loss, self.exchange)
        self._updates = Updates(self.preconditioner)
        self._whole: dict[int, Tensor] | None = None  # see `consolidate_state_dict`; valid until the next step

    def _asked_for(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters in groups with `"method": "adamw"`."""
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [group for group in self.param_groups if group.get("method") == "adamw"]
        return {names.get(id(p), "(unknown)"): p for group in groups for p in group["params"]}

    def close(self) -> None:
        """Remove all hooks from the model, so that another optimizer can watch it, and free recordings.

        Afterwards, `step()` raises. State and report are still available.
        """
        self.preconditioner.close()
        self._updates.close()

    def targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass, before `backward()`, if the optimizer cannot see them.

        The optimizer sees them if the loss is computed by calling the module that was passed as `loss=`. Otherwise,
        targets are required for losses whose curvature depends on them. With `fisher="empirical"`, they are required
        for all losses except cross-entropy, because the scale of gradients must be known. Missing targets raise an
        error.
        """
        self.preconditioner.targets(y)

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return self.preconditioner.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.preconditioner.steps = steps

    @property
    def uncovered(self) -> dict[str, str]:
        """Parameters that KFAC does not cover, with reasons. They are trained by AdamW, or by `rest`."""
        return self.preconditioner.uncovered

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model, such as the parameters of a new layer."""
        super().add_param_group(param_group)
        if not hasattr(self, "preconditioner"):  # called by the constructor
            return
        try:
            self._rest.check(self._asked_for(self.preconditioner.model))
            self.preconditioner.read_groups(self.param_groups)
        except ModelError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also those of `rest`, and discard the statistics of passes since the last step."""
        self.preconditioner.watch.forget()
        super().zero_grad(set_to_none)
        if self._rest.optimizer is not None:
            self._rest.optimizer.zero_grad(set_to_none)

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
            ModelError: If there are no gradients, if factors must be recomputed but no pass through the model was
                seen, or if a `GradScaler` does not unscale gradients of `rest`.
            LossError: If the gradients do not belong to the declared loss.
            SolverError: If the run has diverged: parameters are not finite, or very many steps in a row were skipped.
        """
        # `torch.distributed.checkpoint` takes an empty step to create the state before it saves or loads one.
        if closure is None and self._is_first_step_of_checkpoint():
            self._fill_state()
            return None
        self._whole = None
        preconditioner = self.preconditioner
        with preconditioner.in_step():
            if self._quadratic is not None and closure is None:
                raise ModelError(
                    "A quadratic model needs to evaluate the loss.",
                    "Call step(closure), with a closure that zeroes gradients, calls backward() and returns the loss.",
                )
            batch = None
            if closure is not None:
                batch = BatchLoss(closure, preconditioner.model, preconditioner.params.device, self.exchange.mean)
            result = None if batch is None else batch.result
            beside = self._rest.beside(self._params.tensors.values())
            if beside and called_by_scaler():
                raise ModelError(
                    "A GradScaler divides the gradients of KFAC's own parameters only, but the optimizer rest= has "
                    "others, with gradients.",
                    'Pass these to KFAC, too, in a group with "method": "adamw": rest= still trains them.',
                )
            of_rest = [local_part(p.grad).to_dense() for p in beside if p.grad is not None]
            trial = None if self._quadratic is None else batch
            found = preconditioner.learn(result, trial, of_rest=of_rest)
            # The host may find that gradients are not good. Otherwise, the device skips the step if they are not.
            if found is not None:
                taken = None
                if self._quadratic is None or batch is None:
                    own = found.others if self._rest.optimizer is None else {}
                    with preconditioner.curvature.costs.timed("products"):
                        taken = self._updates.take(self.state, found.natural, own, found.good)
                else:
                    self._try(self._quadratic, batch, found)
                preconditioner.curvature.note_products()
                preconditioner.finish(found, taken)
                self._keep_place_for_carrier()
                if self._rest.optimizer is not None and taken is not None:
                    self._step_rest(taken)
            return result

    def _try(self, quadratic: QuadraticModel, batch: BatchLoss, found: StepGradients) -> None:
        """Try the step of a quadratic model, and one for other parameters, and shorten them until the loss falls."""
        params, curvature, unit = self._params, self.preconditioner.curvature, self.preconditioner.unit
        natural = {n: g / unit for n, g in found.natural.items()}
        with curvature.costs.timed("products"):
            # No trust region: the quadratic model chooses the length of the step.
            D = curvature.precondition(natural, params.tensors, params.groups, limit=False)
        steps = quadratic.steps(natural, D, curvature.dampings(), found.sums)
        noise = batch.round_off / unit
        change = partial(self._change, batch)
        rest = None if self._rest.optimizer is None else partial(self._step_rest, found.good)
        beside = self._rest.beside(params.tensors.values())
        trial = tried_updates(params, self.state, steps, natural, found.others, rest, beside, change, noise)
        factor = quadratic.finish(steps, trial, float(self.param_groups[0]["lr"]), noise)
        curvature.damping.note_trial(trial.share, factor)

    def _step_rest(self, taken: Tensor) -> None:
        """Let the user's optimizer take its step if this one was taken."""
        if sync.number(taken):
            will_cover = self.preconditioner.will_cover
            self._rest.step(p for n, p in self._params.tensors.items() if will_cover(n))

    def _change(self, batch: BatchLoss) -> float:
        """Return the change of the batch loss since its first evaluation. The passes for it compute no factors."""
        costs = self.preconditioner.curvature.costs
        with costs.timed("trials"):
            costs.add("trials", 0.0)
            return (self.preconditioner.evaluated(batch.evaluate) - batch.value) / self.preconditioner.unit

    @property
    def events(self) -> Events:
        """Counts of handled problems: skipped steps, refused statistics, failed inverses. Synchronizes with a GPU."""
        return self.preconditioner.events

    @property
    def audit(self) -> Audit | None:
        """Report of the audit of the last watched pass: checks and errors. `None` if there was no audit."""
        return self.preconditioner.audit

    @property
    def damping_scale(self) -> float:
        """The factor that currently multiplies all dampings."""
        return self.preconditioner.damping_scale

    @property
    def step_scale(self) -> float:
        """The factor that currently multiplies learning rates. Reading it synchronizes with a GPU."""
        return self._scale.value()

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
        lr = tuple(float(group["lr"]) for group in self.param_groups)
        return report_of(self.preconditioner, repr(self), lr, self._rest.name)

    def describe(self) -> Description:
        """Describe model, loss, settings and progress of training."""
        return description_of(
            self.preconditioner,
            "KFAC",
            ("lr", "damping", "momentum", "weight_decay", "trust"),
            f", quadratic_model={self._quadratic is not None}",
            f"step_scale={self.step_scale:.3g}, ",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: training that resumes from it is identical to training without interruption.

        With several processes, call `consolidate_state_dict()` in all of them first. For a sharded model, tensors are
        unsharded: the state is the same as for an unsharded model in one process. `get_optimizer_state_dict` and
        related functions of `torch.distributed.checkpoint` do not need that call, and leave tensors sharded. The state
        of `rest` is not included.

        Raises:
            DistributedError: If there are several processes, and `consolidate_state_dict()` was not called since the
                last step.
        """
        if _is_for_checkpoint():
            return self._state_by_parameter()
        averages = self.preconditioner.whole_averages()
        tensors = self._whole_tensors() if self.exchange.ranks.size == 1 else (self._whole or {})
        state = super().state_dict()
        state["state"] = {
            i: {name: tensors.get(id(value), value) for name, value in one.items() if name != _CARRIER}
            for i, one in state["state"].items()
        }
        state["kfac"] = self._own_state(averages)
        return state

    def _own_state(self, averages: Iterable[Average]) -> dict[str, Any]:
        """Return all state that does not belong to one parameter, given averages over all processes."""
        return self.preconditioner.state(averages) | {
            "step_scale": self._scale.state(),
            "previous": {} if self._quadratic is None else dict(self._quadratic.previous),
        }

    def _is_first_step_of_checkpoint(self) -> bool:
        """Whether this step only creates state: the first one, without passes, with gradients and rates of zero."""
        if (
            self.state
            or self.preconditioner.steps
            or self.preconditioner.watch.has_passes
            or any(group["lr"] for group in self.param_groups)
        ):
            return False
        grads = [local_part(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(bool(g.any()) for g in grads)

    def _fill_state(self) -> None:
        """Create missing state for all trainable parameters, and an entry for the carrier."""
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        age = new_age(self.preconditioner.params.device)
        for p, group in trained:
            adamw = group["method"] == "adamw" or "exp_avg" in self.state[p]
            start_averages(self.state, p, adamw, age)
            if self._scale.noise is not None and not adamw:
                keep_mean_step(self.state, p)
        self._keep_place_for_carrier()

    def _keep_place_for_carrier(self) -> None:
        """Add an entry for the carrier to the first trainable parameter: checkpoints restore existing entries only."""
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        for p in islice(trained, 1):
            self.state[p].setdefault(_CARRIER, Carrier())

    def _state_by_parameter(self) -> dict[str, Any]:
        """Return the state for a distributed checkpoint. All ranks call this. Sharded state stays sharded."""
        self._fill_state()
        averages = self.preconditioner.summed_averages()
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
                names = ("average",) if self._scale.noise is None else ("average", "mean_step")
                mine |= {"age": new_age(self.preconditioner.params.device)} | {
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
        self.preconditioner.consolidate_state_dict()
        self._whole = self._whole_tensors()

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
        state_dict = self._from_checkpoint(state_dict) if isinstance(state_dict, Mapping) else {}
        if "kfac" not in state_dict:
            raise StorageError(
                "The state is not one of kfs.optim.KFAC.", "Load what state_dict() of such an optimizer returned."
            )
        mine = state_dict["kfac"]
        self.preconditioner.check_state(mine, self._own_state(()))
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        read_state(self.state, self.param_groups, state_dict)
        self.preconditioner.restore(mine)
        self._whole = None
        self._scale.restore(mine["step_scale"])
        if self._quadratic is not None:
            self._quadratic.previous = copied_to(self.preconditioner.params.device, mine["previous"])
        self.preconditioner.read_groups(self.param_groups)
        if self.state:
            self._keep_place_for_carrier()
