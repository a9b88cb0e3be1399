r"""Structures: ways to store blocks of a curvature matrix, all with the same methods.

A block acts on matrices $M$ of shape `[d_B, d_A]`: a parameter as its `Layout` reads it (see `kfs.factors.layout`). A
structure holds a *stack* of blocks of one size. Its tensors have a leading axis `stack`, and products act on several
columns at once, `[stack, columns, d_B, d_A]`.

- `Kronecker` (in `kronecker`): $M \mapsto B M A^\top$.
- `Eigenbasis` (in `eigenbasis`): $M \mapsto Q_B \left(\Lambda \odot Q_B^\top M Q_A\right) Q_A^\top$. Damped inverses,
  EKFAC and diagonals (in the trivial basis) have this form.
- `KroneckerSum` (in `kronecker_sum`): $M \mapsto \sum_i B_i M A_i^\top$, and its inverse: `Congruence` for two terms,
  `IterativeInverse` for more.
- `Dense` (in `dense`): any matrix, $\mathrm{rvec}(M) \mapsto C\, \mathrm{rvec}(M)$.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from torch import Tensor

from kfs.factors.blocks import decompositions
from kfs.factors.blocks.factor import Factor, Stackable, check_shape


class Structure(Stackable, ABC):
    """A stack of blocks of one structure and size.

    Attributes:
        rows: `d_B`.
        columns: `d_A`.
        symmetric: Whether blocks equal their transposes.
        field_shapes: For each field, the shape of the tensor without its stack axis, or the size of the factor. Shapes
            consist of the names `"rows"`, `"columns"` and `"size"` (`d_B * d_A`).
    """

    rows: int
    columns: int
    symmetric: bool = True
    field_shapes: ClassVar[Mapping[str, tuple[str, ...]]]

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the device and dtype in which products are computed."""

    @classmethod
    def from_state(cls, state: Any, count: int, rows: int, columns: int) -> Self:
        """Load the result of `state`, for `count` blocks that act on matrices `[rows, columns]`.

        Raises:
            UnfitError: If a tensor does not have the expected shape.
        """
        sizes = {"rows": rows, "columns": columns, "size": rows * columns}
        values: dict[str, Any] = {}
        for f in fields(cls):
            shape = [sizes[name] for name in cls.field_shapes.get(f.name, ())]
            if f.type is Factor:
                values[f.name] = Factor.from_state(state[f.name], count, *shape)
            elif isinstance(f.type, type) and issubclass(f.type, Structure):
                values[f.name] = f.type.from_state(state[f.name], count, rows, columns)
            elif f.type is Tensor:
                values[f.name] = check_shape(state[f.name], count, *shape)
            else:
                values[f.name] = sizes[f.name] if f.name in sizes else bool(state[f.name])
        return cls(**values)

    @abstractmethod
    def multiply(self, M: Tensor) -> Tensor:
        """Return the products of the blocks with matrices `M`, `[stack, columns, d_B, d_A]`."""

    def transposed(self) -> "Structure":
        """Return the transposes. By default, the blocks themselves, because most structures are symmetric."""
        return self

    @abstractmethod
    def scaled(self, factor: float) -> "Structure":
        """Return all blocks multiplied by a number."""

    def eigenbasis(self) -> "Structure":
        """Return symmetric blocks as a structure that implements `eigenvalues` and `power` itself."""
        return self

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the blocks as matrices, `[stack, d_B * d_A, d_B * d_A]`, which act on row-wise flattened `M`."""

    # The defaults below form dense matrices. Structures with a cheaper formula override them.

    def diagonal(self) -> Tensor:
        """Return the diagonals, `[stack, d_B, d_A]`."""
        return self.to_dense().diagonal(dim1=1, dim2=2).reshape(-1, self.rows, self.columns)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[stack]`."""
        return self.to_dense().square().flatten(1).sum(1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, `[stack]` each: zero and minus infinity of singular blocks."""
        return decompositions.slogdet(self.to_dense(), self.symmetric)

    def trace(self) -> Tensor:
        """Return the traces, `[stack]`."""
        return self.diagonal().flatten(1).sum(1)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, `[stack, d_B * d_A]`, in any order."""
        return self.eigenbasis().eigenvalues()

    def power(self, exponent: float, damping: Tensor | None = None) -> "Structure":
        """Return powers of the blocks, after adding damping `[stack]` times the identity."""
        return self.eigenbasis().power(exponent, damping)

    def inverse(self) -> "Structure":
        """Return the inverses of the blocks."""
        return self.power(-1.0)

    def product(self, other: "Structure") -> "Structure | None":
        """Return products, block by block; `None` if no structure can store them."""
        return None

    def plus(self, other: "Structure") -> "Structure | None":
        """Return sums, block by block; `None` if no structure can store them."""
        return None

    @abstractmethod
    def shift(self, delta: float | Tensor) -> "Structure":
        """Add a multiple of the identity: one number for all blocks, or one for each, `[stack]`."""
