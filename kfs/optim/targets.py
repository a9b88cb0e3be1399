"""Targets of a pass: given by the user, guessed, or reconstructed from the gradient of the loss."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfs.errors import LossError
from kfs.kfac.settings import Fisher
from kfs.kfac.structures import computable
from kfs.losses import Loss

# Beyond this relative distance, a gradient is that of other targets. Half precision rounds by less.
_TOLERANCE = 0.05


class Match(NamedTuple):
    """What the gradient of a loss with respect to predictions shows.

    Attributes:
        y: The targets, or others with the same curvature.
        scale: The gradient is this many times that of the sum of criteria; one if it is not needed.
        mismatch: Distance between the gradient and those of the announced loss, relative to the gradient.
    """

    y: Tensor
    scale: Tensor
    mismatch: Tensor


@dataclass
class Targets:
    """The targets of a pass, as far as they are known.

    Attributes:
        y: The targets, or `None`.
        given: Whether the user or the loss module gave targets. If not, `y` is a guess.
    """

    y: Tensor | None = None
    given: bool = False

    def give(self, y: Tensor) -> None:
        """Set the targets. If two different ones are given (mixed labels), neither belongs to the whole loss."""
        self.y = None if self.given else y.detach()
        self.given = True

    def match(self, f: Tensor, g: Tensor, loss: Loss, fisher: Fisher) -> Match:
        """Compare the gradient of a loss with that of the announced loss.

        Args:
            f: Predictions, in float32 or better.
            g: Gradient with respect to them.
            loss: The announced loss.
            fisher: The curvature matrix, which decides what has to be known.

        Raises:
            LossError: If targets are needed and not known.
        """
        # Half precision has lost the small entries that would show whether sums are zero.
        precise = g.dtype == f.dtype
        g = computable(g)
        if self.y is not None:
            try:
                loss.check(f, self.y)
                scale, mismatch = _fit(g, loss.gradient(f, self.y))
                if self.given or mismatch < _TOLERANCE:
                    return Match(self.y, scale, mismatch)
            except (ValueError, TypeError):
                if self.given:
                    raise
        scale = distance = g.new_ones(())
        try:
            y = loss.stand_in(f, g)
            if fisher == "empirical":
                scale, distance = _fit(g, loss.gradient(f, y))
        except LossError:
            # The number of data is enough if curvature depends on inputs alone. The empirical Fisher raises below.
            if fisher not in {"empirical", "forward-only"}:
                raise
            y = f
        if fisher == "empirical" and not distance < _TOLERANCE:
            raise LossError(
                f"The scale of the gradient is not known, because the targets of {loss.name} are not known.",
                "Call the optimizer's targets(y) before backward(), or compute the loss by the module of loss=.",
            )
        return Match(y, scale, loss.departure(f, g) if precise else g.new_zeros(()))


def _fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor that brings a direction closest to `g`, and the distance that is left, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)
