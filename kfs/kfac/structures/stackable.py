"""What all stored things have in common: they are stacked, sliced, moved and stored field by field.

A `Stackable` is a frozen dataclass that stands for several blocks (or factors) of one size. Its tensors have a leading
*stack* axis, with one entry per block. Fields that are `Stackable` themselves follow the same rule. All other fields
hold for the whole stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

# Metadata of a field that files do not have, because something else in the file determines it.
NOT_STORED = {"stored": False}


class Stackable:
    """Several blocks, or factors of blocks, of one size."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # subclasses are dataclasses

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts that have equal keys. A single part is returned as it is, without copying."""
        if len(parts) == 1:
            return parts[0]
        values = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        return replace(parts[0], **{name: _combined(v) for name, v in values.items()})

    def __getitem__(self, part: slice) -> Self:
        """Return some of the blocks; tensors are views."""
        return self._map_tensors(lambda t: t[part])

    def __len__(self) -> int:
        """Count the blocks."""
        return len(getattr(self, fields(self)[0].name))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        return self._map_tensors(lambda t: t.to(device=device, dtype=dtype))

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for blocks to be stacked: sizes, kinds and the device."""
        return type(self).__name__, *(_key(value) for value in self._values().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors. Those with one number per block are not counted."""
        values = self._values().values()
        nested = sum(value.nbytes for value in values if isinstance(value, Stackable))
        return nested + sum(t.nbytes for t in values if isinstance(t, Tensor) and t.ndim > 1)

    def state(self) -> dict[str, Any]:
        """Return what a file stores, by field."""
        stored = [f.name for f in fields(self) if f.metadata.get("stored", True)]
        values = {name: getattr(self, name) for name in stored}
        return {n: v.state() if isinstance(v, Stackable) else v for n, v in values.items()}

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to all tensors."""
        changed: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Tensor):
                changed[name] = function(value)
            elif isinstance(value, Stackable):
                changed[name] = value._map_tensors(function)
        return replace(self, **changed)


def _combined(values: list[Any]) -> Any:
    """Combine one field of several parts."""
    first = values[0]
    if isinstance(first, Stackable):
        return type(first).stack(values)
    if isinstance(first, Tensor):
        return torch.cat(values)
    # A stack has a property (to be symmetric) if all of its blocks have it. Other values are equal, by the key.
    return all(values) if isinstance(first, bool) else first


def _key(value: Any) -> Any:
    """Return what must be equal in one field."""
    if isinstance(value, Stackable):
        return value.key
    if isinstance(value, Tensor):
        return value.shape[1:], value.device
    return None if isinstance(value, bool) else value
