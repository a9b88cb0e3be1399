"""History of a training run that steps are checked against: the last good step, usual sizes, and earlier losses."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, log, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.errors import SolverError
from kfs.problem.whole_parameters import whole
from kfs.runtime.sync import numbers

# A run has diverged if this many times `patience` steps in a row were skipped.
_MOST_SKIPPED = 10
# The largest size decays by this factor in each comparison. A size that recurs within some thousands of them is usual.
_LEFT_OF_SIZE = 0.999
# It decays by this factor if new sizes are this many times smaller: it was a spike, before usual sizes were known.
_LEFT_OF_SPIKE = 0.9
_FAR_SMALLER = 1000.0
# Fraction of the average of losses that is kept in every step.
_KEPT_OF_LOSSES = 0.9
# A loss is far above the lowest one if it exceeds it by this fraction, and by this many standard errors.
_MARGIN = 0.1
_ERRORS = 4.0
_LOSSES_FOR_VARIANCE = 20
_FEW_LOSSES = 10  # Of fewer losses, the average is mostly noise.
_WORSE_STEPS = 50  # A run gets worse if losses are far above the lowest one for this many steps.
_MOST_PAST_STEPS = 2000  # number of losses that are stored
# Progress is the difference of two averages over all losses, in which the n-th loss is weighted by n to these powers:
# most of the weight is around 86 % and around 94 % of the losses so far, regardless of their number.
_EARLIER = 5
_LATER = 15
_FEW_FOR_PROGRESS = 15
# A usual size reduces the number of refusals by this. Single spikes never add up, but spikes in every other step do.
_FORGOTTEN = 0.5


class GoodStep(NamedTuple):
    """A step with finite gradients."""

    step: int
    loss: object  # return value of its closure; it is read from an accelerator only for an error message
    lr: Any
    damping: float

    @classmethod
    def of(cls, step: int, result: object, group: Mapping[str, Any], damping_scale: float) -> "GoodStep":
        """Describe a step by its number, the return value of its closure, its group and its damping."""
        loss = result.detach() if isinstance(result, Tensor) else result
        return cls(step, loss, group.get("lr"), group["damping"] * damping_scale)

    def __str__(self) -> str:
        loss = ""
        if isinstance(self.loss, (int, float)) or (isinstance(self.loss, Tensor) and self.loss.numel() == 1):
            loss = f"loss {float(self.loss):.4g}, "
        lr = "" if self.lr is None else f"lr {float(self.lr):.3g}, "
        return f"Step {self.step} was fine ({loss}{lr}damping {self.damping:.3g})."


@dataclass
class LastGoodStep:
    """The last step with finite gradients, and how many steps were skipped since.

    It is not saved: a resumed run starts to count again.
    """

    patience: int
    last: GoodStep | None = None  # `None` before the first one
    skipped: int = 0
    _unchecked: bool = False  # whether a step was skipped since the last check

    def note(self, fine: GoodStep) -> None:
        """Record a good step."""
        self.skipped = 0
        self.last = fine

    def note_skipped(self) -> None:
        """Count a step that was skipped."""
        self.skipped += 1
        self._unchecked = True

    def check(self, params: Mapping[str, Tensor]) -> None:
        """If steps were skipped since the last check, raise if later steps cannot succeed.

        Raises:
            SolverError: If parameters are not finite, or if very many steps in a row were skipped.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        finite = numbers([whole(p.isfinite()).all() for p in params.values()])
        broken = [name for name, is_finite in zip(params, finite, strict=True) if not is_finite]
        if not broken and self.skipped < _MOST_SKIPPED * self.patience:
            return
        what = f"{self.skipped} steps in a row had gradients or losses that are not finite"
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            what = f"parameter {broken[0]!r}{more} is not finite"
        last = self.last or "No step was fine before: check the data, and the initialization of parameters."
        raise SolverError(
            f"The run has diverged: {what}. {last}",
            "Go back to an earlier checkpoint, and use a smaller lr, warm-up, a larger damping or a smaller trust.",
        )


class PastStep(NamedTuple):
    """A step with a known loss."""

    step: int
    loss: float  # on its batch
    scale: float  # how much of the step was taken


@dataclass(eq=False)
class LossTrend:
    """Losses so far, to detect a run that gets worse.

    A run gets worse if, for many steps, the loss has lost half of its improvement, is a tenth above its lowest value,
    and is higher than noise explains. Losses are averaged over about ten steps.

    Attributes:
        history: Steps with new factors; if there are many, every second one is dropped.
        mean: The current average; infinite if it is unknown.
        progress: How much the loss has fallen lately; infinite if few losses are known.
    """

    history: list[PastStep] = field(default_factory=list)
    mean: float = inf
    progress: float = inf
    _earlier: float = 0.0
    _later: float = 0.0
    _first: float = inf
    _lowest: float = inf
    _lowest_at: int = 0
    _variance: float = 0.0  # of losses around their trend
    _previous: float = inf  # the last loss
    _weight: float = 0.0  # fraction of the average that does not come from its start
    _last: int = 0  # step of the last loss
    _count: int = 0  # of losses
    _worse_since: int | None = None

    def note(self, step: int, loss: float, scale: float) -> str:
        """Record the loss of a step. If the run gets worse, return a description, otherwise an empty string."""
        if not isfinite(loss):
            return ""
        self.history.append(PastStep(step, loss, scale))
        if len(self.history) > _MOST_PAST_STEPS:
            del self.history[1::2]
        noise = self._average(step, loss)
        if self._count < _FEW_LOSSES:
            return ""
        if not isfinite(self._first):
            self._first = self.mean
        if self.mean < self._lowest:
            self._lowest = self.mean
            self._lowest_at = step
        # The lowest of many averages is below their mean by chance, by about this many standard errors.
        errors = _ERRORS + sqrt(2 * log(self._count))
        margin = max((self._first - self._lowest) / 2, _MARGIN * self._lowest, errors * noise)
        if self.mean <= self._lowest + margin:
            self._worse_since = None
            return ""
        if self._worse_since is None:
            self._worse_since = step
        if step - self._worse_since < _WORSE_STEPS:
            return ""
        steps = step - self._worse_since
        self._worse_since = None  # It is reported again if it continues.
        return (
            f"the loss has been rising: it is {self.mean:.3g} at step {step} and has been far above its lowest value, "
            f"{self._lowest:.3g} at step {self._lowest_at}, for {steps} steps (it began at {self._first:.3g})"
        )

    def _average(self, step: int, loss: float) -> float:
        """Update all averages with a loss, and return the standard error of their mean."""
        if self._count == 0:
            self.mean = self._previous = loss
        # The mean.
        self._count += 1
        kept = _KEPT_OF_LOSSES ** max(1, step - self._last)
        self._weight = kept * self._weight + 1 - kept
        self.mean += (1 - kept) / self._weight * (loss - self.mean)
        self._last = step
        # The variance. It is computed from differences, which a trend changes little, and over more losses than the
        # mean, since a few of them may be close to each other by chance.
        square = (loss - self._previous) ** 2 / 2
        self._variance += (square - self._variance) / min(max(1, self._count - 1), _LOSSES_FOR_VARIANCE)
        self._previous = loss
        # Progress.
        self._earlier += (self.mean - self._earlier) * (_EARLIER + 1) / (_EARLIER + self._count)
        self._later += (self.mean - self._later) * (_LATER + 1) / (_LATER + self._count)
        if self._count >= _FEW_FOR_PROGRESS:
            self.progress = self._earlier - self._later
        return sqrt(self._variance * (1 - kept) / (1 + kept))

    def state(self) -> dict[str, Any]:
        """Return everything that is saved in a checkpoint."""
        return asdict(self) | {"history": [tuple(one) for one in self.history]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "LossTrend":
        """Restore a trend from `state`."""
        return cls(**{**state, "history": [PastStep(*one) for one in state["history"]]})


@dataclass(eq=False)
class UsualSizes:
    """The largest sizes so far of gradients or factors, to refuse sizes that are far larger.

    A single gradient that is far too large, because of a broken batch or a flipped bit, would dominate the average over
    gradients, and so all steps, until momentum has forgotten it: for 130 steps, if it is a million times too large. An
    input that is far too large dominates a factor even longer. Sizes that recur are accepted, because the usual size
    has grown. The first size cannot be compared: it is accepted, and decays fast if later ones are far smaller. All
    decisions are made on the device of the sizes, without synchronization.
    """

    limit: float  # Sizes that are larger than this many times the largest so far are refused.
    patience: int  # After this many refusals, with hardly any usual size in between, every size is accepted.
    _refusals: Tensor | float = 0.0
    # Upper bounds of sizes: `limit` times the largest so far, which decay slowly; NaN if only zeros are known.
    _names: tuple[str, ...] = ()  # names that were compared last
    _most: Tensor | None = None  # bounds for these names
    _others: dict[str, Tensor | float] = field(default_factory=dict)  # bounds for other names

    def check(
        self, names: tuple[str, ...], sizes: Tensor, usable: Tensor | None = None, learn: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compare sizes with earlier ones.

        Args:
            names: Names of the tensors that were measured.
            sizes: New sizes, `[n]`; with several processes, the largest of all, which are the same everywhere.
            usable: A flag that is the same on all ranks. If it is false, the tensors are not used for other reasons,
                and their sizes do not count.
            learn: Whether to compare later sizes with these, too. It takes some more operations.

        Returns:
            Whether all sizes are finite, and whether they are finite and accepted.
        """
        refusals = _as_tensor(self._refusals, sizes)
        most = self._most_of(names, sizes)
        # A comparison with NaN is false: sizes without a bound are accepted.
        absurd = ((sizes > most) & (refusals < self.patience - 0.5)).any()
        finite = sizes.isfinite().all()
        good = finite & ~absurd
        refused = finite & absurd
        forgotten = (refusals - _FORGOTTEN * good).clamp(min=0)
        self._refusals = forgotten + (refused if usable is None else refused & usable)
        if learn:
            counts = good if usable is None else good & usable
            new = torch.where(counts & (sizes > 0), self.limit * sizes, torch.nan)
            left = torch.where(_FAR_SMALLER * new < most, _LEFT_OF_SPIKE * most, _LEFT_OF_SIZE * most)
            self._most = torch.fmax(left, new)
        return finite, good

    def _most_of(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        """Return upper bounds of sizes, `[n]`."""
        if self._most is None or self._names != names:
            self._others |= self._known()
            self._names = names
            self._most = torch.stack([_as_tensor(self._others.get(name, torch.nan), like) for name in names])
        return self._most

    def _known(self) -> dict[str, Tensor]:
        return {} if self._most is None else dict(zip(self._names, self._most.unbind(), strict=True))

    def state(self) -> dict[str, Any]:
        """Return bounds and refusals for a checkpoint. This synchronizes with the device."""
        found = {**self._others, **self._known(), "": self._refusals}
        values = dict(zip(found, numbers([torch.as_tensor(one) for one in found.values()]), strict=True))
        refusals = values.pop("")
        return {"most": {name: most for name, most in values.items() if isfinite(most)}, "refusals": refusals}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._most = None
        self._others = dict(state["most"])
        self._refusals = float(state["refusals"])


def _as_tensor(size: Tensor | float, like: Tensor) -> Tensor:
    """Return a size as a scalar tensor."""
    return size.to(like) if isinstance(size, Tensor) else torch.full((), size, dtype=like.dtype, device=like.device)
