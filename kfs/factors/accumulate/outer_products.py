"""A running sum of outer products of vectors: one side of a block, dense or only its diagonal."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.gram import HALF, Strips, add_gram, add_grouped_gram, is_one_product, mirror, rounded
from kfs.factors.settings import Products
from kfs.files import UnfitError
from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import ones as ones_on


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

    @property
    def total(self) -> Tensor:
        """The sum. Assigning another tensor moves or converts it."""
        return self._total

    @total.setter
    def total(self, total: Tensor) -> None:
        self._total = total
        self.device = total.device
        self._groups = len(total)
        one_product = self._groups == 1 and is_one_product(total.shape[-1], total.device)
        self._is_small = one_product and not self.diagonal and self.products != "bf16"
        matrix = total[0] if self._groups == 1 and not self.diagonal else total
        self.inner = matrix
        if self.bias:
            self.inner = total[..., :-1] if self.diagonal else matrix[..., :-1, :-1]
            self._last_column = matrix[..., :-1, -1]

    @property
    def size(self) -> int:
        """Number of coordinates, including the bias."""
        return self.total.shape[-1]

    @property
    def _corner(self) -> Tensor:
        """Writable view of the bias coordinate's square, `[G]`."""
        return self.total[..., -1] if self.diagonal else self.total[..., -1, -1]

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
            x = self.rounded(x)
        if self.diagonal:
            self.inner += self._squares(x).view(self.inner.shape)
        elif self._groups > 1:
            add_grouped_gram(self.inner, x, self.products)
        else:
            self._note(add_gram(self.inner, x, self.products))
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

    def rounded(self, x: Tensor) -> Tensor:
        """Return vectors in the precision in which they are multiplied."""
        return rounded(x, self.products)

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
        if self.diagonal:
            self.total += x.to(self.total.dtype).square().sum(0)
        elif self._groups > 1:
            add_grouped_gram(self.total, x, self.products)
        else:
            self._note(add_gram(self.total[0], x.squeeze(1), self.products))

    def _note(self, computed: Strips) -> None:
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
        self.convert(None, dtype)

    def convert(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Move the total to a device, or convert it. A higher precision does not undo earlier rounding: `eps` stays."""
        self.total = self.total.to(device=device, dtype=dtype)
        self.eps = max(self.eps, torch.finfo(self.total.dtype).eps)

    def on(self, device: torch.device) -> "OuterProductSum":
        """Return a sum on a device for adding vectors: this one, or a new one for `merge_in`."""
        if self.device == device:
            return self
        size, groups = self.size - self.bias, self._groups
        return OuterProductSum.zeros(size, groups, self.diagonal, self.bias, self.total.dtype, device, self.products)

    def merge_in(self, other: "OuterProductSum") -> None:
        """Add another sum, unless it is this one; see `on`."""
        if other is not self:
            self.total += other.total.to(self.total.device)
            self.ones += other.ones
            self.computed = None

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


class full_precision:  # noqa: N801 (used like a function; a generator would take several times as long)
    """Context that disables gradients and `autocast`, so that sums are computed in the precision of their storage."""

    def __init__(self, kind: str) -> None:
        # There is no `autocast` on `meta`.
        self.kind = "cpu" if kind == "meta" else kind

    def __enter__(self) -> None:
        self.autocast = torch.is_autocast_enabled(self.kind)
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        if self.autocast:
            torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        if self.autocast:
            torch.set_autocast_enabled(self.kind, True)
