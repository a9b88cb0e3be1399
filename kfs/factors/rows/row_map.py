"""Row maps: the example that each row of an activation belongs to, and what an audit has found out about them.

The engine uses one axis convention: activations arrive with any leading axes, `[*leading, features]`, and gradients
with one more axis for columns, `[columns, *leading, features]`. Leading axes, flattened, are *rows*. Where it matters
which example a row belongs to, rows are brought into the form `[batch, shared]`.

A row has one position, or several: a convolution reads all positions of an image off one row. Not all of them need to
count (see `kfs.factors.rows.counted`).

A pass gets row maps from a row source (see `kfs.factors.rows.measure`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.rows.counted import ALL, RowRule
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

        Examples with fewer rows are padded with zeros.

        Args:
            t: The tensor.
            trailing: Number of axes that are not leading axes; one for features.
        """

    @abstractmethod
    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Return the number of rows of each example, `[batch]`, with the dtype and device of `like`."""

    @abstractmethod
    def most(self, rows: int) -> int:
        """Return the largest number of rows that any example has."""

    @abstractmethod
    def index(self, rows: int) -> Tensor:
        """Return the example of each row, `[rows]`; negative for rows without an example."""

    @abstractmethod
    def in_order(self, rows: int) -> bool:
        """Whether there is exactly one row for each example, in the order of the examples."""

    def counting(self, counted: Tensor | None) -> Self:
        """Return the same row map, with `counted` positions."""
        other = copy(self)
        object.__setattr__(other, "counted", counted)  # the copy of a frozen dataclass, too
        return other

    def numbers_counted(self, dtype: torch.dtype) -> Tensor:
        """Return ones for positions that count and zeros elsewhere, `[batch, shared, positions of a row]`."""
        assert self.counted is not None  # noqa: S101 (callers have checked)
        return self.by_datum(self.counted.to(dtype))


@dataclass(frozen=True)
class StridedRows(RowMap):
    """Rows in a regular order: `rows = [outer, batch, inner]`.

    Attributes:
        num_data: Number of examples.
        inner: Number of consecutive rows that belong to one example. If the batch axis comes first, all its rows; if it
            comes last, one.
        complete: Whether the order is certain for all rows; rows without a gradient may be in another order.
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
        """Return the row map for a batch axis that comes first: all rows of an example are consecutive."""
        return cls(num_data, max(rows // num_data, 1))

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Reshape to `[batch, shared, *trailing]`; a view if the batch axis comes first."""
        shape = t.shape[t.ndim - trailing :]
        rows = prod(t.shape[: t.ndim - trailing])
        if rows == 0:  # an expert without tokens
            return t.reshape(self.num_data, 0, *shape)
        if self.num_data * self.inner == rows:
            return t.reshape(self.num_data, self.inner, *shape)
        t = t.reshape(-1, self.num_data, self.inner, *shape).movedim(1, 0)
        return t.reshape(self.num_data, -1, *shape)

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Return the number of rows of each example, which is the same for all."""
        return like.new_full((self.num_data,), rows // self.num_data)

    def most(self, rows: int) -> int:
        """Return the number of rows of each example, which is the same for all."""
        return rows // self.num_data

    def index(self, rows: int) -> Tensor:
        """Return the example of each row."""
        return torch.arange(rows) // self.inner % self.num_data

    def in_order(self, rows: int) -> bool:
        """Whether there is exactly one row for each example."""
        return rows == self.num_data

    def from_data(self, t: Tensor, rows: int) -> Tensor:
        """Invert `by_datum`: map `[batch, shared * k]` to `[rows, k]`."""
        outer = rows // (self.num_data * self.inner)
        return t.reshape(self.num_data, outer, self.inner, -1).movedim(0, 1).reshape(rows, -1)


class IndexedRows(RowMap):
    """Rows in any order, with any number for each example: ragged graphs, or tokens that are routed to experts.

    They are measured anew in every batch. Sizes of tensors depend on them, so the host has to synchronize.

    Args:
        row_map: The example of each row, `[rows]`; negative for a row that no gradient comes back to.
        num_data: Number of examples.

    Example:
        >>> IndexedRows(torch.tensor([1, 0, 1]), 2).by_datum(torch.tensor([[5], [6], [7]])).tolist()
        [[[6], [0]], [[5], [7]]]
    """

    def __init__(self, row_map: Tensor, num_data: int) -> None:
        self.num_data = num_data
        with sync.allow_sync():
            self.complete = bool((row_map >= 0).all())
        self._row_map = row_map

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Gather rows into `[batch, shared, *trailing]`, padded with zeros."""
        rows = t.reshape(-1, *t.shape[t.ndim - trailing :])
        zero = rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([rows, zero])[self._places]

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Return the number of rows of each example."""
        return self._counts.to(like)

    def most(self, rows: int) -> int:
        """Return the largest number of rows that any example has."""
        return self._places.shape[1]

    def index(self, rows: int) -> Tensor:
        """Return the example of each row."""
        return self._row_map

    def in_order(self, rows: int) -> bool:
        """Conservatively `False`: rows may be in any order."""
        return False

    @cached_property
    def _counts(self) -> Tensor:
        with sync.allow_sync():
            return torch.bincount(self._row_map[self._row_map >= 0], minlength=self.num_data)

    @cached_property
    def _places(self) -> Tensor:
        """The row indices of each example, `[batch, shared]`, padded with the number of all rows."""
        with sync.allow_sync():
            number, most = int(self._counts.sum()), int(self._counts.max())
        order = self._row_map.argsort(stable=True)
        order = order[len(order) - number :]  # rows without an example come first
        sorted_owners = self._row_map[order]
        first = self._counts.cumsum(0) - self._counts
        position = torch.arange(len(order), device=order.device) - first[sorted_owners]
        places = order.new_full((self.num_data, most), len(self._row_map))
        places[sorted_owners, position] = order
        return places


class UnknownRows(RowMap):
    """Row map that could not be determined; raises on first use."""

    def __init__(self, error: DataError, num_data: int) -> None:
        self.error = error
        self.num_data = num_data

    def by_datum(self, *_: Any, **__: Any) -> Any:
        """Raise the stored error."""
        raise self.error

    counts = most = index = by_datum

    def in_order(self, rows: int) -> bool:
        """Conservatively `False`: rows may be in any order."""
        return False


def by_length(num_data: int, leading: Sequence[int], axis: int | None = None) -> StridedRows:
    """Guess the batch axis from lengths: the first axis, the only one of its length, or a part of the first one.

    Args:
        num_data: Number of examples.
        leading: Lengths of the leading axes.
        axis: Position of the batch axis, if known.

    Raises:
        DataError: If the batch axis is not found.
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


# Gradient callback: receives the gradients of some columns, [columns, *leading, features].
Receiver = Callable[[Tensor], None]
# Called with a row map as soon as it is known; returns the gradient callback.
Start = Callable[[RowMap], Receiver]
# Identifies a query: the operation, and the parameter that it uses.
What = tuple[str, str]
# Identifies the question "does the result of an operation on a parameter and constants have a row for every example?":
# the operation, the parameter, and the number of earlier occurrences of this pair.
Question = tuple[Any, str, int]


@dataclass(slots=True)
class RowQuery:
    """Point in a forward pass where we must know which example each row belongs to, and which rows count."""

    what: What
    leading: tuple[int, ...]  # lengths of the leading axes
    meeting: bool = False  # whether it is for a derived or broadcast parameter, and not for a use
    rule: RowRule = ALL  # which rows count
    positions: int = 1  # of each row
    row_map: RowMap | None = None  # the row map, if it is known by construction
    needs_rows: bool = True  # whether the row map is needed even if the rule does not use it
    waits: bool = False  # whether the rows that count have to be measured, or are known only with the targets

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.leading)


@dataclass(frozen=True)
class KnownUse:
    """The row map of a query, measured on a few examples, in a form that applies to other batches."""

    what: What
    leading: tuple[int, ...]  # lengths of the leading axes in the measurement
    num_data: int  # number of examples in the measurement
    inner: int | None  # consecutive rows per example; `None` if every batch has to be measured

    def row_map(self, num_data: int, leading: tuple[int, ...]) -> StridedRows | None:
        """Return the row map for another batch; `None` if it has to be measured.

        Leading axes may differ only in the length of the batch axis, in proportion to the number of examples.
        """
        if self.inner is None or len(leading) != len(self.leading):
            return None
        differing = [axis for axis, length in enumerate(leading) if length != self.leading[axis]]
        if not differing and num_data == self.num_data:
            return StridedRows(num_data, self.inner)
        if len(differing) != 1:
            return None
        axis = differing[0]
        tail = prod(leading[axis + 1 :])
        if leading[axis] * self.num_data != self.leading[axis] * num_data or self.inner % tail:
            return None
        fits = self.leading[axis] % (self.num_data * (self.inner // tail)) == 0
        return StridedRows(num_data, self.inner) if fits else None


@dataclass(frozen=True)
class AuditResult:
    """The results of an audit that later batches use."""

    uses: tuple[KnownUse, ...] = ()  # queries of uses, in order
    meetings: tuple[KnownUse, ...] = ()  # queries of derived parameters, in order
    # Whether results of operations on constants have a row for every example.
    answers: Mapping[Question, bool] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()  # indices of model inputs that are the same for all examples
    inputs: tuple[bool, ...] = ()  # whether each input is data; empty if not known yet
    rows: tuple[tuple[What, RowRule], ...] = ()  # row rules of uses, in order
    otherwise: RowRule = ALL  # row rule of other uses
    has_mask: bool = True  # whether masks of batches are used
    checked: int | None = None  # the use at which later batches are checked for padding that the audited examples lack
    distrusted: bool = False  # whether such padding was found, so that every batch is measured
    unexplained: frozenset[tuple[str, str]] = frozenset()  # `(parameter, why)` of uses that were missed or misread
    both_ways: frozenset[str] = frozenset()  # weights with biases that are used both plain and transposed
    # Row maps that were looked up: by kind and index of a query, number of examples, and leading axes.
    row_maps: dict[Any, StridedRows | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def row_rules(self) -> frozenset[RowRule]:
        """All row rules."""
        return frozenset((self.otherwise, *(rule for _, rule in self.rows)))

    def rule_of(self, number: int, what: What) -> RowRule:
        """Return the row rule of a use, given its index among all uses of the pass."""
        fits = number < len(self.rows) and self.rows[number][0] == what
        return self.rows[number][1] if fits else self.otherwise
