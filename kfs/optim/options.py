"""What users pass to `KFAC` and `Preconditioner`: options, and parameters in groups.

Everything is validated here, with hints for users of other optimizers.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from kfs.display.suggestions import few
from kfs.errors import KfsWarning, LossError, ModelError, StorageError
from kfs.factors.blocks import METHODS, Method, Relative
from kfs.factors.layout import Layout
from kfs.factors.settings import Fisher, Settings, Sharing
from kfs.optim.averages import Unit
from kfs.optim.fsdp import is_fully_sharded, reshard
from kfs.optim.report import user_stacklevel
from kfs.problem.parameters import refuse_scripted
from kfs.problem.whole_parameters import is_sharded

# A number of steps, or a function that returns it for the current step.
Interval = int | Callable[[int], int]


def check_call(model: Any, loss: Any, name: str = "KFAC") -> None:
    """Check that a model and a loss were passed to the class of this name, in this order.

    Raises:
        ModelError: If the first argument is not a model.
        LossError: If the second argument is missing, or is not a loss, for example parameters.
    """
    example = "lr=1.0" if name == "KFAC" else "damping=0.003"
    if not isinstance(model, nn.Module):
        given = "parameters" if _may_be_parameters(model) else f"a {type(model).__name__}"
        raise ModelError(
            f"{name} needs the model (a torch.nn.Module), but the first argument is {given}: factors come from the "
            "inputs and gradients of its layers, which parameters alone do not show.",
            f"Pass model and loss: {name}(model, nn.CrossEntropyLoss(), {example}). To train only some parameters, or "
            "groups of them, pass params=.",
        )
    if loss is None:
        raise LossError(
            f"{name} needs the loss. Curvature depends on the loss as a function of the model's predictions (its "
            "Hessian, or the likelihood that labels are drawn from), which gradients do not show.",
            f"Pass the loss that you minimize: {name}(model, nn.CrossEntropyLoss()), or nn.MSELoss(), or one of "
            "kfs.losses. The training loop stays as it is.",
        )
    if _may_be_parameters(loss):
        raise LossError(
            f"The second argument of {name} is the loss, but parameters were passed.",
            f"Pass them as the third argument: {name}(model, nn.CrossEntropyLoss(), model.parameters()).",
        )
    if isinstance(loss, int | float):
        raise LossError(
            f"The second argument of {name} is the loss, but {loss!r} was passed.",
            f"Pass settings by name: {name}(model, nn.CrossEntropyLoss(), {example.partition('=')[0]}={loss!r}).",
        )
    if isinstance(loss, type):
        raise LossError(
            f"The loss is the class {loss.__name__}, not an instance of it.",
            f"Call it: {name}(model, nn.CrossEntropyLoss()).",
        )


def _may_be_parameters(given: Any) -> bool:
    """Whether an argument looks like a parameter, a parameter group, or several of these."""
    if isinstance(given, Tensor | dict):
        return True
    return isinstance(given, Iterable) and not isinstance(given, nn.Module | str)


# Half-open ranges of values.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("lr", "damping", "weight_decay"), (0, torch.inf)),
    # Steps, or their overshoot, are divided by these. With zero, parameters would never change.
    **dict.fromkeys(("trust", "kl_clip", "noise"), (1e-12, torch.inf)),
    **dict.fromkeys(("momentum", "decay"), (0, 1)),
    "adamw_lr": (1e-12, torch.inf),  # Weight decay is divided by it.
}
_MAY_BE_NONE = ("trust", "kl_clip", "noise")
# Numbers in parameter groups.
IN_GROUPS = ("lr", "damping", "momentum", "weight_decay", "trust", "adamw_lr")
_METHODS = ("kfac", "adamw")
_INTERVALS = ("factors_every", "inverses_every", "patience")
_CHOICES = {"damping_method": (None, *METHODS), "damping_unit": ("relative", "absolute")}


@dataclass(frozen=True)
class Options:
    """The options of `KFAC` and `Preconditioner`, which describe them. All of them are validated here."""

    damping: float | Relative
    trust: float | None
    kl_clip: float | None
    fisher: Fisher
    sharing: Sharing | Mapping[str, Sharing]
    eigen: bool
    decay: float
    factors_every: Interval | None
    inverses_every: Interval
    damping_method: Method | None
    damping_unit: Unit
    patience: int
    max_dim: int | None
    batch_axis: int | None
    mask: str | Callable[..., Tensor] | None
    seed: int
    audit: bool
    replay: bool

    @property
    def settings(self) -> Settings:
        """The options for factors."""
        return Settings(
            self.fisher,
            self.sharing,
            seed=self.seed,
            max_dim=self.max_dim,
            batch_axis=self.batch_axis,
            audit=self.audit,
        )

    def number_and_unit(self) -> tuple[float, Unit]:
        """Return damping as a number and a unit: `kfs.Relative(0.1)` is 0.1 with the unit `"relative"`."""
        if isinstance(self.damping, Relative):
            return self.damping.fraction, "relative"
        return self.damping, self.damping_unit

    def check(self) -> None:
        """Validate all options.

        Raises:
            ModelError: If a value is out of range, or if two options are incompatible.
        """
        _ = self.settings  # validates the options for factors
        given = vars(self) | {"damping": self.number_and_unit()[0]}
        for name in _RANGES:
            if name in given:
                check_number(name, given[name])
        for name in _INTERVALS:
            value = given[name]
            if value is not None and not callable(value) and not (type(value) is int and value >= 1):
                raise ModelError(f"{name} is {value!r}.", "Use a positive integer (or a function of the step).")
        for name, allowed in _CHOICES.items():
            if given[name] not in allowed:
                raise ModelError(f"{name} is {given[name]!r}.", f"Choose from {list(allowed)}.")
        if self.eigen and (self.fisher == "forward-only" or self.damping_method not in {None, "exact"}):
            raise ModelError(
                "Corrected eigenvalues need gradients and exact damping.",
                "Use eigen=True with another fisher than 'forward-only', and damping_method='exact'.",
            )


def check_quadratic_model(model: nn.Module, factors_every: Interval | None) -> None:
    """Check that a quadratic model of the loss is possible.

    Raises:
        ModelError: If it is not.
    """
    if factors_every not in {None, 1}:
        raise ModelError("A quadratic model needs the data of every step.", "Leave factors_every out, or set it to 1.")
    if is_fully_sharded(model):
        raise ModelError(
            "A quadratic model takes derivatives along a step, which a model that fully_shard has sharded cannot.",
            "Leave quadratic_model out, or train a DistributedDataParallel model.",
        )


# These options may differ between parameters; all others must not.
_NOT_IN_GROUPS = ({field.name for field in fields(Options)} | {"noise", "quadratic_model"}) - {"damping", "trust"}


def grouped(params: Iterable[Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups with all options, given parameters or groups, such as those of an optimizer.

    Groups are copied, without numbers that only optimizers use.
    """
    found: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    given: list[dict[str, Any]] = found if found and isinstance(found[0], dict) else [{"params": found}]
    for group in given:
        if isinstance(group["params"], Iterator):  # It can be read only once; its owner may need it, too.
            group["params"] = list(group["params"])
    unused = set(IN_GROUPS) - defaults.keys()
    groups = [{name: value for name, value in group.items() if name not in unused} for group in given]
    for group in groups:
        some = group["params"]
        some = [some] if isinstance(some, Tensor) else list(some)
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in some]  # Named parameters are pairs.
        for name, value in defaults.items():
            group.setdefault(name, value)
    if max(Counter(id(p) for group in groups for p in group["params"]).values(), default=0) > 1:
        raise ModelError("Some parameters were passed more than once.", "Pass each parameter once, in one group.")
    return groups


def check_groups(groups: Collection[Mapping[str, Any]]) -> None:
    """Check parameter groups. Unknown entries are allowed, because schedulers and trainers add some.

    Raises:
        ModelError: If a number is out of range, or an option must be the same for all parameters.
    """
    for group in groups:
        for name in group:
            if name in _NOT_IN_GROUPS:
                raise ModelError(
                    f"A parameter group sets {name}, which must be the same for all parameters.",
                    f"Pass {name}= to KFAC itself. Groups may have lr, weight_decay, damping, trust, adamw_lr, method.",
                )
        if group["method"] not in _METHODS:
            raise ModelError(f"A group has the method {group['method']!r}.", "Choose 'kfac' or 'adamw'.")
    check_numbers(groups)
    if len({group.get("momentum") for group in groups}) > 1:
        raise ModelError(
            "Parameter groups differ in their momentum, but weights and biases are averaged together.",
            "Give all groups the same momentum.",
        )


def check_numbers(groups: Iterable[Mapping[str, Any]]) -> None:
    """Check the numbers in parameter groups, which a schedule may have changed.

    Raises:
        ModelError: If a value is out of range, or not a number.
    """
    for group in groups:
        for name in IN_GROUPS:
            if name in group:
                check_number(name, group[name])


def check_number(name: str, value: Any) -> None:
    """Check that the value of an option is a number in its range, or, if that has a meaning, `None`.

    Raises:
        ModelError: If it is not.
    """
    low, high = _RANGES[name]
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if not (number and low <= value < high) and not (value is None and name in _MAY_BE_NONE):
        raise ModelError(f"{name} is {value!r}.", f"Use a number of at least {low:g} and below {high:g}.")


def warmup_interval(step: int) -> int:
    """Return the default interval between factors. It is short at first, when curvature changes most.

    Example:
        >>> [warmup_interval(step) for step in (0, 9, 10, 50, 90, 1000)]
        [1, 1, 2, 6, 10, 10]
    """
    return min(10, 1 + step // 10)


def interval_at(interval: Interval, step: int) -> int:
    """Return the number of steps between two computations that applies at this step."""
    return max(1, interval(step) if callable(interval) else interval)


# By parameter: a weak reference to the `Parameters` that it belongs to.
_OWNERS: Any = WeakIdKeyDictionary()


class Parameters:
    """The parameters of an optimizer.

    Args:
        model: The model that contains them.
        groups: The optimizer's parameter groups.
        close: Weak reference to the method that closes the optimizer, for another one that takes the model over.
        kind: The name of its kind, for messages.

    Attributes:
        tensors: Parameters by name.
        groups: Parameter groups by name of the parameter.
        closed: Whether the optimizer was closed, so that other optimizers may own the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        close: "weakref.WeakMethod[Callable[[], None]]",
        kind: str,
    ) -> None:
        """Look up names, and take the parameters over from an earlier optimizer of the same model."""
        refuse_scripted(model, [("", model)])  # scripted parts of a model are trained by AdamW
        self.closed = False
        self.kind = kind
        self._taken_over = False
        self._model = model
        self._close = close
        self.read(groups, take_over=True)

    def read(self, groups: list[dict[str, Any]], take_over: bool = False) -> None:
        """Look up names, after groups have changed.

        Args:
            groups: The optimizer's parameter groups.
            take_over: Whether to close another optimizer of the same model that owns some of the parameters.

        Raises:
            ModelError: If a parameter does not belong to the model, another optimizer owns it, or a group has an
                invalid setting.
        """
        reshard(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        found = [(p, group) for group in groups for p in group["params"]]
        if not found:
            raise ModelError("There are no parameters.", "Pass parameters of the model, or leave params= out.")
        strange = [list(p.shape) for p, _ in found if id(p) not in names]
        if strange:
            raise ModelError(
                f"Parameters of shapes {strange} are not parameters of the model.",
                "Pass parameters of the model itself, not of a copy: its forward pass is watched.",
            )
        without_values = [names[id(p)] for p, _ in found if p.is_meta and p.requires_grad]
        if without_values:
            raise ModelError(
                f"These parameters are on the meta device, without values: {few(without_values)}. If accelerate has "
                "offloaded them, their gradients are lost after each pass.",
                "Train other parameters, such as adapters, or do not offload these.",
            )
        check_groups(groups)
        self._claim([p for p, _ in found], take_over)
        self.tensors: dict[str, Tensor] = {names[id(p)]: p for p, _ in found}
        self.groups: dict[str, dict[str, Any]] = {names[id(p)]: group for p, group in found}
        self._shapes = self._shapes_now()
        # Modules with their children and parameters, to compare quickly. They stay alive, so their ids stay unique.
        self._parts = [(m, list(m._modules.values()), list(m._parameters.values())) for m in self._model.modules()]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.tensors.values())).device

    def ordered(self, groups: list[dict[str, Any]]) -> list[str]:
        """Return parameter names in the order of groups."""
        names = {id(p): name for name, p in self.tensors.items()}
        return [names[id(p)] for group in groups for p in group["params"]]

    def check_open(self) -> None:
        """Raise if the optimizer was closed."""
        if self._taken_over:
            raise ModelError(
                f"The model of this {self.kind} was taken over by another KFAC optimizer, which was made later for the "
                "same model and watches its passes now.",
                "Use the new optimizer, or make one again and use only that.",
            )
        if self.closed:
            raise ModelError(f"This {self.kind} was closed.", f"Make a new {self.kind}.")

    def trainable(self) -> dict[str, Tensor]:
        """Return parameters in groups for KFAC that require gradients, by name."""
        return {n: p for n, p in self.tensors.items() if p.requires_grad and self.groups[n]["method"] == "kfac"}

    def are_the_models(self) -> bool:
        """Whether the model still has the same parameters. `functional_call` replaces them while it runs."""
        for module, children, params in self._parts:
            now = list(module._parameters.values())
            same = len(now) == len(params) and all(map(_is_same, now, params))
            if not same or list(module._modules.values()) != children:
                return False
        return all(p.shape == self._shapes[id(p)] for _, _, params in self._parts for p in params if p is not None)

    def check_model(self) -> None:
        """Raise if parameters of the model were replaced, added, removed or reshaped."""
        reshard(self._model)
        if self.are_the_models():
            return
        changed = [name for name, p in self._model.named_parameters() if self._shapes.get(id(p)) != p.shape]
        what = f"parameters {changed} are new" if changed else "parameters were removed"
        way_out = f"Make a new {self.kind} (close() the old one first)"
        added = ", or add_param_group() for parameters that were added" if self.kind == "optimizer" else ""
        raise ModelError(f"The model has changed since the {self.kind} was made: {what}.", f"{way_out}{added}.")

    def check_device(self, device: torch.device) -> None:
        """Raise if the model was moved away from the device of the optimizer's state."""
        where = {p.device for p in self.tensors.values()}
        if device not in where:
            raise ModelError(
                f"The model is on {', '.join(sorted(map(str, where)))}, but the optimizer's state is on {device}.",
                "Move the model first, then make the optimizer; load_state_dict() takes over a state.",
            )

    def check_blocks(self, averages: Iterable[Mapping[str, Any]]) -> None:
        """Raise if the averages of a state belong to another model."""
        layouts = [Layout.from_state(average["layout"]) for average in averages]
        sizes = {n: p.numel() for n, p in self.tensors.items()}
        strange = [x.name for x in layouts if sizes.get(x.weight) != prod(x.shape) or (x.bias or x.weight) not in sizes]
        if strange:
            raise StorageError(
                f"The state has blocks {strange}, which this model does not have.",
                "Load it for the model that it was saved for.",
            )

    def _shapes_now(self) -> dict[int, torch.Size]:
        return {id(p): p.shape for p in self._model.parameters()}

    def _claim(self, params: list[Tensor], take_over: bool) -> None:
        """Register these parameters as owned by this optimizer."""
        if self._other_owners(params):
            gc.collect()  # The other optimizer may be unreachable.
        others = self._other_owners(params)
        if others and not (take_over and all(other._model is self._model for other in others)):
            raise ModelError(
                "Another KFAC optimizer has parameters of this model; both would watch its passes.",
                "Call close() of the other one first, or give them different parameters with params=.",
            )
        if others:
            text = "A KFAC optimizer for this model exists already. The new one takes the model over, and the first "
            text += "one's step() raises from now on. To avoid this warning, call close() of the first one before."
            warnings.warn(text, KfsWarning, stacklevel=user_stacklevel())
        for other, close in others.items():
            close()
            other._taken_over = True
        for p in params:
            _OWNERS[p] = weakref.ref(self)

    def _other_owners(self, params: list[Tensor]) -> dict["Parameters", Callable[[], None]]:
        """Return other open optimizers that own some of these parameters, and the method that closes each of them."""
        owners = {owner() for p in params if (owner := _OWNERS.get(p)) is not None} - {None, self}
        open_ones = [owner for owner in owners if not owner.closed]
        return {owner: close for owner in open_ones if (close := owner._close()) is not None}


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether this is the same parameter object, its unsharded copy, or a frozen one that accelerate loads anew."""
    if now is before:
        return True
    if now is not None and before is not None and before.is_meta:
        return not now.requires_grad and now.shape == before.shape
    is_whole = isinstance(now, nn.Parameter) and not is_sharded(now)
    return is_whole and is_sharded(before) and before is not None and now is not None and now.shape == before.shape
