"""Blocks without structure, for small layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kfs.kfac.structures import decompositions
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.structure import Structure
from kfs.storage import UnfitError


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
            raise UnfitError(f"a block has shape {list(state['matrix'].shape)}")
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
