"""What is sent back for a batch, which determines the curvature matrix: `backpropagated_vectors`, for the engine.

The listing has three curvature matrices, datum by datum. Here are all of them, for whole batches, several vectors at a
time:

- `"type-2"`: the columns of a factor of the Fisher matrix in prediction space,
- `"ggn"`: the columns of a factor of the criterion's Hessian (the same for most losses),
- `"mc"`: gradients for labels drawn from the model's likelihood, over the root of their number,
- `"empirical"`: the gradient for the label at hand,
- `"forward-only"`: zeros. The gradient-based factor is then a multiple of the identity.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.settings import Settings
from kfs.losses import Loss
from kfs.losses.counter import Draws

Answer = TypeVar("Answer")
# Columns with this many numbers in all are computed together.
_NUMBERS = 2**22


def backpropagated_vectors(
    loss: Loss,
    f: Tensor,
    y: Tensor,
    settings: Settings,
    first_datum: int | Tensor,
    at_once: int,
) -> Iterator[Tensor]:
    """Generate the vectors of a batch.

    Args:
        loss: Describes the criterion.
        f: Predictions, `[N, ...]`, detached.
        y: Targets, `[N, ...]`.
        settings: Which curvature matrix is approximated.
        first_datum: Index of the first datum within all data, as in `Draws`.
        at_once: Number of vectors to return together.

    Yields:
        Some columns, `[columns, *f.shape]`: the same number of vectors for every datum.
    """
    if settings.fisher in {"type-2", "ggn"}:
        factor = loss.fisher_factor if settings.fisher == "type-2" else loss.hessian_factor
        # Many columns are computed together and sent back a few at a time, as far as they fit into memory.
        many = at_once * max(1, _NUMBERS // (at_once * max(f.numel(), 1)))
        start = 0
        while len(columns := factor(f, y, start, start + many)):
            # Chunks of equal size: a small last one would take nearly as long as the others.
            yield from columns.to(f.dtype).chunk(max(1, -(-len(columns) // at_once)))
            if len(columns) < many:
                return
            start += many
    elif settings.fisher == "mc":
        for start in range(0, settings.mc_samples, at_once):
            samples = range(start, min(start + at_once, settings.mc_samples))
            draws = [Draws(settings.seed, first_datum, settings.first_sample + sample) for sample in samples]
            gradients = [loss.sampled_gradient(f, y, d).to(f.dtype) for d in draws]
            # These may be as large as anything: a single one is not copied.
            together = gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(gradients)
            yield together if settings.mc_samples == 1 else together / settings.mc_samples**0.5
    elif settings.fisher == "empirical":
        yield loss.gradient(f, y).unsqueeze(0).to(f.dtype)
    else:
        # A backward pass is needed only to find out which uses predictions depend on.
        yield torch.zeros_like(f).unsqueeze(0)


def columns_at_once(settings: Settings, device: torch.device) -> int:
    """Return how many vectors to send back together: the setting or, if not given, what keeps a GPU busy."""
    if settings.fisher in {"empirical", "forward-only"} or (settings.fisher == "mc" and settings.mc_samples == 1):
        return 1
    return settings.columns_at_once or (8 if device.type == "cuda" else 1)


def one_by_one_if_needed(settings: Settings, run: Callable[[Settings], Answer]) -> Answer:
    """Compute something for several vectors together, or one by one if an operation does not work with `vmap`."""
    try:
        return run(settings)
    except (RuntimeError, NotImplementedError) as error:
        if "vmap" not in str(error):
            raise
        if settings.columns_at_once is not None:
            raise ModelError(
                "An operation's backward pass does not work for several vectors together (vmap).",
                "Leave columns_at_once out, or set it to one.",
            ) from error
        return run(replace(settings, columns_at_once=1))
