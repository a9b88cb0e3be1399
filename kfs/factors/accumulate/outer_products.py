r"""A running sum of outer products of vectors: one side of a block, dense or only its diagonal.

The hot spot of KFAC is adding $X^\top X$ to a running total, in the requested precision (`add_gram`). The product is
symmetric, so only its upper triangle is computed, strip by strip. A strip consists of a few rows of the result, from
the diagonal to the right. With `D` columns and strips of width `w`, this costs `(1 + w / D) / 2` of a full product.

By default, inputs in half precision are multiplied as they are, with results in float32 if the device supports that.
`kfs.KFAC` documents the other values of `products`. Sums are in float32 or better in any case.
"""

from collections.abc import Collection
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors.settings import Products
from kfs.files import UnfitError
from kfs.runtime.precision import at_least_float32, tf32, uses_tf32
from kfs.runtime.sync import ones as ones_on

HALF = {torch.float16, torch.bfloat16}
_USES_TF32 = {"float32": False, "tf32": True}


def check_products(products: Products, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Raise an error if a block's sums in `dtype` cannot have products that are computed in the requested precision."""
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
    for strips in cut:
        for start, stop in strips:
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


class OuterProductSum:
    """A sum of outer products of vectors, before any scaling.

    Vectors are `[..., G * D]`: any leading axes, and `D` features in each of `G` groups. If the sum has a bias, vectors
    get one more coordinate at the end, which is one or zero and not part of `D`.

    Args:
        total: `[G, D, D]`, or only the diagonals `[G, D]`; with one more coordinate for a bias. Changed in place. Only
            the upper triangle of a dense total is valid until `complete`.
        diagonal: Whether only diagonals are kept.
        bias: Whether there is a coordinate for a bias.
        products: Precision in which vectors are multiplied. Ignored if only diagonals are kept.
    """

    def __init__(self, total: Tensor, diagonal: bool, bias: bool = False, products: Products = "auto") -> None:
        self.diagonal = diagonal
        self.bias = bias
        self.products: Products = "auto" if diagonal else products
        self.ones = 0.0  # number of vectors with a bias coordinate of one that the total does not include yet
        # The strips of the total that were computed since it was zero; `None` if unknown.
        self.computed: set[Strips] | None = None
        self.total = total
        self.eps: float = torch.finfo(total.dtype).eps  # precision of the entries, which may be stored in a higher one

    @classmethod
    def zeros(
        cls,
        size: int,
        groups: int,
        diagonal: bool,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        products: Products = "auto",
    ) -> "OuterProductSum":
        """Return an empty sum for vectors of a given size (without the bias) and dtype, in float32 or better."""
        size += bias
        width = -(-size // 16) * 16  # rows that start at multiples of 64 bytes are faster to write
        shape = [groups, width] if diagonal else [groups, size, width]
        dtype = at_least_float32(dtype)
        result = cls(torch.zeros(shape, dtype=dtype, device=device)[..., :size], diagonal, bias, products)
        result.computed = set()
        return result

    def zeros_like(self, device: torch.device | str, products: Products) -> "OuterProductSum":
        """Return an empty sum for the same vectors."""
        size = self.size - self.bias
        return OuterProductSum.zeros(size, self._groups, self.diagonal, self.bias, self.total.dtype, device, products)

    @property
    def total(self) -> Tensor:
        """The sum. Assigning another tensor moves or converts it."""
        return self._total

    @total.setter
    def total(self, total: Tensor) -> None:
        self._total = total
        self.device = total.device
        self.size = total.shape[-1]  # number of coordinates, including the bias
        self._groups = len(total)
        # Whether a product with a plain matrix is computed at once, without strips.
        is_plain = self._groups == 1 and not self.diagonal and self.products != "bf16"
        self._is_small = is_plain and total.is_cpu and self.size <= _STRIPS["cpu"][0]
        matrix = total[0] if self._groups == 1 and not self.diagonal else total
        self.inner = matrix
        if self.bias:
            self.inner = total[..., :-1] if self.diagonal else matrix[..., :-1, :-1]
            self._last_column = matrix[..., :-1, -1]
            self._corner = total[..., -1] if self.diagonal else total[..., -1, -1]  # square of the bias, `[G]`

    @property
    def entries(self) -> Tensor:
        """Writable view of the diagonals, `[G, D]`."""
        return self.total if self.diagonal else self.total.diagonal(dim1=-2, dim2=-1)

    def add(self, x: Tensor, ones: bool = False, number: float | Tensor | None = None) -> int:
        """Add vectors, and return their number.

        Their bias coordinate, if there is one, is one if `ones`, otherwise zero. If `number` is given, only this many
        vectors count; the other ones must be zero, and their bias coordinate is zero, too.
        """
        if number is None and self._is_small and x.ndim == 2 and x.dtype is self._total.dtype:
            # Shortcut: for small layers, Python overhead dominates.
            transposed = x.T
            self.inner.addmm_(transposed, x)
            if ones:
                self.ones += len(x)
                self._last_column.addmv_(transposed, _ones(len(x), x.dtype))
            return len(x)
        if x.ndim == 1:
            x = x.unsqueeze(0)
        if self.products != "auto":
            # Round before products with the bias coordinate, too. All entries then belong to the same vectors, and the
            # sum has no negative eigenvalues.
            x = rounded(x, self.products)
        self._add_products(self.inner, x)
        count = x.numel() // max(x.shape[-1], 1)
        if ones:
            self.add_ones(self._sum(x), count if number is None else number)
        return count

    def _squares(self, x: Tensor) -> Tensor:
        """Sum squares of vectors, `[G * D]`; on an accelerator without storing the squares."""
        rows = tuple(range(x.ndim - 1))
        dtype = self._total.dtype
        if x.is_cpu:
            return x.to(dtype).square().sum(rows)
        norms: Tensor = torch.linalg.vector_norm(x, dim=rows, dtype=dtype)  # pragma: no cover (tested on a GPU)
        return norms.square_()  # pragma: no cover

    def _sum(self, x: Tensor) -> Tensor:
        """Sum vectors, `[G * D]`. A GPU multiplies them with ones, because its reductions over rows are slow."""
        dtype = self._total.dtype
        if x.is_cuda and x.is_contiguous() and dtype == torch.float32:  # pragma: no cover (tested on a GPU)
            flat = x.flatten(0, -2)
            if x.dtype in HALF:
                return torch.mm(ones_on(8 * len(flat), x.dtype, x.device).view(8, -1), flat, out_dtype=dtype)[0]
            if x.dtype == dtype:
                return flat.T.mv(ones_on(len(flat), x.dtype, x.device))
        rows = 0 if x.ndim == 2 else tuple(range(x.ndim - 1))
        return x.sum(rows, dtype=dtype)

    def add_ones(self, x: Tensor, count: float | Tensor) -> None:
        """Add the products of vectors with their bias coordinate of one.

        Args:
            x: The sum of all vectors, `[G * D]`.
            count: Number of vectors; a tensor if reading it would synchronize with the device.
        """
        if isinstance(count, Tensor):
            self._corner.add_(count)
        else:
            self.ones += count
        if not self.diagonal:
            self._last_column.add_(x if self._groups == 1 else x.view(self._last_column.shape))

    def add_whole(self, x: Tensor) -> None:
        """Add vectors that contain all coordinates, including the bias: `[rows, G, D]`."""
        self._add_products(self.total if self.diagonal or self._groups > 1 else self.total[0], x.flatten(1))

    def _add_products(self, total: Tensor, x: Tensor) -> None:
        """Add the outer products of vectors `[..., G * D]` to the total, or to its part without the bias."""
        if self.diagonal:
            total += self._squares(x).view(total.shape)
        elif self._groups > 1:
            x = rounded(x, self.products).reshape(-1, *total.shape[:2]).movedim(1, 0).to(total.dtype)
            with multiplying(self.products):
                total.baddbmm_(x.transpose(1, 2), x)
        else:
            computed = add_gram(total, x, self.products)
            if self.computed is not None:
                self.computed.add(computed)

    def complete(self, dtype: torch.dtype | None = None, roughly: bool = False) -> None:
        """Fill in the lower triangle, and convert the total to `dtype` if given.

        With `roughly`, the result is symmetric only up to round-off, which is faster on an accelerator.
        """
        if self.ones:
            self._corner.add_(self.ones)
            self.ones = 0.0
        if not self.diagonal and self.device.type != "meta":
            mirror(self.total, self.computed if roughly else None)
            if self.bias:
                self.total[..., -1, :-1] = self._last_column
        if dtype is not None:
            self.convert(None, dtype)

    def convert(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Move the total to a device, or convert it. A higher precision does not undo earlier rounding: `eps` stays."""
        self.total = self.total.to(device=device, dtype=dtype)
        self.eps = max(self.eps, torch.finfo(self.total.dtype).eps)

    def on(self, device: torch.device) -> "OuterProductSum":
        """Return a sum on a device for adding vectors: this one, or a new one for `merge_in`."""
        return self if self.device == device else self.zeros_like(device, self.products)

    def merge_in(self, other: "OuterProductSum") -> None:
        """Add another sum, unless it is this one; see `on`."""
        if other is not self:
            self.total += other.total.to(self.total.device)
            self.ones += other.ones
            self.computed = None

    def fits(self, other: "OuterProductSum") -> bool:
        """Whether both sums are stored in the same way."""
        mine, theirs = ((s.total.shape, s.total.dtype, s.bias) for s in (self, other))
        return mine == theirs

    def plus(self, other: "OuterProductSum") -> "OuterProductSum":
        """Return the sum of two sums of the same vectors, added in float32 or better, without `ones`."""
        dtype = at_least_float32(self.total.dtype)
        total = self.total.to(dtype) + other.total.to(self.total.device, dtype)
        result = OuterProductSum(total.to(self.total.dtype), self.diagonal, self.bias)
        result.eps = max(self.eps, other.eps)
        return result

    def densified(self) -> "OuterProductSum":
        """Return the same sum with zeros off the diagonal, if only the diagonal is kept."""
        if not self.diagonal:
            return self
        return OuterProductSum(torch.diag_embed(self.total), False, self.bias)

    def state(self) -> dict[str, Any]:
        """Return the sum as the content of a file, without `ones`. It need not be complete."""
        return {"total": self.total, "diagonal": self.diagonal, "bias": self.bias, "eps": self.eps}

    @classmethod
    def from_state(cls, state: Any, size: int, groups: int, products: Products = "auto") -> "OuterProductSum":
        """Load the result of `state`, for vectors of a given size (without the bias).

        Further vectors are multiplied in the precision `products`.
        """
        total, diagonal, bias = state["total"], bool(state["diagonal"]), bool(state["bias"])
        result = cls.zeros(size, groups, diagonal, bias, total.dtype, total.device, products)
        result.computed = None
        shape = result.total.shape
        if total.shape != shape:
            raise UnfitError(f"a factor has shape {list(total.shape)} instead of {list(shape)}")
        if not total.is_floating_point():
            raise UnfitError(f"a factor has dtype {total.dtype}")
        if total.dtype == result.total.dtype:
            # Keep the alignment of rows, so that results are the same to the last bit.
            result.total.copy_(total)
        else:
            result.total = total
        result.eps = max(float(state["eps"]), torch.finfo(total.dtype).eps)
        return result


@lru_cache(maxsize=64)
def _ones(size: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(size, dtype=dtype)
