"""The options of `KFAC` and `Preconditioner`, and their validation, with hints for users of other optimizers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from kfs.errors import LossError, ModelError
from kfs.factors.blocks import METHODS, Method, Relative
from kfs.factors.settings import Fisher, Settings, Sharing
from kfs.optim.averages import Unit
from kfs.optim.fsdp import is_fully_sharded

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


# Half-open ranges of values. `None` is accepted for all of them; the signature says where it has a meaning.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("lr", "damping", "weight_decay"), (0, torch.inf)),
    # Steps, or their overshoot, are divided by these. With zero, parameters would never change.
    **dict.fromkeys(("trust", "kl_clip", "noise"), (1e-12, torch.inf)),
    **dict.fromkeys(("momentum", "decay"), (0, 1)),
    "adamw_lr": (1e-12, torch.inf),  # Weight decay is divided by it.
}
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


def check_groups(groups: Iterable[Mapping[str, Any]]) -> None:
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
    """Check that the value of an option is a number in its range, or `None`.

    Raises:
        ModelError: If it is not.
    """
    low, high = _RANGES[name]
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if value is not None and not (number and low <= value < high):
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
