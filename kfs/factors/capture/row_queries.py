"""Row queries: points in a forward pass where we must know which example each row belongs to.

If the row map is known from an audit, the query starts at once. Otherwise, it waits until its row map is measured.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.accumulate.statistic import Receiver
from kfs.factors.rows.counted import ALL, BatchMasks, RowRule
from kfs.factors.rows.measure import (
    Measured,
    has_gradient,
    measured,
    nearest_order,
    number_of_digits,
    obeys,
    project,
    regular_order,
)
from kfs.factors.rows.row_map import IndexedRows, RowMap, StridedRows, by_length

CPU = torch.device("cpu")
# Identifies a query: the operation, and the parameter that it uses.
What = tuple[str, str]
# Identifies the question "does the result of an operation on a parameter and constants have a row for every example?":
# the operation, the parameter, and the number of earlier occurrences of this pair.
Question = tuple[Any, str, int]


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

    @cached_property
    def row_rules(self) -> frozenset[RowRule]:
        """All row rules."""
        return frozenset((self.otherwise, *(rule for _, rule in self.rows)))


@dataclass(frozen=True)
class Counting:
    """Which positions of a use count."""

    rule: RowRule = ALL
    positions: int = 1  # of each row
    row_map: RowMap | None = None  # the row map, if it is known by construction
    needs_rows: bool = True  # whether the row map is needed even if the rule does not use it


EVERYTHING = Counting()


@dataclass(eq=False)
class RowQuery:
    """A pending query: takes probe gradients until its row map is measured, then the gradients to accumulate."""

    what: What
    leading: tuple[int, ...]
    start: Callable[[RowMap], Receiver]  # takes the row map, and returns the gradient callback
    queries: "RowQueries"
    meeting: bool  # whether it is for a derived parameter, and not for a use
    counting: Counting = EVERYTHING
    known: RowMap | None = None  # the row map, if it need not be measured
    has_gradient: Tensor | None = None  # which positions have a gradient, `[rows, positions]`
    of_vector: Tensor | None = None  # gradients of the first of the two vectors that determine `has_gradient`
    receiver: Receiver | None = None
    probed: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None  # gradients of the first probe, for `RowQueries.replay`
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    measured: Measured | None = None
    # The example of each row, or -1; `None` if positions of a row belong to different examples.
    row_map: Tensor | None = None
    inner: int | None = None
    certain: bool = True

    def receive(self, g: Tensor) -> None:
        """Process gradients `[columns, *leading, ..., features]`: of probes, or, once started, those to accumulate."""
        if self.receiver is not None:
            self.receiver(g)
            return
        if self.queries.measuring and self.first is None:
            self.first = g
        if self.queries.counting_rows:
            self._look_for_gradients(g[0])
            return
        if self.known is not None:
            return
        g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
        self.dtype, self.device = g.dtype, g.device
        self.probed.append(project(g[0]))

    def _look_for_gradients(self, g: Tensor) -> None:
        """Store the gradients of a vector; when those of its multiple arrive, determine which rows have a gradient."""
        if self.counting.rule.kind != "measured":
            return
        if self.of_vector is None:
            self.of_vector = g
            return
        self.has_gradient = has_gradient(self.of_vector, g).reshape(prod(self.leading), self.counting.positions)
        self.of_vector = None

    @property
    def is_certain(self) -> bool:
        """Whether rows are in exactly one regular order."""
        return self.certain and self.inner is not None

    def find_order(self, found: Measured, num_data: int, mixing: bool) -> None:
        """Derive the order of rows from a measurement."""
        self.measured = found
        self.row_map = found.of_groups(prod(self.leading))
        if mixing and found.mixes:
            self.inner = nearest_order(self.probed, num_data, self.leading)
        elif self.row_map is not None:
            self.inner, self.certain = regular_order(self.row_map, num_data, self.leading)
            self.certain = self.certain and found.has_votes
        self.probed.clear()

    def adopt(self, inner: int | None, num_data: int) -> None:
        """Adopt the order of rows of other queries, if the own order is uncertain and does not contradict it."""
        if self.is_certain or inner is None:
            return
        silent = self.measured is None  # no gradient arrived
        if silent or (self.row_map is not None and obeys(self.row_map, inner, num_data)):
            self.inner, self.certain = inner, True

    def begin(self, num_data: int) -> None:
        """Start with the row map that is known, measured or guessed."""
        rule = self.counting.rule
        if rule.kind == "measured" and self.has_gradient is None:  # no prediction that counts depends on these rows
            self.has_gradient = torch.zeros(prod(self.leading), self.counting.positions, dtype=torch.bool)
            self.has_gradient = self.has_gradient.to(self.queries.masks.device, non_blocking=True)
        if self.known is not None:
            self.receiver = self.start(self.queries.counted(self.known, self.leading, self.counting, self.has_gradient))
        elif self.inner is not None:
            has_votes = self.measured is not None and self.measured.has_votes
            regular = StridedRows(num_data, self.inner, complete=self.certain or not has_votes)
            self.receiver = self.start(self.queries.counted(regular, self.leading, self.counting, self.has_gradient))
        elif self.measured is None:  # predictions do not depend on these rows
            self.certain = False
            self.receiver = self.start(guessed(num_data, self.leading, self.queries.axis))
        elif self.row_map is not None:
            listed = IndexedRows(self.row_map.to(self.device), num_data)
            counted = self.has_gradient
            if rule.kind == "data" and (of_data := self.queries.masks.counted(rule, 1)) is not None:
                index = listed.index(prod(self.leading))
                counted = of_data[index.clamp(min=0)] & (index >= 0).unsqueeze(1)
                counted = counted.expand(-1, self.counting.positions)
            self.receiver = self.start(listed.counting(counted))
        else:
            operation, parameter = self.what
            error = DataError(
                f"One input of {operation} (parameter {parameter!r}) has positions that belong to different data.",
                "Use KFAC with sharing='expand', which needs no row map, or leave the parameter out with params=.",
            )
            self.receiver = self.start(UnknownRows(error, num_data))


class UnknownRows(RowMap):
    """Row map that could not be determined; raises on first use."""

    def __init__(self, error: DataError, num_data: int) -> None:
        self.error = error
        self.num_data = num_data

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Raise the stored error."""
        raise self.error

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Raise the stored error."""
        raise self.error

    def most(self, rows: int) -> int:
        """Raise the stored error."""
        raise self.error

    def index(self, rows: int) -> Tensor:
        """Raise the stored error."""
        raise self.error

    def in_order(self, rows: int) -> bool:
        """Conservatively `False`: rows may be in any order."""
        return False

    def counting(self, counted: Tensor | None) -> "UnknownRows":
        """Return the same row map, with `counted` positions."""
        other = copy(self)
        other.counted = counted
        return other


class RowQueries:
    """All row queries of one pass.

    Args:
        num_data: Number of examples.
        axis: Position of the batch axis in activations, if given. It is used if nothing is measured.
        known: Results of an audit. `None` to guess.
        measuring: Whether to measure the row maps of all queries.
        mixing: Whether examples may mix.
        masks: The masks that determine which rows count.
    """

    def __init__(
        self,
        num_data: int,
        axis: int | None = None,
        known: AuditResult | None = None,
        measuring: bool = False,
        mixing: bool = False,
        masks: BatchMasks | None = None,
    ) -> None:
        self.masks = masks or BatchMasks()
        self.counting_rows = False  # whether the vectors being sent back show which rows count
        self.num_data = num_data
        self.axis = axis
        self.measuring = measuring
        self.opened: list[RowQuery] = []
        self.observed: list[RowQuery] = []
        self._known = known
        self._mixing = mixing
        self.questions: list[
            tuple[Question, bool, list[RowQuery]]
        ] = []  # with the answer, and the queries that depend on it
        self._next = [0, 0]
        self._asked: Counter[tuple[Any, str]] = Counter()

    @property
    def next_use(self) -> int:
        """Index of the next use among those that the audit recorded."""
        return self._next[False]

    @property
    def need_probes(self) -> bool:
        """Whether probes have to be sent back, to measure row maps or which rows count."""
        return self.need_row_maps or self.count_rows

    @property
    def count_rows(self) -> bool:
        """Whether probes have to be sent back to measure which rows count."""
        return any(query.counting.rule.kind == "measured" for query in self.opened)

    @property
    def need_row_maps(self) -> bool:
        """Whether probes have to be sent back to measure row maps."""
        return bool(self.observed) or any(query.known is None for query in self.opened)

    def open(
        self,
        what: What,
        leading: tuple[int, ...],
        start: Callable[[RowMap], Receiver],
        meeting: bool = False,
        counting: Counting = EVERYTHING,
    ) -> Receiver:
        """Open a query, and return its gradient callback for `[columns, *leading, ..., features]`.

        Args:
            what: The operation, and the parameter that it uses.
            leading: Lengths of the leading axes.
            start: Called with the row map as soon as it is known; returns the gradient callback.
            meeting: Whether it is for a derived parameter, and not for a use.
            counting: Which positions count.
        """
        # Is the row map known: trivially, by construction, from an audit, or as a guess?
        row_map = counting.row_map
        if self.num_data == 1:
            row_map = StridedRows.batch_first(1, prod(leading))
        elif not self.measuring and row_map is None:
            if self._known is None:
                row_map = guessed(self.num_data, leading, self.axis)
            else:
                known = self._known.meetings if meeting else self._known.uses
                row_map = self._look_up(what, leading, known, meeting)
            # If only the rows with gradients matter, no row map is needed.
            if row_map is None and not counting.needs_rows and counting.rule.kind in {"all", "measured"}:
                error = DataError("The row map of this input was not measured.", "Use sharing='expand'.")
                row_map = UnknownRows(error, self.num_data)
        # Which rows count may have to be measured, or is known only with the targets.
        rule = counting.rule
        waits = rule.kind == "measured" or (rule.kind != "all" and self.masks.pending)
        if row_map is not None and not waits:
            return start(self.counted(row_map, leading, counting))
        query = RowQuery(what, leading, start, self, meeting, counting, row_map)
        self.opened.append(query)
        return query.receive

    def counted(
        self, row_map: RowMap, leading: tuple[int, ...], counting: Counting, has_gradient: Tensor | None = None
    ) -> RowMap:
        """Return a row map with the positions that count."""
        if has_gradient is not None:
            return row_map.counting(has_gradient)
        rows, rule = prod(leading), counting.rule
        if rule.kind == "all" or not isinstance(row_map, StridedRows) or rows % row_map.num_data:
            return row_map
        found = self.masks.counted(rule, rows // row_map.num_data * counting.positions)
        if found is None:
            return row_map
        return row_map.counting(row_map.from_data(found.expand(row_map.num_data, -1), rows))

    def observe(self, what: What, shape: tuple[int, ...]) -> Receiver:
        """Measure the row map of a result number by number, and discard its gradients otherwise."""
        query = RowQuery(what, shape, nothing, self, meeting=True)
        self.observed.append(query)
        return lambda g: query.receive(g.unsqueeze(-1))

    @contextmanager
    def with_axis(self, axis: int | None) -> Iterator[None]:
        """Override the batch axis in this context; it is used if nothing is measured."""
        before = self.axis
        self.axis = before if axis is None else axis
        try:
            yield
        finally:
            self.axis = before

    @contextmanager
    def question(self, func: Any, name: str, guess: bool) -> Iterator[bool]:
        """Ask whether the result of an operation on a parameter and constants has a row for every example.

        The answer comes from an audit; without one, it is `guess`. Queries opened in this context depend on it.
        """
        question = (func, name, self._asked[func, name])
        self._asked[func, name] += 1
        answer = guess if self._known is None else self._known.answers.get(question, guess)
        opened, observed = len(self.opened), len(self.observed)
        yield answer
        since = self.opened[opened:] if answer else self.observed[observed:]
        self.questions.append((question, answer, since))

    def answer_all(self) -> None:
        """Compute all row maps, and start all queries, after all probes were sent back."""
        probes = 1 + number_of_digits(self.num_data)
        kinds: dict[Any, list[RowQuery]] = {}
        for query in (*self.opened, *self.observed):
            if query.known is None and len(query.probed) == probes:
                kinds.setdefault((query.dtype, query.probed[0].shape[1]), []).append(query)
        # Gradients in float32 that came through operations in half precision are no more precise than those.
        lowest = max((dtype for dtype, _ in kinds), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        for (dtype, _), queries in kinds.items():
            # All rows are processed together, and on the CPU: these are many small computations.
            # Squares of vanishing gradients need the range of float64.
            gradients = [torch.cat([query.probed[i] for query in queries]).cpu().double() for i in range(probes)]
            lengths = [len(query.probed[0]) for query in queries]
            found_at = measured(gradients, lengths, self.num_data, dtype, lowest)
            for query, found in zip(queries, found_at, strict=True):
                query.find_order(found, self.num_data, self._mixing)
        # If too few rows have gradients, assume the order of another query with the same leading axes.
        orders = {query.leading: query.inner for query in self.opened if query.is_certain}
        for query in (*self.opened, *self.observed):
            if query.known is None:
                query.adopt(orders.get(query.leading), self.num_data)
            query.begin(self.num_data)

    def replay(self) -> None:
        """Pass on the gradients of the first probe once row maps are known, latest query first."""
        for query in reversed(self.opened):
            if query.first is not None and query.receiver is not None:
                query.receiver(query.first)

    def forget(self) -> None:
        """Drop all queries, which may hold activations."""
        self.opened.clear()
        self.observed.clear()
        self.questions.clear()

    def _look_up(
        self, what: What, leading: tuple[int, ...], known: Sequence[KnownUse], meeting: bool
    ) -> StridedRows | None:
        """Return the known row map of the next query; `None` if there is none, or if it is for another operation."""
        place = self._next[meeting]
        self._next[meeting] += 1
        if place >= len(known) or known[place].what != what:
            return None
        return known[place].row_map(self.num_data, leading)


def guessed(num_data: int, leading: tuple[int, ...], axis: int | None) -> RowMap:
    """Guess a row map from lengths; if this is not possible, it raises on first use."""
    try:
        return by_length(num_data, leading, axis)
    except DataError as error:
        return UnknownRows(error, num_data)


def nothing(_: Any) -> Receiver:
    """Return a receiver that ignores gradients."""
    return lambda _: None
