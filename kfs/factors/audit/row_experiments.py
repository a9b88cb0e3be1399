"""Experiments of the audit that determine which rows of every use count.

A row counts if it influences a prediction whose target counts. The experiments send back vectors that are zero at some
predictions, as if their targets did not count, and call the model with another mask. The rows that get gradients then
show which `RowRule` a use follows.

Rows may also lack a gradient because of their values: all units of a rectifier are off, or another position is the
maximum. Such rows count. So if no rule explains the missing gradients, all experiments are repeated with noise added to
the output of every operation. Inputs are unchanged, because they may contain the padding. A row with a gradient in any
repetition counts. A row that never has one does not count, unless similar rows have gradients rarely.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfs.factors.capture import CapturedPass
from kfs.factors.rows.counted import ALL, MEASURED, BatchMasks, RowRule, matching_rule
from kfs.factors.rows.measure import MULTIPLE, are_gradients, gradient_sizes, probes
from kfs.factors.rows.row_map import AuditResult, Receiver, RowMap, RowQuery, StridedRows, What
from kfs.factors.trace.trace import Trace
from kfs.problem.data import MaskSource
from kfs.runtime.nested import mapped, tensors_in

log = logging.getLogger("kfs.factors")
# Number of experiments that leave out targets, each a different part of an example's targets; see `_targets`.
_TARGETS = 3
# Maximum and minimum number of repetitions with noise.
_ROUNDS, _FEWEST = 8, 2
# A row that never had a gradient still counts if chance explains this with more than this probability, judging by rows
# of the same use that had one sometimes.
_CHANCE = 1e-3
# Evaluates the model within a context. Takes inputs, the number of examples, and the context.
Run = Callable[[Any, int, AbstractContextManager[Any] | None], Tensor]


@dataclass(frozen=True)
class Counts:
    """The source of what determines which rows count: the masks of batches, and targets that the loss ignores."""

    source: MaskSource
    class_axis: int | None = None  # the loss's class axis of predictions; `None` if all targets count


@dataclass
class _Seen:
    """The rows of a use that had gradients, for each vector that was sent back."""

    query: RowQuery
    row_map: RowMap
    arrived: list[Tensor] = field(default_factory=list)  # gradients of a vector, and of its multiple
    sizes: list[Tensor] = field(default_factory=list)  # see `gradient_sizes`
    dtype: torch.dtype = torch.float32  # of gradients
    rows: Sequence[Tensor] = ()  # booleans, [rows, positions of a row], on the CPU; see `_read`
    times: list[Tensor] = field(default_factory=list)  # in how many repetitions each row had a gradient
    rounds: int = 1

    def note(self) -> None:
        """Record sizes of gradients, after a vector and its multiple were sent back."""
        if len(self.arrived) == 2:
            self.dtype = self.arrived[0].dtype
            self.sizes.append(gradient_sizes(*self.arrived).reshape(2, -1))
        elif self.sizes:  # no gradient arrived
            self.sizes.append(torch.zeros_like(self.sizes[0]))
        self.arrived.clear()

    def add(self, other: "_Seen | None") -> bool:
        """Add the rows that had gradients in another repetition, and return whether there are new ones."""
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
        """The probability that a row never had a gradient, if it is like the row that had the fewest, but some."""
        sometimes = [times[(times > 0) & (times < self.rounds)] for times in self.times]
        fewest = min((int(times.min()) for times in sometimes if len(times)), default=self.rounds)
        return (1 - fewest / self.rounds) ** self.rounds

    @property
    def evidence(self) -> Hashable:
        """Everything in a use that `rule` depends on."""
        inner = self.row_map.inner if isinstance(self.row_map, StridedRows) else None
        tensors = [*self.rows, *([] if self.query.not_padding is None else [self.query.not_padding])]
        return inner, self.rows[0].shape, *(t.numpy().tobytes() for t in tensors)

    def rule(self, masks: Sequence[BatchMasks], routes: bool) -> tuple[RowRule, bool]:
        """Return the row rule of the use, and whether it explains all missing gradients."""
        cares = self.query.not_padding
        if all(bool((rows if cares is None else rows | ~cares).all()) for rows in self.rows):
            return ALL, True
        if not any(bool(rows.any()) for rows in self.rows):  # no prediction depends on it; for other examples, some may
            return ALL, not routes
        if not isinstance(self.row_map, StridedRows):
            return ALL, False
        alive = [self.row_map.by_datum(rows).flatten(1) for rows in self.rows]
        cares = None if cares is None else self.row_map.by_datum(cares).flatten(1)
        # A use that differs under the other mask takes part in fewer experiments.
        pairs = list(zip(masks, alive, strict=False))
        inside = [pair for pair in pairs if not pair[0].beyond]
        rule, exact = matching_rule([mask for mask, _ in inside], [rows for _, rows in inside], cares)
        if rule.kind in {"mask", "causal"} and not self._sees_hidden(pairs, rule.outer):
            rule = replace(rule, own=False)
        return rule, exact

    def _sees_hidden(self, pairs: Sequence[tuple[BatchMasks, Tensor]], outer: bool) -> bool:
        """Whether rows outside of the mask get gradients if their own targets count; true if not tested."""
        hidden = [(one.hidden(rows.shape[1], outer), rows) for one, rows in pairs if one.beyond]
        tried = [(those, rows) for those, rows in hidden if those is not None and bool(those.any())]
        return not tried or any(bool((those & rows).any()) for those, rows in tried)


@dataclass
class RowExperiments:
    """Runs all experiments on a few examples."""

    run: Run  # evaluates the model
    x: Any  # inputs
    num_data: int
    trace: Trace
    batch_axis: int | None
    known: AuditResult  # results of the audit so far
    counts: Counts
    routes: bool = False  # whether the data determine which rows there are

    def __post_init__(self) -> None:
        """Find the mask of these examples. A mask without any position is ignored."""
        mask = self.counts.source.find(self.x, self.num_data)
        mask = None if mask is None else mask.cpu()
        self.mask = None if mask is None or not mask.any() else mask
        self._ignores_mask = mask is not None and self.mask is None
        self._generator = torch.Generator()

    def result(self) -> AuditResult:
        """Return the results of the audit, with the row rule of every use."""
        # Find a rule for every use from one round of experiments.
        masks, seen = self._all()
        # Layers of a model are often alike.
        of_evidence = {one.evidence: one for one in seen.values()}
        rule_of = {evidence: one.rule(masks, self.routes) for evidence, one in of_evidence.items()}
        found = {number: rule_of[one.evidence] for number, one in seen.items()}
        # Among a few examples, the same positions may lack gradients by chance, so rules of kind "positions" are
        # doubtful.
        doubtful = {n for n, (rule, exact) in found.items() if not exact or rule.kind == "positions"}
        for turn in range(_ROUNDS if doubtful else 0):
            again = self._again(turn)
            for number in [n for n in doubtful if seen[n].add(again.get(n))]:
                found[number] = rule, exact = seen[number].rule(masks, self.routes)
                if exact and rule.kind != "positions":
                    doubtful.discard(number)
            # A row may be off in a few repetitions. Repeat more often before concluding that no rule explains it.
            unexplained = any(not found[n][1] and seen[n].query.row_map is None for n in doubtful) and not self.routes
            if not again or (turn + 1 >= _FEWEST and not unexplained and not any(seen[n].chance for n in doubtful)):
                break
        # Check the remaining rules, and choose the use at which later batches are checked for padding.
        if any(rule.kind == "positions" for rule, _ in found.values()):
            found = self._without_alike(seen, found)
        rules = {number: self._final(seen[number], *found[number]) for number in seen}
        if self.routes and any(rule.kind == "measured" for rule in rules.values()):
            # Even if all rows count here, rows of other batches may be unused slots.
            rules = {n: rule if self._is_regular(seen[n].query) else MEASURED for n, rule in rules.items()}
        checked = min((n for n, one in seen.items() if self._shows_padding(one, rules[n])), default=None)
        if self.num_data == 1:  # a single example's rows are all rows
            rules = {n: self.known.otherwise if rule == ALL else rule for n, rule in rules.items()}
        uses = range(max(seen, default=-1) + 1)
        rows = tuple((seen[n].query.what, rules[n]) if n in seen else (("", ""), ALL) for n in uses)
        return replace(self.known, rows=rows, has_mask=not self._ignores_mask, checked=checked)

    def _shows_padding(self, one: _Seen, rule: RowRule) -> bool:
        """Whether gradients of a use would show padding that these examples lack: in tokens or other inputs."""
        inputs = tensors_in(self.x)
        plausible = len(inputs) > 1 or any(t.ndim > 1 and not t.is_floating_point() for t in inputs)
        several = one.query.rows * one.query.positions > self.num_data and one.query.row_map is None
        # Zeros mean nothing if values determine which rows have gradients, or if every batch is measured anyway.
        return plausible and several and one.rounds == 1 and rule.kind not in {"positions", "measured"}

    def _without_alike(
        self, seen: dict[int, _Seen], found: dict[int, tuple[RowRule, bool]]
    ) -> dict[int, tuple[RowRule, bool]]:
        """Drop rules of kind "positions" that hold only because examples look alike, by shifting inputs."""
        try:
            moved = mapped(self.x, self._rolled)
            mask = self.counts.source.find(moved, self.num_data)
            again = self._one(moved, None if mask is None else mask.cpu(), None)[1]
        except Exception:  # a model may refuse such inputs
            log.debug("The experiment with shifted inputs failed.", exc_info=True)
            again = {}
        result = dict(found)
        for number, (rule, exact) in found.items():
            other = again.get(number)
            rows = seen[number].rows[0]
            # Values may switch off further rows in a single run.
            holds = other is not None and other.rows[0].shape == rows.shape and not bool((other.rows[0] & ~rows).any())
            if rule.kind == "positions" and not (exact and holds):
                result[number] = (ALL, False)
        return result

    def _rolled(self, t: Tensor) -> Tensor:
        """Shift the inputs of each example along all other axes, by a different distance for each example."""
        axis = self.batch_axis or 0
        if t.ndim < 2 or t.shape[axis : axis + 1] != (self.num_data,):
            return t
        each = [one.roll([1 + n] * one.ndim, list(range(one.ndim))) for n, one in enumerate(t.unbind(axis))]
        return torch.stack(each, axis)

    def _again(self, turn: int) -> dict[int, _Seen]:
        """Run all experiments with noise; return nothing if the model fails."""
        try:
            return self._all(torch.Generator().manual_seed(turn))[1]
        except Exception:  # values may be indices
            log.debug("The experiment with noise failed.", exc_info=True)
            return {}

    def _final(self, one: _Seen, rule: RowRule, exact: bool) -> RowRule:
        """Return the final rule of a use, after all repetitions."""
        # Do values determine which rows have gradients? If no repetition was possible, assume so, unless the data
        # select rows.
        assumed = one.rounds == 1 and not self.routes
        by_values = one.chance > _CHANCE or assumed
        by_construction = one.query.row_map is not None
        if rule.kind == "positions" and by_construction:  # derived parameters have no noise
            return self.known.otherwise
        # A position has no gradient in any example: that all of them are off by chance is less probable.
        if rule.kind == "positions" and (assumed or one.chance**self.num_data > _CHANCE):
            return ALL
        # If all rows have gradients whenever all targets count, such batches need not be measured.
        measured = replace(MEASURED, whole=bool(one.rows[0].all()) and (self.mask is None or bool(self.mask.all())))
        if not exact and not by_values and not by_construction:  # neither values nor a rule explain it
            return measured
        rule = self._trusted(one, rule)
        # If the order of rows differs from batch to batch, a mask cannot be matched with rows.
        return rule if rule == ALL or self._is_regular(one.query) else measured

    def _trusted(self, one: _Seen, rule: RowRule) -> RowRule:
        """Return the mask's rule if the user computes the mask and no padding of these examples can show it."""
        if not callable(self.counts.source.mask) or self.mask is None or not self.mask.all():
            return rule
        size = one.query.rows * one.query.positions // self.num_data
        fits = size > 1 and size % self.mask.shape[1] == 0
        return RowRule("mask") if rule.kind in {"all", "data"} and fits else rule

    def _is_regular(self, query: RowQuery) -> bool:
        """Whether the rows of a use are in a regular order in all batches."""
        if query.row_map is not None or self.num_data == 1:
            return True
        place, uses = query.place, self.known.uses
        return place is not None and place < len(uses) and uses[place].inner is not None

    def _all(self, noise: torch.Generator | None = None) -> tuple[list[BatchMasks], dict[int, _Seen]]:
        """Run all experiments, and return masks, and rows with gradients by the index of the use."""
        self._generator.manual_seed(0)
        masks, seen = self._one(self.x, self.mask, noise)
        other = None if self.mask is None else self._other_mask(self.mask)
        x = None if other is None else self.counts.source.replaced(self.x, other)
        if x is None:
            return masks, seen
        try:
            more, of_other = self._one(x, other, noise)
        except Exception:  # a model may refuse a mask that the user did not choose
            log.debug("The experiment with another mask failed.", exc_info=True)
            return masks, seen
        for number, one in seen.items():
            if number in of_other and one.query == of_other[number].query:
                one.rows = (*one.rows, *of_other[number].rows)
        return (masks + more if of_other else masks), seen

    def _one(
        self, x: Any, mask: Tensor | None, noise: torch.Generator | None
    ) -> tuple[list[BatchMasks], dict[int, _Seen]]:
        """Run the model once, send some vectors back, and return their masks and the rows that had gradients."""
        seen: dict[int, _Seen] = {}

        def observe(query: RowQuery, row_map: RowMap, _: Receiver) -> Receiver:
            seen[query.number] = found = _Seen(query, row_map)
            return lambda g: found.arrived.append(g[0])

        one = CapturedPass(self.trace, [], self.num_data, self.batch_axis, self.known, observer=observe, noise=noise)
        try:
            f = self.run(one.mark(x), self.num_data, one)
            one.measure_rows(f)
            v = next(probes(f, self.num_data))
            masks = list(self._masks(f, mask))
            for of_vector in masks:
                for multiple in (1, MULTIPLE):
                    one.backward(f, of_vector.of_predictions(multiple * v).unsqueeze(0), keep_graph=True)
                for use in seen.values():
                    use.note()
        finally:
            one.forget()
        _read(seen.values())
        # A mask may leave nothing to attend to. Then predictions are not finite, and gradients are meaningless.
        usable = mask is self.mask or not f.isnan().any()
        return masks, {number: use for number, use in seen.items() if usable and len(use.rows) == len(masks)}

    def _masks(self, f: Tensor, mask: Tensor | None) -> Iterator[BatchMasks]:
        """Generate the masks of the vectors that are sent back: which predictions count, with a mask of the inputs."""
        axis = self.counts.class_axis
        if axis is None:
            yield BatchMasks(None, mask)
            return
        shape = [1 if place == axis else n for place, n in enumerate(f.shape)]
        there = torch.ones(self.num_data, f[0].numel() // f.shape[axis], dtype=torch.bool)
        if mask is not None and mask.shape == there.shape:  # predictions at padding do not count
            there = mask
        yield BatchMasks(there.reshape(shape), mask)
        if mask is not None and mask.shape == there.shape and not there.all():
            yield BatchMasks(torch.ones(shape, dtype=torch.bool), mask, beyond=True)
        for turn in range(_TARGETS if there.shape[1] > 1 else 1):
            yield BatchMasks(self._targets(there, turn).reshape(shape), mask)

    def _targets(self, there: Tensor, turn: int) -> Tensor:
        """Choose some of the existing targets, `[N, positions]`, and none of one example.

        In turns, these are the first target of an example, the last one, and some of the others, to distinguish rules.
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
        """Return another mask: the first position of each example, and some of the others, except for one example.

        The first position stays, because a model may predict from it.
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


def _read(uses: Iterable[_Seen]) -> None:
    """Set the rows of all uses, on the CPU: rules are found by many small computations. One copy moves all numbers."""
    uses = [use for use in uses if use.sizes]
    tensors = [t for use in uses for t in (*use.sizes, use.query.not_padding) if t is not None]
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])  # promotes booleans and all dtypes of gradients to one
    parts = iter(flat.cpu().split([t.numel() for t in tensors]))
    for use in uses:
        shape = (use.query.rows, use.query.positions)
        sizes = torch.stack([next(parts).view(2, *shape) for _ in use.sizes], 1)
        use.rows = are_gradients(sizes, use.dtype).unbind()
        if use.query.not_padding is not None:
            use.query.not_padding = next(parts).view(use.query.not_padding.shape) > 0


def hold_for(rules: Sequence[tuple[What, RowRule]], uses: Sequence[What]) -> bool:
    """Whether rules hold for inputs of any size, given the uses of a pass."""
    if any(rule.kind in {"positions", "measured"} for _, rule in rules):
        return False
    return len(rules) == len(uses) and all(what == use for (what, _), use in zip(rules, uses, strict=True))
