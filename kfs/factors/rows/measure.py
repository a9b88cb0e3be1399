r"""Measurement of row maps: which example a row of an activation belongs to.

Send back vectors $v$, and the same vectors with the entries of example $n$ multiplied by $c_n$. If a row influences the
prediction for example $n$ alone, its gradient is multiplied by $c_n$, too: the ratio of its two gradients identifies
its example. If it influences several predictions, the ratio is not one of the $c_n$, or its features disagree: examples
mix. Nothing is guessed from lengths of axes.

The $c_n$ are powers of two, so both gradients are rounded in the same way, and ratios are exact in any precision.
With more than eight examples, the digits of $n$ in base eight are sent back one after the other.

Rows nearly always come in a regular order (see `StridedRows`), which is measured once, on a few examples (see
`kfs.factors.audit`). It then holds for batches of any size. If the order depends on the data, every batch is measured.

`MeasureRows` does this within a pass, for an audit or for the uses whose rows depend on the data. It is the only row
source whose uses wait. After the forward pass, it sends probes back, determines the row maps of all pending queries,
and starts them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.factors.rows.counted import BatchMasks
from kfs.factors.rows.row_map import (
    IndexedRows,
    Question,
    Receiver,
    RowMap,
    RowQuery,
    RowSource,
    Send,
    Start,
    StridedRows,
    UnknownRows,
    What,
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
    for _ in range(number_of_digits(num_data)):
        factors = (2.0 ** (n % BASE)).to(f.dtype)
        yield v * factors.reshape(-1, *[1] * (f.ndim - 1))
        n //= BASE


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


def number_of_digits(num_data: int) -> int:
    """Return the number of base-eight digits of an example's index."""
    digits = 1
    while BASE**digits < num_data:
        digits += 1
    return digits


@dataclass
class Measured:
    """The measured row map of some rows, and how well it fits."""

    row_map: Tensor  # the example of each row; -1 if no gradient came back to it
    misfit: Tensor  # relative distance of each row's gradients from those of a row that belongs to one example
    loud: Tensor  # whether a row's gradient is large enough for the misfit to be meaningful
    tolerance: float

    @property
    def has_votes(self) -> bool:
        """Whether any row has a gradient."""
        return bool((self.row_map >= 0).any())

    @property
    def worst(self) -> float:
        """The largest misfit of all rows whose gradient is not tiny."""
        misfit = self.misfit[self.loud]
        return float(misfit.max()) if len(misfit) else 0.0

    @property
    def mixes(self) -> bool:
        """Whether a row influences the predictions for several examples."""
        return self.worst > self.tolerance

    @property
    def is_precise(self) -> bool:
        """Whether gradients had more than half precision."""
        return self.tolerance < _MISFIT_IN_HALF_PRECISION

    @property
    def number_of_owners(self) -> int:
        """The number of different examples that rows belong to."""
        return len(set(self.row_map[self.row_map >= 0].tolist()))

    def of_groups(self, groups: int) -> Tensor | None:
        """Return the example of each group of consecutive rows; `None` if rows of a group differ."""
        if groups == len(self.row_map):
            return self.row_map
        row_map = self.row_map.reshape(groups, -1)
        largest = row_map.amax(1) if row_map.numel() else row_map.new_full((groups,), -1)
        agree = (row_map == largest.unsqueeze(1)) | (row_map < 0)
        return largest if bool(agree.all()) else None


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
    loud = votes & ((noise <= tolerance) | (misfit > noise))
    parts = zip(*(t.split(list(lengths)) for t in (row_map, misfit, loud)), strict=True)
    return [Measured(datum, distance, counts, tolerance) for datum, distance, counts in parts]


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
    obeyed = []
    for inner in _candidates(num_data, leading):
        if obeys(row_map, inner, num_data):
            obeyed.append(inner)
            if all_measured:
                break
    # An axis as long as the batch is a better explanation than a part of a longer axis.
    along_axes = [inner for inner in obeyed if inner in _axes(num_data, leading)]
    chosen = along_axes or obeyed
    return (chosen[0] if chosen else None), len(chosen) == 1


def obeys(row_map: Tensor, inner: int, num_data: int) -> bool:
    """Whether all rows that have a gradient are in a regular order."""
    voters = (row_map >= 0).nonzero().squeeze(1)
    return torch.equal(voters // inner % num_data, row_map[voters])


def _candidates(num_data: int, leading: Sequence[int]) -> Iterator[int]:
    """Generate candidates for the number of consecutive rows of one example, simplest first."""
    shared = prod(leading) // num_data
    folded = [inner for inner in range(shared, 0, -1) if shared % inner == 0] if shared < 2**16 else [shared, 1]
    yield from dict.fromkeys((shared, *_axes(num_data, leading), *folded))


def _axes(num_data: int, leading: Sequence[int]) -> list[int]:
    """Return the numbers of consecutive rows of one example, one for each axis that is as long as the batch."""
    return [prod(leading[axis + 1 :]) for axis, length in enumerate(leading) if length == num_data]


def nearest_order(gradients: Sequence[Tensor], num_data: int, leading: Sequence[int]) -> int | None:
    """Return the regular order closest to the measurement, for models in which examples may mix."""
    groups = prod(leading)
    if groups == 0 or groups % num_data:
        return None
    first, *others = (rows.reshape(groups, -1) for rows in gradients)
    rows = torch.arange(groups, device=first.device)
    best, smallest = None, torch.inf
    for inner in _candidates(num_data, leading):
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
        found = are_gradients(gradient_sizes(self.of_vector, g), g.dtype)
        self.has_gradient = found.reshape(self.query.rows, self.query.positions)
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
        self.takes_probes = row_map is None or query.waits
        if row_map is not None and not self.takes_probes:
            return start(self.counted(row_map, query))
        pending = PendingQuery(replace(query, row_map=row_map), start, self)
        self.opened.append(pending)
        self.has_pending = True
        return pending.receive

    def observe(self, what: What, shape: tuple[int, ...]) -> Receiver:
        """Measure the row map of a result number by number, and discard its gradients otherwise."""
        pending = PendingQuery(RowQuery(what, shape, meeting=True), lambda _: lambda _: None, self)
        self.observed.append(pending)
        self.takes_probes = self.has_pending = True
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
        self.has_pending = False
