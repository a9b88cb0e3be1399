r"""The scale of steps: how much of each step is taken, so that steps that are too long do little harm.

Let $\bar\theta$ be an average over the latest parameters, mostly over ten steps, and $g$ the gradient of the next
batch at $\theta$, where the last step has ended. The *overshoot* of the latest steps is half the slope of the loss on
the way from the average,

$$
c = \tfrac{1}{2}\, g^\top (\theta - \bar\theta).
$$

It is negative as long as steps lead downhill. It is positive if they have gone too far, because of curvature or because
of noise in their gradients, so that the average is the better place: for a parabola with its minimum there, the loss
would fall by $c$. The next batch is independent of the noise of earlier ones, so that noise alone does not make $c$
positive.

Progress requires steps that are a little too long. Overshoot may be a fraction of the loss, the setting `noise`, as
long as the loss falls. If the loss does not fall, most of it may be noise of the data that no step removes, and
overshoot may be at most twice the recent decrease of the loss. The *scale* multiplies learning rates. While the average
of $c$ over some steps exceeds the allowed value, the scale falls, and otherwise it rises, up to one. If a schedule has
lowered the learning rate, noise ends with it sooner or later, and more is allowed: by the square of the factor.

`LossTrend` averages losses: it says how much the loss has fallen lately, and notices a run that gets worse.

Overshoot becomes visible only after it has done harm. So the first steps are short, whatever the learning rate is, and
the scale rises fast while there is no overshoot: a warm-up of seven steps. After overshoot that was far too large, the
scale rises slowly, since the same step length would do the same harm again: networks that memorize their data have no
overshoot until their loss jumps up by orders of magnitude.

This is neither the longest nor the best step for the next batch. Such steps are too short in the long run, since they
avoid all noise, and noise can be undone by shorter steps at the end (Wu et al., 2018, call it short-horizon bias).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, log, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.optim.update_rule import KEPT_OF_STEPS, Scalar, Tensors
from kfs.runtime.sync import numbers as read_numbers

# Fraction of the average of overshoots that is kept in every step.
_KEPT_OF_OVERSHOOTS = 0.8
# The scale falls only if this average has at least this weight: after five steps.
_ENOUGH = 0.6
# The logarithm of the scale falls by at most twice this number in a step, and rises by at most this number; in early
# steps by more: `_EARLY` over their number, up to `_FASTEST_RISE`.
_RATE = 0.03
_FASTEST_FALL = 2.0
_EARLY = 3.0
_FASTEST_RISE = 0.3
# The first learning rate, including the scale, is at most this.
_FIRST_LR = 0.2
# Overshoot may be this many times the progress of the loss, and in any case this fraction of the setting `noise`.
_PER_PROGRESS = 2.0
_LEAST = 0.03
# A learning rate below this fraction of the largest so far counts as zero.
_TINY = 1e-6
# Overshoot is far too large if it is this many times the allowed one. Then the scale rises slowly, by this number.
_FAR_TOO_LARGE = 3.0
_SLOW_RISE = 0.01
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
# Smaller tensors are concatenated before they are multiplied, because there are many of them.
_SMALL = 2**16


def inner_product(left: Tensors, right: Tensors) -> Tensor:
    """Return the sum of products of all entries, in float64.

    Example:
        >>> inner_product([torch.ones(2), torch.ones(3)], [torch.ones(2), 2 * torch.ones(3)])
        tensor(8., dtype=torch.float64)
    """
    pairs = list(zip(left, right, strict=True))
    large = [(a, b) for a, b in pairs if a.numel() > _SMALL]
    small = [(a, b) for a, b in pairs if a.numel() <= _SMALL]
    products = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in large]
    if small:
        flat = [torch.cat([t.reshape(-1) for t in side]) for side in zip(*small, strict=True)]
        products.append(torch.dot(*flat).double())
    return torch.stack(products).sum()


def displacement_factor(lr: Scalar) -> Scalar:
    """Return the factor between an average of steps and the displacement of parameters from their average.

    Both averages keep `KEPT_OF_STEPS`. The learning rate is treated as if it had always been the current one.
    """
    return -lr * KEPT_OF_STEPS / (1 - KEPT_OF_STEPS)


class Numbers(NamedTuple):
    """The numbers of a scale, on the device of parameters.

    Attributes:
        overshoot: Average over the latest steps, times `weight`.
        weight: Weight of this average: it starts at zero and tends to one.
        logarithm: Logarithm of the scale.
        ceiling: The largest logarithm that is currently allowed.
        steps: Number of steps taken.
    """

    overshoot: Tensor
    weight: Tensor
    logarithm: Tensor
    ceiling: Tensor
    steps: Tensor


def next_numbers(numbers: Tensor, overshoot: Tensor, allowed: Scalar) -> Tensor:
    """Return the numbers of a scale after another step.

    Args:
        numbers: Numbers before the step, `[5]` (see `Numbers`).
        overshoot: Overshoot of the latest steps.
        allowed: The largest allowed overshoot; infinite if it is unknown.

    Example:
        >>> numbers = torch.zeros(5, dtype=torch.float64)
        >>> for _ in range(10):
        ...     numbers = next_numbers(numbers, torch.tensor(2.0), allowed=1.0)  # twice as much as allowed
        >>> numbers[2].exp()
        tensor(0.8353, dtype=torch.float64)
    """
    old = Numbers(*numbers.unbind())
    mean = _KEPT_OF_OVERSHOOTS * old.overshoot + (1 - _KEPT_OF_OVERSHOOTS) * overshoot
    weight = _KEPT_OF_OVERSHOOTS * old.weight + (1 - _KEPT_OF_OVERSHOOTS)
    steps = old.steps + 1
    ratio = mean / (weight * allowed)
    # There is no overshoot before the first step.
    rise = (_EARLY / steps).clamp(_RATE, _FASTEST_RISE) * (old.steps > 0)
    fall = _RATE * (weight > _ENOUGH)
    change = torch.where(ratio < 1, rise * (1 - ratio).clamp(max=1.0), fall * (1 - ratio).clamp(min=-_FASTEST_FALL))
    logarithm = torch.minimum(old.logarithm + change, old.ceiling)
    is_far = (ratio > _FAR_TOO_LARGE) & (weight > _ENOUGH)
    ceiling = torch.where(is_far, logarithm, (old.ceiling + _SLOW_RISE).clamp(max=0.0))
    return torch.stack([mean, weight, logarithm, ceiling, steps])


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
class StepScale:
    """How much of each step is taken.

    Attributes:
        noise: Allowed overshoot, as a fraction of the loss; `None` for whole steps.
    """

    noise: float | None
    _numbers: Tensor = field(default_factory=lambda: torch.zeros(len(Numbers._fields), dtype=torch.float64))
    _peak: float = 0.0  # the largest learning rate so far

    def numbers_on(self, device: torch.device) -> Tensor:
        """Return `Numbers` as a tensor on the device of parameters, where they change in place."""
        self._numbers = self._numbers.to(device)
        return self._numbers

    def allowed(self, loss: float, progress: float, groups: Sequence[Mapping[str, Any]]) -> float:
        """Return the largest allowed overshoot.

        Args:
            loss: The loss above the smallest loss that predictions could have; infinite if it is unknown.
            progress: How much the loss has fallen lately; infinite if it is unknown.
            groups: Parameter groups, with the current learning rates.
        """
        if self.noise is None:
            return inf
        lr = max(float(group["lr"]) for group in groups)
        if self._peak == 0 and lr > _FIRST_LR:
            self._numbers[2] = log(_FIRST_LR / lr)
        self._peak = max(self._peak, lr)
        share = self.noise * loss
        share = min(share, max(_PER_PROGRESS * progress, _LEAST * share))
        # A schedule that ends with learning rates near zero ends noise.
        allowed = share * (self._peak / lr) ** 2 if lr > _TINY * self._peak else inf
        return allowed if allowed > 0 else inf

    def value(self) -> float:
        """Return the scale. This synchronizes with the device."""
        return 1.0 if self.noise is None else read_numbers([self._numbers[2].exp()])[0]

    def state(self) -> dict[str, Any] | None:
        """Return everything that is saved in a checkpoint. This synchronizes with the device."""
        if self.noise is None:
            return None
        return {"numbers": read_numbers(list(self._numbers)), "peak": self._peak}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state`. The run that saved it may have taken whole steps."""
        if self.noise is not None and state is not None:
            self._numbers = torch.tensor(state["numbers"], dtype=torch.float64)
            self._peak = float(state["peak"])
