r"""Structures: ways to store symmetric blocks of a curvature matrix, all with the same methods.

A block acts on matrices $M$ of shape `[d_B, d_A]`: a parameter as its `Layout` reads it (see `kfs.kfac.layout`). A
structure holds a *stack* of blocks of one size. Its tensors have a leading axis `stack`, and products act on several
columns at once, `[stack, columns, d_B, d_A]`.

- `Kronecker` (in `kronecker`): $M \mapsto B M A^\top$.
- `Eigenbasis` (in `eigenbasis`): $M \mapsto Q_B \left(\Lambda \odot Q_B^\top M Q_A\right) Q_A^\top$. Damped inverses,
  EKFAC and diagonals (in the trivial basis) have this form.
- `Dense` (in `dense`): any matrix, $\mathrm{rvec}(M) \mapsto C\, \mathrm{rvec}(M)$.
"""

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, Self

from torch import Tensor

from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.stackable import Stackable
from kfs.storage import UnfitError


class Structure(Stackable, ABC):
    """A stack of blocks of one structure and size.

    Attributes:
        rows: `d_B`.
        columns: `d_A`.
        symmetric: Whether blocks equal their transposes.
    """

    rows: int
    columns: int
    symmetric: bool = True

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the device and the dtype that products are computed in."""

    @classmethod
    @abstractmethod
    def field_shapes(cls, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor without its stack axis, and the size of every factor, by field."""

    @classmethod
    def from_state(cls, state: Any, count: int, rows: int, columns: int) -> Self:
        """Undo `state`.

        Args:
            state: What a file has.
            count: Number of blocks in the stack.
            rows: `d_B`.
            columns: `d_A`.

        Raises:
            UnfitError: If something has another shape than it should.
        """
        shapes = cls.field_shapes(rows, columns)
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in {"rows", "columns"}:
                values[f.name] = rows if f.name == "rows" else columns
            elif f.type is Factor:
                values[f.name] = Factor.from_state(state[f.name], count, *shapes[f.name])
            elif f.type is Tensor:
                expected = (count, *shapes[f.name])
                if state[f.name].shape != expected:
                    found = list(state[f.name].shape)
                    raise UnfitError(f"{f.name} has shape {found} instead of {list(expected)}")
                values[f.name] = state[f.name]
            else:
                values[f.name] = bool(state[f.name])
        return cls(**values)

    @abstractmethod
    def multiply(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, d_B, d_A]`."""

    @abstractmethod
    def transposed(self) -> "Structure":
        """Return the transposes."""

    @abstractmethod
    def scaled(self, factor: float) -> "Structure":
        """Scale all blocks."""

    @abstractmethod
    def eigenbasis(self) -> "Structure":
        """Return symmetric blocks in a form whose eigenvalues are known, or cheap to compute."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return `[stack, d_B * d_A, d_B * d_A]`. Matrices are flattened by rows."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals, `[stack, d_B, d_A]`."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[stack]`."""

    @abstractmethod
    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, `[stack]` each."""

    def trace(self) -> Tensor:
        """Return the traces, `[stack]`."""
        return self.diagonal().flatten(1).sum(1)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, `[stack, d_B * d_A]`, in any order."""
        return self.eigenbasis().eigenvalues()

    def power(self, exponent: float, damping: Tensor | None = None) -> "Structure":
        """Raise blocks to a power, after adding damping `[stack]` times the identity."""
        return self.eigenbasis().power(exponent, damping)

    def inverse(self) -> "Structure":
        """Invert."""
        return self.power(-1.0)

    @abstractmethod
    def product(self, other: "Structure") -> "Structure | None":
        """Multiply block by block. `None` if the result has none of these structures."""

    @abstractmethod
    def plus(self, other: "Structure") -> "Structure | None":
        """Add block by block. `None` if the result has none of these structures."""

    @abstractmethod
    def shift(self, delta: float) -> "Structure":
        """Add a multiple of the identity."""
