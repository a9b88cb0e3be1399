"""The vectors on one side of rows: plain ones, perhaps with a coordinate for the bias, or unit vectors by their index.

Rows are those of `owners`, in the form `[batch, shared]`: each datum has as many, and those that a datum does not have
are zero. With groups of channels there is one more axis in front.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What is computed for some data at a time fills about this many bytes.
_BYTES = {False: 2**24, True: 2**28}  # on a CPU, on an accelerator


def at_a_time(like: Tensor, numbers: int) -> int:
    """Return for how many data to compute something together, given how many numbers each has."""
    return max(1, _BYTES[like.device.type != "cpu"] // (4 * max(numbers, 1)))


class RowVectors(ABC):
    """Vectors of all rows, `[groups, batch, shared, size]`.

    Attributes:
        groups: Number of groups of channels.
        num_data: Number of data.
        shared: Number of rows of each datum.
        size: Number of coordinates.
        work: How many multiplications an inner product takes.
        numbers: How many numbers are stored for each datum.
    """

    groups: int
    num_data: int
    shared: int
    size: int
    work: int
    numbers: int

    @abstractmethod
    def dense(self) -> Tensor:
        """Write all coordinates down, `[groups, batch, shared, size]`."""

    @abstractmethod
    def times(self, Q: Tensor) -> "PlainVectors":
        """Multiply every vector with a matrix from the right, `[groups, size, any]`."""

    @abstractmethod
    def some(self, data: slice) -> "RowVectors":
        """Return the vectors of some data."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "RowVectors":
        """Convert numbers, if there are any."""

    def dots(self, other: "RowVectors") -> Tensor:
        """Return the inner products of all pairs of vectors, `[groups, rows, rows of the other]`."""
        return self.dense().flatten(1, 2) @ other.dense().flatten(1, 2).transpose(1, 2)

    def dots_within(self, other: "RowVectors") -> Tensor:
        """Return the inner products of pairs of vectors that the same datum has, `[groups, batch, shared, shared]`."""
        return self.dense() @ other.dense().transpose(2, 3)


@dataclass(frozen=True)
class PlainVectors(RowVectors):
    """Vectors that are there.

    Attributes:
        values: `[groups, batch, shared, features]`.
        last: The value of one more coordinate, that of a bias: one where the bias was used, zero where it was not.
            `None` if there is no such coordinate.
    """

    values: Tensor
    last: float | None = None

    def __post_init__(self) -> None:
        shape = self.values.shape
        counts = {
            "groups": shape[0],
            "num_data": shape[1],
            "shared": shape[2],
            "size": shape[3] + (self.last is not None),
            "work": shape[3],
            "numbers": shape[0] * shape[2] * shape[3],
        }
        for name, number in counts.items():
            object.__setattr__(self, name, number)

    def dense(self) -> Tensor:
        """Append the coordinate of the bias."""
        if self.last is None:
            return self.values
        return torch.nn.functional.pad(self.values, (0, 1), value=self.last)

    def times(self, Q: Tensor) -> "PlainVectors":
        """Multiply; the last row of the matrix belongs to the bias."""
        features = self.values.shape[3]
        flat = self.values.flatten(1, 2)
        # A plain product is faster than a batched one with a batch of one.
        product = (flat[0] @ Q[0, :features]).unsqueeze(0) if self.groups == 1 else flat @ Q[:, :features]
        if self.last:
            product = product + self.last * Q[:, features:]
        return PlainVectors(product.unflatten(1, self.values.shape[1:3]))

    def some(self, data: slice) -> "PlainVectors":
        """Return the vectors of some data."""
        return PlainVectors(self.values[:, data], self.last)

    def to(self, dtype: torch.dtype) -> "PlainVectors":
        """Convert."""
        return PlainVectors(self.values.to(dtype), self.last)

    def dots(self, other: RowVectors) -> Tensor:
        """Multiply, or look entries up."""
        if isinstance(other, UnitVectors):
            return other.dots(self).transpose(1, 2)
        if not isinstance(other, PlainVectors) or self._differs(other):
            return super().dots(other)
        mine, theirs = self.values.flatten(1, 2), other.values.flatten(1, 2)
        both = (mine[0] @ theirs[0].T).unsqueeze(0) if self.groups == 1 else mine @ theirs.transpose(1, 2)
        return both.add_(self._product_of_last(other)) if self._product_of_last(other) else both

    def dots_within(self, other: RowVectors) -> Tensor:
        """Multiply, or look entries up."""
        if isinstance(other, UnitVectors):
            return other.dots_within(self).transpose(2, 3)
        if not isinstance(other, PlainVectors) or self._differs(other):
            return super().dots_within(other)
        return self.values @ other.values.transpose(2, 3) + self._product_of_last(other)

    def _differs(self, other: "PlainVectors") -> bool:
        """Whether others have written their last coordinate down."""
        return self.values.shape[3] != other.values.shape[3]

    def _product_of_last(self, other: "PlainVectors") -> float:
        return (self.last or 0.0) * (other.last or 0.0)


@dataclass(frozen=True)
class UnitVectors(RowVectors):
    """Unit vectors, by the coordinate that is one. There is a single group.

    Attributes:
        index: `[batch, shared]`.
        size: Number of coordinates.
        dtype: Dtype of numbers that are computed from them.
    """

    index: Tensor
    size: int
    dtype: torch.dtype
    groups = 1
    work = 1

    def __post_init__(self) -> None:
        num_data, shared = self.index.shape
        for name, number in {"num_data": num_data, "shared": shared, "numbers": shared}.items():
            object.__setattr__(self, name, number)

    def dense(self) -> Tensor:
        """Write zeros and ones down."""
        zeros = torch.zeros(*self.index.shape, self.size, dtype=self.dtype, device=self.index.device)
        return zeros.scatter_(2, self.index.unsqueeze(2), 1.0).unsqueeze(0)

    def times(self, Q: Tensor) -> PlainVectors:
        """Look rows up."""
        return PlainVectors(Q[:, self.index])

    def some(self, data: slice) -> "UnitVectors":
        """Return the vectors of some data."""
        return UnitVectors(self.index[data], self.size, self.dtype)

    def to(self, dtype: torch.dtype) -> "UnitVectors":
        """Say what numbers to compute."""
        return UnitVectors(self.index, self.size, dtype)

    def dots(self, other: RowVectors) -> Tensor:
        """Look entries up, or compare indices."""
        mine = self.index.flatten()
        if isinstance(other, UnitVectors):
            return (mine.unsqueeze(1) == other.index.flatten()).to(self.dtype).unsqueeze(0)
        return other.dense().flatten(1, 2)[..., mine].transpose(1, 2)

    def dots_within(self, other: RowVectors) -> Tensor:
        """Look entries up, or compare indices."""
        if isinstance(other, UnitVectors):
            return (self.index.unsqueeze(2) == other.index.unsqueeze(1)).to(self.dtype).unsqueeze(0)
        theirs = other.dense()
        index = self.index[None, :, None].expand(1, -1, theirs.shape[2], -1)
        return theirs.gather(3, index).transpose(2, 3)


def joined(parts: Sequence[RowVectors]) -> RowVectors:
    """Put the vectors of several batches one after the other. Those of a kind have equal sizes and groups.

    Where data of one batch have fewer rows, unit vectors and plain ones are filled up with their first coordinate and
    with zeros. The other side of such rows has to be zero.
    """
    if len(parts) == 1:
        return parts[0]
    most = max(part.shared for part in parts)
    if all(isinstance(part, UnitVectors) for part in parts):
        units = [part for part in parts if isinstance(part, UnitVectors)]
        index = torch.cat([torch.nn.functional.pad(part.index, (0, most - part.shared)) for part in units])
        return UnitVectors(index, units[0].size, units[0].dtype)
    plain = [part if isinstance(part, PlainVectors) else PlainVectors(part.dense()) for part in parts]
    if len({part.last for part in plain}) > 1:
        plain = [PlainVectors(part.dense()) for part in plain]
    values = torch.cat([torch.nn.functional.pad(part.values, (0, 0, 0, most - part.shared)) for part in plain], 1)
    return PlainVectors(values, plain[0].last)
