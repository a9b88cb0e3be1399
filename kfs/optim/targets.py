"""Targets of a pass: given by the user, guessed, or reconstructed from the gradient of the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.errors import LossError
from kfs.kfac.settings import Fisher
from kfs.kfac.structures import computable
from kfs.losses import Loss

# Beyond this relative distance, a gradient is that of other targets. Half precision rounds by less.
_TOLERANCE = 0.05


@dataclass
class Targets:
    """The targets of a pass, as far as they are known, and what the gradient of the loss says about them."""

    y: Tensor | None
    given: bool = False  # whether the user or the loss module gave them; if not, they are a guess
    scale: Tensor | float = 1.0  # the loss is this many times the sum of criteria; one if it is not needed
    mismatch: Tensor | float = 0.0  # relative distance between the gradient and that of the announced loss

    def give(self, y: Tensor) -> None:
        """Set the targets. If two different ones are given (mixed labels), neither belongs to the whole loss."""
        self.y = None if self.given else y.detach()
        self.given = True

    def match(self, f: Tensor, g: Tensor, loss: Loss, fisher: Fisher) -> Tensor:
        """Return the targets, or others with the same curvature, and set scale and mismatch.

        Predictions are in float32 or better. What has to be known depends on `fisher`.

        Raises:
            LossError: If targets are needed and not known.
        """
        # Half precision has lost the small entries that would show whether sums are zero.
        precise = g.dtype == f.dtype
        g = computable(g)
        if self.y is not None:
            try:
                loss.check_now(f, self.y)
                self.scale, self.mismatch = _fit(g, loss.gradient(f, self.y))
                if self.given or self.mismatch < _TOLERANCE:
                    return self.y
            except (ValueError, TypeError):
                if self.given:
                    raise
        self.mismatch = loss.departure(f, g) if precise else g.new_zeros(())
        self.scale = distance = g.new_ones(())
        try:
            y = loss.stand_in(f, g)
            if fisher == "empirical":
                self.scale, distance = _fit(g, loss.gradient(f, y))
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
        return y


def _fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor that brings a direction closest to `g`, and the distance that is left, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)
