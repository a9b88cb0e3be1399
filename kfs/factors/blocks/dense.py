"""Blocks as plain matrices, for small layers."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kfs.factors.blocks import decompositions
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import NOT_STORED, Factor
from kfs.factors.blocks.structure import Structure


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Structure):
    """Blocks as plain matrices.

    Attributes:
        matrix: `[stack, d_B * d_A, d_B * d_A]`.
        rows: `d_B`.
        columns: `d_A`.
        symmetric: Whether blocks equal their transposes.
    """

    matrix: Tensor
    rows: int = field(metadata=NOT_STORED)
    columns: int = field(metadata=NOT_STORED)
    symmetric: bool = True
    field_shapes: ClassVar = {"matrix": ("size", "size")}

    @property
    def like(self) -> Tensor:
        """The matrices."""
        return self.matrix

    def multiply(self, M: Tensor) -> Tensor:
        """Multiply with the matrices."""
        return (self.matrix @ M.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(M.shape)

    def transposed(self) -> "Dense":
        """Return the transposes."""
        return self if self.symmetric else replace(self, matrix=self.matrix.transpose(1, 2))

    def scaled(self, factor: float) -> "Dense":
        """Return the matrices multiplied by a number."""
        return replace(self, matrix=factor * self.matrix)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues."""
        return decompositions.eigh(self.matrix)[0]

    def to_dense(self) -> Tensor:
        """Return the matrices."""
        return self.matrix

    def inverse(self) -> "Dense":
        """Return the inverses. A singular block raises an error."""
        if self.symmetric:
            return self.power(-1.0)
        return replace(self, matrix=decompositions.general_inverse(self.matrix))

    def power(self, exponent: float, damping: Tensor | None = None) -> "Dense":
        """Return powers of the damped blocks, computed from their eigenvalues."""
        values, vectors = decompositions.eigh(self.matrix)
        # A dense block is an `Eigenbasis` with a trivial input side. Use its checks and powers.
        Q_A = Factor.identity(1, values.new_ones(len(values)))
        noise = decompositions.round_off(values)
        basis = Eigenbasis(Q_A, Factor.dense(vectors), values.unsqueeze(2), noise)
        powered = basis.power(exponent, damping).values.transpose(1, 2)
        return replace(self, matrix=(vectors * powered) @ vectors.transpose(1, 2))

    def product(self, other: Structure) -> "Dense":
        """Return products with blocks of any structure."""
        return replace(self, matrix=self.matrix @ other.to_dense(), symmetric=False)

    def plus(self, other: Structure) -> "Dense":
        """Return sums with blocks of any structure."""
        symmetric = self.symmetric and other.symmetric
        return replace(self, matrix=self.matrix + other.to_dense(), symmetric=symmetric)

    def shift(self, delta: float | Tensor) -> "Dense":
        """Add a number to the diagonals."""
        identity = torch.eye(self.matrix.shape[1]).to(self.matrix)
        each = torch.as_tensor(delta, dtype=self.matrix.dtype, device=self.matrix.device).reshape(-1, 1, 1)
        return replace(self, matrix=self.matrix + each * identity)
