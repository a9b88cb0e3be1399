r"""Structures: ways to store a symmetric block of a curvature matrix, all with the same abilities.

A block acts on matrices $M$ of shape `[d_B, d_A]`: a parameter in its own frame, see `blocks`. Blocks of one structure
and size are processed together, as `U` *units*: all methods take and return tensors with a leading axis of that
length, and products act on `K` columns at once, `[U, K, d_B, d_A]`.

- `Kronecker` (in `kronecker`): $M \mapsto B M A^\top$.
- `Eigenbasis`: $M \mapsto Q_B \left(\Lambda \odot Q_B^\top M Q_A\right) Q_A^\top$: what a damped inverse, EKFAC and
  diagonals (in the trivial basis) have in common.
- `Dense`: any matrix, $\mathrm{rvec}(M) \mapsto C\, \mathrm{rvec}(M)$.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kfs.kfac import decompositions
from kfs.kfac.factors import Factor, positive_power


class Structure(ABC):
    """Some blocks of one structure and size.

    Attributes:
        units: How many.
        rows: `d_B`.
        columns: `d_A`.
        symmetric: Whether blocks equal their transposes.
    """

    units: int
    rows: int
    columns: int
    symmetric: bool = True

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """What blocks that are processed together have in common."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the device and the dtype that products are computed in."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all units."""

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Put blocks with equal keys together."""

    @abstractmethod
    def __getitem__(self, units: slice) -> Self:
        """Return some of the blocks."""

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Any, units: int, rows: int, columns: int) -> Self:
        """Undo `state`, for some blocks of a size."""

    @abstractmethod
    def multiply(self, M: Tensor) -> Tensor:
        """Multiply `[U, K, d_B, d_A]`."""

    @abstractmethod
    def transposed(self) -> "Structure":
        """Return the transposes."""

    @abstractmethod
    def scaled(self, factor: float) -> "Structure":
        """Scale all blocks."""

    @abstractmethod
    def eigenbasis(self) -> "Eigenbasis | Dense":
        """Return the eigendecomposition, if the structure has a simple one, of symmetric blocks."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return `[U, d_B * d_A, d_B * d_A]`; rows of `M` come one after the other."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals, `[U, d_B, d_A]`."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[U]`."""

    @abstractmethod
    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, `[U]` each."""

    def trace(self) -> Tensor:
        """Return the traces, `[U]`."""
        return self.diagonal().flatten(1).sum(1)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, `[U, d_B * d_A]`, in any order."""
        return self.eigenbasis().eigenvalues()

    def power(self, exponent: float, damping: Tensor | None = None) -> "Structure":
        """Raise blocks plus damping `[U]` times the identity to a power."""
        return self.eigenbasis().power(exponent, damping)

    def inverse(self) -> "Structure":
        """Invert."""
        return self.power(-1.0)

    def product(self, other: "Structure") -> "Structure | None":
        """Multiply block by block; nothing if the result has no simple structure."""
        return None

    def plus(self, other: "Structure") -> "Structure | None":
        """Add block by block; nothing if the result has no simple structure."""
        return None

    def shift(self, delta: float) -> "Structure":
        """Add a multiple of the identity."""
        return self.eigenbasis().shift(delta)


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
            raise ValueError(f"eigenvalues have shape {list(state['values'].shape)}")
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


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """Blocks without structure.

    Attributes:
        matrix: `[U, d_B * d_A, d_B * d_A]`.
        rows: `d_B`.
        columns: `d_A`.
        symmetric: Whether blocks equal their transposes.
    """

    matrix: Tensor
    rows: int
    columns: int
    symmetric: bool = True

    @property
    def units(self) -> int:  # type: ignore[override]
        """How many."""
        return len(self.matrix)

    @property
    def key(self) -> tuple[Any, ...]:
        """Sizes."""
        return ("dense", self.rows, self.columns, self.matrix.device)

    @property
    def like(self) -> Tensor:
        """The matrices."""
        return self.matrix

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.matrix.numel() * self.matrix.element_size()

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Put blocks together."""
        first = parts[0]
        matrix = first.matrix if len(parts) == 1 else torch.cat([part.matrix for part in parts])
        return cls(matrix, first.rows, first.columns, all(part.symmetric for part in parts))

    def __getitem__(self, units: slice) -> Self:
        """Return some of the blocks."""
        return replace(self, matrix=self.matrix[units])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        return replace(self, matrix=self.matrix.to(device=device, dtype=dtype))

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {"matrix": self.matrix, "symmetric": self.symmetric}

    @classmethod
    def from_state(cls, state: Any, units: int, rows: int, columns: int) -> Self:
        """Undo `state`, for some blocks of a size."""
        if state["matrix"].shape != (units, rows * columns, rows * columns):
            raise ValueError(f"a block has shape {list(state['matrix'].shape)}")
        return cls(state["matrix"], rows, columns, bool(state["symmetric"]))

    def multiply(self, M: Tensor) -> Tensor:
        """Multiply with matrices."""
        return (self.matrix @ M.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(M.shape)

    def transposed(self) -> "Dense":
        """Transpose."""
        return self if self.symmetric else replace(self, matrix=self.matrix.transpose(1, 2))

    def scaled(self, factor: float) -> "Dense":
        """Scale."""
        return replace(self, matrix=factor * self.matrix)

    def eigenbasis(self) -> "Dense":
        """Return the blocks as they are: their eigenvectors have no structure."""
        return self

    def eigenvalues(self) -> Tensor:
        """Decompose."""
        return decompositions.eigh(self.matrix)[0]

    def to_dense(self) -> Tensor:
        """Return the matrices."""
        return self.matrix

    def diagonal(self) -> Tensor:
        """Return the diagonals."""
        return self.matrix.diagonal(dim1=1, dim2=2).reshape(self.units, self.rows, self.columns)

    def squared_norm(self) -> Tensor:
        """Sum squares."""
        return self.matrix.square().flatten(1).sum(1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Decompose."""
        sign, log = torch.linalg.slogdet(self.matrix)
        return sign, log

    def inverse(self) -> "Dense":
        """Invert."""
        if self.symmetric:
            return self.power(-1.0)
        return replace(self, matrix=torch.linalg.inv(self.matrix))

    def power(self, exponent: float, damping: Tensor | None = None) -> "Dense":
        """Decompose, and raise damped eigenvalues to a power."""
        values, vectors = decompositions.eigh(self.matrix)
        ones = values.new_ones(len(values))
        basis = Eigenbasis(
            Factor.identity(1, ones), Factor.dense(vectors), values.unsqueeze(2), decompositions.round_off(values)
        ).power(exponent, damping)
        return replace(self, matrix=(vectors * basis.values.transpose(1, 2)) @ vectors.transpose(1, 2))

    def product(self, other: Structure) -> Structure | None:
        """Multiply with any structure."""
        return Dense(self.matrix @ other.to_dense(), self.rows, self.columns, symmetric=False)

    def plus(self, other: Structure) -> Structure | None:
        """Add any structure."""
        return replace(self, matrix=self.matrix + other.to_dense(), symmetric=self.symmetric and other.symmetric)

    def shift(self, delta: float) -> "Dense":
        """Add to the diagonals."""
        return replace(self, matrix=self.matrix + delta * torch.eye(self.matrix.shape[1]).to(self.matrix))
