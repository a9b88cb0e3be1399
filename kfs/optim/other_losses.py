"""Losses whose gradient shows that it is theirs: their targets can be read off it, and then it fits.

Cross-entropies are such losses. The gradient of a square loss is a residual, which may be anything.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kfs.losses import Loss, TokenCrossEntropy
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.cross_entropy import CrossEntropy
from kfs.losses.gaussian import Gaussian
from kfs.losses.huber import Huber
from kfs.losses.poisson import Poisson
from kfs.losses.square import Square

_SOFTMAX = (CrossEntropy, TokenCrossEntropy)
_SHOWN = (*_SOFTMAX, BinaryCrossEntropy)
# What a user writes may be any loss, and is not compared with others.
_COMPARED = (*_SHOWN, Square, Huber, Poisson, Gaussian)
# A gradient that fits another loss to this relative distance is that loss's. Half precision rounds by less.
_FITS = 0.02
# While predictions are near zero, gradients of many losses are alike. They have to differ from those at zero by this.
_DIFFERS_FROM_ZERO = 0.1
# Fewer numbers may fit by accident.
_ENOUGH_NUMBERS = 8


def shows_targets(loss: Loss) -> bool:
    """Whether targets can be read off a loss's gradient, so that its scale is known, too."""
    return isinstance(loss, _SHOWN)


def other_losses(announced: Loss, f: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Compare a gradient with those of other losses than the announced one.

    Args:
        announced: The announced loss.
        f: Predictions.
        g: The gradient of the loss that is minimized with respect to them.

    Returns:
        By name of a loss: whether the gradient is its own. Nothing is waited for.
    """
    if type(announced) not in _COMPARED or f.numel() < _ENOUGH_NUMBERS:
        return {}
    return {loss.name: _is_gradient_of(loss, f, g) for loss in _candidates(announced, f)}


def fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor that brings a direction closest to `g`, and the distance that is left, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)


def _candidates(announced: Loss, f: Tensor) -> Iterator[Loss]:
    """Yield losses of other families that take such predictions."""
    if not isinstance(announced, BinaryCrossEntropy):
        yield BinaryCrossEntropy(nn.BCEWithLogitsLoss())
    if isinstance(announced, _SOFTMAX):
        return
    if f.ndim > 1 and f.shape[1] > 1:
        yield CrossEntropy(nn.CrossEntropyLoss())
    if f.ndim == 3 and f.shape[2] > 1:
        yield TokenCrossEntropy()


def _is_gradient_of(loss: Loss, f: Tensor, g: Tensor) -> Tensor:
    y = loss.stand_in(f, g)
    direction = loss.gradient(f, y)
    scale, distance = fit(g, direction)
    _, from_zero = fit(direction, loss.gradient(torch.zeros_like(f), y))
    # The scale is zero if the gradient is.
    return (scale > 0) & (distance < _FITS) & (from_zero > _DIFFERS_FROM_ZERO)
