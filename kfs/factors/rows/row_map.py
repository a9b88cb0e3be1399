"""Which example a row of an activation belongs to, and how rows are brought into the form `[batch, shared, features]`.

This is the axis convention of the whole engine: activations arrive with any leading axes, `[*leading, features]`, and
gradients with one more axis for columns, `[columns, *leading, features]`. Leading axes, flattened, are *rows*. Where it
matters which example a row belongs to, rows are brought into the form `[batch, shared]`.

Owners are measured (see `kfs.factors.rows.measure`), or guessed from lengths if nobody measures.

A row has one position, or several: a convolution reads all positions of an image off one row. Not all of them need to
count (see `kfs.factors.rows.counted`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.runtime import sync


class RowMap(ABC):
    """The example that each row belongs to.

    Attributes:
        num_data: Number of examples.
        complete: Whether every row belongs to some example.
        counted: Which positions of rows count, booleans `[rows, positions of a row]`. `None` if all do.
    """

    num_data: int
    complete: bool = True
    counted: Tensor | None = None

    @abstractmethod
    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Bring a tensor `[*leading, *trailing]` into the form `[batch, shared, *trailing]`.

        An example that has fewer rows than others gets zeros.

        Args:
            t: The tensor.
            trailing: How many axes are not leading ones: one for features.
        """

    @abstractmethod
    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Return how many of some rows each example has, `[batch]`, with dtype and device of a tensor."""

    @abstractmethod
    def most(self, rows: int) -> int:
        """Return how many of some rows an example has at most."""

    @abstractmethod
    def index(self, rows: int) -> Tensor:
        """Return the example of each row, `[rows]`; negative for a row that belongs to none."""

    @abstractmethod
    def in_order(self, rows: int) -> bool:
        """Whether there is one row for each example, in the order of data."""

    @abstractmethod
    def counting(self, counted: Tensor | None) -> "RowMap":
        """Return the same owners, with `counted` positions."""

    def numbers_counted(self, dtype: torch.dtype) -> Tensor:
        """Return ones for positions that count, and zeros, `[batch, shared, positions of a row]`."""
        assert self.counted is not None  # noqa: S101 (whoever asks has looked)
        return self.by_datum(self.counted.to(dtype))


@dataclass(frozen=True)
class StridedRows(RowMap):
    """Rows in a regular order: `rows = [outer, batch, inner]`.

    Attributes:
        num_data: Number of examples.
        inner: How many consecutive rows belong to one example. If the batch axis comes first, these are all its rows;
            if it comes last, one.
        complete: Whether that is certain for all rows: those without gradient may be in another order.
        counted: As in `RowMap`.

    Example:
        >>> StridedRows(2, inner=1).by_datum(torch.tensor([[0], [1], [0], [1]])).tolist()
        [[[0], [0]], [[1], [1]]]
    """

    num_data: int
    inner: int
    complete: bool = True
    counted: Tensor | None = field(default=None, compare=False)

    @classmethod
    def batch_first(cls, num_data: int, rows: int) -> "StridedRows":
        """Return the order in which all rows of an example stand together, data by data."""
        return cls(num_data, max(rows // num_data, 1))

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Reshape; this copies nothing if the batch axis comes first."""
        shape = t.shape[t.ndim - trailing :]
        rows = prod(t.shape[: t.ndim - trailing])
        if rows == 0:  # an expert without tokens
            return t.reshape(self.num_data, 0, *shape)
        if self.num_data * self.inner == rows:
            return t.reshape(self.num_data, self.inner, *shape)
        t = t.reshape(-1, self.num_data, self.inner, *shape).movedim(1, 0)
        return t.reshape(self.num_data, -1, *shape)

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Return the same number for all data."""
        return like.new_full((self.num_data,), rows // self.num_data)

    def most(self, rows: int) -> int:
        """All data have as many."""
        return rows // self.num_data

    def index(self, rows: int) -> Tensor:
        """Count."""
        return torch.arange(rows) // self.inner % self.num_data

    def in_order(self, rows: int) -> bool:
        """Whether there is one row for each example."""
        return rows == self.num_data

    def counting(self, counted: Tensor | None) -> "StridedRows":
        """Return the same order."""
        return replace(self, counted=counted)

    def from_data(self, t: Tensor, rows: int) -> Tensor:
        """Undo `by_datum` for `[batch, shared * k]`: `[rows, k]`."""
        outer = rows // (self.num_data * self.inner)
        return t.reshape(self.num_data, outer, self.inner, -1).movedim(0, 1).reshape(rows, -1)


class IndexedRows(RowMap):
    """Rows in any order, and any number of them for each example: ragged graphs, tokens that are sent to experts.

    They are measured anew in every batch, and sizes of tensors depend on them: an accelerator has to be waited for.

    Args:
        owners: The example of each row, `[rows]`; negative for a row that belongs to none, because no gradient comes
            back to it.
        num_data: Number of examples.

    Example:
        >>> IndexedRows(torch.tensor([1, 0, 1]), 2).by_datum(torch.tensor([[5], [6], [7]])).tolist()
        [[[6], [0]], [[5], [7]]]
    """

    def __init__(self, row_map: Tensor, num_data: int) -> None:
        self.num_data = num_data
        with sync.allow_sync():
            self.complete = bool((row_map >= 0).all())
        self._owners = row_map

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Copy rows to where they belong."""
        rows = t.reshape(-1, *t.shape[t.ndim - trailing :])
        zero = rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([rows, zero])[self._places]

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Count the rows of each example."""
        return self._counts.to(like)

    def most(self, rows: int) -> int:
        """Return the length of the table of rows."""
        return self._places.shape[1]

    def index(self, rows: int) -> Tensor:
        """Return them."""
        return self._owners

    def in_order(self, rows: int) -> bool:
        """Be careful: say no."""
        return False

    def counting(self, counted: Tensor | None) -> "IndexedRows":
        """Return the same table."""
        other = copy(self)
        other.counted = counted
        return other

    @cached_property
    def _counts(self) -> Tensor:
        with sync.allow_sync():
            return torch.bincount(self._owners[self._owners >= 0], minlength=self.num_data)

    @cached_property
    def _places(self) -> Tensor:
        """The rows of each example, `[batch, shared]`; the number of all rows where there are no more."""
        with sync.allow_sync():
            number, most = int(self._counts.sum()), int(self._counts.max())
        order = self._owners.argsort(stable=True)
        order = order[len(order) - number :]  # those that belong to no example come first
        sorted_owners = self._owners[order]
        first = self._counts.cumsum(0) - self._counts
        position = torch.arange(len(order), device=order.device) - first[sorted_owners]
        places = order.new_full((self.num_data, most), len(self._owners))
        places[sorted_owners, position] = order
        return places


def by_length(num_data: int, leading: Sequence[int], axis: int | None = None) -> StridedRows:
    """Guess where the batch axis is: the first one, the only one of its length, or a part of the first one.

    Args:
        num_data: Number of examples.
        leading: Lengths of the leading axes.
        axis: Where the batch axis is, if somebody knows.

    Raises:
        DataError: If it is not found.
    """
    rows = prod(leading)
    if num_data == 1 or rows == 0:
        return StridedRows.batch_first(num_data, rows)
    if axis == 1 and len(leading) == 1 and rows % num_data == 0:  # sequence and batch share an axis
        return StridedRows(num_data, 1)
    if axis is not None and axis < len(leading):
        found = axis if leading[axis] == num_data else None
    else:
        matches = [place for place, length in enumerate(leading) if length == num_data]
        folded = bool(leading) and leading[0] > 0 and leading[0] % num_data == 0
        found = matches[0] if 0 in matches or len(matches) == 1 else 0 if folded and not matches else None
    if found is None:
        raise DataError(
            f"A parameter is used with an input of leading axes {list(leading)}, in which the batch of "
            f"{num_data} examples is not found.",
            "Say where it is with batch_axis=, or put it first. KFAC with sharing='expand' needs no batch axis.",
        )
    return StridedRows(num_data, leading[found] // num_data * prod(leading[found + 1 :]))
