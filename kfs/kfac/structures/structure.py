r"""Structures: ways to store a symmetric block of a curvature matrix, all with the same abilities.

A block acts on matrices $M$ of shape `[d_B, d_A]`: a parameter in its own frame, see `blocks`. Blocks of one structure
and size are processed together, as `U` *units*: all methods take and return tensors with a leading axis of that
length, and products act on `K` columns at once, `[U, K, d_B, d_A]`.

- `Kronecker` (in `kronecker`): $M \mapsto B M A^\top$.
- `Eigenbasis` (in `eigenbasis`): $M \mapsto Q_B \left(\Lambda \odot Q_B^\top M Q_A\right) Q_A^\top$: what a damped
  inverse, EKFAC and diagonals (in the trivial basis) have in common.
- `Dense` (in `dense`): any matrix, $\mathrm{rvec}(M) \mapsto C\, \mathrm{rvec}(M)$.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor


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
    def eigenbasis(self) -> "Structure":
        """Return symmetric blocks in a form whose spectrum is at hand."""

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

    @abstractmethod
    def product(self, other: "Structure") -> "Structure | None":
        """Multiply block by block; nothing if the result has no simple structure."""

    @abstractmethod
    def plus(self, other: "Structure") -> "Structure | None":
        """Add block by block; nothing if the result has no simple structure."""

    @abstractmethod
    def shift(self, delta: float) -> "Structure":
        """Add a multiple of the identity."""
