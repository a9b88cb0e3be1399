"""Blocks by eigenvalues, and eigenvectors that are Kronecker products: EKFAC, damped inverses, diagonals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kfs.kfac.structures import decompositions
from kfs.kfac.structures.factor import Factor, positive_power
from kfs.kfac.structures.structure import Structure
from kfs.storage import UnfitError


@dataclass(frozen=True, eq=False)
class Eigenbasis(Structure):
    """Blocks by eigenvalues and eigenvectors that are Kronecker products; nothing has to be positive.

    Attributes:
        Q_A: Orthogonal matrices on the input side.
        Q_B: Orthogonal matrices on the gradient side.
        values: Eigenvalues, `[U, d_B, d_A]`.
        noise: How wrong eigenvalues may be, `[U]`.
    """

    Q_A: Factor
    Q_B: Factor
    values: Tensor
    noise: Tensor

    @classmethod
    def of_diagonal(cls, values: Tensor) -> "Eigenbasis":
        """Make diagonal blocks from `[U, d_B, d_A]`."""
        ones = values.new_ones(len(values))
        Q_A, Q_B = Factor.identity(values.shape[2], ones), Factor.identity(values.shape[1], ones)
        return cls(Q_A, Q_B, values, torch.zeros_like(ones))

    @property
    def units(self) -> int:  # type: ignore[override]
        """How many."""
        return len(self.values)

    @property
    def rows(self) -> int:  # type: ignore[override]
        """`d_B`."""
        return self.values.shape[1]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """`d_A`."""
        return self.values.shape[2]

    @property
    def key(self) -> tuple[Any, ...]:
        """Kinds and sizes."""
        return ("eigenbasis", self.Q_A.kind, self.Q_B.kind, *self.values.shape[1:], self.values.device)

    @property
    def like(self) -> Tensor:
        """The eigenvalues."""
        return self.values

    @property
    def nbytes(self) -> int:
        """Bytes of both bases and the eigenvalues."""
        return self.Q_A.nbytes + self.Q_B.nbytes + self.values.numel() * self.values.element_size()

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Put blocks together."""
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        Q_A, Q_B = Factor.stack([part.Q_A for part in parts]), Factor.stack([part.Q_B for part in parts])
        return cls(Q_A, Q_B, torch.cat([p.values for p in parts]), torch.cat([p.noise for p in parts]))

    def __getitem__(self, units: slice) -> Self:
        """Return some of the blocks."""
        return type(self)(self.Q_A[units], self.Q_B[units], self.values[units], self.noise[units])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        values, noise = (t.to(device=device, dtype=dtype) for t in (self.values, self.noise))
        return type(self)(self.Q_A.to(device, dtype), self.Q_B.to(device, dtype), values, noise)

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {"Q_A": self.Q_A.state(), "Q_B": self.Q_B.state(), "values": self.values, "noise": self.noise}

    @classmethod
    def from_state(cls, state: Any, units: int, rows: int, columns: int) -> Self:
        """Undo `state`, for some blocks of a size."""
        Q_A, Q_B = Factor.from_state(state["Q_A"], units, columns), Factor.from_state(state["Q_B"], units, rows)
        if state["values"].shape != (units, rows, columns) or state["noise"].shape != (units,):
            raise UnfitError(f"eigenvalues have shape {list(state['values'].shape)}")
        return cls(Q_A, Q_B, state["values"], state["noise"])

    def rotated(self, M: Tensor, back: bool = False) -> Tensor:
        """Return `Q_B^T M Q_A`; or, the way back, `Q_B M Q_A^T`."""
        Q_A, Q_B = (self.Q_A, self.Q_B) if back else (self.Q_A.T, self.Q_B.T)
        return Q_B.left(Q_A.right(M))

    def multiply(self, M: Tensor) -> Tensor:
        """Rotate, scale, rotate back."""
        return self.rotated(self.values.unsqueeze(1) * self.rotated(M), back=True)

    def transposed(self) -> "Eigenbasis":
        """Return the blocks: they are symmetric."""
        return self

    def scaled(self, factor: float) -> "Eigenbasis":
        """Scale eigenvalues."""
        return replace(self, values=factor * self.values, noise=abs(factor) * self.noise)

    def eigenbasis(self) -> "Eigenbasis":
        """Return the blocks as they are."""
        return self

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues."""
        return self.values.flatten(1)

    def to_dense(self) -> Tensor:
        """Multiply out."""
        Q_A, Q_B = self.Q_A.to_dense(), self.Q_B.to_dense()
        Q = torch.einsum("uij,ukl->uikjl", Q_B, Q_A).reshape(self.units, self.rows * self.columns, -1)
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
        values, noise = self.values.clamp(min=0), self.noise
        if damping is not None and (damping > 0).any():
            values = values + damping.to(values).reshape(-1, 1, 1)
            noise = torch.where(damping.to(noise) > 0, 0.0, noise)  # what is added is not noise
        values = positive_power(values, exponent, noise)
        return replace(self, values=values, noise=torch.zeros_like(noise))

    def product(self, other: Structure) -> Structure | None:
        """Multiply eigenvalues, if the eigenvectors are the same."""
        return replace(self, values=self.values * other.values) if self.same_basis(other) else None  # type: ignore[attr-defined]

    def plus(self, other: Structure) -> Structure | None:
        """Add eigenvalues, if the eigenvectors are the same."""
        if not self.same_basis(other):
            return None
        return replace(self, values=self.values + other.values, noise=self.noise + other.noise)  # type: ignore[attr-defined]

    def shift(self, delta: float) -> "Eigenbasis":
        """Add to all eigenvalues."""
        return replace(self, values=self.values + delta)

    def same_basis(self, other: Structure) -> bool:
        """Whether another structure has the same eigenvectors."""
        return isinstance(other, Eigenbasis) and self.Q_A.equals(other.Q_A) and self.Q_B.equals(other.Q_B)
