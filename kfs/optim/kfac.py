"""KFAC as an optimizer: a thin shell around the update rule (`rule`), with curvature from the training's own passes."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfs.errors import KfsWarning, LossError, ModelError, StorageError
from kfs.kfac.blocks import Layout
from kfs.kfac.damping import METHODS, Method
from kfs.kfac.live import Watch
from kfs.kfac.live_pass import Bases, Record
from kfs.kfac.settings import Fisher, Settings, Sharing
from kfs.losses import describe
from kfs.optim.averages import Unit
from kfs.optim.curvature import Curvature, Events, Interval
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic import as_before, coefficients, is_checked, ratio_to_scale
from kfs.optim.rule import Tensors, adamw_step, natural_step

_MISMATCH = 0.05  # relative distance beyond which gradients are those of another loss; half precision rounds by less


class KFAC(Optimizer):
    """Natural gradient descent with Kronecker-factored curvature. It is used like any optimizer of `torch.optim`.

    Args:
        model: The model. Train it by calling it: `loss_function(model(x), y).backward()`.
        loss: The loss that is minimised: a loss module of `torch.nn`, or a `kfs.losses.Loss`. It says what curvature
            is; gradients come from your backward pass.
        params: Parameters or parameter groups, as for other optimizers. By default all of the model.
        lr: Learning rate, the setting to tune. By default 0.1, and 1 with a quadratic model.
        damping: What is added to eigenvalues of the curvature, in units of their mean (see `damping_unit`).
        momentum: How much of the average over gradients is kept in every step.
        weight_decay: Decoupled weight decay.
        trust: Limits each layer's step before it is multiplied by `lr`: how much it may change outputs, for inputs of
            unit size. Nothing for no limit.
        kl_clip: Limits the step as a whole: to which change of predictions it may lead according to the curvature.
        fisher: Which curvature matrix: `"mc"` (one more backward pass, for labels drawn from the model's likelihood),
            `"empirical"` (costs no pass), `"type-2"` (exact; one pass per class), or `"forward-only"` (inputs alone).
        sharing: How positions that share a weight enter, as in `kfs.KFAC`.
        eigen: Whether to correct eigenvalues, as in `kfs.EKFAC`, by running averages in the eigenbasis.
        decay: How much of the averages over factors is kept when new ones enter.
        factors_every: In how many steps new factors are computed: a number, or a function of the step.
        inverses_every: For how many steps an inverse is used, likewise. Work is spread over all steps. It is done more
            often in the first steps.
        damping_method: `"exact"` or `"factored"`, as in `kfs.KFAC.inverse`.
        damping_unit: `"relative"` to each block's mean eigenvalue, or `"absolute"`.
        quadratic_model: Whether learning rate and momentum come from a quadratic model of the loss, and damping from
            how good it is (Martens & Grosse, 2015). Then `step` needs a closure.
        adamw_lr: Learning rate of AdamW, relative to `lr`, for parameters that KFAC does not cover, and for groups with
            `"method": "adamw"`.
        patience: After how many events in a row (see `events`) damping rises.
        max_dim: Factors wider than this keep their diagonal only.
        batch_axis: Where the batch axis is in inputs and activations, if it is not first.
        seed: Of the labels drawn for `"mc"`.

    Attributes:
        steps: How many steps were taken.
        uncovered: Parameters that KFAC does not cover, and why. They are trained by AdamW.

    Raises:
        ModelError: If the model has no trainable parameter, or another KFAC optimizer.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> x, y, criterion = torch.randn(64, 4), torch.randint(3, (64,)), nn.CrossEntropyLoss()
        >>> optimizer = KFAC(model, criterion)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(loss < 0.5)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object,
        params: Iterable[Any] | None = None,
        *,
        lr: float | None = None,
        damping: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 1.0,
        kl_clip: float | None = None,
        fisher: Fisher = "mc",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        eigen: bool = False,
        decay: float = 0.95,
        factors_every: Interval = 1,
        inverses_every: Interval = 10,
        damping_method: Method = "exact",
        damping_unit: Unit = "relative",
        quadratic_model: bool = False,
        adamw_lr: float = 0.01,
        patience: int = 3,
        max_dim: int | None = 4096,
        batch_axis: int | None = None,
        seed: int = 0,
    ) -> None:
        """Check everything, then put hooks on the model."""
        self._loss = describe(loss)
        settings = Settings(fisher, sharing, seed=seed, max_dim=max_dim, batch_axis=batch_axis)
        _check_settings(locals())
        defaults = {
            "lr": (1.0 if quadratic_model else 0.1) if lr is None else lr,
            "damping": damping,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adamw_lr": adamw_lr,
            "method": "kfac",
        }
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"The model is a {type(model).__name__}.", "Pass a torch.nn.Module: its passes are watched."
            )
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self._model, self._settings = model, settings
        self._kl_clip, self._quadratic = kl_clip, quadratic_model
        self._factors_every = factors_every
        self._curvature = Curvature(decay, damping_method, damping_unit, eigen, inverses_every, patience)
        self.steps, self.uncovered = 0, dict[str, str]()
        self._tracked: frozenset[str] = frozenset()
        self._unit, self._previous = 1.0, dict[str, Tensor]()
        self._closed = self._paused = False
        self._params = Parameters(model, self.param_groups)
        module = loss if isinstance(loss, nn.Module) else None
        me = weakref.WeakMethod(self._wanted), weakref.WeakMethod(self._bases)
        self._watch = Watch(
            model,
            self._loss,
            module,
            settings,
            lambda: _call(me[0]),
            lambda: _call(me[1]),
            self._loss.reduction == "sum",
        )
        weakref.finalize(self, _remove, self._watch._handles)

    @property
    def events(self) -> Events:
        """How often something went wrong, and was dealt with: skipped steps, refused statistics, failed inverses."""
        return self._curvature.events

    @property
    def damping_scale(self) -> float:
        """What all dampings are multiplied by at the moment."""
        return self._curvature.damping_scale

    def close(self) -> None:
        """Take all hooks off the model, so that another optimizer can have it. Steps are an error afterwards."""
        self._watch.close()
        self._params.release()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as those of a layer that was added to it."""
        super().add_param_group(param_group)
        if hasattr(self, "_params"):
            self._params.read(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Computes the loss and its gradients, as for `torch.optim.LBFGS`. With `quadratic_model=True` it is
                needed, and called a second time in every fifth step.

        Returns:
            What the closure returned.

        Raises:
            ModelError: If there are no gradients, or no forward pass of the model was seen.
            LossError: If gradients are not those of the loss that was announced.
        """
        if self._closed:
            raise ModelError("This optimizer was closed, or its model went to another one.", "Make a new optimizer.")
        if self._quadratic and closure is None:
            raise ModelError(
                "A quadratic model needs to evaluate the loss.",
                "Call step(closure), with a closure that zeroes gradients, calls backward() and returns the loss.",
            )
        random, result = torch.get_rng_state(), None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        record = self._watch.collect()
        grads = {n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in self._with_gradient()}
        self._check(record, grads)
        good = torch.nn.utils.get_total_norm(list(grads.values())).isfinite()
        if (record is not None or not good.is_cuda) and not good:
            self.events.skipped_steps += 1
            self._curvature.trouble("gradients are not finite, and the step was skipped")
            return result
        if record is not None:
            self._commit(record)
        self._curvature.refresh(self.steps, lambda layout: float(self._group_of(layout)["damping"]), self._quadratic)
        natural = {n: g / self._unit for n, g in grads.items() if n in self._curvature.covered}
        rest = {n: g for n, g in grads.items() if n in self.uncovered or self._params.groups[n]["method"] == "adamw"}
        if self._quadratic and record is not None:
            predicted = self._quadratic_step(natural, record)
        else:
            self._natural_step(natural, good)
        self._adamw_step(rest, good)
        if self._quadratic and record is not None and is_checked(self.steps):
            self._adapt_damping(closure, result, predicted, random)  # type: ignore[arg-type]
        self.steps += 1
        return result

    def _natural_step(self, grads: dict[str, Tensor], good: Tensor) -> None:
        """Apply the update rule to parameters that have curvature."""
        names = list(grads)
        if not names:
            return
        params, groups = [self._params.tensors[n] for n in names], [self._params.groups[n] for n in names]
        states = [self._state_of(p, ("average",)) for p in params]
        lrs = [float(group["lr"]) for group in groups]

        def precondition(u: Tensors) -> Tensors:
            D = self._precondition(dict(zip(names, u, strict=True)))
            if self._kl_clip is None:
                return [D[n] for n in names]
            change = torch.stack([lr**2 * (v * D[n]).sum() for n, v, lr in zip(names, u, lrs, strict=True)]).sum()
            shorter = (self._kl_clip / change.clamp(min=1e-30)).sqrt().clamp(max=1.0)
            return [shorter * D[n] for n in names]

        new, averages = natural_step(
            params,
            [g.to(s["average"].dtype) for g, s in zip(grads.values(), states, strict=True)],
            [s["average"] for s in states],
            precondition,
            lr=lrs,
            weight_decay=[group["weight_decay"] for group in groups],
            momentum=groups[0]["momentum"],
            ages=[s["age"] for s in states],
        )
        _assign([*params, *(s["average"] for s in states)], [*new, *averages], good)
        for s in states:
            s["age"] += 1

    def _adamw_step(self, grads: dict[str, Tensor], good: Tensor) -> None:
        """Apply AdamW to the others."""
        for name, g in grads.items():
            p, group = self._params.tensors[name], self._params.groups[name]
            s = self._state_of(p, ("exp_avg", "exp_avg_sq"))
            lr = float(group["lr"]) * group["adamw_lr"]
            old = [p, s["exp_avg"], s["exp_avg_sq"]]
            g = g.to(s["exp_avg"].dtype)
            new = adamw_step(
                p,
                g,
                *old[1:],
                lr=lr,
                weight_decay=group["weight_decay"] / group["adamw_lr"],
                betas=_BETAS,
                age=s["age"],
            )
            _assign(old, list(new), good)
            s["age"] += 1

    def _quadratic_step(self, grads: dict[str, Tensor], record: Record) -> float:
        """Step along the natural gradient and the last step, as the quadratic model says; return its prediction."""
        D = self._precondition(grads)
        directions = [{n: -d for n, d in D.items()}]
        if self._previous.keys() == D.keys():
            directions.append(self._previous)
        dampings = self._curvature.dampings()
        x, b, C = coefficients(self._model, self._loss, record, grads, directions, dampings)
        self._previous = {n: sum(c * d[n] for c, d in zip(x.to(D[n].dtype), directions, strict=True)) for n in D}  # type: ignore[misc]
        for n, s in self._previous.items():
            group = self._params.groups[n]
            self._params.tensors[n].mul_(1 - group["lr"] * group["weight_decay"]).add_(s, alpha=float(group["lr"]))
        lr = float(self.param_groups[0]["lr"])
        return float(lr * (b @ x) + 0.5 * lr**2 * (x @ C @ x))

    def _adapt_damping(self, closure: Callable[[], Any], before: Any, predicted: float, random: Tensor) -> None:
        """Compare the loss after the step with the quadratic model's prediction (Levenberg-Marquardt)."""
        self._paused = True
        try:
            with as_before(self._model), torch.enable_grad():
                torch.set_rng_state(random)
                change = (float(closure()) - float(before)) / self._unit
        finally:
            self._paused = False
        self._watch.collect()
        self._curvature.damping_scale *= ratio_to_scale(change / predicted if predicted else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continued training needs to equal one that was never stopped."""
        state = super().state_dict()
        state["kfac"] = {
            "curvature": self._curvature.state(),
            "steps": self.steps,
            "first_datum": self._watch.first_datum,
            "unit": self._unit,
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
            "previous": dict(self._previous),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`.

        Raises:
            StorageError: If the state is that of another optimizer, or of another model.
        """
        if "kfac" not in state_dict:
            raise StorageError(
                "The state is not one of kfs.optim.KFAC.", "Load what state_dict() of such an optimizer returned."
            )
        mine = state_dict["kfac"]
        layouts = [Layout.from_state(a["layout"]) for a in mine["curvature"]["averages"]]
        strange = [x.name for x in layouts if any(n not in self._params.tensors for n in x.params)]
        if strange:
            raise StorageError(f"The state has blocks {strange}, which this model has not.", "Use the model it is of.")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True):
            saved = state_dict["state"].get(i, {})  # in its own precision, which may be better than the parameter's
            self.state[p] = {k: v.to(p.device, copy=True) if isinstance(v, Tensor) else v for k, v in saved.items()}
        device = self.param_groups[0]["params"][0].device
        self._curvature.restore(mine["curvature"], device)
        self.steps, self._watch.first_datum, self._unit = mine["steps"], mine["first_datum"], mine["unit"]
        self.uncovered, self._tracked = dict(mine["uncovered"]), frozenset(mine["tracked"])
        self._previous = {n: t.to(device, copy=True) for n, t in mine["previous"].items()}
        self._params.read(self.param_groups)

    def _wanted(self) -> dict[str, Tensor] | None:
        """Return parameters to track in the forward pass that begins, or nothing."""
        every = self._factors_every(self.steps) if callable(self._factors_every) else self._factors_every
        params = {n: p for n, p in self._params.trainable().items() if n not in self.uncovered}
        due = self.steps % max(1, every) == 0 or frozenset(params) != self._tracked
        if self._paused or not params or not due:
            return None
        self._params.check_model()
        for average in self._curvature.averages.values():
            self._params.check_device(average.factors.like.device)
            break
        return params

    def _bases(self) -> Bases:
        return self._curvature.bases()

    def _with_gradient(self) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in self._params.tensors.items() if p.grad is not None]

    def _check(self, record: Record | None, grads: Mapping[str, Tensor]) -> None:
        """Refuse a step without gradients, without curvature, or for another loss."""
        if not grads:
            raise ModelError("No parameter has a gradient.", "Call backward() of the loss before step().")
        needed = self._loss.reduction == "sum" or self._wanted() is not None
        if record is None and needed:
            raise ModelError(
                "No forward and backward pass through the model was seen since the last step.",
                "Call the model that you passed itself, model(x), not its parts or a copy, and then backward().",
            )
        if record is not None and record.mismatch > _MISMATCH:
            raise LossError(
                f"The gradient at the predictions differs from that of {self._loss.name} by {record.mismatch:.0%}.",
                "Pass the loss that you minimise as loss=, and let the model return what that loss takes.",
            )

    def _commit(self, record: Record) -> None:
        """Let a step's statistics enter the state."""
        if record.examples and record.finite:
            mean = self._loss.reduction == "mean"
            self._unit = self._loss.scale * record.examples / (record.count if mean else 1.0)
        if not record.blocks and not record.uncovered and record.finite:
            return  # only counted, or nothing counts
        trained = self._params.trainable()
        lost = {n: why for n, why in record.uncovered.items() if n in trained and trained[n].grad is not None}
        broken = {n for b in record.blocks.values() if lost.keys() & set(b.layout.params) for n in b.layout.params}
        lost = dict.fromkeys(broken, "it shares a block with one that is not covered") | lost
        if not self._curvature.commit(record, lost):
            return
        self._curvature.no_trouble()
        self._tracked = frozenset(n for n in trained if n not in self.uncovered and n not in lost)
        if lost:
            self.uncovered |= lost
            listed = "; ".join(f"{name!r}: {why}" for name, why in list(lost.items())[:5])
            more = f"; and {len(lost) - 5} more" if len(lost) > 5 else ""
            text = f"KFAC does not cover some parameters, which are trained by AdamW ({listed}{more})."
            warnings.warn(text, KfsWarning, stacklevel=4)

    def _precondition(self, u: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply with inverses; a parameter of a block that has no gradient counts as zero."""
        missing = self._curvature.covered - u.keys()
        zeros = {n: torch.zeros_like(self._params.tensors[n]) for n in missing}
        trust = None if self._quadratic else lambda layout: self._group_of(layout)["trust"]
        D = self._curvature.precondition(u | zeros, trust or (lambda _: None))
        return {n: D[n] for n in u}

    def _group_of(self, layout: Layout) -> dict[str, Any]:
        return self._params.groups[layout.weight]

    def _state_of(self, p: Tensor, names: Iterable[str]) -> dict[str, Any]:
        """Return a parameter's state, new at first, with averages in float32 or better."""
        state: dict[str, Any] = self.state[p]
        for name in names:
            if name not in state:
                dtype = torch.promote_types(p.dtype, torch.float32)
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                state["age"] = 0
        return state


_BETAS = (0.9, 0.95)


def _assign(targets: list[Tensor], values: list[Tensor], good: Tensor) -> None:
    """Write new values; where the device has not been asked yet, only if gradients were finite."""
    if good.is_cuda:  # pragma: no cover (tested on a GPU)
        values = [torch.where(good, value, target) for target, value in zip(targets, values, strict=True)]
    torch._foreach_copy_(targets, values)


def _call(method: Any) -> Any:
    """Call a method of an object, if that still exists."""
    alive = method()
    return None if alive is None else alive()


def _remove(handles: list[Any]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()


def _check_settings(given: Mapping[str, Any]) -> None:
    """Refuse settings that are out of range.

    Raises:
        ModelError: If one is.
    """
    ranges: dict[str, tuple[float, float]] = {
        "lr": (0, torch.inf),
        "damping": (0, torch.inf),
        "momentum": (0, 1),
        "weight_decay": (0, torch.inf),
        "decay": (0, 1),
        "adamw_lr": (0, torch.inf),
        "trust": (0, torch.inf),
        "kl_clip": (0, torch.inf),
    }
    for name, (low, high) in ranges.items():
        value = given[name]
        number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
        if value is not None and not (number and low <= value < high):
            raise ModelError(f"{name} is {value!r}.", f"Use a number from {low:g} to {high:g}.")
    for name in ("factors_every", "inverses_every", "patience"):
        value = given[name]
        if not callable(value) and not (type(value) is int and value >= 1):
            raise ModelError(f"{name} is {value!r}.", "Use an integer from 1 on (or a function of the step).")
    choices = {"damping_method": METHODS, "damping_unit": ("relative", "absolute")}
    for name, allowed in choices.items():
        if given[name] not in allowed:
            raise ModelError(f"{name} is {given[name]!r}.", f"Choose from {list(allowed)}.")
    if given["eigen"] and (given["fisher"] == "forward-only" or given["damping_method"] != "exact"):
        raise ModelError(
            "Corrected eigenvalues need gradients and exact damping.",
            "Use eigen=True with another fisher than 'forward-only', and damping_method='exact'.",
        )
