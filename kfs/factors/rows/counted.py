"""Which rows count: those that influence at least one prediction whose target counts.

Padding, packed neighbors and positions that nothing attends to are not part of the function that is learned: they
change neither loss nor gradient, and must not change a factor. Which rows these are differs from one operation to the
next. In the head of a language model, a row counts if its target does. Below causal attention, a row also counts if a
later target does. Below other attention, all positions that the mask allows count. After a class token is selected, one
row of each example counts.

An audit finds a `RowRule` for every use (see `kfs.factors.audit.row_experiments`). A rule converts the batch's
`BatchMasks` to booleans for the rows of a use, with a few small operations that can be recorded in a CUDA graph. If no
such rule explains which rows have gradients, the rule is `"measured"`: every batch is measured by sending two more
vectors back.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kfs.runtime import sync

Kind = Literal["all", "data", "mask", "causal", "targets", "positions", "measured"]
Lone = Literal["", "row", "target", "datum"]


@dataclass(frozen=True)
class RowRule:
    """Which rows of a use count, given the masks of a batch.

    Attributes:
        kind: `"all"`: all rows. `"data"`: rows of examples with at least one target that counts. `"mask"`: of these,
            the positions in the batch's mask. `"causal"`: of these, the positions up to the last target that counts.
            `"targets"`: positions whose target counts. `"positions"`: the same positions in every example.
            `"measured"`: rows that have a gradient.
        outer: Whether repeats of a mask position are at a distance, and not consecutive.
        pattern: Which positions count, for kind `"positions"`.
        lone: What to leave out because a position that attends only to itself has a query and a key without influence.
            Below causal attention, this is the first position: `"row"` leaves it out (queries), `"target"` its target
            (keys). Elsewhere, it is the only position of an example: `"datum"` leaves out examples with one position.
        own: Whether a position outside of the mask counts if its own target does. It does not if the mask hides it from
            every prediction, as with keys, values, and all inputs of an encoder.
        whole: Whether all rows count if all targets do and the mask has all positions.
    """

    kind: Kind = "all"
    outer: bool = False
    pattern: tuple[bool, ...] = ()
    lone: Lone = ""
    own: bool = True
    whole: bool = False

    @property
    def always_leaves_out(self) -> bool:
        """Whether rows are left out even if all targets count and the mask has all positions."""
        return self.kind == "positions" or bool(self.lone) or (self.kind == "measured" and not self.whole)

    def __str__(self) -> str:
        """Describe which rows count; empty if all do."""
        if self.kind == "positions":
            return f"{sum(self.pattern)} of {len(self.pattern)} rows of an example count"
        texts = {
            "mask": "rows that the mask has count",
            "causal": "rows count up to the last target that does",
            "targets": "rows count whose target does",
            "measured": "rows that count are measured in every batch",
        }
        return texts.get(self.kind, "") + (" but the first" if self.lone == "row" else "")


ALL = RowRule()
MEASURED = RowRule("measured")
_LONE: dict[Kind, tuple[Lone, ...]] = {
    "mask": ("datum",),
    "causal": ("row", "target"),
    "targets": ("row", "target", "datum"),
}


class BatchMasks:
    """The masks of a batch that determine which rows count.

    Args:
        targets: Which predictions count, as returned by `Loss.counted`. `None` if all do.
        mask: Which positions of the inputs are not padding, booleans `[N, S]`. `None` if the batch has no mask.
        pending: Whether `targets` are set later. In training, they are known when the gradient of the loss is.
        device: Device of the rows.
        beyond: Whether targets outside of the mask count. Only experiments set this.
    """

    def __init__(
        self,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        pending: bool = False,
        device: torch.device | str = "cpu",
        beyond: bool = False,
    ) -> None:
        self.beyond = beyond
        self.pending = pending
        self.mask = mask
        self.device = torch.device(device)
        self._found: dict[tuple[RowRule, int], Tensor | None] = {}
        self._positions: dict[RowRule, Tensor | None] = {}  # cache of `positions`
        self._all_count = False
        self._complete: bool | None = None  # cache of `are_complete`
        self._of_predictions: Tensor | None = None
        self._targets: Tensor | None = None
        if not pending:
            self.set_targets(targets)

    def set_targets(self, targets: Tensor | None) -> None:
        """Set which predictions count."""
        self.pending = False
        self._complete = None
        self._found.clear()
        self._positions.clear()
        self._of_predictions = targets
        self._targets = None if targets is None else targets.flatten(1)

    def of_predictions(self, v: Tensor) -> Tensor:
        """Return vectors shaped like predictions, with zeros where predictions do not count."""
        return v if self._of_predictions is None else v * self._of_predictions.to(v.device)

    @property
    def are_complete(self) -> bool:
        """Whether the host knows that all targets count and that the mask has all positions."""
        if self._complete is None:
            masks = [t for t in (None if self._all_count else self._targets, self.mask) if t is not None]
            known = not self.pending and not any(sync.is_asynchronous(t.device) for t in masks)
            self._complete = known and all(bool(t.all()) for t in masks)
        return self._complete

    def hidden(self, size: int, outer: bool) -> Tensor | None:
        """Return rows outside of the mask whose target counts, `[N, size]`; `None` if the shapes do not fit."""
        if self._targets is None or self.mask is None or self._targets.shape != self.mask.shape:
            return None
        return _spread(self._targets & ~self.mask, size, outer)

    def assume_all_count(self) -> None:
        """Assume that all targets count. The caller verifies this."""
        self._all_count = True
        self._complete = None

    def leave_out(self, rules: Set[RowRule]) -> bool:
        """Whether any of the rules may leave a row out. True if only the accelerator could tell."""
        if rules == {ALL}:
            return False
        return not self.are_complete or any(rule.always_leaves_out for rule in rules)

    def counted(self, rule: RowRule, size: int) -> Tensor | None:
        """Return which rows count, `[N, size]`, for `size` rows per example; `None` if all do."""
        if self.are_complete and not rule.always_leaves_out:
            return None
        key = (rule, size)
        if key not in self._found:
            found = self.positions(rule)
            found = None if found is None else _spread(found, size, rule.outer)
            if found is not None and not sync.is_asynchronous(found.device) and found.all():
                found = None
            self._found[key] = found
        return self._found[key]

    def positions(self, rule: RowRule) -> Tensor | None:
        """Return which positions count by a rule: `[N, S]`, or `[N, 1]` if an example's positions are alike."""
        if rule not in self._positions:
            self._positions[rule] = self._of_rule(rule)
        return self._positions[rule]

    def _of_rule(self, rule: RowRule) -> Tensor | None:
        """Compute `positions`."""
        if rule.kind in {"all", "measured"}:
            return None
        T, M = self._targets, self.mask
        if rule.lone == "datum" and M is not None:
            several = M.sum(1, keepdim=True) > 1
            T, M = (several if T is None else T & several), M & several
        first = self._first(T) if T is not None and rule.lone in {"row", "target"} else None
        if T is not None and first is not None and rule.lone == "target":
            T = T & ~first
        of_data = None if T is None else T.any(1, keepdim=True)
        if rule.kind == "data":
            return of_data
        if rule.kind == "positions":
            pattern = _as_tensor(rule.pattern, self.device).unsqueeze(0)
            return pattern if of_data is None else pattern & of_data
        if rule.kind == "targets":
            found = T
        else:
            found = of_data if rule.kind == "mask" or T is None else (T.flip(1).cumsum(1) > 0).flip(1)
            if M is not None and (found is None or found.shape[1] in {1, M.shape[1]}):
                found = M if found is None else found & M
                found = found | T if rule.own and T is not None and T.shape == found.shape else found
        return found & ~first if rule.lone == "row" and first is not None and found is not None else found

    def _first(self, targets: Tensor) -> Tensor:
        """Return the first position of each example that is in the mask, booleans `[N, S]` like targets."""
        there = self.mask if self.mask is not None and self.mask.shape == targets.shape else torch.ones_like(targets)
        return there & (there.cumsum(1) == 1)


def candidates(num_data: int, size: int, masks: Sequence[BatchMasks], alive: Sequence[Tensor]) -> Iterator[RowRule]:
    """Generate candidate rules for a use with `size` rows per example, simplest first.

    Args:
        num_data: Number of examples.
        size: Number of rows of an example.
        masks: The masks of some experiments.
        alive: Which rows had gradients in each experiment, `[N, size]`.
    """
    yield ALL
    yield RowRule("data")
    kinds: tuple[Kind, ...] = ("mask", "causal", "targets")
    for kind in kinds:
        lengths = {found.shape[1] for one in masks if (found := one.positions(RowRule(kind))) is not None}
        if len(lengths) != 1 or size % (length := lengths.pop()):
            continue
        for outer in (False, True) if 1 < length < size else (False,):
            yield RowRule(kind, outer)
            for lone in _LONE[kind] if length > 1 else ():
                yield RowRule(kind, outer, lone=lone)
    pattern = torch.stack([one.any(0) for one in alive]).any(0)
    if num_data > 1 and not pattern.all():
        yield RowRule("positions", pattern=tuple(pattern.tolist()))
        yield RowRule("positions", pattern=tuple(pattern.tolist()), lone="datum")


def matching_rule(
    masks: Sequence[BatchMasks], alive: Sequence[Tensor], cares: Tensor | None = None
) -> tuple[RowRule, bool]:
    """Return the rule that predicts, in all experiments, which rows have gradients.

    Args:
        masks: The masks of some experiments. All tensors are on the CPU: these are many small computations.
        alive: Which rows had gradients in each experiment, `[N, size]`.
        cares: Which rows to compare, likewise; `None` for all.

    Returns:
        The rule, and whether it is exact. If no rule is exact, the one that leaves out most rows without leaving out
        any row that had a gradient.
    """
    num_data, size = alive[0].shape
    cares = torch.ones_like(alive[0]) if cares is None else cares
    best, fewest = ALL, float("inf")
    for rule in candidates(num_data, size, masks, alive):
        found = [one.counted(rule, size) for one in masks]
        expected = [torch.ones_like(a) if one is None else one for one, a in zip(found, alive, strict=True)]
        if not any(bool(((one != a) & cares).any()) for one, a in zip(expected, alive, strict=True)):
            return rule, True
        covers = not any(bool((a & ~one & cares).any()) for one, a in zip(expected, alive, strict=True))
        number = sum(int(one.sum()) for one in expected)
        # A rule of kind "positions" covers by construction, which explains nothing.
        if covers and number < fewest and rule.kind != "positions":
            best, fewest = rule, number
    return best, False


def _spread(found: Tensor, size: int, outer: bool) -> Tensor | None:
    """Repeat booleans for positions to `size` rows per example; `None` if they do not fit."""
    length = found.shape[1]
    if length == size:
        return found
    if size % length:
        return None
    return found.repeat(1, size // length) if outer else found.repeat_interleave(size // length, 1)


@lru_cache(maxsize=256)
def _as_tensor(pattern: tuple[bool, ...], device: torch.device) -> Tensor:
    """Return a pattern on a device. It is cached, because recorded passes cannot copy from the host."""
    return torch.tensor(pattern).to(device, non_blocking=True)
