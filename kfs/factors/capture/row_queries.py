"""Places of a pass at which it matters whose rows are, and what is known about them.

Where it is known from an audit, a place starts at once. Where it is not, it waits until its rows were measured.
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
from kfs.factors.accumulate.interface import Receiver
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
# What happens at a place: the operation, and the parameter that it uses.
What = tuple[str, str]
# Does the result of an operation on a parameter and constants have a row for every example? Identified by the
# operation, the parameter, and how often they were met before.
Question = tuple[Any, str, int]


@dataclass(frozen=True)
class KnownUse:
    """What is known about a place from a measurement on a few examples."""

    what: What
    leading: tuple[int, ...]  # there
    num_data: int  # there
    inner: int | None  # how many consecutive rows belong to an example; `None` if that has to be measured anew

    def row_map(self, num_data: int, leading: tuple[int, ...]) -> StridedRows | None:
        """Return the owners of rows in another batch; `None` if they have to be measured.

        Leading axes may differ only in the length of the batch axis, by as much as the number of examples does.
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
    """What a measurement on a few examples found."""

    uses: tuple[KnownUse, ...] = ()  # places of uses, in their order
    meetings: tuple[KnownUse, ...] = ()  # places at which a derived parameter meets the batch, in their order
    # Whether results that do not depend on data have a row for every example.
    answers: Mapping[Question, bool] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()  # which inputs of the model are the same for all data, by their number
    inputs: tuple[bool, ...] = ()  # which inputs are data; empty if that is not known yet
    rows: tuple[tuple[What, RowRule], ...] = ()  # which rows count, for uses in their order
    otherwise: RowRule = ALL  # which rows of other uses do
    has_mask: bool = True  # whether masks of batches say anything
    checked: int | None = None  # the use whose gradients show whether a batch has padding that these data do not have
    distrusted: bool = False  # whether a batch had some, so that every batch is measured
    unexplained: frozenset[tuple[str, str]] = frozenset()  # `(parameter, why)` of uses that were missed or misread
    both_ways: frozenset[str] = frozenset()  # weights that are used both ways round, and have biases

    @cached_property
    def row_rules(self) -> frozenset[RowRule]:
        """All rules about rows that count."""
        return frozenset((self.otherwise, *(rule for _, rule in self.rows)))


@dataclass(frozen=True)
class Counting:
    """Which positions of a use count."""

    rule: RowRule = ALL
    positions: int = 1  # of each row
    row_map: RowMap | None = None  # those of rows, if nobody has to ask
    by_datum: bool = True  # whether it matters which example a row belongs to, also if the rule does not need it


EVERYTHING = Counting()


@dataclass(eq=False)
class RowQuery:
    """A place in a pass at which gradients arrive, and whose rows wait to be measured."""

    what: What
    leading: tuple[int, ...]
    start: Callable[[RowMap], Receiver]  # takes the owners of rows, and returns what takes gradients
    sites: "RowQueries"
    meeting: bool  # whether a derived parameter meets the batch there
    counting: Counting = EVERYTHING
    known: RowMap | None = None  # the owners of rows, if they need not be measured
    has_gradient: Tensor | None = None  # which positions have one, `[rows, positions]`
    of_vector: Tensor | None = None  # gradients for the vector that shows it
    receiver: Receiver | None = None
    probed: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None  # gradients of the first probe, if somebody wants them again
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    measured: Measured | None = None
    row_map: Tensor | None = (
        None  # the example of each row, or -1; `None` if positions of a row belong to different data
    )
    inner: int | None = None
    certain: bool = True

    def receive(self, g: Tensor) -> None:
        """Take gradients `[columns, *leading, ..., features]`: of probes, or later of vectors that count."""
        if self.receiver is not None:
            self.receiver(g)
            return
        if self.sites.measuring and self.first is None:
            self.first = g
        if self.sites.counting_rows:
            self._look_for_gradients(g[0])
            return
        if self.known is not None:
            return
        g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
        self.dtype, self.device = g.dtype, g.device
        self.probed.append(project(g[0]))

    def _look_for_gradients(self, g: Tensor) -> None:
        """Take the gradients of a vector, or those of a multiple of it, which show together which rows have any."""
        if self.counting.rule.kind != "measured":
            return
        if self.of_vector is None:
            self.of_vector = g
            return
        self.has_gradient = has_gradient(self.of_vector, g).reshape(prod(self.leading), self.counting.positions)
        self.of_vector = None

    @property
    def is_certain(self) -> bool:
        """Whether rows are in a regular order, and in no other one."""
        return self.certain and self.inner is not None

    def find_order(self, found: Measured, num_data: int, mixing: bool) -> None:
        """Find the order of rows, with what was measured."""
        self.measured = found
        self.row_map = found.of_groups(prod(self.leading))
        if mixing and found.mixes:
            self.inner = nearest_order(self.probed, num_data, self.leading)
        elif self.row_map is not None:
            self.inner, self.certain = regular_order(self.row_map, num_data, self.leading)
            self.certain = self.certain and found.has_votes
        self.probed.clear()

    def adopt(self, inner: int | None, num_data: int) -> None:
        """Take over the order of rows at other places, where it is not certain and not contradicted."""
        if self.is_certain or inner is None:
            return
        silent = self.measured is None  # no gradient came back at all
        if silent or (self.row_map is not None and obeys(self.row_map, inner, num_data)):
            self.inner, self.certain = inner, True

    def begin(self, num_data: int) -> None:
        """Start, with the owners of rows."""
        rule = self.counting.rule
        if rule.kind == "measured" and self.has_gradient is None:  # no prediction that counts depends on it
            self.has_gradient = torch.zeros(prod(self.leading), self.counting.positions, dtype=torch.bool)
            self.has_gradient = self.has_gradient.to(self.sites.masks.device, non_blocking=True)
        if self.known is not None:
            self.receiver = self.start(self.sites.counted(self.known, self.leading, self.counting, self.has_gradient))
        elif self.inner is not None:
            has_votes = self.measured is not None and self.measured.has_votes
            regular = StridedRows(num_data, self.inner, complete=self.certain or not has_votes)
            self.receiver = self.start(self.sites.counted(regular, self.leading, self.counting, self.has_gradient))
        elif self.measured is None:  # predictions do not depend on it
            self.certain = False
            self.receiver = self.start(guessed(num_data, self.leading, self.sites.axis))
        elif self.row_map is not None:
            listed = IndexedRows(self.row_map.to(self.device), num_data)
            counted = self.has_gradient
            if rule.kind == "data" and (of_data := self.sites.masks.counted(rule, 1)) is not None:
                index = listed.index(prod(self.leading))
                counted = of_data[index.clamp(min=0)] & (index >= 0).unsqueeze(1)
                counted = counted.expand(-1, self.counting.positions)
            self.receiver = self.start(listed.counting(counted))
        else:
            operation, parameter = self.what
            error = DataError(
                f"One input of {operation} (parameter {parameter!r}) has positions that belong to different data.",
                "KFAC with sharing='expand' does not need to know whose they are; or leave the parameter out with "
                "params=.",
            )
            self.receiver = self.start(UnknownRows(error, num_data))


class UnknownRows(RowMap):
    """Rows of which one does not know whose they are: an error as soon as it matters."""

    def __init__(self, error: DataError, num_data: int) -> None:
        self.error = error
        self.num_data = num_data

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Refuse."""
        raise self.error

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Refuse."""
        raise self.error

    def most(self, rows: int) -> int:
        """Refuse."""
        raise self.error

    def index(self, rows: int) -> Tensor:
        """Refuse."""
        raise self.error

    def in_order(self, rows: int) -> bool:
        """Say no."""
        return False

    def counting(self, counted: Tensor | None) -> "UnknownRows":
        """Return the same error, as long as positions that count are all that matters."""
        other = copy(self)
        other.counted = counted
        return other


class RowQueries:
    """All places of one pass at which it matters which example a row belongs to.

    Args:
        num_data: Number of examples.
        axis: Where the batch axis is in activations, if somebody said so. It is used if nobody measures.
        known: What a measurement found. `None` to guess.
        measuring: Whether all places wait to be measured.
        mixing: Whether data may mix.
        masks: What the batch says about rows that count.
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
        self.counting_rows = False  # whether vectors are sent back that show which rows count
        self.num_data = num_data
        self.axis = axis
        self.measuring = measuring
        self.waiting: list[RowQuery] = []
        self.observed: list[RowQuery] = []
        self._known = known
        self._mixing = mixing
        self.questions: list[
            tuple[Question, bool, list[RowQuery]]
        ] = []  # with answers, and the places that they are about
        self._next = [0, 0]
        self._asked: Counter[tuple[Any, str]] = Counter()

    @property
    def next_use(self) -> int:
        """The place of the next use among those that an audit knows."""
        return self._next[False]

    @property
    def need_probes(self) -> bool:
        """Whether vectors have to be sent back, to find out whose rows are, or which ones count."""
        return self.need_owners or self.count_rows

    @property
    def count_rows(self) -> bool:
        """Whether vectors have to be sent back that show which rows count."""
        return any(site.counting.rule.kind == "measured" for site in self.waiting)

    @property
    def need_owners(self) -> bool:
        """Whether vectors have to be sent back that tell data apart."""
        return bool(self.observed) or any(site.known is None for site in self.waiting)

    def open(
        self,
        what: What,
        leading: tuple[int, ...],
        start: Callable[[RowMap], Receiver],
        meeting: bool = False,
        counting: Counting = EVERYTHING,
    ) -> Receiver:
        """Open a place, and return what takes its gradients `[columns, *leading, ..., features]`.

        Args:
            what: What happens there.
            leading: Lengths of the leading axes.
            start: Takes the owners of rows as soon as they are known, and returns what takes gradients.
            meeting: Whether it is a place at which a derived parameter meets the batch, and not a use.
            counting: Which positions count.
        """
        row_map = counting.row_map
        if self.num_data == 1:
            row_map = StridedRows.batch_first(1, prod(leading))
        elif not self.measuring and row_map is None:
            if self._known is None:
                row_map = guessed(self.num_data, leading, self.axis)
            else:
                known = self._known.meetings if meeting else self._known.uses
                row_map = self._look_up(what, leading, known, meeting)
            # If a use only asks which of its rows have gradients, nobody needs to know whose they are.
            if row_map is None and not counting.by_datum and counting.rule.kind in {"all", "measured"}:
                error = DataError("It was not measured which example rows belong to.", "Use sharing='expand'.")
                row_map = UnknownRows(error, self.num_data)
        rule = counting.rule
        waits = rule.kind == "measured" or (rule.kind != "all" and self.masks.pending)
        if row_map is not None and not waits:
            return start(self.counted(row_map, leading, counting))
        site = RowQuery(what, leading, start, self, meeting, counting, row_map)
        self.waiting.append(site)
        return site.receive

    def counted(
        self, row_map: RowMap, leading: tuple[int, ...], counting: Counting, has_gradient: Tensor | None = None
    ) -> RowMap:
        """Return owners that know which positions of rows count."""
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
        """Measure a result number by number, and do nothing else with its gradients."""
        site = RowQuery(what, shape, nothing, self, meeting=True)
        self.observed.append(site)
        return lambda g: site.receive(g.unsqueeze(-1))

    @contextmanager
    def with_axis(self, axis: int | None) -> Iterator[None]:
        """Override the batch axis in this context, where nobody measures."""
        before = self.axis
        self.axis = before if axis is None else axis
        try:
            yield
        finally:
            self.axis = before

    @contextmanager
    def question(self, func: Any, name: str, guess: bool) -> Iterator[bool]:
        """Ask whether the result of an operation on a parameter and constants has a row for every example.

        An audit finds out; without one, the answer is a guess. It is about the places that are opened in this context.
        """
        question = (func, name, self._asked[func, name])
        self._asked[func, name] += 1
        answer = guess if self._known is None else self._known.answers.get(question, guess)
        waiting, observed = len(self.waiting), len(self.observed)
        yield answer
        opened = self.waiting[waiting:] if answer else self.observed[observed:]
        self.questions.append((question, answer, opened))

    def settle(self) -> None:
        """Find out whose the rows are, and which ones count, after all probes were sent back."""
        probes = 1 + number_of_digits(self.num_data)
        kinds: dict[Any, list[RowQuery]] = {}
        for site in (*self.waiting, *self.observed):
            if site.known is None and len(site.probed) == probes:
                kinds.setdefault((site.dtype, site.probed[0].shape[1]), []).append(site)
        # Gradients in float32 that came through operations in half precision are no more precise than those.
        lowest = max((dtype for dtype, _ in kinds), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        for (dtype, _), sites in kinds.items():
            # All rows together, and not on an accelerator: there are many small questions to answer.
            # Squares of vanishing gradients need the range of float64.
            gradients = [torch.cat([site.probed[i] for site in sites]).cpu().double() for i in range(probes)]
            lengths = [len(site.probed[0]) for site in sites]
            found_at = measured(gradients, lengths, self.num_data, dtype, lowest)
            for site, found in zip(sites, found_at, strict=True):
                site.find_order(found, self.num_data, self._mixing)
        # Where gradients of too few rows came back, rows are in the order that they have at other places.
        orders = {site.leading: site.inner for site in self.waiting if site.is_certain}
        for site in (*self.waiting, *self.observed):
            if site.known is None:
                site.adopt(orders.get(site.leading), self.num_data)
            site.begin(self.num_data)

    def replay(self) -> None:
        """Pass gradients of the first probe on, now that it is known whose they are; the latest places come first."""
        for site in reversed(self.waiting):
            if site.first is not None and site.receiver is not None:
                site.receiver(site.first)

    def forget(self) -> None:
        """Forget all places, which may hold activations."""
        self.waiting.clear()
        self.observed.clear()
        self.questions.clear()

    def _look_up(
        self, what: What, leading: tuple[int, ...], known: Sequence[KnownUse], meeting: bool
    ) -> StridedRows | None:
        """Return what is known about the next place; `None` if that is another one, or nothing."""
        place = self._next[meeting]
        self._next[meeting] += 1
        if place >= len(known) or known[place].what != what:
            return None
        return known[place].row_map(self.num_data, leading)


def guessed(num_data: int, leading: tuple[int, ...], axis: int | None) -> RowMap:
    """Guess owners by lengths; if that is not possible, it is an error as soon as somebody needs them."""
    try:
        return by_length(num_data, leading, axis)
    except DataError as error:
        return UnknownRows(error, num_data)


def nothing(_: Any) -> Receiver:
    """Return a receiver that does nothing, whoever the owners are."""
    return lambda _: None
