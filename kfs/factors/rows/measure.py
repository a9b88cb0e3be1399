r"""Row sources of passes, and how they measure which example a row of an activation belongs to.

Send back vectors $v$, and the same vectors with the entries of example $n$ multiplied by $c_n$. If a row influences the
prediction for example $n$ alone, its gradient is multiplied by $c_n$, too: the ratio of its two gradients identifies
its example. If it influences several predictions, the ratio is not one of the $c_n$, or its features disagree: examples
mix.

The $c_n$ are powers of two, so both gradients are rounded in the same way, and ratios are exact in any precision.
With more than eight examples, the digits of $n$ in base eight are sent back one after the other.

Rows nearly always come in a regular order (see `StridedRows`), which is measured once, on a few examples (see
`kfs.factors.audit`). It then holds for batches of any size. If the order depends on the data, every batch is measured.

The `RowSource` of a pass answers all its row queries. Without an audit, it guesses row maps from lengths of axes. With
one, it looks them up in its result. What the audit left open is measured in every pass, and the audit itself starts
from an empty result, so it measures everything. A query whose row map has to be measured waits: after the forward pass,
the source sends probes back, determines the row maps of all pending queries, and starts them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.rows.counted import BatchMasks
from kfs.factors.rows.row_map import (
    AuditResult,
    IndexedRows,
    Question,
    Receiver,
    RowMap,
    RowQuery,
    Start,
    StridedRows,
    UnknownRows,
    What,
    by_length,
)
from kfs.runtime.precision import at_least_float32

CPU = torch.device("cpu")
BASE = 8
# Not a power of two, so that both gradients are rounded in different ways.
MULTIPLE = 3
# Gradients of a row are projected to this many directions.
_DIRECTIONS = 4
# A row whose gradient is smaller than this many times the precision, relative to the largest one, has none: it is what
# remains if a few larger terms cancel, and its ratio is meaningless.
_NOTHING = 8
# A row with a larger gradient than this always has one. In half precision, eight times the precision would be 6 % of
# the largest gradient, and gradients of different examples differ by more than that.
_SMALLEST = 1e-3
# A row's gradient may be off by this many rounding errors of the largest one. Errors of k terms add up to about the
# root of k: this is for 4096 terms. In half precision, sums are rounded once they are complete, once for each of the
# two gradients that are compared. A larger tolerance would leave too few digits to detect anything.
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
_ROUNDINGS_IN_HALF_PRECISION = 2
# The largest relative misfit with which a row belongs to one example. Powers of two leave no rounding errors, except
# that a GPU may add numbers in varying order; the tolerance is far above that. If examples mix in equal parts, the
# misfit is about one, because factors differ by two or more. In half precision, it is four times the precision of
# bfloat16.
_MISFIT = {torch.float64: 1e-6, torch.float32: 1e-3}
_MISFIT_IN_HALF_PRECISION = 3e-2


def probes(f: Tensor, num_data: int) -> Iterator[Tensor]:
    """Generate probe vectors for predictions `[N, ...]`: a random one, then copies of it scaled by example."""
    generator = torch.Generator(f.device).manual_seed(0)
    v = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
    v = torch.where(f.detach().isfinite(), v, 0)  # a masked class has no gradient
    yield v
    n = torch.arange(num_data, device=f.device)
    digits = 0
    while digits == 0 or BASE**digits < num_data:
        factors = (2.0 ** (n % BASE)).to(f.dtype)
        yield v * factors.reshape(-1, *[1] * (f.ndim - 1))
        n //= BASE
        digits += 1


def gradient_sizes(g: Tensor, of_multiple: Tensor) -> Tensor:
    """Return the size of each row's gradient, and that of what does not scale with the vector, `[2, ...]`.

    Args:
        g: Gradients of a vector, `[..., features]`.
        of_multiple: Gradients of `MULTIPLE` times the vector.
    """
    rest = torch.sub(of_multiple, g, alpha=MULTIPLE)
    wide = torch.promote_types(g.dtype, torch.float32)
    sizes: Tensor = torch.linalg.vector_norm(torch.stack((g, rest)), dim=-1, dtype=wide)
    return sizes


def are_gradients(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which rows have a gradient, given `gradient_sizes` of gradients in this dtype.

    Rounding errors of a vanishing gradient, such as that of a query with a single key, do not scale with the vector.
    """
    size, rest = sizes
    # A rounding error is off by about its own size. Other gradients are off by some roundings: far below 5 %, or, in
    # half precision, by up to some tens of them, each 0.8 % in bfloat16.
    tolerance = 0.05 if torch.finfo(dtype).bits > 16 else 0.3
    found: Tensor = (size > 0) & (rest <= tolerance * MULTIPLE * size)
    return found


@dataclass(frozen=True)
class Measured:
    """The measured row map of some rows, and how well it fits."""

    row_map: Tensor  # the example of each row; -1 if no gradient came back to it
    has_votes: bool  # whether any row has a gradient
    worst: float  # largest relative distance of a row's gradients from those of a row that belongs to one example
    mixes: bool  # whether a row influences the predictions for several examples
    is_precise: bool  # whether gradients had more than half precision

    @property
    def number_of_owners(self) -> int:
        """The number of different examples that rows belong to."""
        return len(set(self.row_map[self.row_map >= 0].tolist()))


def measured(
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    num_data: int,
    dtype: torch.dtype,
    precision: torch.dtype | None = None,
) -> list[Measured]:
    """Measure the example of each row, for the rows of several queries together.

    Args:
        gradients: For each vector of `probes`, projected gradients of all rows, `[rows of all queries, directions]`.
        lengths: Number of rows of each query.
        num_data: Number of examples.
        dtype: The dtype of gradients.
        precision: The lowest precision that they passed through, if it is another one, as under `autocast`.

    Returns:
        The measurement of each query.
    """
    first = gradients[0]
    size = first.square().sum(1)
    precision = precision or dtype
    eps, tolerance = torch.finfo(precision).eps, _MISFIT.get(precision, _MISFIT_IN_HALF_PRECISION)
    # Rows are compared with the largest row of the same query.
    maxima = torch.stack([part.max() if len(part) else part.new_zeros(()) for part in size.split(list(lengths))])
    largest = maxima.repeat_interleave(torch.tensor(lengths))
    # Numbers close to the smallest normal one have larger relative errors. In half precision, dividing by the precision
    # would exclude too much: gradients in float16 are often that small.
    smallest = torch.finfo(dtype).tiny * (4 if torch.finfo(dtype).bits == 16 else 1 / torch.finfo(dtype).eps)
    votes = (size > min(_NOTHING * eps, _SMALLEST) ** 2 * largest) & (size > smallest**2)
    roundings = _ROUNDINGS.get(precision, _ROUNDINGS_IN_HALF_PRECISION)
    noise = roundings * eps * (largest / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt()
    row_map = torch.zeros_like(size, dtype=torch.long)
    misfit = torch.zeros_like(size)
    for position, other in enumerate(gradients[1:]):
        ratio = (first * other).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny)
        digit = ratio.clamp(min=1, max=2.0 ** (BASE - 1)).log2().round()
        expected = 2**digit
        distance = (other - expected.unsqueeze(1) * first).norm(dim=1) / (expected * size.sqrt())
        misfit = torch.maximum(misfit, distance.nan_to_num(nan=0.0))
        row_map += digit.long() * BASE**position
    misfit[row_map >= num_data] = torch.inf
    row_map[~votes | (row_map >= num_data)] = -1
    # A tiny gradient is too noisy for its misfit to mean anything.
    misfit = torch.where(votes & ((noise <= tolerance) | (misfit > noise)), misfit, 0)
    found = []
    for examples, distances in zip(row_map.split(list(lengths)), misfit.split(list(lengths)), strict=True):
        worst = float(distances.max()) if len(distances) else 0.0
        has_votes, is_precise = bool((examples >= 0).any()), tolerance < _MISFIT_IN_HALF_PRECISION
        found.append(Measured(examples, has_votes, worst, worst > tolerance, is_precise))
    return found


def regular_order(row_map: Tensor, num_data: int, leading: Sequence[int]) -> tuple[int | None, bool]:
    """Return the simplest regular order of the rows that have a gradient.

    Args:
        row_map: The example of each row, or -1.
        num_data: Number of examples.
        leading: Lengths of the leading axes.

    Returns:
        The number of consecutive rows of one example, or `None` if there is no regular order; and whether this is
        certain, because no other order fits.
    """
    rows = len(row_map)
    if rows == 0 or rows % num_data:
        return None, True
    all_measured = bool((row_map >= 0).all())
    along_axes, every = _candidates(num_data, leading)
    obeyed = []
    for inner in every:
        if obeys(row_map, inner, num_data):
            obeyed.append(inner)
            if all_measured:
                break
    # An axis as long as the batch is a better explanation than a part of a longer axis.
    chosen = [inner for inner in obeyed if inner in along_axes] or obeyed
    return (chosen[0] if chosen else None), len(chosen) == 1


def obeys(row_map: Tensor, inner: int, num_data: int) -> bool:
    """Whether all rows that have a gradient are in a regular order."""
    voters = (row_map >= 0).nonzero().squeeze(1)
    return torch.equal(voters // inner % num_data, row_map[voters])


def _candidates(num_data: int, leading: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return candidates for the number of consecutive rows of one example.

    Returns:
        One for each axis that is as long as the batch; and these with all others, simplest first.
    """
    shared = prod(leading) // num_data
    along_axes = [prod(leading[axis + 1 :]) for axis, length in enumerate(leading) if length == num_data]
    folded = [inner for inner in range(shared, 0, -1) if shared % inner == 0] if shared < 2**16 else [shared, 1]
    return along_axes, list(dict.fromkeys((shared, *along_axes, *folded)))


def nearest_order(gradients: Sequence[Tensor], num_data: int, leading: Sequence[int]) -> int | None:
    """Return the regular order closest to the measurement, for models in which examples may mix."""
    groups = prod(leading)
    if groups == 0 or groups % num_data:
        return None
    first, *others = (rows.reshape(groups, -1) for rows in gradients)
    rows = torch.arange(groups, device=first.device)
    best, smallest = None, torch.inf
    for inner in _candidates(num_data, leading)[1]:
        n = rows // inner % num_data
        distance = 0.0
        for other in others:
            factors = (2.0 ** (n % BASE)).unsqueeze(1).to(first.dtype)
            distance += float((other - factors * first).square().sum())
            n = n // BASE
        if distance < (1 - 1e-6) * smallest:  # of equal ones, up to rounding errors, take the simplest
            best, smallest = inner, distance
    return best


def project(g: Tensor) -> Tensor:
    """Project gradients `[*leading, ..., features]` to a few directions, `[rows, directions]`."""
    rows = g.reshape(-1, g.shape[-1])
    rows = rows.to(at_least_float32(g.dtype))
    return rows @ _directions(g.shape[-1], rows.dtype, rows.device)


@lru_cache(maxsize=64)
def _directions(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random directions `[features, directions]`; the identity if there are few features."""
    if features <= _DIRECTIONS:
        return torch.eye(features, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(features)
    signs = torch.randint(2, (features, _DIRECTIONS), generator=generator) * 2 - 1
    return signs.to(device, dtype)


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
    first: Tensor | None = None  # gradients of the first probe, for `RowSource.replay`
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
            if self.known is None:
                g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
                self.dtype, self.device = g.dtype, g.device
                self.probed.append(project(g[0]))
        elif self.query.rule.kind != "measured":
            return
        elif self.of_vector is None:
            self.of_vector = g[0]
        else:
            # The gradients of a vector and of its multiple are there: which rows have one?
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

    def adopt(self, inner: int) -> None:
        """Adopt the order of rows of other queries, if the own order is uncertain and does not contradict it."""
        if self.certain and self.inner is not None:
            return
        fits = self.row_map is not None and obeys(self.row_map, inner, self.source.num_data)
        if fits or self.measured is None:
            self.inner, self.certain = inner, True

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
        auditing: Whether the pass is an audit: record all queries and questions, measure results on constants, and keep
            the gradients of the first probe, so that `replay` can pass them on.

    Attributes:
        takes_probes: Whether the callback that was returned last also takes the probes that measure row maps.
        counting_rows: Whether the vectors being sent back show which rows count.
        next_use: Index of the next use among those that the audit recorded.
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
        self.next_use = 0
        self.asked: list[RowQuery] = []
        self.opened: list[PendingQuery] = []
        self.observed: list[PendingQuery] = []
        self.questions: list[tuple[Question, bool, list[PendingQuery]]] = []
        self._known = known
        self._next_meeting = 0
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
        if query.meeting:
            known, place = self._known.meetings, self._next_meeting
            self._next_meeting += 1
        else:
            known, place = self._known.uses, self.next_use
            self.next_use += 1
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
            count = 0
            for v in probes(predictions, self.num_data):
                yield v
                count += 1
            self._find_row_maps(unknown, count)
        for one in pending:
            one.begin()

    def _find_row_maps(self, unknown: list[PendingQuery], count: int) -> None:
        """Compute the row maps of all queries that have received all probes, given their number."""
        kinds: dict[Any, list[PendingQuery]] = {}
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
                pending.find_order(found)
        # If too few rows have gradients, assume the order of another query with the same leading axes.
        orders = {one.query.leading: one.inner for one in self.opened if one.certain and one.inner is not None}
        for pending in unknown:
            if pending.query.leading in orders:
                pending.adopt(orders[pending.query.leading])

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
