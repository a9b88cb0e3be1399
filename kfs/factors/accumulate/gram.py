r"""The hot spot of KFAC: adding $X^\top X$ to a running total, in the requested precision.

The running total itself lives in `kfs.factors.accumulate.outer_products`.

The product is symmetric, so only its upper triangle is computed, strip by strip. A strip consists of a few rows of the
result, from the diagonal to the right. With `D` columns and strips of width `w`, this costs `(1 + w / D) / 2` of a full
product.

By default, inputs in half precision are multiplied as they are, with results in float32 if the device supports that.
`kfs.KFAC` documents the other values of `products`. Sums are in float32 or better in any case.
"""

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors.settings import Products
from kfs.runtime.precision import tf32, uses_tf32

HALF = {torch.float16, torch.bfloat16}
_USES_TF32 = {"float32": False, "tf32": True}


def check_products(products: Products, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Raise an error if the requested precision cannot be used.

    Args:
        products: The precision.
        dtype: Dtype of the sums.
        device: Device on which products are computed.
        name: The block's name.

    Raises:
        ModelError: If sums are in float64, or TF32 is requested on a device that does not support it.
    """
    if products != "auto" and dtype == torch.float64:
        raise ModelError(
            f"products is {products!r}, but the factors of block {name!r} are summed in float64.",
            "Use products='auto', which multiplies in float64, or a model and factor_dtype of lower precision.",
        )
    if products == "tf32" and device.type not in {"cuda", "meta"}:
        raise ModelError(
            f"products is 'tf32', but block {name!r} is computed on the device {str(device)!r}, which has no TF32.",
            "Use products='auto', or move the model to a GPU.",
        )


def rounded(x: Tensor, products: Products) -> Tensor:
    """Return vectors in the precision in which they are multiplied."""
    if products == "float32" and x.dtype in HALF:
        return x.float()
    if products == "bf16" and x.dtype == torch.float32:
        # Other devices multiply bfloat16 slowly, or round the result. There, rounded numbers are multiplied in float32.
        return x.bfloat16() if x.is_cuda else x.bfloat16().float()
    return x


def multiplying(products: Products) -> tf32:
    """Return a context that switches TF32 on or off, if `products` requires it."""
    return tf32(_USES_TF32.get(products))


# Largest number of columns for which one product is faster than strips, and width of strips; measured by
# `benchmarks/gram.py`.
_STRIPS = {"cpu": (128, 96), "cuda": (256, 256), "cuda, tensor cores": (1536, 1024)}
# On the general cores of a GPU, up to this many columns are cut into two strips; the first has two thirds of them.
_TWO_STRIPS = 768
# Smaller products (in multiplications) are not cut: launching another operation takes about 35 us on an accelerator.
_LAUNCH = 3e9
# Half-open ranges of rows.
Strips = tuple[tuple[int, int], ...]


def add_gram(total: Tensor, x: Tensor, products: Products = "auto") -> Strips:
    """Add the sum of outer products of vectors to the upper triangle of a total.

    Entries below the diagonal are valid only after `mirror`.

    Args:
        total: `[D, D]`, changed in place.
        x: `[..., D]`, with any strides.
        products: Precision of the multiplication.

    Returns:
        The strips that were computed. A strip `(start, stop)` covers rows `start:stop` and columns `start:`.
    """
    if products != "auto":
        with multiplying(products):
            return add_gram(total, rounded(x, products))
    if x.ndim > 2:
        features_first = x.ndim == 3 and x.stride(1) == 1 and x.stride(2) != 1
        # Images are stored channel by channel. Products per image need no copy, and their results are small.
        if features_first and len(x) > 1 and x.shape[1] >= 4 * x.shape[2] and x.dtype == total.dtype:
            total += torch.bmm(x.transpose(1, 2), x).sum(0)
            return ((0, len(total)),)
        # Otherwise copy along contiguous memory, if a copy is needed.
        x = x.permute(2, 0, 1).reshape(x.shape[2], -1).T if features_first else x.reshape(-1, x.shape[-1])
    strips = _strips(x.shape[1], x)
    if len(strips) == 1:
        _add_product(total, x.T, x)
        return strips
    for start, stop in strips:
        _add_product(total[start:stop, start:], x[:, start:stop].T, x[:, start:])
    return strips


def add_grouped_gram(total: Tensor, x: Tensor, products: Products = "auto") -> None:
    """Add the sums of outer products within each group of features; `x`: `[..., G * D]`, `total`: `[G, D, D]`."""
    if products != "auto":
        with multiplying(products):
            add_grouped_gram(total, rounded(x, products))
        return
    groups, size = total.shape[:2]
    x = x.reshape(-1, groups, size).movedim(1, 0).to(total.dtype)
    total.baddbmm_(x.transpose(1, 2), x)


def is_one_product(size: int, device: torch.device) -> bool:
    """Whether a Gram matrix of this size is computed in a single product, without strips."""
    return device.type == "cpu" and size <= _STRIPS["cpu"][0]


def mirror(total: Tensor, computed: Collection[Strips] | None = None) -> None:
    """Copy the upper triangle of `[..., D, D]` to the lower one, in place, after all products have been added.

    Args:
        total: The matrices.
        computed: The strips that `add_gram` has returned for all products, if known. Then less is copied on an
            accelerator, and results are symmetric only up to round-off. Ignored on a CPU, where strips depend only on
            the size.
    """
    if total.device.type == "cpu":  # pragma: no branch
        computed = [_strips(total.shape[-1], total)]
    cut = None if computed is None else {strips for strips in computed if len(strips) > 1}
    if cut is None or len(cut) > 1:  # pragma: no cover (tested on a GPU)
        total.triu_()
        total += total.triu(1).mT
        return
    for start, stop in (strip for strips in cut for strip in strips):
        total[..., stop:, start:stop] = total[..., start:stop, stop:].mT


def _strips(size: int, x: Tensor) -> Strips:
    """Return the half-open range of rows of each strip; a single strip if that is faster."""
    if x.device.type == "cpu":
        return _ranges(size, *_STRIPS["cpu"])
    return _strips_on_accelerator(size, x)  # pragma: no cover (tested on a GPU)


def _strips_on_accelerator(size: int, x: Tensor) -> Strips:  # pragma: no cover
    kind = x.device.type
    if x.shape[0] * size**2 < _LAUNCH:
        return _ranges(size, size, size)
    if kind == "cuda" and (x.dtype in HALF or (x.dtype == torch.float32 and uses_tf32())):
        most, widest = _STRIPS["cuda, tensor cores"]
        return _ranges(size, most, min(widest, -(-size // (3 * 128)) * 128))  # about three strips
    if kind == "cuda" and _STRIPS["cuda"][0] < size <= _TWO_STRIPS:
        return _ranges(size, 0, -(-2 * size // (3 * 64)) * 64)
    return _ranges(size, *_STRIPS.get(kind, (size, size)))


@cache
def _ranges(size: int, most: int, width: int) -> Strips:
    """Cut `size` rows into strips of the given width; a single strip if there are at most `most` rows."""
    width = size if size <= most else width
    return tuple((start, min(start + width, size)) for start in range(0, size, width))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a total, in the total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.dtype in HALF and left.device.type == "cuda":  # pragma: no cover (measured and tested on a GPU)
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
