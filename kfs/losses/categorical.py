"""Probabilities of classes, and what is drawn from them, in place: logits of language models fill much of a memory.

A tensor of probabilities is `[N, C, ...]`. Drawing labels from it needs cumulative sums in float64; these are computed
for some positions at a time. All else that is as large as the logits is the result itself.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import counting

# Cumulative sums that exist at the same time take about this many bytes.
_TEMPORARY_BYTES = 2**26
# More classes than these are drawn in two steps: a block of so many of them, and one of the block.
_MANY_CLASSES = 4096
_BLOCK = 256


def softmax(f: Tensor) -> Tensor:
    """Return the softmax over axis 1, in a new tensor whose classes are adjacent in memory if those of `f` are.

    PyTorch would copy a tensor whose axes are not in the order of its memory, and return it in another order.
    """
    if f.ndim > 2 and not f.is_contiguous():
        rows = f.movedim(1, -1)
        if rows.is_contiguous():
            return rows.softmax(-1).movedim(-1, 1)
    return f.softmax(1)


def subtract_one_(sigma: Tensor, labels: Tensor) -> Tensor:
    """Subtract one from `sigma`, `[N, C, ...]`, at the labels, `[N, 1, ...]`, in place; return `sigma`."""
    return sigma.scatter_add_(1, labels, sigma.new_full((1,) * labels.ndim, -1.0).expand(labels.shape))


def subtract_draws_(sigma: Tensor, u: Tensor) -> Tensor:
    """Draw a label for every position and subtract one there, in place.

    Args:
        sigma: Probabilities `[N, C, ...]`. They need not sum to one exactly.
        u: Numbers between 0 and 1, `[N, 1, ...]`.

    Returns:
        `sigma`.
    """
    num_data, classes = sigma.shape[:2]
    positions = prod(sigma.shape[2:])
    # In two steps, cumulative sums are those of blocks, and of a few tensors as large as one of them.
    numbers = classes // _BLOCK + 8 * _BLOCK if classes > _MANY_CLASSES else max(classes, 1)
    at_a_time = _TEMPORARY_BYTES // (8 * numbers)
    if 0 < num_data * positions <= at_a_time:
        return subtract_one_(sigma, _draw(sigma, u))
    # A view, or an error: a copy would be changed in vain.
    flat = sigma.view(num_data, classes, positions)
    u = u.reshape(num_data, 1, positions)
    for data, where in _pieces(num_data, positions, at_a_time):
        piece = flat[data, :, where]
        subtract_one_(piece, _draw(piece, u[data, :, where]))
    return sigma


def covariance_product(sigma: Tensor, v: Tensor, axis: int) -> Tensor:
    """Multiply `diag(sigma) - sigma sigma^T` with `v` along an axis, counted from the last one."""
    product = sigma * v
    return product.addcmul_(sigma, product.sum(axis, keepdim=True), value=-1)


def _draw(sigma: Tensor, u: Tensor) -> Tensor:
    """Return labels `[N, 1, ...]` for `[N, C, ...]`: the first class whose cumulative probability reaches `u`."""
    rows = sigma.movedim(1, -1)
    if rows.shape[-1] > _MANY_CLASSES:
        return _draw_in_two_steps(rows, u.movedim(1, -1)).movedim(-1, 1)
    cumulative = rows.to(torch.float64, copy=True, memory_format=torch.contiguous_format).cumsum_(-1)
    # Rounded probabilities sum to a bit more or less than one. So `u` is relative to their sum.
    reached = u.movedim(1, -1) * cumulative[..., -1:]
    # Where probabilities are NaN, no class is reached. An index must be one nevertheless.
    return torch.searchsorted(cumulative, reached).clamp_(max=rows.shape[-1] - 1).movedim(-1, 1)


def _draw_in_two_steps(rows: Tensor, u: Tensor) -> Tensor:
    """Return labels `[..., 1]` for probabilities `[..., C]`: draw a block of classes, and one of its classes.

    Cumulative sums in float64 of tens of thousands of classes would take longer than all else.
    """
    classes = rows.shape[-1]
    whole = classes // _BLOCK * _BLOCK
    dtype = at_least_float32(rows.dtype)
    sums = [rows[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1, dtype=dtype)]
    if whole < classes:
        sums.append(rows[..., whole:].sum(-1, keepdim=True, dtype=dtype))
    cumulative = torch.cat(sums, -1).double().cumsum_(-1)
    reached = u * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, reached).clamp_(max=cumulative.shape[-1] - 1)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    index = block * _BLOCK + counting(_BLOCK, rows.device)
    # The last block may be shorter.
    inside = (rows.gather(-1, index.clamp(max=classes - 1)).double() * (index < classes)).cumsum_(-1)
    # The sum of a block may be rounded to a bit more than its classes have together. Where that is left over, the last
    # class would be drawn, even if it has no probability.
    share = (reached - before) / (cumulative.gather(-1, block) - before)
    place = torch.searchsorted(inside, share * inside[..., -1:])
    return (block * _BLOCK + place.clamp_(max=_BLOCK - 1)).clamp_(max=classes - 1)


def _pieces(num_data: int, positions: int, at_a_time: int) -> Iterator[tuple[slice, slice]]:
    """Divide data and their positions into ranges of about `at_a_time` positions, at least one."""
    width = max(1, min(positions, at_a_time))
    data = max(1, at_a_time // max(positions, 1))
    for n in range(0, num_data, data):
        for p in range(0, positions, width):
            yield slice(n, n + data), slice(p, p + width)
