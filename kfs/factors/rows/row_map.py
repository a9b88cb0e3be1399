"""Row maps: the example that each row of an activation belongs to, and the sources that passes get them from.

The engine uses one axis convention: activations arrive with any leading axes, `[*leading, features]`, and gradients
with one more axis for columns, `[columns, *leading, features]`. Leading axes, flattened, are *rows*. Where it matters
which example a row belongs to, rows are brought into the form `[batch, shared]`.

A row has one position, or several: a convolution reads all positions of an image off one row. Not all of them need to
count (see `kfs.factors.rows.counted`).

The `RowSource` of a pass answers all its row queries. Without an audit, it guesses row maps from lengths of axes. With
one, it looks them up in its result. What the audit left open, such as the rows of experts that the data choose, is
measured in every pass (see `kfs.factors.rows.measure`). The audit itself starts from an empty result, so it measures
everything. A query whose row map has to be measured waits: after the forward pass, the source sends probes back,
determines the row maps of all pending queries, and starts them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.rows.counted import ALL, BatchMasks, RowRule
from kfs.factors.rows.measure import (
    MULTIPLE,
    Measured,
    are_gradients,
    gradient_sizes,
    measured,
    nearest_order,
    obeys,
    probes,
    project,
    regular_order,
)
from kfs.runtime import sync

CPU = torch.device("cpu")


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
    number: int = 0  # index among all uses of the pass
    place: int | None = None  # index among the uses that the audit recorded, if it was looked up there
    not_padding: Tensor | None = field(default=None, compare=False)  # positions that inputs do not mark as padding

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


@dataclass(eq=False)
class PendingQuery:
    """A query that waits: takes gradients of probes until its row map is measured, then those to accumulate."""

    query: RowQuery
    known: RowMap | None  # the row map, if only the rows that count have to be measured or to be set
    start: Start
    source: "RowSource"
    has_gradient: Tensor | None = None  # which positions have a gradient, `[rows, positions]`
    of_vector: Tensor | None = None  # gradients of the first of the two vectors that determine `has_gradient`
    receiver: Receiver | None = None
    probed: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None  # gradients of the first probe, in an audit
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    measured: Measured | None = None  # `None` if no gradient arrived
    # The example of each row, or -1; `None` if positions of a row belong to different examples.
    row_map: Tensor | None = None
    inner: int | None = None  # consecutive rows of one example, if rows are in a regular order
    certain: bool = True  # whether no other regular order fits

    def receive(self, g: Tensor) -> None:
        """Process gradients `[columns, *leading, ..., features]`: of probes, or, once started, those to accumulate."""
        if self.receiver is not None:
            self.receiver(g)
            return
        if self.source.auditing and self.first is None:
            self.first = g
        if not self.source.counting_rows:
            if self.known is None:  # which example does each row belong to?
                g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
                self.dtype, self.device = g.dtype, g.device
                self.probed.append(project(g[0]))
        elif self.query.rule.kind == "measured":  # which rows have a gradient? Compare two vectors.
            if self.of_vector is None:
                self.of_vector = g[0]
                return
            found = are_gradients(gradient_sizes(self.of_vector, g[0]), g.dtype)
            self.has_gradient = found.reshape(self.query.rows, self.query.positions)
            self.of_vector = None

    def find_order(self, found: Measured) -> None:
        """Derive the order of rows from a measurement."""
        num_data, leading = self.source.num_data, self.query.leading
        self.measured = found
        self.row_map = found.row_map
        if len(found.row_map) != self.query.rows:  # rows of several positions, which should agree
            positions = found.row_map.reshape(self.query.rows, -1)
            largest = positions.amax(1) if positions.numel() else positions.new_full((self.query.rows,), -1)
            agree = (positions == largest.unsqueeze(1)) | (positions < 0)
            self.row_map = largest if bool(agree.all()) else None
        if self.source.mixing and found.mixes:
            self.inner = nearest_order(self.probed, num_data, leading)
        elif self.row_map is not None:
            self.inner, self.certain = regular_order(self.row_map, num_data, leading)
            self.certain = self.certain and found.has_votes
        self.probed.clear()

    def begin(self) -> None:
        """Start with the row map that is known, measured or guessed, and the positions that count."""
        query, source = self.query, self.source
        if query.rule.kind == "measured" and self.has_gradient is None:  # no prediction that counts depends on the rows
            nothing = torch.zeros(query.rows, query.positions, dtype=torch.bool)
            self.has_gradient = nothing.to(source.masks.device, non_blocking=True)
        counted, row_map = self.has_gradient, self.known
        if row_map is None and self.inner is not None:
            has_votes = self.measured is not None and self.measured.has_votes
            row_map = StridedRows(source.num_data, self.inner, complete=self.certain or not has_votes)
        if row_map is not None:
            row_map = source.counted(row_map, query) if counted is None else row_map.counting(counted)
        elif self.measured is None:  # predictions do not depend on these rows
            self.certain = False
            row_map = source.guessed(query)
        elif self.row_map is not None:
            row_map = IndexedRows(self.row_map.to(self.device), source.num_data)
            if query.rule.kind == "data" and (of_data := source.masks.counted(query.rule, 1)) is not None:
                index = row_map.index(query.rows)
                counted = of_data[index.clamp(min=0)] & (index >= 0).unsqueeze(1)
                counted = counted.expand(-1, query.positions)
            row_map = row_map.counting(counted)
        else:
            operation, parameter = query.what
            error = DataError(
                f"One input of {operation} (parameter {parameter!r}) has positions that belong to different data.",
                "Use KFAC with sharing='expand', which needs no row map, or leave the parameter out with params=.",
            )
            row_map = UnknownRows(error, source.num_data)
        self.receiver = self.start(row_map)


class RowSource:
    """Gives row maps to the uses of one pass.

    Args:
        num_data: Number of examples.
        axis: Position of the batch axis in activations, if given. It is used if nothing is measured.
        masks: The masks that determine which rows count. By default, all do.
        known: The result of an audit. `None` to guess row maps from lengths.
        mixing: Whether examples may mix.
        auditing: Whether the pass is an audit: record all queries and questions, measure results on constants, and pass
            on the gradients of the first probe once row maps are known.

    Attributes:
        takes_probes: Whether the callback that was returned last also takes the probes that measure row maps.
        counting_rows: Whether the vectors being sent back show which rows count.
        asked: All queries of uses, in order. Only audits need them.
        opened: The pending queries.
        observed: Pending queries of results on constants, whose numbers are measured one by one.
        questions: Questions with their answers, and the pending queries that depend on them. Only audits need them.
    """

    def __init__(
        self,
        num_data: int,
        axis: int | None = None,
        masks: BatchMasks | None = None,
        known: AuditResult | None = None,
        mixing: bool = False,
        auditing: bool = False,
    ) -> None:
        self.num_data = num_data
        self.axis = axis
        self.masks = masks or BatchMasks()
        self.mixing = mixing
        self.auditing = auditing
        self.takes_probes = False
        self.counting_rows = False
        self.asked: list[RowQuery] = []
        self.opened: list[PendingQuery] = []
        self.observed: list[PendingQuery] = []
        self.questions: list[tuple[Question, bool, list[PendingQuery]]] = []
        self._known = known
        self._next = {False: 0, True: 0}  # index of the next use, and of the next meeting, among those of the audit
        self._occurrences: Counter[tuple[Any, str]] = Counter()  # of pairs in questions

    def receiver(self, query: RowQuery, start: Start) -> Receiver:
        """Call `start` with the row map as soon as it is known, and return the gradient callback."""
        if self.auditing and not query.meeting:
            self.asked.append(query)
        if self.num_data == 1:
            row_map: RowMap | None = StridedRows.batch_first(1, query.rows)
        else:
            row_map = query.row_map or (self.guessed(query) if self._known is None else self._look_up(query))
        # If only the rows with gradients matter, no row map is needed.
        if row_map is None and not query.needs_rows and query.rule.kind in {"all", "measured"}:
            error = DataError("The row map of this input was not measured.", "Use sharing='expand'.")
            row_map = UnknownRows(error, self.num_data)
        self.takes_probes = row_map is None or query.waits
        if row_map is not None and not query.waits:
            return start(self.counted(row_map, query))
        pending = PendingQuery(query, row_map, start, self)
        self.opened.append(pending)
        return pending.receive

    def _look_up(self, query: RowQuery) -> StridedRows | None:
        """Return the known row map of the next query; `None` if there is none, or if it is for another operation."""
        assert self._known is not None  # noqa: S101 (the caller has checked)
        known = self._known.meetings if query.meeting else self._known.uses
        query.place = place = self._next[query.meeting]
        self._next[query.meeting] += 1
        if place >= len(known) or known[place].what != query.what:
            return None
        row_maps, key = self._known.row_maps, (query.meeting, place, self.num_data, query.leading)
        if key not in row_maps:
            row_maps[key] = known[place].row_map(self.num_data, query.leading)
        return row_maps[key]

    def guessed(self, query: RowQuery) -> RowMap:
        """Guess a row map from lengths; if this is not possible, it raises on first use."""
        try:
            return by_length(self.num_data, query.leading, self.axis)
        except DataError as error:
            return UnknownRows(error, self.num_data)

    def counted(self, row_map: RowMap, query: RowQuery) -> RowMap:
        """Return a row map with the positions that count."""
        rows, rule = query.rows, query.rule
        if rule.kind == "all" or not isinstance(row_map, StridedRows) or rows % row_map.num_data:
            return row_map
        found = self.masks.counted(rule, rows // row_map.num_data * query.positions)
        if found is None:
            return row_map
        return row_map.counting(row_map.from_data(found.expand(row_map.num_data, -1), rows))

    def observe(self, what: What, shape: tuple[int, ...]) -> Receiver | None:
        """Return a callback that measures the row map of a result on constants; `None` if it need not be measured."""
        if not self.auditing:
            return None
        pending = PendingQuery(RowQuery(what, shape, meeting=True), None, lambda _: lambda _: None, self)
        self.observed.append(pending)
        self.takes_probes = True
        return lambda g: pending.receive(g.unsqueeze(-1))

    @contextmanager
    def question(self, func: Any, name: str, guess: bool) -> Iterator[bool]:
        """Ask whether the result of an operation on a parameter and constants has a row for every example.

        The answer comes from an audit; without one, it is `guess`. Queries opened in this context depend on it.
        """
        question = (func, name, self._occurrences[func, name])
        self._occurrences[func, name] += 1
        answer = guess if self._known is None else self._known.answers.get(question, guess)
        opened, observed = len(self.opened), len(self.observed)
        yield answer
        if self.auditing:
            self.questions.append((question, answer, self.opened[opened:] if answer else self.observed[observed:]))

    @contextmanager
    def with_axis(self, axis: int | None) -> Iterator[None]:
        """Override the batch axis in this context; it is used if nothing is measured."""
        before = self.axis
        self.axis = before if axis is None else axis
        try:
            yield
        finally:
            self.axis = before

    @property
    def need_probes(self) -> bool:
        """Whether probes have to be sent back, to measure row maps or which rows count."""
        return any(one.known is None or one.query.rule.kind == "measured" for one in (*self.opened, *self.observed))

    def measure(self, predictions: Tensor) -> Iterator[Tensor]:
        """Generate probes, to be sent back; then determine the row maps of all pending queries, and start them."""
        pending = [*self.opened, *self.observed]
        unknown = [one for one in pending if one.known is None]
        # Which rows have a gradient? Send back a vector and a multiple of it.
        if any(one.query.rule.kind == "measured" for one in pending):
            self.counting_rows = True
            try:
                v = self.masks.of_predictions(next(probes(predictions, self.num_data)))
                yield from (v, MULTIPLE * v)
            finally:
                self.counting_rows = False
        # Which example does each row belong to? Send back vectors that are scaled differently for each example.
        if unknown:
            vectors = list(probes(predictions, self.num_data))
            yield from vectors
            # In half precision, results of an accelerator may differ noticeably between runs. How much, two runs show.
            # Gradients that came through operations in half precision are no more precise than those.
            dtypes = [pending.dtype for pending in unknown if pending.probed]
            lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
            repeats = torch.finfo(lowest).bits == 16 and sync.is_asynchronous(predictions.device)
            if repeats:
                yield vectors[0]
            self._find_row_maps(unknown, len(vectors), lowest, repeats)
        for one in pending:
            one.begin()
        # In an audit, the gradients of the first probe are accumulated, too; those of the latest use came first.
        for one in reversed(self.opened):
            if one.first is not None and one.receiver is not None:
                one.receiver(one.first)

    def _find_row_maps(
        self, unknown: list[PendingQuery], count: int, lowest: torch.dtype, repeated: bool = False
    ) -> None:
        """Compute the row maps of all queries that have received all probes.

        Args:
            unknown: The queries.
            count: Number of probes.
            lowest: Lowest precision of all gradients.
            repeated: Whether the first probe was sent again, after all others.
        """
        kinds: dict[Any, list[PendingQuery]] = {}
        for pending in unknown:
            if len(pending.probed) == count + repeated:
                kinds.setdefault((pending.dtype, pending.probed[0].shape[1]), []).append(pending)
        for (dtype, _), some in kinds.items():
            # All rows are processed together, and on the CPU: these are many small computations.
            # Squares of vanishing gradients need the range of float64.
            numbers = range(count + repeated)
            gradients = [torch.cat([pending.probed[i] for pending in some]).cpu().double() for i in numbers]
            lengths = [len(pending.probed[0]) for pending in some]
            again = gradients.pop() if repeated else None
            found_at = measured(gradients, lengths, self.num_data, dtype, lowest, again)
            for pending, found in zip(some, found_at, strict=True):
                pending.find_order(found)
        # If too few rows have gradients, assume the order of another query with the same leading axes.
        orders = {one.query.leading: one.inner for one in self.opened if one.certain and one.inner is not None}
        for pending in unknown:
            inner = orders.get(pending.query.leading)
            if inner is None or (pending.certain and pending.inner is not None):
                continue
            fits = pending.row_map is not None and obeys(pending.row_map, inner, self.num_data)
            if fits or pending.measured is None:
                pending.inner, pending.certain = inner, True

    def forget(self) -> None:
        """Drop all queries, which may hold activations."""
        self.asked.clear()
        self.opened.clear()
        self.observed.clear()
        self.questions.clear()
