r"""The scale of steps: how much of each step is taken, so that steps that are too long do little harm.

Let $\bar\theta$ be an average over the latest parameters, mostly over ten steps, and $g$ the gradient of the next
batch at $\theta$, where the last step has ended. The *overshoot* of the latest steps is half the slope of the loss on
the way from the average,

$$
c = \tfrac{1}{2}\, g^\top (\theta - \bar\theta).
$$

It is negative as long as steps lead downhill. It is positive if they have gone too far, be it because of curvature or
because of noise in their gradients, so that the average is the better place: for a parabola that has its minimum
there, $c$ is what the loss would fall by. The next batch knows nothing of the noise of earlier ones, so that noise
alone does not make $c$ positive.

Steps that are a little too long are the price of progress. Overshoot may be a share of the loss, the setting `noise`.
The *scale* multiplies learning rates. While the average of $c$ over some steps exceeds that share, it falls, and
otherwise it rises, up to one. If a schedule has lowered the learning rate, noise ends with it sooner or later, and
more is allowed: by the square of the factor.

This is neither the longest nor the best step for the next batch. Such steps are too short in the long run, since they
avoid all noise, and noise can be undone by shorter steps at the end (Wu et al., 2018, call it short-horizon bias).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from kfs.optim.rule import KEPT_OF_STEPS, Scalar, Tensors
from kfs.waiting import numbers as read_numbers

# How much the average of overshoots keeps in every step.
_KEPT_OF_OVERSHOOTS = 0.8
# They are compared when their average has this share of its weight: after five steps.
_ENOUGH = 0.6
# The scale rises by at most this share of itself in a step, and falls by at most twice as much.
_RATE = 0.03
_FASTEST_FALL = 2.0
# Smaller tensors are put side by side before they are multiplied: there are many of them.
_SMALL = 2**16


def inner_product(left: Tensors, right: Tensors) -> Tensor:
    """Return the sum of products of all numbers, in float64.

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

    Both averages keep `KEPT_OF_STEPS`. Learning rates count as if they had always been the current one.
    """
    return -lr * KEPT_OF_STEPS / (1 - KEPT_OF_STEPS)


def next_numbers(numbers: Tensor, overshoot: Tensor, allowed: Scalar) -> Tensor:
    """Return the numbers of a scale after another step: average overshoot, its weight, and the scale's logarithm.

    Args:
        numbers: The same before, `[3]`.
        overshoot: That of the latest steps.
        allowed: The largest one that is allowed; infinite if nobody knows.

    Example:
        >>> numbers = torch.zeros(3, dtype=torch.float64)
        >>> for _ in range(10):
        ...     numbers = next_numbers(numbers, torch.tensor(2.0), allowed=1.0)  # twice as much as allowed
        >>> numbers[2].exp()
        tensor(0.8353, dtype=torch.float64)
    """
    mean, weight, logarithm = numbers.unbind()
    mean = _KEPT_OF_OVERSHOOTS * mean + (1 - _KEPT_OF_OVERSHOOTS) * overshoot
    weight = _KEPT_OF_OVERSHOOTS * weight + (1 - _KEPT_OF_OVERSHOOTS)
    change = _RATE * (1 - mean / (weight * allowed)).clamp(-_FASTEST_FALL, 1.0)
    logarithm = torch.where(weight > _ENOUGH, (logarithm + change).clamp(max=0.0), logarithm)
    return torch.stack([mean, weight, logarithm])


@dataclass(eq=False)
class StepScale:
    """How much of each step is taken.

    Attributes:
        noise: The share of the loss that overshoot may be.
    """

    noise: float
    _numbers: Tensor | None = None  # see `next_numbers`; changed in place, where the device decides
    _peak: float = 0.0  # the largest learning rate so far

    def numbers_on(self, device: torch.device) -> Tensor:
        """Return the numbers of the scale, on the device of parameters."""
        if self._numbers is None or self._numbers.device != device:
            before = torch.zeros(3, dtype=torch.float64) if self._numbers is None else self._numbers
            self._numbers = before.to(device)
        return self._numbers

    def allowed(self, loss: float, groups: Sequence[Mapping[str, Any]]) -> float:
        """Return the largest overshoot that is allowed.

        Args:
            loss: The loss, above the smallest one that predictions could have; infinite if nobody knows.
            groups: Parameter groups, with the learning rates of now.
        """
        lr = max(float(group["lr"]) for group in groups)
        self._peak = max(self._peak, lr)
        allowed = self.noise * loss * (self._peak / lr) ** 2 if lr else inf
        return allowed if allowed > 0 else inf

    def value(self) -> float:
        """Return the scale. This waits for the device."""
        return 1.0 if self._numbers is None else read_numbers([self._numbers[2].exp()])[0]

    def state(self) -> dict[str, Any]:
        """Return everything that changes, for a file. This waits for the device."""
        known = [0.0, 0.0, 0.0] if self._numbers is None else read_numbers(list(self._numbers))
        return {"numbers": known, "peak": self._peak}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Undo `state`."""
        self._numbers = torch.tensor(state["numbers"], dtype=torch.float64)
        self._peak = float(state["peak"])
