"""Experiments of the audit: which rows of every use count?

A row counts if a prediction depends on it whose target counts. Vectors that are zero at some predictions are sent back,
as if their targets did not count, and the model is called with another mask. Which rows get gradients then says which
`RowRule` a use follows.

Rows may also lack a gradient because of their values: all units of a rectifier are off, or another position is the
maximum. Such rows count. So wherever no rule explains what is missing, everything is repeated with other values: noise
is added to the output of every operation. Inputs stay as they are, since they may say where padding is. What has a
gradient once is there. What never has one is not there, unless others like it have gradients rarely.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.interface import Adder, Ignore, PlannedUse, Receiver, Sums
from kfs.factors.capture.capture import Capture, Used
from kfs.factors.capture.row_queries import AuditResult, What
from kfs.factors.capture.tap import backward, measure_rows
from kfs.factors.rows.counted import ALL, MEASURED, BatchMasks, RowRule, matching_rule
from kfs.factors.rows.measure import MULTIPLE, has_gradient, probes
from kfs.factors.rows.row_map import RowMap, StridedRows
from kfs.factors.trace.session import Session
from kfs.problem.data import MaskSource
from kfs.runtime.nested import mapped, tensors_in

log = logging.getLogger("kfs.factors")
# So many times targets are left out. Each time another part of an example's targets is; see `_targets`.
_TARGETS = 3
# With other values, everything is repeated up to so many times; and at least so many times.
_ROUNDS, _FEWEST = 8, 2
# A row that never had a gradient counts all the same if chance explains that with more than this probability, judging
# by rows of the same use that had one sometimes.
_CHANCE = 1e-3
Rules = tuple[tuple[What, RowRule], ...]
# Evaluates the model on some inputs, within a context: takes inputs, their number, and the context.
Run = Callable[[Any, int, AbstractContextManager[Any] | None], Tensor]


@dataclass(frozen=True)
class Counts:
    """What says which rows count: the mask of a batch, and targets that the loss ignores."""

    source: MaskSource
    class_axis: int | None = None  # that of the loss: an axis of predictions; `None` if all targets count


@dataclass
class _Seen:
    """Rows of a use that had gradients, for all vectors that were sent back."""

    used: Used
    row_map: RowMap
    rows: list[Tensor] = field(default_factory=list)  # booleans, [rows, positions of a row]
    arrived: list[Tensor] = field(default_factory=list)  # gradients for a vector, and for a multiple of it
    times: list[Tensor] = field(default_factory=list)  # how often each row had a gradient, with other values
    rounds: int = 1

    def receive(self, g: Tensor) -> None:
        """Take gradients `[1, *leading, ..., features]`."""
        self.arrived.append(g[0])

    def note(self) -> None:
        """Note which rows have a gradient, after a vector and a multiple of it were sent back."""
        if len(self.arrived) == 2:
            self.rows.append(has_gradient(*self.arrived).reshape(self.used.rows, self.used.positions))
        elif self.rows:  # no gradient came back
            self.rows.append(torch.zeros_like(self.rows[0]))
        self.arrived.clear()

    def add(self, other: "_Seen | None") -> bool:
        """Add rows that had gradients with other values, and return whether there are new ones."""
        if other is None or len(other.rows) != len(self.rows) or other.rows[0].shape != self.rows[0].shape:
            return False
        before = self.rows
        self.times = self.times or [rows.int() for rows in before]
        self.times = [times + rows for times, rows in zip(self.times, other.rows, strict=True)]
        self.rounds += 1
        self.rows = [times > 0 for times in self.times]
        return any(bool((now & ~rows).any()) for now, rows in zip(self.rows, before, strict=True))

    @property
    def chance(self) -> float:
        """The probability that a row has never had a gradient, if it is like the one that had the fewest of some."""
        sometimes = [times[(times > 0) & (times < self.rounds)] for times in self.times]
        fewest = min((int(times.min()) for times in sometimes if len(times)), default=self.rounds)
        return (1 - fewest / self.rounds) ** self.rounds

    def rule(self, masks: Sequence[BatchMasks], routes: bool) -> tuple[RowRule, bool]:
        """Return the rule that explains which rows had gradients, and whether it explains all of them."""
        cares = self.used.not_padding
        if all(bool((rows if cares is None else rows | ~cares).all()) for rows in self.rows):
            return ALL, True
        if not any(bool(rows.any()) for rows in self.rows):  # no prediction depends on it; others may, of other data
            return ALL, not routes
        if not isinstance(self.row_map, StridedRows):
            return ALL, False
        alive = [self.row_map.by_datum(rows).flatten(1).cpu() for rows in self.rows]
        cares = None if cares is None else self.row_map.by_datum(cares).flatten(1).cpu()
        # A use that the other mask does not reach in the same way takes part in fewer experiments.
        pairs = list(zip(masks, alive, strict=False))
        inside = [pair for pair in pairs if not pair[0].beyond]
        rule, exact = matching_rule([mask for mask, _ in inside], [rows for _, rows in inside], cares)
        if rule.kind in {"mask", "causal"} and not self._sees_hidden(pairs, rule.outer):
            rule = replace(rule, own=False)
        return rule, exact

    def _sees_hidden(self, pairs: Sequence[tuple[BatchMasks, Tensor]], outer: bool) -> bool:
        """Whether rows that the mask does not have get gradients if their own targets count, as far as one knows."""
        hidden = [(one.hidden(rows.shape[1], outer), rows) for one, rows in pairs if one.beyond]
        tried = [(those.cpu(), rows) for those, rows in hidden if those is not None and bool(those.any())]
        return not tried or any(bool((those & rows).any()) for those, rows in tried)


class _NoSums(Sums):
    """Adds nothing."""

    by_datum = True

    def adder_of(self, plan: PlannedUse) -> Adder:
        return Ignore()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        pass


@dataclass
class RowExperiments:
    """All experiments with a few examples."""

    run: Run  # evaluates the model
    x: Any  # inputs
    num_data: int
    session: Session
    batch_axis: int | None
    known: AuditResult  # what the audit has found so far
    counts: Counts
    routes: bool = False  # whether data decide which rows there are

    def __post_init__(self) -> None:
        """Find the mask of these data. One that has no position at all is none."""
        mask = self.counts.source.find(self.x, self.num_data)
        self.mask = None if mask is None or not mask.any() else mask
        self.has_mask = mask is None or self.mask is not None
        self.checked: int | None = None
        self._generator = torch.Generator()

    def rules(self) -> Rules:
        """Return the rule of every use, in their order."""
        masks, seen = self._all()
        found = {number: one.rule(masks, self.routes) for number, one in seen.items()}
        # In a few examples, the same positions may lack gradients by chance.
        doubtful = {n for n, (rule, exact) in found.items() if not exact or rule.kind == "positions"}
        for turn in range(_ROUNDS if doubtful else 0):
            again = self._again(turn)
            for number in [n for n in doubtful if seen[n].add(again.get(n))]:
                found[number] = rule, exact = seen[number].rule(masks, self.routes)
                if exact and rule.kind != "positions":
                    doubtful.discard(number)
            if not again or (turn + 1 >= _FEWEST and not any(seen[n].chance for n in doubtful)):
                break
        if any(rule.kind == "positions" for rule, _ in found.values()):
            found = self._without_alike(seen, found)
        rules = {number: self._final(seen[number], *found[number]) for number in seen}
        if self.routes and any(rule.kind == "measured" for rule in rules.values()):
            # Where all rows of these data are there, those of others may be free places.
            rules = {n: rule if self._is_regular(seen[n].used) else MEASURED for n, rule in rules.items()}
        self.checked = min((n for n, one in seen.items() if self._shows_padding(one, rules[n])), default=None)
        uses = range(max(seen, default=-1) + 1)
        return tuple((seen[n].used.what, rules[n]) if n in seen else (("", ""), ALL) for n in uses)

    def _shows_padding(self, one: _Seen, rule: RowRule) -> bool:
        """Whether gradients of a use would show padding that these data do not have: by tokens, or by other inputs."""
        inputs = tensors_in(self.x)
        plausible = len(inputs) > 1 or any(t.ndim > 1 and not t.is_floating_point() for t in inputs)
        several = one.used.rows * one.used.positions > self.num_data and not one.used.by_construction
        # If values decide which rows have gradients, zeros say nothing. Nor do they where all are looked at anyway.
        return plausible and several and one.rounds == 1 and rule.kind not in {"positions", "measured"}

    def _without_alike(
        self, seen: dict[int, _Seen], found: dict[int, tuple[RowRule, bool]]
    ) -> dict[int, tuple[RowRule, bool]]:
        """Take back rules about positions that hold only because data look alike: with inputs that are moved along."""
        try:
            moved = mapped(self.x, self._rolled)
            again = self._one(moved, self.counts.source.find(moved, self.num_data), None)[1]
        except Exception:  # a model may refuse such inputs
            log.debug("The experiment with moved inputs did not go through.", exc_info=True)
            again = {}
        result = dict(found)
        for number, (rule, exact) in found.items():
            if rule.kind == "positions" and not (exact and _same_rows(seen[number], again.get(number))):
                result[number] = (ALL, False)
        return result

    def _rolled(self, t: Tensor) -> Tensor:
        """Move the inputs of each example along all other axes, each by another distance."""
        axis = self.batch_axis or 0
        if t.ndim < 2 or t.shape[axis : axis + 1] != (self.num_data,):
            return t
        each = [one.roll([1 + n] * one.ndim, list(range(one.ndim))) for n, one in enumerate(t.unbind(axis))]
        return torch.stack(each, axis)

    def _again(self, turn: int) -> dict[int, _Seen]:
        """Do all experiments with other values; return nothing if the model does not take any."""
        try:
            return self._all(torch.Generator().manual_seed(turn))[1]
        except Exception:  # values may be indices
            log.debug("The experiment with other values did not go through.", exc_info=True)
            return {}

    def _final(self, one: _Seen, rule: RowRule, exact: bool) -> RowRule:
        """Return the rule of a use after all rounds."""
        # Do values decide which rows have gradients? If nothing could be tried, they do, unless data decide.
        by_values = one.chance > _CHANCE or (one.rounds == 1 and not self.routes)
        if rule.kind == "positions" and one.used.by_construction:  # what meets data later has no noise
            return self.known.otherwise
        if rule.kind == "positions" and by_values:
            return ALL
        # If all rows have gradients as long as all targets count, nobody has to look where they do.
        measured = replace(MEASURED, whole=bool(one.rows[0].all()) and (self.mask is None or bool(self.mask.all())))
        if not exact and not by_values and not one.used.by_construction:  # nor does any rule explain it
            return measured
        rule = self._trusted(one, rule)
        # Where the order of rows differs from batch to batch, no mask says which of them it is about.
        return rule if rule == ALL or self._is_regular(one.used) else measured

    def _trusted(self, one: _Seen, rule: RowRule) -> RowRule:
        """Return the rule of a mask that the user computes, where these data have no padding that would show it."""
        if not callable(self.counts.source.mask) or self.mask is None or not self.mask.all():
            return rule
        size = one.used.rows * one.used.positions // self.num_data
        fits = size > 1 and size % self.mask.shape[1] == 0
        return RowRule("mask") if rule.kind in {"all", "data"} and fits else rule

    def _is_regular(self, used: Used) -> bool:
        """Whether the rows of a use are in a regular order in all batches."""
        if used.by_construction or self.num_data == 1:
            return True
        return used.site < len(self.known.uses) and self.known.uses[used.site].inner is not None

    def _all(self, noise: torch.Generator | None = None) -> tuple[list[BatchMasks], dict[int, _Seen]]:
        """Do all experiments, and return masks, and rows with gradients by the number of a use."""
        self._generator.manual_seed(0)
        masks, seen = self._one(self.x, self.mask, noise)
        other = None if self.mask is None else self._other_mask(self.mask.cpu()).to(self.mask.device)
        x = None if other is None else self.counts.source.replaced(self.x, other)
        if x is None:
            return masks, seen
        try:
            more, of_other = self._one(x, other, noise)
        except Exception:  # a model may refuse a mask that the user did not choose
            log.debug("The experiment with another mask did not go through.", exc_info=True)
            return masks, seen
        for number, one in seen.items():
            if number in of_other and one.used == of_other[number].used:
                one.rows += of_other[number].rows
        return (masks + more if of_other else masks), seen

    def _one(
        self, x: Any, mask: Tensor | None, noise: torch.Generator | None
    ) -> tuple[list[BatchMasks], dict[int, _Seen]]:
        """Run the model once, send some vectors back, and return their masks, and what was seen."""
        capture = Capture(self.session, _NoSums(), self.num_data, self.batch_axis, self.known)
        capture.noise = noise
        seen: dict[int, _Seen] = {}

        def observe(used: Used, row_map: RowMap, _: Receiver) -> Receiver:
            seen[used.number] = _Seen(used, row_map)
            return seen[used.number].receive

        capture.observer = observe
        try:
            f = self.run(mapped(x, capture.mark_data), self.num_data, capture)
        finally:
            capture.clear_marks()
            capture.running = False
        measure_rows(f, capture)
        v = next(probes(f, self.num_data))
        masks = list(self._masks(f, mask))
        for one in masks:
            for multiple in (1, MULTIPLE):
                backward(f, capture, one.of_predictions(multiple * v).unsqueeze(0), keep_graph=True)
            for use in seen.values():
                use.note()
        capture.places().forget()
        # A mask may leave nothing to attend to, so that predictions are not finite, and gradients tell nothing.
        usable = mask is self.mask or not f.isnan().any()
        return masks, {number: use for number, use in seen.items() if usable and len(use.rows) == len(masks)}

    def _masks(self, f: Tensor, mask: Tensor | None) -> Iterator[BatchMasks]:
        """Generate which predictions count for the vectors that are sent back, with a mask of the inputs."""
        axis = self.counts.class_axis
        if axis is None:
            yield BatchMasks(None, mask, device=f.device)
            return
        shape = [1 if place == axis else n for place, n in enumerate(f.shape)]
        there = torch.ones(self.num_data, f[0].numel() // f.shape[axis], dtype=torch.bool)
        if mask is not None and mask.shape == there.shape:  # predictions at padding do not count
            there = mask.cpu()
        yield BatchMasks(there.to(f.device).reshape(shape), mask, device=f.device)
        if mask is not None and mask.shape == there.shape and not there.all():
            every = torch.ones(shape, dtype=torch.bool, device=f.device)
            yield BatchMasks(every, mask, device=f.device, beyond=True)
        for turn in range(_TARGETS if there.shape[1] > 1 else 1):
            targets = self._targets(there, turn).to(f.device)
            yield BatchMasks(targets.reshape(shape), mask, device=f.device)

    def _targets(self, there: Tensor, turn: int) -> Tensor:
        """Choose some of the targets that are there, `[N, positions]`, and none of one example.

        In turns, that is the first one of an example, the last one, and some of the others: that tells rules apart.
        """
        targets = torch.zeros_like(there)
        left_out = self._number(0, self.num_data) if self.num_data > 2 or self.num_data > there.shape[1] else -1
        for n, row in enumerate(there):
            (places,) = row.nonzero(as_tuple=True)
            if n == left_out or not len(places):
                continue
            last = (0, len(places) - 1, self._number(len(places) // 2, len(places)))[(n + turn) % _TARGETS]
            if (n + turn) % _TARGETS == _TARGETS - 1:
                targets[n, places[:last]] = torch.rand(last, generator=self._generator) < 0.5
            targets[n, places[last]] = True
        return targets

    def _other_mask(self, mask: Tensor) -> Tensor:
        """Return another mask: of each example the first position, some of the others, and of one example no others.

        The first one stays, since a model may read off it what it predicts.
        """
        other = torch.zeros_like(mask)
        alone = self._number(0, self.num_data) if self.num_data > 2 else -1
        for n, there in enumerate(mask):
            (places,) = there.nonzero(as_tuple=True)
            other[n, places[:1]] = True
            if n == alone or len(places) < 2:
                continue
            rest = places[1:]
            stays = torch.rand(len(rest), generator=self._generator) < 0.6
            stays[self._number(0, len(rest))] = True
            if len(rest) > 1 and stays.all():
                stays[self._number(0, len(rest))] = False
            other[n, rest[stays]] = True
        return other

    def _number(self, low: int, high: int) -> int:
        """Draw an integer from a half-open range."""
        return int(torch.randint(low, high, (), generator=self._generator))


def _same_rows(one: _Seen, other: _Seen | None) -> bool:
    """Whether the same rows had gradients for the first vector."""
    return other is not None and other.rows[0].shape == one.rows[0].shape and torch.equal(one.rows[0], other.rows[0])


def hold_for(rules: Rules, uses: Sequence[What]) -> bool:
    """Whether rules hold for inputs of any size, in a pass with some uses."""
    if any(rule.kind in {"positions", "measured"} for _, rule in rules):
        return False
    return len(rules) == len(uses) and all(what == use for (what, _), use in zip(rules, uses, strict=True))
