"""Row maps that have to be measured in a pass: by an audit, or because they depend on the data.

The mathematics of measuring lives in `kfs.factors.rows.measure`. `MeasureRows` is the only row source whose uses wait:
after the forward pass, it sends probes back, determines the row maps of all pending queries, and starts them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.rows.counted import BatchMasks
from kfs.factors.rows.measure import (
    MULTIPLE,
    Measured,
    has_gradient,
    measured,
    nearest_order,
    number_of_digits,
    obeys,
    probes,
    project,
    regular_order,
)
from kfs.factors.rows.row_map import IndexedRows, RowMap, StridedRows
from kfs.factors.rows.source import Question, Receiver, RowQuery, RowSource, Send, Start, UnknownRows, What

CPU = torch.device("cpu")


@dataclass(eq=False)
class PendingQuery:
    """A query that waits: takes gradients of probes until its row map is measured, then those to accumulate."""

    query: RowQuery
    start: Start
    source: "MeasureRows"
    has_gradient: Tensor | None = None  # which positions have a gradient, `[rows, positions]`
    of_vector: Tensor | None = None  # gradients of the first of the two vectors that determine `has_gradient`
    receiver: Receiver | None = None
    probed: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None  # gradients of the first probe, for `MeasureRows.replay`
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
        if self.source.keeps_first and self.first is None:
            self.first = g
        if self.source.counting_rows:
            self._look_for_gradients(g[0])
            return
        if self.query.row_map is not None:
            return
        g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
        self.dtype, self.device = g.dtype, g.device
        self.probed.append(project(g[0]))

    def _look_for_gradients(self, g: Tensor) -> None:
        """Store the gradients of a vector; when those of its multiple arrive, determine which rows have a gradient."""
        if self.query.rule.kind != "measured":
            return
        if self.of_vector is None:
            self.of_vector = g
            return
        self.has_gradient = has_gradient(self.of_vector, g).reshape(self.query.rows, self.query.positions)
        self.of_vector = None

    @property
    def is_certain(self) -> bool:
        """Whether rows are in exactly one regular order."""
        return self.certain and self.inner is not None

    def find_order(self, found: Measured, num_data: int, mixing: bool) -> None:
        """Derive the order of rows from a measurement."""
        self.measured = found
        self.row_map = found.of_groups(self.query.rows)
        if mixing and found.mixes:
            self.inner = nearest_order(self.probed, num_data, self.query.leading)
        elif self.row_map is not None:
            self.inner, self.certain = regular_order(self.row_map, num_data, self.query.leading)
            self.certain = self.certain and found.has_votes
        self.probed.clear()

    def adopt(self, inner: int | None, num_data: int) -> None:
        """Adopt the order of rows of other queries, if the own order is uncertain and does not contradict it."""
        if self.is_certain or inner is None:
            return
        silent = self.measured is None  # no gradient arrived
        if silent or (self.row_map is not None and obeys(self.row_map, inner, num_data)):
            self.inner, self.certain = inner, True

    def begin(self) -> None:
        """Start with the row map that is known, measured or guessed."""
        query, masks = self.query, self.source.masks
        if query.rule.kind == "measured" and self.has_gradient is None:  # no prediction that counts depends on the rows
            self.has_gradient = torch.zeros(query.rows, query.positions, dtype=torch.bool)
            self.has_gradient = self.has_gradient.to(masks.device, non_blocking=True)
        self.receiver = self.start(self._found())

    def _found(self) -> RowMap:
        """Return the row map with the positions that count."""
        query, source = self.query, self.source
        regular = query.row_map
        if regular is None and self.inner is not None:
            has_votes = self.measured is not None and self.measured.has_votes
            regular = StridedRows(source.num_data, self.inner, complete=self.certain or not has_votes)
        if regular is not None:
            return source.counted(regular, query) if self.has_gradient is None else regular.counting(self.has_gradient)
        if self.measured is None:  # predictions do not depend on these rows
            self.certain = False
            return source.guessed(query)
        if self.row_map is not None:
            listed = IndexedRows(self.row_map.to(self.device), source.num_data)
            counted = self.has_gradient
            if query.rule.kind == "data" and (of_data := source.masks.counted(query.rule, 1)) is not None:
                index = listed.index(query.rows)
                counted = of_data[index.clamp(min=0)] & (index >= 0).unsqueeze(1)
                counted = counted.expand(-1, query.positions)
            return listed.counting(counted)
        operation, parameter = query.what
        error = DataError(
            f"One input of {operation} (parameter {parameter!r}) has positions that belong to different data.",
            "Use KFAC with sharing='expand', which needs no row map, or leave the parameter out with params=.",
        )
        return UnknownRows(error, source.num_data)


class MeasureRows(RowSource):
    """Measures row maps by sending probes back, except those that a query has already.

    Args:
        num_data: As in `RowSource`.
        axis: Likewise.
        masks: Likewise.
        answers: Likewise.
        mixing: Whether examples may mix.
        keeps_first: Whether to keep the gradients of the first probe, so that `replay` can pass them on.

    Attributes:
        asked: All queries of uses, in order.
        opened: The pending queries.
        observed: Pending queries of results on constants, whose numbers are measured one by one.
        questions: Questions with their answers, and the pending queries that depend on them.
    """

    def __init__(
        self,
        num_data: int,
        axis: int | None = None,
        masks: BatchMasks | None = None,
        answers: Mapping[Question, bool] | None = None,
        mixing: bool = False,
        keeps_first: bool = False,
    ) -> None:
        super().__init__(num_data, axis, masks, answers)
        self.counting_rows = False  # whether the vectors being sent back show which rows count
        self.keeps_first = keeps_first
        self.asked: list[RowQuery] = []
        self.opened: list[PendingQuery] = []
        self.observed: list[PendingQuery] = []
        self.questions: list[tuple[Question, bool, list[PendingQuery]]] = []
        self._mixing = mixing

    def receiver(self, query: RowQuery, start: Start) -> Receiver:
        """Start at once if the row map and the rows that count are known; otherwise wait until they are measured."""
        if not query.meeting:
            self.asked.append(query)
        row_map = self.without_audit(query)
        waits = query.rule.kind == "measured" or (query.rule.kind != "all" and self.masks.pending)
        self.takes_probes = row_map is None or waits
        if row_map is not None and not waits:
            return start(self.counted(row_map, query))
        pending = PendingQuery(replace(query, row_map=row_map), start, self)
        self.opened.append(pending)
        return pending.receive

    def observe(self, what: What, shape: tuple[int, ...]) -> Receiver:
        """Measure the row map of a result number by number, and discard its gradients otherwise."""
        pending = PendingQuery(RowQuery(what, shape, meeting=True), lambda _: lambda _: None, self)
        self.observed.append(pending)
        self.takes_probes = True
        return lambda g: pending.receive(g.unsqueeze(-1))

    @contextmanager
    def question(self, func: Any, name: str, guess: bool) -> Iterator[bool]:
        """Ask as in `RowSource`, and record which queries depend on the answer."""
        question, answer = self._answer(func, name, guess)
        opened, observed = len(self.opened), len(self.observed)
        yield answer
        since = self.opened[opened:] if answer else self.observed[observed:]
        self.questions.append((question, answer, since))

    @property
    def need_probes(self) -> bool:
        """Whether probes have to be sent back, to measure row maps or which rows count."""
        return self._need_row_maps or self._need_rows_that_count

    @property
    def _need_rows_that_count(self) -> bool:
        return any(pending.query.rule.kind == "measured" for pending in self.opened)

    @property
    def _need_row_maps(self) -> bool:
        return bool(self.observed) or any(pending.query.row_map is None for pending in self.opened)

    def measure(self, predictions: Tensor, send: Send) -> None:
        """Send probes back, determine the row maps of all pending queries, and start them."""
        if not (self.opened or self.observed):
            return
        # Which rows have a gradient? Send back a vector and a multiple of it.
        if self._need_rows_that_count:
            self.counting_rows = True
            try:
                v = self.masks.of_predictions(next(probes(predictions, self.num_data)))
                for multiple in (v, MULTIPLE * v):
                    send(multiple)
            finally:
                self.counting_rows = False
        # Which example does each row belong to? Send back vectors that are scaled differently for each example.
        for v in probes(predictions, self.num_data) if self._need_row_maps else ():
            send(v)
        self._find_row_maps()
        for pending in (*self.opened, *self.observed):
            pending.begin()

    def _find_row_maps(self) -> None:
        """Compute the row maps of all queries that have received all probes."""
        count = 1 + number_of_digits(self.num_data)
        kinds: dict[Any, list[PendingQuery]] = {}
        unknown = [pending for pending in (*self.opened, *self.observed) if pending.query.row_map is None]
        for pending in unknown:
            if len(pending.probed) == count:
                kinds.setdefault((pending.dtype, pending.probed[0].shape[1]), []).append(pending)
        # Gradients in float32 that came through operations in half precision are no more precise than those.
        lowest = max((dtype for dtype, _ in kinds), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        for (dtype, _), some in kinds.items():
            # All rows are processed together, and on the CPU: these are many small computations.
            # Squares of vanishing gradients need the range of float64.
            gradients = [torch.cat([pending.probed[i] for pending in some]).cpu().double() for i in range(count)]
            lengths = [len(pending.probed[0]) for pending in some]
            found_at = measured(gradients, lengths, self.num_data, dtype, lowest)
            for pending, found in zip(some, found_at, strict=True):
                pending.find_order(found, self.num_data, self._mixing)
        # If too few rows have gradients, assume the order of another query with the same leading axes.
        orders = {pending.query.leading: pending.inner for pending in self.opened if pending.is_certain}
        for pending in unknown:
            pending.adopt(orders.get(pending.query.leading), self.num_data)

    def replay(self) -> None:
        """Pass on the gradients of the first probe once row maps are known, latest query first."""
        for pending in reversed(self.opened):
            if pending.first is not None and pending.receiver is not None:
                pending.receiver(pending.first)

    def forget(self) -> None:
        """Drop all queries, which may hold activations."""
        self.asked.clear()
        self.opened.clear()
        self.observed.clear()
        self.questions.clear()
