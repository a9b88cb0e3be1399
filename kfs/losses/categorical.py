"""Class probabilities and draws of labels, computed in place, since logits of language models take much memory.

A tensor of probabilities is `[N, C, ...]`. Drawing labels requires cumulative sums in float64, which are computed for a
limited number of positions at a time. Apart from the result, no tensor as large as the logits is allocated.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import counting

# Approximate memory limit for cumulative sums.
_TEMPORARY_BYTES = 2**26
# With more classes than this, a draw takes two steps: first a block of `_BLOCK` classes, then a class of the block.
_MANY_CLASSES = 4096
_BLOCK = 256


def softmax(f: Tensor) -> Tensor:
    """Return the softmax over axis 1. If classes are contiguous in memory in `f`, they are in the result, too.

    PyTorch's softmax would copy a tensor that is not contiguous, and return it with another memory layout.
    """
    if f.ndim > 2 and not f.is_contiguous():
        rows = f.movedim(1, -1)
        if rows.is_contiguous():
            return rows.softmax(-1).movedim(-1, 1)
    return f.softmax(1)


def subtract_one_(sigma: Tensor, labels: Tensor) -> Tensor:
    """Subtract one from `sigma` `[N, C, ...]` at the labels `[N, 1, ...]`, in place, and return `sigma`."""
    return sigma.scatter_add_(1, labels, sigma.new_full((1,) * labels.ndim, -1.0).expand(labels.shape))


def subtract_draws_(sigma: Tensor, u: Tensor) -> Tensor:
    """Draw a label for every position, and subtract one at the label, in place.

    Args:
        sigma: Probabilities `[N, C, ...]`. Their sums may differ from one by rounding.
        u: Uniform numbers between 0 and 1, `[N, 1, ...]`.

    Returns:
        `sigma`.
    """
    num_data, classes = sigma.shape[:2]
    positions = prod(sigma.shape[2:])
    # Numbers per position. Two steps need cumulative sums over blocks, and a few tensors with the size of a block.
    numbers = classes // _BLOCK + 8 * _BLOCK if classes > _MANY_CLASSES else max(classes, 1)
    at_a_time = _TEMPORARY_BYTES // (8 * numbers)
    if 0 < num_data * positions <= at_a_time:
        return subtract_one_(sigma, _draw(sigma, u))
    # Use `view`, which fails instead of copying: the result must be written into `sigma`.
    flat = sigma.view(num_data, classes, positions)
    u = u.reshape(num_data, 1, positions)
    for data, where in _pieces(num_data, positions, at_a_time):
        piece = flat[data, :, where]
        subtract_one_(piece, _draw(piece, u[data, :, where]))
    return sigma


def covariance_product(sigma: Tensor, v: Tensor, axis: int) -> Tensor:
    """Multiply `diag(sigma) - sigma sigma^T` with `v` along a (negative) axis."""
    product = sigma * v
    return product.addcmul_(sigma, product.sum(axis, keepdim=True), value=-1)


def _draw(sigma: Tensor, u: Tensor) -> Tensor:
    """Return labels `[N, 1, ...]` for `[N, C, ...]`: the first class whose cumulative probability reaches `u`."""
    rows = sigma.movedim(1, -1)
    if rows.shape[-1] > _MANY_CLASSES:
        return _draw_in_two_steps(rows, u.movedim(1, -1)).movedim(-1, 1)
    cumulative = rows.to(torch.float64, copy=True, memory_format=torch.contiguous_format).cumsum_(-1)
    # Scale `u` by the sum of probabilities, which differs from one by rounding.
    reached = u.movedim(1, -1) * cumulative[..., -1:]
    # If probabilities are NaN, no class is reached. Clamp the index to keep it valid.
    return torch.searchsorted(cumulative, reached).clamp_(max=rows.shape[-1] - 1).movedim(-1, 1)


def _draw_in_two_steps(rows: Tensor, u: Tensor) -> Tensor:
    """Return labels `[..., 1]` for probabilities `[..., C]`: draw a block of classes, then a class of the block.

    Cumulative sums in float64 over tens of thousands of classes would dominate the run time.
    """
    # Draw a block, using the sums of all blocks.
    classes = rows.shape[-1]
    whole = classes // _BLOCK * _BLOCK
    dtype = at_least_float32(rows.dtype)
    sums = [rows[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1, dtype=dtype)]
    if whole < classes:
        sums.append(rows[..., whole:].sum(-1, keepdim=True, dtype=dtype))
    cumulative = torch.cat(sums, -1).double().cumsum_(-1)
    reached = u * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, reached).clamp_(max=cumulative.shape[-1] - 1)

    # Draw a class of the block.
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    index = block * _BLOCK + counting(_BLOCK, rows.device)
    # The last block may be shorter.
    inside = (rows.gather(-1, index.clamp(max=classes - 1)).double() * (index < classes)).cumsum_(-1)
    # Rescale to the sum of the classes of the block. The sum of the block may be rounded to a larger number, and the
    # last class would then be drawn for the difference, even if its probability is zero.
    share = (reached - before) / (cumulative.gather(-1, block) - before)
    place = torch.searchsorted(inside, share * inside[..., -1:])
    return (block * _BLOCK + place.clamp_(max=_BLOCK - 1)).clamp_(max=classes - 1)


def _pieces(num_data: int, positions: int, at_a_time: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of examples and positions with about `at_a_time` positions each, at least one."""
    width = max(1, min(positions, at_a_time))
    data = max(1, at_a_time // max(positions, 1))
    for n in range(0, num_data, data):
        for p in range(0, positions, width):
            yield slice(n, n + data), slice(p, p + width)
