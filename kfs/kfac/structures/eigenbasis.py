"""Blocks by eigenvalues, with eigenvectors that are Kronecker products: EKFAC, damped inverses, diagonals."""

from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from kfs.kfac.structures import decompositions
from kfs.kfac.structures.factor import Factor, kronecker_product, positive_power
from kfs.kfac.structures.structure import Structure


@dataclass(frozen=True, eq=False)
class Eigenbasis(Structure):
    """Blocks by eigenvalues of any sign, and eigenvectors that are Kronecker products.

    Attributes:
        Q_A: Orthogonal matrices on the input side.
        Q_B: Orthogonal matrices on the gradient side.
        values: Eigenvalues, `[stack, d_B, d_A]`.
        noise: Bound on the round-off in eigenvalues, `[stack]`.
    """

    Q_A: Factor
    Q_B: Factor
    values: Tensor
    noise: Tensor
    field_shapes: ClassVar = {"Q_A": ("columns",), "Q_B": ("rows",), "values": ("rows", "columns"), "noise": ()}

    @classmethod
    def of_diagonal(cls, values: Tensor) -> "Eigenbasis":
        """Make diagonal blocks from `[stack, d_B, d_A]`."""
        ones = values.new_ones(len(values))
        Q_A = Factor.identity(values.shape[2], ones)
        Q_B = Factor.identity(values.shape[1], ones)
        return cls(Q_A, Q_B, values, torch.zeros_like(ones))

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
        """The eigenvalues."""
        return self.values

    def rotated(self, M: Tensor, back: bool = False) -> Tensor:
        """Return `Q_B^T M Q_A`, or `Q_B M Q_A^T` to go back."""
        Q_A, Q_B = (self.Q_A, self.Q_B) if back else (self.Q_A.T, self.Q_B.T)
        return Q_B.left(Q_A.right(M))

    def multiply(self, M: Tensor) -> Tensor:
        """Rotate, scale, rotate back."""
        return self.rotated(self.values.unsqueeze(1) * self.rotated(M), back=True)

    def scaled(self, factor: float) -> "Eigenbasis":
        """Scale eigenvalues."""
        return replace(self, values=factor * self.values, noise=abs(factor) * self.noise)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues."""
        return self.values.flatten(1)

    def to_dense(self) -> Tensor:
        """Multiply out."""
        Q = kronecker_product(self.Q_B, self.Q_A)
        return (Q * self.values.flatten(1).unsqueeze(1)) @ Q.transpose(1, 2)

    def diagonal(self) -> Tensor:
        """Sum squared eigenvectors, weighted by eigenvalues."""
        Q_A, Q_B = (replace(Q, values=Q.values.square()) for Q in (self.Q_A, self.Q_B))
        return Q_B.left(Q_A.right(self.values.unsqueeze(1))).squeeze(1)

    def trace(self) -> Tensor:
        """Sum eigenvalues."""
        return self.values.flatten(1).sum(1)

    def squared_norm(self) -> Tensor:
        """Sum squared eigenvalues."""
        return self.values.square().flatten(1).sum(1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Multiply eigenvalues."""
        flat = self.values.flatten(1)
        return flat.sign().prod(1), flat.abs().log().sum(1)

    def power(self, exponent: float, damping: Tensor | None = None) -> "Eigenbasis":
        """Raise damped eigenvalues to a power."""
        decompositions.check_finite(self.values)
        decompositions.check_definite(self.values, self.noise)
        values = self.values.clamp(min=0)
        noise = self.noise
        if damping is not None and (damping > 0).any():
            values = values + damping.to(values).reshape(-1, 1, 1)
            # Eigenvalues are now at least the damping, so that none of them is zero up to round-off.
            noise = torch.where(damping.to(noise) > 0, 0.0, noise)
        values = positive_power(values, exponent, noise)
        return replace(self, values=values, noise=torch.zeros_like(noise))

    def product(self, other: Structure) -> "Eigenbasis | None":
        """Multiply eigenvalues, if the eigenvectors are the same."""
        return replace(self, values=self.values * other.values) if self.same_basis(other) else None

    def plus(self, other: Structure) -> "Eigenbasis | None":
        """Add eigenvalues, if the eigenvectors are the same."""
        if not self.same_basis(other):
            return None
        return replace(self, values=self.values + other.values, noise=self.noise + other.noise)

    def shift(self, delta: float) -> "Eigenbasis":
        """Add to all eigenvalues."""
        return replace(self, values=self.values + delta)

    def same_basis(self, other: Structure) -> TypeGuard["Eigenbasis"]:
        """Whether another structure has the same eigenvectors."""
        return isinstance(other, Eigenbasis) and self.Q_A.equals(other.Q_A) and self.Q_B.equals(other.Q_B)
