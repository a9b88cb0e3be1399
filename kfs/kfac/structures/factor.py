"""One side of a Kronecker product: dense, diagonal or identity matrices, a stack of them at once.

All methods act on a stack of matrices of size `d`, each with a scale of its own.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kfs.kfac.structures import decompositions
from kfs.kfac.structures.stackable import NOT_STORED, Stackable, check_shape

Kind = Literal["dense", "diagonal", "identity"]
_FEW = 32  # On a CPU, matrices with fewer columns than this are multiplied side by side.


@dataclass(frozen=True, eq=False, repr=False)
class Factor(Stackable):
    """A stack of matrices: scales times dense, diagonal or identity matrices.

    Attributes:
        values: `[stack, d, d]` for dense matrices, `[stack, d]` for diagonals. For identities, `[stack, d]` of ones,
            which are expanded and take no memory.
        scale: `[stack]`.
        kind: `"dense"`, `"diagonal"` or `"identity"`.
        symmetric: Whether matrices equal their transposes.
        eps: Precision that values were stored in. `None` for that of their dtype.
    """

    values: Tensor
    scale: Tensor
    kind: Kind
    symmetric: bool = True
    eps: float | None = field(default=None, metadata=NOT_STORED)

    def __post_init__(self) -> None:
        """Expand the ones of identities again, if concatenation or conversion has stored them."""
        if self.kind == "identity" and self.values.stride(-1) != 0:
            object.__setattr__(self, "values", self.scale.new_ones(()).expand(self.values.shape))

    @classmethod
    def dense(cls, values: Tensor, scale: Tensor | None = None, symmetric: bool = True) -> "Factor":
        """Wrap matrices `[stack, d, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "dense", symmetric)

    @classmethod
    def diagonal(cls, values: Tensor, scale: Tensor | None = None) -> "Factor":
        """Wrap diagonals `[stack, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "diagonal")

    @classmethod
    def identity(cls, size: int, scale: Tensor) -> "Factor":
        """Make multiples of the identity, with scales `[stack]`."""
        return cls(scale.new_ones(()).expand(len(scale), size), scale, "identity")

    def state(self) -> dict[str, Any]:
        """Return what a file stores. Identities store their size instead of their values."""
        return super().state() | ({"values": self.size} if self.kind == "identity" else {})

    @classmethod
    def from_state(cls, state: Any, count: int, size: int) -> Self:
        """Undo `state`, for a number of matrices of some size."""
        kind = state["kind"]
        scale = check_shape(state["scale"], count)
        values = scale.new_ones(count, int(state["values"])) if kind == "identity" else state["values"]
        shape = (size, size) if kind == "dense" else (size,)
        return cls(check_shape(values, count, *shape), scale, kind, bool(state["symmetric"]))

    @property
    def size(self) -> int:
        """Rows of a matrix."""
        return self.values.shape[-1]

    @property
    def is_multiple_of_identity(self) -> bool:
        """Whether one can tell from kind and size that all matrices are multiples of the identity."""
        return self.kind == "identity" or self.size == 1

    @property
    def T(self) -> "Factor":  # noqa: N802
        """The transposes."""
        return self if self.symmetric else replace(self, values=self.values.transpose(1, 2))

    def to_dense(self) -> Tensor:
        """Return `[stack, d, d]`."""
        values = self.values if self.kind == "dense" else torch.diag_embed(self.values)
        return values * self.scale.reshape(-1, 1, 1)

    def entries(self) -> Tensor:
        """Return the diagonals, `[stack, d]`."""
        values = self.values.diagonal(dim1=1, dim2=2) if self.kind == "dense" else self.values
        return values * self.scale.unsqueeze(1)

    def left(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, d, e]` from the left with the matrices, without their scales."""
        if self.kind == "diagonal":
            return self.values[:, None, :, None] * M
        if self.kind == "identity":
            return M
        if M.shape[1] == 1:
            return (self.values @ M.squeeze(1)).unsqueeze(1)
        is_on_cpu = M.device.type == "cpu"
        if is_on_cpu and M.shape[3] < _FEW:
            # Thin products would read the whole factor once per column.
            return self.right(M.transpose(2, 3)).transpose(2, 3)
        if len(self.values) == 1 or not is_on_cpu:
            return self.values.unsqueeze(1) @ M
        # On a CPU, the product above would copy each matrix once per column.
        return torch.stack([matrix @ columns for matrix, columns in zip(self.values, M, strict=True)])

    def right(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, e, d]` from the right with the transposes, without their scales."""
        if self.kind == "diagonal":
            return self.values[:, None, None, :] * M
        if self.kind == "identity":
            return M
        return (M.flatten(1, 2) @ self.values.transpose(1, 2)).reshape(M.shape)

    def compose(self, other: "Factor") -> "Factor":
        """Multiply matrix by matrix."""
        scale = self.scale * other.scale
        if "identity" in {self.kind, other.kind}:
            return replace(other if self.kind == "identity" else self, scale=scale)
        eps = self._common_eps(other)
        if self.kind == other.kind == "diagonal":
            return replace(Factor.diagonal(self.values * other.values, scale), eps=eps)
        if self.kind == "diagonal":
            product = self.values.unsqueeze(2) * other.values
        elif other.kind == "diagonal":
            product = self.values * other.values.unsqueeze(1)
        else:
            product = self.values @ other.values
        return replace(Factor.dense(product, scale, symmetric=False), eps=eps)

    def plus(self, other: "Factor") -> "Factor":
        """Add matrix by matrix."""
        if self.kind == other.kind == "identity":
            return replace(self, scale=self.scale + other.scale)
        eps = self._common_eps(other)
        if "dense" not in {self.kind, other.kind}:
            return replace(Factor.diagonal(self.entries() + other.entries()), eps=eps)
        symmetric = self.symmetric and other.symmetric
        return replace(Factor.dense(self.to_dense() + other.to_dense(), symmetric=symmetric), eps=eps)

    def _common_eps(self, other: "Factor") -> float | None:
        """Return the precision of a product or a sum: the worse one of both."""
        return max(self.eps or 0.0, other.eps or 0.0) or None

    def shift(self, delta: Tensor) -> "Factor":
        """Add multiples `[stack]` of the identity."""
        if self.kind != "dense":
            return self.plus(Factor.identity(self.size, delta.to(self.scale)))
        values = self.to_dense()
        values.diagonal(dim1=1, dim2=2).add_(delta.to(values).unsqueeze(1))
        return Factor.dense(values, symmetric=self.symmetric)

    def scaled(self, factor: Tensor | float) -> "Factor":
        """Scale all matrices by a number, or by one each, `[stack]`."""
        return replace(self, scale=self.scale * factor)

    def unscaled(self) -> "Factor":
        """Replace all scales by one."""
        return replace(self, scale=torch.ones_like(self.scale))

    def equals(self, other: "Factor") -> bool:
        """Whether all matrices are the same, up to scales."""
        if self.kind != other.kind:
            return False
        return self.values is other.values or torch.equal(self.values, other.values)

    def trace(self) -> Tensor:
        """Return the traces, `[stack]`."""
        return self.entries().sum(1)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[stack]`."""
        return self.values.square().flatten(1).sum(1) * self.scale.square()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, `[stack]` each."""
        if self.kind == "dense":
            sign, log = decompositions.slogdet(self.values, self.symmetric, self.eps)
        else:
            sign = self.values.sign().prod(1)
            log = self.values.abs().log().sum(1)
        return sign * self.scale.sign() ** self.size, log + self.size * self.scale.abs().log()

    @cached_property
    def _unscaled_eigh(self) -> "tuple[Tensor, Factor]":
        """Eigenvalues and eigenvectors without scales, decomposed once for all uses of the factor."""
        if self.kind == "dense":
            values, vectors = decompositions.eigh(self.values)
            return values, Factor.dense(vectors, symmetric=False)
        decompositions.check_finite(self.values)
        return self.values, Factor.identity(self.size, torch.ones_like(self.scale))

    def eigh(self) -> "tuple[Tensor, Factor]":
        """Return eigenvalues `[stack, d]` and eigenvectors of symmetric matrices."""
        values, vectors = self._unscaled_eigh
        return values * self.scale.unsqueeze(1), vectors

    def inverse(self) -> "Factor":
        """Invert, by Cholesky factors if matrices are symmetric."""
        decompositions.check_each(self.scale != 0, "is singular: its scale is zero")
        values: Tensor = self.values
        if self.kind == "diagonal":
            decompositions.check_finite(values)
            decompositions.check_each((values != 0).all(1), "is singular: a diagonal entry is zero")
            values = 1 / values
        elif self.kind == "dense" and self.symmetric:
            values = decompositions.inverse(values)
        elif self.kind == "dense":
            values = decompositions.general_inverse(values, self.eps)
        return replace(self, values=values, scale=1 / self.scale.to(values.dtype))

    def power(self, exponent: float) -> "Factor":
        """Raise positive semi-definite matrices to a power. A negative power of zero is an error."""
        values, vectors = self.eigh()
        powered = positive_power(values, exponent, decompositions.round_off(values, self.eps))
        if self.kind == "identity":
            return replace(self, scale=powered[:, 0])
        if self.kind == "diagonal":
            return Factor.diagonal(powered)
        rotated = vectors.values * powered.unsqueeze(1)
        return Factor.dense(rotated @ vectors.values.transpose(1, 2))


def kronecker_product(B: Factor, A: Factor) -> Tensor:
    """Return the matrices of `B (x) A`, `[stack, d_B * d_A, d_B * d_A]`."""
    product = torch.einsum("uij,ukl->uikjl", B.to_dense(), A.to_dense())
    return product.reshape(len(A), A.size * B.size, -1)


def positive_power(values: Tensor, exponent: float, noise: Tensor) -> Tensor:
    """Raise eigenvalues that are not negative, up to noise, to a power.

    Args:
        values: `[stack, ...]`.
        exponent: Any number.
        noise: Bound on the round-off in the eigenvalues: `[stack]`, or one for each of them.

    Raises:
        BlockError: If one is negative, or zero and the exponent is negative.
    """
    decompositions.check_definite(values, noise)
    if exponent >= 0:
        return values.clamp(min=0) ** exponent
    above_noise = values.flatten(1) > noise.reshape(len(values), -1)
    decompositions.check_each(above_noise.all(1), "is singular, up to round-off")
    return values**exponent
