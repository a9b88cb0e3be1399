"""Targets of a pass: given by the user, guessed, or reconstructed from the gradient of the loss."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfs.errors import LossError
from kfs.kfac.settings import Fisher
from kfs.kfac.structures import computable
from kfs.losses import Loss
from kfs.optim.other_losses import fit, other_losses, shows_targets

# Beyond this relative distance, a gradient is that of other targets. Half precision rounds by less.
_TOLERANCE = 0.05
_UNITS = 8.0  # of round-off, in each of two gradients


@dataclass
class Targets:
    """The targets of a pass, as far as they are known, and what the gradient of the loss says about them."""

    y: Tensor | None
    given: bool = False  # whether the user or the loss module gave them; if not, they are a guess
    scale: Tensor | float = 1.0  # the loss is this many times the sum of criteria; one if it is not needed
    mismatch: Tensor | float = 0.0  # relative distance between the gradient and that of the announced loss
    calls_for_changed: int = 0  # how often the loss module was called with labels, for predictions that were changed
    compare: bool = False  # whether to look for the scale, and for other losses, where that is not needed otherwise
    fit: tuple[Tensor, Tensor] | None = None  # scale, and how well it fits, if targets are known or shown
    others: dict[str, Tensor] = field(default_factory=dict)  # by name of a loss: whether the gradient is its own

    def give(self, y: Tensor, changed: bool = False) -> None:
        """Set the targets. If two different ones are given (mixed labels), neither belongs to the whole loss.

        Args:
            y: The targets.
            changed: Whether they are those of predictions that were changed, such as a part of them. Then they may not
                fit these predictions, and are only counted.
        """
        if changed:
            self.calls_for_changed += 1
            return
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
        if self.compare:
            self.others = other_losses(loss, f, g)
        if self.y is not None:
            try:
                loss.check_now(f, self.y)
                direction = loss.gradient(f, self.y)
                self.fit = self.scale, distance = fit(g, direction)
                self.mismatch = distance * (distance > _round_off(f, g, self.y, loss))
                if self.given or self.mismatch < _TOLERANCE:
                    return self.y
            except (ValueError, TypeError):
                if self.given:
                    raise
        self.fit = None
        self.mismatch = loss.departure(f, g) if precise else g.new_zeros(())
        return self._stand_in(f, g, loss, fisher)

    def _stand_in(self, f: Tensor, g: Tensor, loss: Loss, fisher: Fisher) -> Tensor:
        """Return targets that are as good as the true ones, which are not known, and set the scale."""
        self.scale = distance = g.new_ones(())
        try:
            if fisher == "ggn" and loss.hessian_needs_targets:
                raise loss.unknown_targets()
            y = loss.stand_in(f, g)
            if fisher == "empirical" or loss.weighs_targets or (self.compare and shows_targets(loss)):
                self.fit = self.scale, distance = fit(g, loss.gradient(f, y))
        except LossError:
            # The number of data is enough if curvature depends on inputs alone. The empirical Fisher raises below.
            if fisher not in {"empirical", "forward-only"}:
                raise
            y = f
        if fisher == "empirical" and not distance < _TOLERANCE:
            raise LossError(
                f"The scale of the gradient is not known, because the targets of {loss.name} are not known.",
                "Call the optimizer's targets(y) between the forward pass and backward(), or compute the loss by the "
                "module of loss=.",
            )
        # Labels explain the gradient if changes are harmless, such as another order or precision.
        if self.calls_for_changed == 1 and self.fit is not None and distance > _round_off(f, g, y, loss):
            self.mismatch = torch.maximum(torch.as_tensor(self.mismatch), distance)
        # Labels that do not explain the gradient are not the true ones, which may be soft, smoothed or mixed.
        if loss.weighs_targets and distance > _TOLERANCE and distance > _round_off(f, g, y, loss):
            raise loss.unknown_targets()
        return y

    def known_scale(self) -> float | None:
        """Return how many times the sum of criteria the loss is; `None` if that is not known."""
        if self.fit is None:
            return None
        scale, distance = map(float, self.fit)
        # A gradient that vanishes has no scale.
        return scale if scale and distance < _TOLERANCE else None

    def other_loss(self) -> str:
        """Return the name of another loss that the gradient is of; empty if none, or if the announced one fits."""
        if self.known_scale() is not None:
            return ""
        return next((name for name, is_its_own in self.others.items() if is_its_own), "")


def _round_off(f: Tensor, g: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Return how far a gradient that nearly vanishes may be from another way to compute it, relative to its length.

    Its entries are differences of a prediction and a target, or of their probabilities, and rounded like these.
    """
    terms = len(f) if y.is_floating_point() else y.numel()
    weight = loss.scale / (terms if loss.reduction == "mean" else 1)
    size = f.abs().clamp(max=1.0).norm()
    noise = _UNITS * torch.finfo(f.dtype).eps * weight * size
    result: Tensor = noise / g.norm().clamp(min=torch.finfo(f.dtype).tiny)
    return result
