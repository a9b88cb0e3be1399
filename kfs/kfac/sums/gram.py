r"""The hot spot of KFAC: $X^\top X$, added to a running total.

The product is symmetric, so only its upper triangle is computed: strip by strip, where a strip is a few rows of the
result from the diagonal to the right. With `D` columns and strips of width `w` this costs `(1 + w / D) / 2` of a full
product. Inputs in half precision are multiplied as they are, with results in float32 where the device can do that.
"""

import torch
from torch import Tensor

# Up to which number of columns one product is faster than strips, and how wide strips are: `benchmarks/gram.py`
# measures it.
_STRIPS = {"cpu": (128, 96), "cuda": (512, 256), "cuda, tensor cores": (1536, 768)}
_LAUNCH = 3e9  # multiplications of a product that is too small to cut: starting another operation takes some 35 us
_HALF = {torch.float16, torch.bfloat16}


def add_gram(total: Tensor, x: Tensor) -> bool:
    """Add the sum of outer products of vectors to a total, at least to its upper triangle.

    Args:
        total: `[D, D]`, or `[G, D, D]` for groups of features, changed in place. What is below the diagonal of `[D,
            D]` is not complete before `mirror`.
        x: `[N, P, D]` (or `[N, P, G, D]`), with any strides.

    Returns:
        Whether `mirror` is needed.
    """
    if x.ndim == 4:
        x = x.flatten(0, 1).movedim(1, 0).to(total.dtype)
        total.baddbmm_(x.transpose(1, 2), x)
        return False
    num_data, positions, size = x.shape
    features_first = x.stride(1) == 1 and x.stride(2) != 1
    if features_first and num_data > 1 and positions >= 4 * size and x.dtype == total.dtype:
        total += torch.bmm(x.transpose(1, 2), x).sum(0)  # no copy, and small results
        return False
    if features_first:
        x = x.permute(2, 0, 1).reshape(size, num_data * positions).T  # copies along contiguous memory
    else:
        x = x.reshape(num_data * positions, size)
    strips = _strips(size, x)
    for start, stop in strips:
        _add_product(total[start:stop, start:], x[:, start:stop].T, x[:, start:])
    return len(strips) > 1


def add_squares(total: Tensor, x: Tensor) -> None:
    """Add the sum of squared vectors `[N, P, D]` (or `[N, P, G, D]`) to a total `[D]` (or `[G, D]`)."""
    total += x.to(total.dtype).square().sum((0, 1))


def mirror(total: Tensor) -> None:
    """Fill in what is below the diagonal of `[D, D]`, in place, after all products have been added."""
    if total.device.type != "cpu":  # pragma: no cover (few large operations are faster there; tested on a GPU)
        total.triu_()
        total += total.triu(1).T
        return
    for start, stop in _strips(len(total), total):
        total[stop:, start:stop] = total[start:stop, stop:].T


def _strips(size: int, x: Tensor) -> list[tuple[int, int]]:
    """Return first and one behind the last row of every strip; a single one if that is faster."""
    kind = x.device.type
    if kind != "cpu" and x.shape[0] * size**2 < _LAUNCH:
        return [(0, size)]  # pragma: no cover (tested on a GPU)
    if kind == "cuda" and (x.dtype in _HALF or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)):
        kind = "cuda, tensor cores"  # pragma: no cover (tested on a GPU)
    most, width = _STRIPS.get(kind, (size, size))
    width = size if size <= most else width
    return [(start, min(start + width, size)) for start in range(0, size, width)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a total, in the total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.dtype in _HALF and left.device.type == "cuda":  # pragma: no cover (measured and tested on a GPU)
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
