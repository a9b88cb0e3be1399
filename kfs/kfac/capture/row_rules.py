"""Experiments of the audit: which rows of every use count?

A row counts if a prediction depends on it whose target counts. Vectors that are zero at some predictions are sent back,
as if their targets did not count, and the model is called with other masks. Which rows get gradients then says which
`RowRule` a use follows.

Rows may also lack a gradient because of their values: all units of a rectifier are off, or another position is the
maximum. Such rows count. So wherever no rule explains what is missing, everything is repeated, with noise at the output
of every operation. What has a gradient once is there; what never has one is not, once repeating changes nothing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kfs.data import MaskSource, mapped
from kfs.kfac.capture.counted_rows import ALL, BatchMasks, RowRule, matching_rule
from kfs.kfac.capture.mode import Capture, Used
from kfs.kfac.capture.ownership import MULTIPLE, has_gradient, probes
from kfs.kfac.capture.session import Session
from kfs.kfac.capture.sites import Known, What
from kfs.kfac.capture.tap import backward, measure_rows
from kfs.kfac.sums.interface import Adder, Ignore, PlannedUse, Receiver, Sums
from kfs.kfac.sums.owners import Owners, Regular

log = logging.getLogger("kfs.kfac")
# So many times targets are left out, and the mask is replaced. With four data, that tells rules apart.
_TARGETS = 3
_MASKS = 1
# With noise, everything is repeated up to so many times. A row of four units is off in all rounds once in 2^32 times.
_ROUNDS = 8
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
    owners: Owners
    rows: list[Tensor] = field(default_factory=list)  # booleans, [rows, positions of a row]
    arrived: list[Tensor] = field(default_factory=list)  # gradients for a vector, and for a multiple of it

    def receive(self, g: Tensor) -> None:
        """Take gradients `[1, *leading, ..., features]`."""
        self.arrived.append(g[0])

    def note(self) -> None:
        """Note which rows have a gradient, after a vector and a multiple of it were sent back."""
        if len(self.arrived) == 2:
            self.rows.append(has_gradient(*self.arrived).reshape(self.used.rows, -1))
        elif self.rows:  # no gradient came back
            self.rows.append(torch.zeros_like(self.rows[0]))
        self.arrived.clear()

    def by_datum(self) -> list[Tensor] | None:
        """Return them as `[N, rows of a datum]`; `None` if they have no regular order."""
        if not isinstance(self.owners, Regular):
            return None
        return [self.owners.by_datum(rows).flatten(1).cpu() for rows in self.rows]


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
    """All experiments with a few data.

    Args:
        run: Evaluates the model.
        x: Inputs.
        num_data: Their number.
        session: Has parameters and rules.
        batch_axis: Where the batch axis is in inputs, if not first.
        known: What the audit has found so far.
        source: Where the batch has its mask.
        class_axis: That of the loss: an axis of predictions; `None` if all targets count.
    """

    run: Run
    x: Any
    num_data: int
    session: Session
    batch_axis: int | None
    known: Known
    source: MaskSource
    class_axis: int | None

    def __post_init__(self) -> None:
        """Find the mask of these data."""
        self.mask = self.source.find(self.x, self.num_data)
        self._generator = torch.Generator().manual_seed(0)

    def rules(self) -> tuple[tuple[What, RowRule], ...]:
        """Return the rule of every use, in their order."""
        masks, seen = self._all()
        total = {number: [rows.clone() for rows in one.rows] for number, one in seen.items()}
        found = {number: self._rule(one, masks, total[number]) for number, one in seen.items()}
        # In a few data, the same positions may lack gradients by chance.
        doubtful = {n for n, (rule, exact) in found.items() if not exact or rule.kind == "positions"}
        changed_late: set[int] = set()
        for round_ in range(_ROUNDS):
            if not doubtful:
                break
            _, again = self._all(noise=torch.Generator().manual_seed(round_))
            for number in doubtful.copy():
                if number not in again or not _add(total[number], again[number]):
                    continue
                if round_ >= _ROUNDS // 2:
                    changed_late.add(number)
                found[number] = rule, exact = self._rule(seen[number], masks, total[number])
                if exact and rule.kind != "positions":
                    doubtful.discard(number)
        for number in doubtful:
            rule, exact = found[number]
            if number in changed_late and exact:  # positions that lack gradients by chance
                found[number] = (ALL, True)
            elif number not in changed_late and not exact and not seen[number].used.by_construction:
                # Which rows have gradients does not depend on values, nor does any rule explain it.
                found[number] = (RowRule("measured"), True)
        for number, (rule, _) in found.items():
            # Where rows belong to others in every batch, a mask does not say which ones it is about.
            if rule != ALL and self._is_irregular(seen[number]):
                found[number] = (RowRule("measured"), True)
        last = max(found, default=-1)
        whats = {number: one.used.what for number, one in seen.items()}
        return tuple((whats.get(n, ("", "")), found.get(n, (ALL, True))[0]) for n in range(last + 1))

    def _is_irregular(self, one: _Seen) -> bool:
        """Whether the order of a use's rows is measured in every batch."""
        if one.used.by_construction or self.num_data == 1:
            return False
        placed = self.known.uses
        return one.used.site is None or one.used.site >= len(placed) or placed[one.used.site].inner is None

    def _rule(self, one: _Seen, masks: Sequence[BatchMasks], rows: list[Tensor]) -> tuple[RowRule, bool]:
        """Return the rule that explains rows with gradients, and whether it explains them all."""
        alive = _Seen(one.used, one.owners, rows).by_datum()
        # A use that no prediction depends on stays as it is.
        if all(bool(some.all()) for some in rows) or not any(bool(some.any()) for some in rows):
            return ALL, True
        return (ALL, False) if alive is None else matching_rule(masks, alive)

    def _all(self, noise: torch.Generator | None = None) -> tuple[list[BatchMasks], dict[int, _Seen]]:
        """Do all experiments, and return masks, and rows with gradients by the number of a use."""
        self._generator.manual_seed(0)
        masks: list[BatchMasks] = []
        seen: dict[int, _Seen] = {}
        for x, mask in self._inputs():
            try:
                masks += self._one(x, mask, seen, noise, first=not masks)
            except Exception:
                if not masks:
                    raise
                log.debug("An experiment with another mask did not go through.", exc_info=True)
        # A use that other masks do not reach takes part in fewer experiments than others.
        return masks, {number: one for number, one in seen.items() if len(one.rows) == len(masks)}

    def _inputs(self) -> Iterator[tuple[Any, Tensor | None]]:
        """Generate inputs with their masks: the user's, then others."""
        yield self.x, self.mask
        for _ in range(_MASKS if self.mask is not None else 0):
            assert self.mask is not None  # noqa: S101 (or there would be no round)
            other = self._other_mask(self.mask.cpu()).to(self.mask.device)
            x = self.source.replaced(self.x, other)
            if x is not None:
                yield x, other

    def _one(
        self, x: Any, mask: Tensor | None, seen: dict[int, _Seen], noise: torch.Generator | None, first: bool
    ) -> list[BatchMasks]:
        """Run the model once, send some vectors back, and return their masks."""
        capture = Capture(self.session, _NoSums(), self.num_data, self.batch_axis, self.known)
        capture.noise = noise
        of_this: dict[int, _Seen] = {}

        def observe(used: Used, owners: Owners, _: Receiver) -> Receiver:
            of_this[used.number] = one = _Seen(used, owners)
            return one.receive

        capture.observer = observe
        try:
            f = self.run(mapped(x, capture.mark_data), self.num_data, capture)
        finally:
            capture.leave_nothing_behind()
            capture.running = False
        if not first and f.isnan().any():  # as where a mask leaves nothing to attend to
            return []
        measure_rows(f, capture)
        v = next(probes(f, self.num_data))
        masks = list(self._masks(f, mask, first))
        for one in masks:
            for multiple in (1, MULTIPLE):
                backward(f, capture, one.of_predictions(multiple * v).unsqueeze(0), keep_graph=True)
            for use in of_this.values():
                use.note()
        if capture.sites is not None:
            capture.sites.forget()
        for number, use in of_this.items():
            if len(use.rows) != len(masks):
                continue
            if first:
                seen[number] = use
            elif number in seen and seen[number].used == use.used:
                seen[number].rows += use.rows
        return masks

    def _masks(self, f: Tensor, mask: Tensor | None, first: bool) -> Iterator[BatchMasks]:
        """Generate what vectors are sent back with a mask of inputs: which predictions count."""
        positions = 1 if self.class_axis is None else f[0].numel() // f.shape[self.class_axis]
        if self.class_axis is None:
            yield BatchMasks(None, mask)
            return
        shape = [1 if axis == self.class_axis else n for axis, n in enumerate(f.shape)]
        fits = positions > 1 and mask is not None and mask.shape[1] == positions
        there = torch.ones(self.num_data, positions, dtype=torch.bool, device=f.device)
        there = mask if mask is not None and fits else there  # predictions at padding do not count
        yield BatchMasks(there.reshape(shape), mask)
        for turn in range(_TARGETS if positions > 1 else int(first)):
            yield BatchMasks(self._targets(there.cpu(), turn).to(f.device).reshape(shape), mask)

    def _targets(self, there: Tensor, turn: int) -> Tensor:
        """Choose some of the targets that are there, `[N, positions]`, and none of one datum.

        In turns, that is the first one of a datum, the last one, and some of the others: that tells rules apart.
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

    def _number(self, low: int, high: int) -> int:
        """Draw an integer from a half-open range."""
        return int(torch.randint(low, high, (), generator=self._generator))

    def _other_mask(self, mask: Tensor) -> Tensor:
        """Return another mask: of each datum's positions at least the half, and of one datum's a single one."""
        other = torch.zeros_like(mask)
        alone = self._number(0, self.num_data) if self.num_data > 2 else -1
        for n, there in enumerate(mask):
            (places,) = there.nonzero(as_tuple=True)
            shortest = 1 if n == alone else min(len(places), max(2, (len(places) + 1) // 2))
            longest = 1 if n == alone else max(shortest, len(places) - 1)
            length = self._number(shortest, longest + 1)
            start = self._number(0, len(places) - length + 1) if len(places) else 0
            other[n, places[start : start + length]] = True
        return other


def _add(total: list[Tensor], again: _Seen) -> bool:
    """Add rows with gradients, in place, and return whether there were new ones."""
    if len(again.rows) != len(total) or again.rows[0].shape != total[0].shape:
        return False
    new = any(bool((one & ~before).any()) for one, before in zip(again.rows, total, strict=True))
    for before, one in zip(total, again.rows, strict=True):
        before.logical_or_(one)
    return new
