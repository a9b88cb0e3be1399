"""A step is tried on its own batch. If the loss does not fall as predicted, the step is shortened, or taken back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.state import restored

# The share of the change that the slope predicts which has to come true (Armijo's condition).
_SUFFICIENT = 1e-4
# A step is shortened to something between these shares of it: the loss cannot be trusted to be a parabola.
_SHORTEST, _LONGEST = 0.1, 0.5
_MOST_TRIALS = 10
# Two evaluations of one loss may differ by this many units of round-off, relative to its value.
_ROUND_OFF = 4.0


@dataclass(frozen=True)
class Trial:
    """How a step went.

    Attributes:
        share: How much of the step was taken. Zero if it was taken back.
        change: Change of the loss after the whole step.
    """

    share: float
    change: float


def try_step(params: list[Tensor], old: list[Tensor], change: Callable[[], float], slope: float, noise: float) -> Trial:
    """Shorten a step until the loss falls. If it never does, restore all parameters.

    Args:
        params: Parameters after the whole step. They are changed in place.
        old: Parameters before the step.
        change: Evaluates the change of the loss since then.
        slope: Change of the loss for the whole step if the loss was linear; not positive.
        noise: Round-off of losses: changes below it do not count.

    Example:
        >>> p, old = torch.tensor([-9.0]), torch.tensor([1.0])  # a step that is ten times too long, for a parabola
        >>> try_step([p], [old], lambda: float(p**2 - old**2), slope=-20.0, noise=0.0)
        Trial(share=0.1, change=80.0)
        >>> p
        tensor([0.])
    """
    new = [p.clone() for p in params]
    share = 1.0
    first = now = _or_infinite(change())
    for _ in range(_MOST_TRIALS):
        if now <= _SUFFICIENT * share * slope + noise:
            return Trial(share, first)
        share *= _next_share(now, share * slope)
        torch._foreach_copy_(params, torch._foreach_lerp(old, new, share))
        now = _or_infinite(change())
    torch._foreach_copy_(params, old)
    return Trial(0.0, first)


def _or_infinite(change: float) -> float:
    return change if isfinite(change) else inf


def _next_share(change: float, slope: float) -> float:
    """Return how much of a step to try next: the minimum of the parabola through what is known, within limits."""
    beyond = change - slope  # what the loss rises above the line of its slope
    share = 0.0 if beyond <= 0 else -0.5 * slope / beyond
    return min(max(share, _SHORTEST), _LONGEST)


class BatchLoss:
    """The loss on the batch of a step, as the user's closure computes it.

    Args:
        closure: The user's.
        model: What it trains.
        device: That of the model.
        mean: Returns the mean of a number over all processes.

    Attributes:
        result: What the closure returned at first.
    """

    def __init__(
        self, closure: Callable[[], Any], model: nn.Module, device: torch.device, mean: Callable[[float], float]
    ) -> None:
        """Call the closure."""
        self._mean = mean
        self._closure = closure
        self._model = model
        self._device = device
        self._random_state = torch.get_rng_state()
        if device.type == "cuda":  # pragma: no cover (tested on a GPU)
            self._cuda_random_state = torch.cuda.get_rng_state(device)
        with torch.enable_grad():
            self.result = closure()

    @cached_property
    def value(self) -> float:
        """The loss at first. This waits for an accelerator, and for other processes."""
        return self._mean(_value_of(self.result))

    @property
    def round_off(self) -> float:
        """By how much two evaluations may differ."""
        tensors = [torch.as_tensor(self.result), *self._model.parameters()]
        dtypes = {t.dtype for t in tensors if t.is_floating_point()}
        return _ROUND_OFF * max(torch.finfo(dtype).eps for dtype in dtypes) * abs(self.value)

    def evaluate(self) -> float:
        """Return the loss with the parameters of now. Buffers do not change, and the same random numbers are drawn."""
        with restored(self._model, self._device, refuse=False), torch.enable_grad():
            torch.set_rng_state(self._random_state)
            if self._device.type == "cuda":  # pragma: no cover (tested on a GPU)
                torch.cuda.set_rng_state(self._cuda_random_state, self._device)
            return self._mean(_value_of(self._closure()))


def _value_of(result: object) -> float:
    """Return the loss that a closure returned.

    Raises:
        ModelError: If it returned something else.
    """
    try:
        return float(torch.as_tensor(result).detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"The closure returned a {type(result).__name__} instead of the loss.",
            "Let it return the loss that it has called backward() of.",
        ) from error
