"""Stackable objects: dataclasses of tensors that are stacked, sliced, moved and stored field by field.

A `Stackable` is a frozen dataclass that stands for several blocks (or factors) of one size. Its tensors have a leading
*stack* axis, with one entry per block. Fields that are `Stackable` themselves, or tuples of such objects, follow the
same rule. All other fields hold for the whole stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from kfs.describing import shaped
from kfs.storage import UnfitError

# Metadata of a field that files do not have, because something else in the file determines it.
NOT_STORED = {"stored": False}
S = TypeVar("S", bound="Stackable")


class Stackable:
    """Several blocks, or factors of blocks, of one size."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # subclasses are dataclasses

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts that have equal keys. A single part is returned as it is, without copying."""
        return parts[0] if len(parts) == 1 else _combined(torch.cat, parts)

    def __getitem__(self, part: slice) -> Self:
        """Return some of the blocks; tensors are views."""
        return _combined(lambda tensors: tensors[0][part], [self])

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __repr__(self) -> str:
        """Return all fields; of tensors, only shape, dtype and device."""
        return f"{type(self).__name__}({', '.join(f'{f.name}={_shown(getattr(self, f.name))}' for f in fields(self))})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        return _combined(lambda tensors: tensors[0].to(device=device, dtype=dtype), [self])

    def empty_on(self, device: torch.device | str) -> Self:
        """Return blocks of the same sizes, with numbers that are not set yet, also of those on the meta device."""
        return _combined(lambda tensors: torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=device), [self])

    def overwrite(self, other: Self, where: Tensor | None = None) -> None:
        """Write the blocks of another stack of the same key over these, in place.

        Args:
            other: What to write.
            where: Which blocks to write, `[stack]`; all by default.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Stackable):
                mine.overwrite(theirs, where)
            # What is one expanded number, such as the diagonal of an identity, is the same in both.
            elif isinstance(mine, Tensor) and 0 not in mine.stride():
                if where is not None:
                    theirs = torch.where(where.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)
                mine.copy_(theirs)

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for blocks to be stacked: sizes, kinds and the device."""
        return type(self).__name__, *(_key(getattr(self, f.name)) for f in fields(self))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, except those with one number per block and those that are one expanded number."""
        values = [part for f in fields(self) for part in _parts(getattr(self, f.name))]
        nested = sum(value.nbytes for value in values if isinstance(value, Stackable))
        return nested + sum(t.nbytes for t in values if isinstance(t, Tensor) and t.ndim > 1 and t.stride(-1) > 0)

    def state(self) -> dict[str, Any]:
        """Return what a file stores, by field."""
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata != NOT_STORED}
        return {n: v.state() if isinstance(v, Stackable) else v for n, v in stored.items()}


def check_shape(t: Tensor, *shape: int) -> Tensor:
    """Return a tensor from a file if it has the expected shape; raise an `UnfitError` otherwise."""
    if t.shape != shape:
        raise UnfitError(f"a tensor has shape {list(t.shape)} instead of {list(shape)}")
    return t


def _combined(function: Callable[[list[Tensor]], Tensor], parts: Sequence[S]) -> S:
    """Combine parts into one object. The function takes the tensors that one field has in all parts."""
    result: dict[str, Any] = {}
    for f in fields(parts[0]):
        values = [getattr(part, f.name) for part in parts]
        if isinstance(values[0], Stackable):
            result[f.name] = _combined(function, values)
        elif isinstance(values[0], tuple):
            result[f.name] = tuple(_combined(function, same) for same in zip(*values, strict=True))
        elif isinstance(values[0], Tensor):
            result[f.name] = function(values)
        else:
            # A stack has a property (to be symmetric) if all of its blocks have it. Other values are equal, by the key.
            result[f.name] = all(values) if isinstance(values[0], bool) else values[0]
    return type(parts[0])(**result)


def _parts(value: Any) -> tuple[Any, ...]:
    """Return what a field consists of: itself, or the members of a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _key(value: Any) -> Any:
    """Return what must be equal in one field."""
    if isinstance(value, Stackable):
        return value.key
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    if isinstance(value, Tensor):
        return value.shape[1:], value.device
    return None if isinstance(value, bool) else value


def _shown(value: Any) -> str:
    return f"({shaped(value)})" if isinstance(value, Tensor) else repr(value)
