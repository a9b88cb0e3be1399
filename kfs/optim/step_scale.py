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

Overshoot becomes visible only after it has done harm. So the first steps are short, whatever the learning rate is, and
the scale rises fast while there is no overshoot: a warm-up of seven steps. After overshoot that was far too large, the
scale rises slowly, since the same step length would do the same harm again: networks that memorize their data have no
overshoot until their loss jumps up by orders of magnitude.

This is neither the longest nor the best step for the next batch. Such steps are too short in the long run, since they
avoid all noise, and noise can be undone by shorter steps at the end (Wu et al., 2018, call it short-horizon bias).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
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


@dataclass(eq=False)
class StepScale:
    """How much of each step is taken.

    Attributes:
        noise: Allowed overshoot, as a fraction of the loss.
    """

    noise: float
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
        return read_numbers([self._numbers[2].exp()])[0]

    def state(self) -> dict[str, Any]:
        """Return everything that is saved in a checkpoint. This synchronizes with the device."""
        return {"numbers": read_numbers(list(self._numbers)), "peak": self._peak}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._numbers = torch.tensor(state["numbers"], dtype=torch.float64)
        self._peak = float(state["peak"])
