"""The settings of a KFAC approximation, which are validated on construction."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, get_args

import torch

from kfs.display.suggestions import guess
from kfs.errors import DtypeError, ModelError

Fisher = Literal["type-2", "ggn", "mc", "type-1", "empirical", "forward-only"]
Sharing = Literal["expand", "reduce"]
Uncovered = Literal["error", "skip", "diagonal"]
Products = Literal["auto", "float32", "tf32", "bf16"]
Placed = Literal["replicated", "owner"]
_CHOICES = {
    "fisher": get_args(Fisher),
    "uncovered": get_args(Uncovered),
    "sharing": get_args(Sharing),
    "products": get_args(Products),
    "placement": get_args(Placed),
}
# The smallest value of each number.
_SMALLEST = {
    "mc_samples": 1,
    "seed": 0,
    "max_dim": 1,
    "first_datum": 0,
    "columns_at_once": 1,
    "first_sample": 0,
    "memory": 0,
    "factor_memory": 1,
}
# Settings that do not affect results: whether to check, how to compute, and where to store.
_NO_RESULT: dict[str, Any] = {
    "audit": True,
    "replay": True,
    "memory": None,
    "placement": "replicated",
    "factor_memory": None,
}


class Advanced(TypedDict, total=False):
    """The settings of `kfs.KFAC` that are rarely needed. It documents them."""

    joint_bias: bool
    batch_axis: int | None
    first_datum: int
    columns_at_once: int | None
    factor_device: str | torch.device | None
    factor_dtype: torch.dtype | None
    products: Products
    audit: bool
    replay: bool
    memory: int | None
    placement: Placed
    factor_memory: int | None


def check_names(given: Iterable[str], common: Iterable[str]) -> None:
    """Raise for arguments of `kfs.KFAC` that do not exist, and suggest similar ones.

    Args:
        given: The names of the advanced settings that were passed.
        common: The names of the other arguments of `kfs.KFAC`.

    Raises:
        DtypeError: If an argument does not exist.
    """
    for name in given:
        if name not in Advanced.__annotations__:
            if name == "group":
                raise DtypeError(
                    "KFAC has no argument 'group': it takes the processes that share the risk's data.",
                    "Pass them to the risk: EmpiricalRisk(..., kfs.shard(data, group)), or EmpiricalRisk(..., "
                    "group=group) for data that are split already.",
                )
            known = [*common, *Advanced.__annotations__]
            all_of_them = f"Choose from {', '.join(known)}."
            raise DtypeError(f"KFAC has no argument {name!r}.", guess([name], known) or all_of_them)


def check_device(device: str | torch.device) -> None:
    """Raise a `ModelError` for a device that does not exist, or that stores no values."""
    try:
        usable = torch.zeros(1, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):
        usable = False
    if not usable:
        raise ModelError(f"There is no device {str(device)!r} here.", "Use 'cpu', or one that PyTorch finds.")


@dataclass(frozen=True)
class Settings:
    """The settings of `kfs.KFAC`, which documents them.

    Attributes:
        first_sample: Index of the first draw for each example: zero for factors; `kfs.EKFAC` sets it for eigenvalues.

    Raises:
        ModelError: If a setting is unknown or out of range.
    """

    fisher: Fisher = "type-2"
    sharing: Sharing | Mapping[str, Sharing] = "expand"
    mc_samples: int = 1
    seed: int = 0
    joint_bias: bool = True
    max_dim: int | None = None
    uncovered: Uncovered = "error"
    batch_axis: int | None = None
    first_datum: int = 0
    columns_at_once: int | None = None
    factor_device: str | torch.device | None = None
    factor_dtype: torch.dtype | None = None
    audit: bool = True
    first_sample: int = 0
    products: Products = "auto"
    replay: bool = True
    memory: int | None = None
    placement: Placed = "replicated"
    factor_memory: int | None = None

    def __post_init__(self) -> None:
        if self.fisher == "type-1":  # as the paper and `kfs.Fisher` call it; everything else knows one name
            object.__setattr__(self, "fisher", "mc")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            for one in value.values() if isinstance(value, Mapping) else [value]:
                if one not in choices:
                    raise ModelError(f"{name} is {one!r}.", f"Choose from {', '.join(map(repr, choices))}.")
        for name, smallest in _SMALLEST.items():
            value = getattr(self, name)
            optional = name in {"max_dim", "columns_at_once", "memory", "factor_memory"} and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < smallest):
                raise ModelError(f"{name} is {value!r}.", f"Use an integer of at least {smallest}.")
        dtype = self.factor_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ModelError(f"factor_dtype is {dtype!r}.", "Use a floating-point type of PyTorch.")
        if self.factor_device is not None:
            check_device(self.factor_device)
            object.__setattr__(self, "factor_device", str(self.factor_device))  # as stored in files

    def state(self) -> dict[str, Any]:
        """Return all settings, for a file."""
        dtype = None if self.factor_dtype is None else str(self.factor_dtype).removeprefix("torch.")
        sharing = dict(self.sharing) if isinstance(self.sharing, Mapping) else self.sharing
        state = asdict(self) | {"sharing": sharing, "factor_dtype": dtype}
        for name in _NO_RESULT:
            del state[name]
        # Files store these only if they differ from the default, and checkpoints are compared with files.
        if self.first_sample == 0:
            del state["first_sample"]
        if self.products == "auto":
            del state["products"]
        return state

    def all(self) -> dict[str, Any]:
        """Return all settings that must be equal in all processes, including those that distribute results."""
        return self.state() | {"placement": self.placement, "factor_memory": self.factor_memory}

    def with_fresh_draws(self) -> "Settings":
        """Return the same settings with new draws, as many for each example."""
        return replace(self, first_sample=self.first_sample + self.mc_samples) if self.fisher == "mc" else self

    @classmethod
    def from_state(cls, state: Any) -> "Settings":
        """Undo `state`."""
        dtype = state["factor_dtype"]
        return cls(**state | {"factor_dtype": None if dtype is None else getattr(torch, dtype)})

    def check_same(self, other: "Settings") -> None:
        """Raise a `ModelError` if a setting differs, except for which data were used."""
        mine, theirs = (replace(one, first_datum=0, **_NO_RESULT) for one in (self, other))
        if mine != theirs:
            raise ModelError(f"The settings differ: {mine} and {theirs}.", "Merge only objects with the same settings.")

    def sharing_of(self, name: str) -> Sharing:
        """Return the weight sharing of a parameter: its own, its module's, or `"expand"`."""
        if isinstance(self.sharing, str):
            return self.sharing
        return self.sharing.get(name, self.sharing.get(name.rpartition(".")[0], "expand"))

    def is_diagonal(self, size: int) -> bool:
        """Whether a side of this size is too wide for a dense factor."""
        return self.max_dim is not None and size > self.max_dim
