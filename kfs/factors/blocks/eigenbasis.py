"""Blocks stored as eigenvalues, with eigenvectors that are Kronecker products: EKFAC, damped inverses, diagonals.

An eigenvalue that is zero up to round-off must not be inverted. Therefore, blocks store the *noise* of their
eigenvalues: a bound on their errors. Operations propagate it from their operands to their result. For example, an
eigenvalue `v` with an error up to `e`, times an eigenvalue `w` with an error up to `f`, has an error up to
`|v| f + |w| e + e f`. In this way, a singular block stays singular after any multiplication.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeGuard

import torch
from torch import Tensor

from kfs.factors.blocks import decompositions
from kfs.factors.blocks.factor import Factor, check_shape, kronecker_product, positive_power
from kfs.factors.blocks.structure import Structure


class InBasis(Structure):
    """Base of structures `T diag(values) T^T`, where `T` is a Kronecker product of bases of both sides.

    Attributes:
        values: `[stack, d_B, d_A]`.
        bases: The bases of the input side and of the gradient side, with scales of one.
    """

    values: Tensor

    @property
    @abstractmethod
    def bases(self) -> tuple[Factor, Factor]:
        """As above."""

    @property
    def rows(self) -> int:  # type: ignore[override]
        """`d_B`."""
        return self.values.shape[1]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """`d_A`."""
        return self.values.shape[2]

    @property
    def like(self) -> Tensor:
        """The values."""
        return self.values

    def rotated(self, M: Tensor, back: bool = False) -> Tensor:
        """Return `T_B^T M T_A`, or `T_B M T_A^T` if `back`."""
        T_A, T_B = self.bases
        return T_B.left(T_A.right(M)) if back else T_B.T.left(T_A.T.right(M))

    def multiply(self, M: Tensor) -> Tensor:
        """Multiply in the basis: rotate, scale, rotate back."""
        return self.rotated(self.values.unsqueeze(1) * self.rotated(M), back=True)

    def to_dense(self) -> Tensor:
        """Return the blocks as matrices."""
        T_A, T_B = self.bases
        T = kronecker_product(T_B, T_A)
        return (T * self.values.flatten(1).unsqueeze(1)) @ T.transpose(1, 2)

    def diagonal(self) -> Tensor:
        """Return the diagonals: sums of squared entries of the basis, weighted by values."""
        T_A, T_B = (replace(T, values=T.values.square()) for T in self.bases)
        return T_B.left(T_A.right(self.values.unsqueeze(1))).squeeze(1)


@dataclass(frozen=True, eq=False, repr=False)
class Eigenbasis(InBasis):
    """Blocks stored as eigenvalues of any sign, with eigenvectors that are Kronecker products.

    Attributes:
        Q_A: Orthogonal matrices on the input side.
        Q_B: Orthogonal matrices on the gradient side.
        values: Eigenvalues, `[stack, d_B, d_A]`.
        noise: Bound on the round-off in eigenvalues: one number for all eigenvalues of a block, `[stack]`, or one for
            each of them, `[stack, d_B, d_A]`.
    """

    Q_A: Factor
    Q_B: Factor
    values: Tensor
    noise: Tensor
    field_shapes: ClassVar = {"Q_A": ("columns",), "Q_B": ("rows",), "values": ("rows", "columns"), "noise": ()}

    @property
    def bases(self) -> tuple[Factor, Factor]:
        """The eigenvectors of both sides."""
        return self.Q_A, self.Q_B

    @classmethod
    def of_diagonal(cls, values: Tensor) -> "Eigenbasis":
        """Return diagonal blocks with the given entries, `[stack, d_B, d_A]`."""
        ones = values.new_ones(len(values))
        Q_A = Factor.identity(values.shape[2], ones)
        Q_B = Factor.identity(values.shape[1], ones)
        return cls(Q_A, Q_B, values, torch.zeros_like(ones))

    @classmethod
    def from_state(cls, state: Any, count: int, rows: int, columns: int) -> Self:
        """Load the result of `state`. The noise has one of two shapes."""
        noise = state["noise"]
        basis = super().from_state(state | {"noise": noise.new_zeros(count)}, count, rows, columns)
        shape = (count,) if noise.ndim == 1 else (count, rows, columns)
        return replace(basis, noise=check_shape(noise, *shape))

    def scaled(self, factor: float) -> "Eigenbasis":
        """Return blocks with scaled eigenvalues."""
        return replace(self, values=factor * self.values, noise=abs(factor) * self.noise)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues."""
        return self.values.flatten(1)

    def trace(self) -> Tensor:
        """Sum eigenvalues."""
        return self.values.flatten(1).sum(1)

    def squared_norm(self) -> Tensor:
        """Sum squared eigenvalues."""
        return self.values.square().flatten(1).sum(1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants. Eigenvalues that are zero up to round-off count as zero."""
        flat = self.values.flatten(1)
        # Damping may be smaller than the noise of large eigenvalues; it must not be mistaken for round-off.
        least = torch.finfo(flat.dtype).eps ** 1.5 * flat.abs().max(1, keepdim=True).values
        is_zero = flat.abs() <= torch.minimum(self.noise.reshape(len(flat), -1), least)
        flat = torch.where(is_zero, 0.0, flat)
        return flat.sign().prod(1), flat.abs().log().sum(1)

    def power(self, exponent: float, damping: Tensor | None = None) -> "Eigenbasis":
        """Return powers of the damped blocks."""
        decompositions.check_finite(self.values)
        decompositions.check_definite(self.values, self.noise)
        values = self.values.clamp(min=0)
        noise = self._noise_of_each()
        known = noise
        if damping is not None and not decompositions.is_zero(damping):
            damping = damping.to(values).reshape(-1, 1, 1)
            values = values + damping
            # Eigenvalues are now at least as large as the damping, so none is zero up to round-off.
            known = torch.where(damping > 0, 0.0, noise)
        powered = positive_power(values, exponent, known)
        if exponent < 0:
            # Eigenvalues were larger than their noise, or damped, so no result is zero up to round-off.
            return replace(self, values=powered, noise=powered.new_zeros(len(powered)))
        # Depending on the exponent, the larger error is above or below the eigenvalue.
        above = (values + noise) ** exponent - powered
        below = powered - (values - noise).clamp(min=0) ** exponent
        return replace(self, values=powered, noise=torch.maximum(above, below))

    def product(self, other: Structure) -> "Eigenbasis | None":
        """Multiply eigenvalues if the eigenvectors are equal; otherwise return `None`."""
        if not self.same_basis(other):
            return None
        mine, theirs = self._noise_of_each(), other._noise_of_each()
        noise = self.values.abs() * theirs + other.values.abs() * mine + mine * theirs
        return replace(self, values=self.values * other.values, noise=noise)

    def plus(self, other: Structure) -> "Eigenbasis | None":
        """Add eigenvalues if the eigenvectors are equal; otherwise return `None`."""
        if not self.same_basis(other):
            return None
        values = self.values + other.values
        # Rounding of a large sum becomes visible if most of it is subtracted again.
        rounding = torch.finfo(values.dtype).eps * values.abs()
        return replace(self, values=values, noise=self._noise_of_each() + other._noise_of_each() + rounding)

    def shift(self, delta: float | Tensor) -> "Eigenbasis":
        """Add a number to all eigenvalues."""
        each = torch.as_tensor(delta, dtype=self.values.dtype, device=self.values.device).expand(len(self.values))
        rounding = torch.finfo(self.values.dtype).eps * each.abs()
        noise = self.noise + rounding.reshape(-1, *[1] * (self.noise.ndim - 1))
        return replace(self, values=self.values + each.reshape(-1, 1, 1), noise=noise)

    def _noise_of_each(self) -> Tensor:
        """Return the noise in a shape that broadcasts with eigenvalues, `[stack, 1, 1]` or `[stack, d_B, d_A]`."""
        return self.noise.reshape(-1, 1, 1) if self.noise.ndim == 1 else self.noise

    def same_basis(self, other: Structure) -> TypeGuard["Eigenbasis"]:
        """Whether another structure has equal eigenvectors."""
        return isinstance(other, Eigenbasis) and self.Q_A.equals(other.Q_A) and self.Q_B.equals(other.Q_B)
