r"""Backpropagated vectors $\blacktriangle_{n,c}$: what is sent back through the net makes the curvature matrix.

The curvature of each datum is $J_n^\top [\sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top] J_n$, with

- `"type-2"`: the columns of a factor of the Fisher matrix in prediction space,
- `"ggn"`: the columns of a factor of the criterion's Hessian (the same for most losses),
- `"mc"`: gradients for labels drawn from the model's likelihood, over the root of their number,
- `"empirical"`: the gradient for the label at hand,
- `"forward-only"`: nothing at all; the gradient-based factor is then the identity.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kfs.kfac.settings import Settings
from kfs.losses import Loss
from kfs.losses.counter import Draws


def backpropagated_vectors(
    loss: Loss, f: Tensor, y: Tensor, settings: Settings, first_datum: int, at_once: int
) -> Iterator[Tensor]:
    """Generate the vectors of a batch.

    Args:
        loss: Describes the criterion.
        f: Predictions, `[N, ...]`, detached.
        y: Targets, `[N, ...]`.
        settings: Say which curvature matrix is approximated.
        first_datum: Index of the first datum within all data: draws depend on it.
        at_once: How many vectors to return together.

    Yields:
        Some vectors for every datum, `[columns, *f.shape]`.
    """
    if settings.fisher in {"type-2", "ggn"}:
        factor = loss.fisher_factor if settings.fisher == "type-2" else loss.hessian_factor
        start = 0
        while len(columns := factor(f, y, start, start + at_once)):
            yield columns
            start += at_once
    elif settings.fisher == "mc":
        for start in range(0, settings.mc_samples, at_once):
            samples = range(start, min(start + at_once, settings.mc_samples))
            draws = [Draws(settings.seed, first_datum, sample) for sample in samples]
            yield torch.stack([loss.sampled_gradient(f, y, d) for d in draws]) / settings.mc_samples**0.5
    elif settings.fisher == "empirical":
        yield loss.gradient(f, y).unsqueeze(0)
    else:
        yield torch.zeros_like(f).unsqueeze(0)  # only to learn on which uses predictions depend
