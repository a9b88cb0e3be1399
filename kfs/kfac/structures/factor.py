r"""One side of a Kronecker product: a dense, diagonal or identity matrix, for many blocks of one size at once.

All methods act on `U` matrices of size `d` together, each with a scale of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.kfac.structures import decompositions
from kfs.storage import UnfitError

Kind = Literal["dense", "diagonal", "identity"]


@dataclass(frozen=True, eq=False)
class Factor:
    """Some matrices: scales times dense, diagonal or identity matrices.

    Attributes:
        values: `[U, d, d]` for dense matrices, `[U, d]` for diagonals. For identities, `[U, d]` of (expanded) ones.
        scale: `[U]`.
        kind: Which of the three.
        symmetric: Whether matrices equal their transposes.
        eps: The precision that values were stored in, if not that of their dtype.
    """

    values: Tensor
    scale: Tensor
    kind: Kind
    symmetric: bool = True
    eps: float | None = None

    @classmethod
    def dense(cls, values: Tensor, scale: Tensor | None = None, symmetric: bool = True) -> "Factor":
        """Wrap matrices `[U, d, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "dense", symmetric)

    @classmethod
    def diagonal(cls, values: Tensor, scale: Tensor | None = None) -> "Factor":
        """Wrap diagonals `[U, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "diagonal")

    @classmethod
    def identity(cls, size: int, scale: Tensor) -> "Factor":
        """Make multiples of the identity, with scales `[U]`."""
        return cls(scale.new_ones(()).expand(len(scale), size), scale, "identity")

    @classmethod
    def stack(cls, parts: Sequence["Factor"]) -> "Factor":
        """Put matrices of one kind and size together."""
        first = parts[0]
        if len(parts) == 1:
            return first
        scale = torch.cat([part.scale for part in parts])
        if first.kind == "identity":
            return cls.identity(first.size, scale)
        symmetric = all(part.symmetric for part in parts)
        return cls(torch.cat([part.values for part in parts]), scale, first.kind, symmetric, first.eps)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Factor":
        """Return the same matrices on a device, or in another precision."""
        values, scale = (t.to(device=device, dtype=dtype) for t in (self.values, self.scale))
        return replace(self, values=values, scale=scale)

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        values = self.size if self.kind == "identity" else self.values
        return {"kind": self.kind, "values": values, "scale": self.scale, "symmetric": self.symmetric}

    @classmethod
    def from_state(cls, state: Any, units: int, size: int) -> "Factor":
        """Undo `state`, for some matrices of a size."""
        kind, values, scale = state["kind"], state["values"], state["scale"]
        if kind == "identity":
            values = scale.new_ones(()).expand(units, int(values))
        shape = {"dense": (units, size, size), "diagonal": (units, size), "identity": (units, size)}[kind]
        if values.shape != shape or scale.shape != (units,):
            raise UnfitError(f"a factor has shape {list(values.shape)} instead of {list(shape)}")
        return cls(values, scale, kind, bool(state["symmetric"]))

    def __getitem__(self, units: slice) -> "Factor":
        """Return some of the matrices."""
        return replace(self, values=self.values[units], scale=self.scale[units])

    def __len__(self) -> int:
        """Count the matrices."""
        return len(self.scale)

    @property
    def size(self) -> int:
        """Rows of a matrix."""
        return self.values.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return 0 if self.kind == "identity" else self.values.numel() * self.values.element_size()

    @property
    def T(self) -> "Factor":  # noqa: N802
        """The transposes."""
        return self if self.symmetric else replace(self, values=self.values.transpose(1, 2))

    def to_dense(self) -> Tensor:
        """Return `[U, d, d]`."""
        values = self.values if self.kind == "dense" else torch.diag_embed(self.values)
        return values * self._scale(values)

    def entries(self) -> Tensor:
        """Return the diagonals, `[U, d]`."""
        values = self.values.diagonal(dim1=1, dim2=2) if self.kind == "dense" else self.values
        return values * self.scale.unsqueeze(1)

    def left(self, M: Tensor) -> Tensor:
        """Multiply `[U, K, d, e]` from the left with the matrices, without their scales."""
        if self.kind == "diagonal":
            return self.values[:, None, :, None] * M
        if self.kind == "identity":
            return M
        if M.shape[1] == 1:
            return (self.values @ M.squeeze(1)).unsqueeze(1)
        if len(self) == 1 or M.device.type != "cpu":
            return self.values.unsqueeze(1) @ M
        return torch.stack([matrix @ columns for matrix, columns in zip(self.values, M, strict=True)])  # not K copies

    def right(self, M: Tensor) -> Tensor:
        """Multiply `[U, K, e, d]` from the right with the transposed matrices, without their scales."""
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
        if self.kind == other.kind == "diagonal":
            return Factor.diagonal(self.values * other.values, scale)
        if self.kind == "diagonal":
            return Factor.dense(self.values.unsqueeze(2) * other.values, scale, symmetric=False)
        if other.kind == "diagonal":
            return Factor.dense(self.values * other.values.unsqueeze(1), scale, symmetric=False)
        return Factor.dense(self.values @ other.values, scale, symmetric=False)

    def plus(self, other: "Factor") -> "Factor":
        """Add matrix by matrix."""
        if self.kind == other.kind == "identity":
            return replace(self, scale=self.scale + other.scale)
        if "dense" not in {self.kind, other.kind}:
            return Factor.diagonal(self.entries() + other.entries())
        return Factor.dense(self.to_dense() + other.to_dense(), symmetric=self.symmetric and other.symmetric)

    def shift(self, delta: Tensor) -> "Factor":
        """Add multiples `[U]` of the identity."""
        if self.kind != "dense":
            return self.plus(Factor.identity(self.size, delta.to(self.scale)))
        values = self.values * self._scale(self.values)
        values.diagonal(dim1=1, dim2=2).add_(delta.to(values).unsqueeze(1))
        return Factor.dense(values, symmetric=self.symmetric)

    def scaled(self, factor: Tensor | float) -> "Factor":
        """Scale all matrices by a number, or by one each, `[U]`."""
        return replace(self, scale=self.scale * factor)

    def equals(self, other: "Factor") -> bool:
        """Whether all matrices are the same, up to scales."""
        return self.kind == other.kind and (self.values is other.values or torch.equal(self.values, other.values))

    def trace(self) -> Tensor:
        """Return the traces, `[U]`."""
        return self.entries().sum(1)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[U]`."""
        return self.values.square().flatten(1).sum(1) * self.scale.square()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, `[U]` each."""
        if self.kind == "dense":
            sign, log = torch.linalg.slogdet(decompositions.computable(self.values))
        else:
            sign, log = self.values.sign().prod(1), self.values.abs().log().sum(1)
        return sign * self.scale.sign() ** self.size, log + self.size * self.scale.abs().log()

    @cached_property
    def _unscaled_eigh(self) -> "tuple[Tensor, Factor]":
        if self.kind == "dense":
            values, vectors = decompositions.eigh(self.values)
            return values, Factor.dense(vectors, symmetric=False)
        decompositions.check_finite(self.values)
        return self.values, Factor.identity(self.size, torch.ones_like(self.scale))

    def eigh(self) -> "tuple[Tensor, Factor]":
        """Return eigenvalues `[U, d]` and eigenvectors of symmetric matrices."""
        values, vectors = self._unscaled_eigh
        return values * self.scale.unsqueeze(1), vectors

    def inverse(self) -> "Factor":
        """Invert, by Cholesky factors where matrices are symmetric."""
        if self.kind == "identity":
            return self._inverse_of_scale(self.values)
        if self.kind == "diagonal":
            decompositions.check_finite(self.values)
            if (self.values == 0).any():
                unit = int((self.values == 0).any(1).nonzero()[0])
                raise decompositions.UnitError(unit, "is singular: a diagonal entry is zero")
            return self._inverse_of_scale(1 / self.values)
        if self.symmetric:
            return self._inverse_of_scale(decompositions.inverse(self.values))
        return self._inverse_of_scale(torch.linalg.inv(decompositions.computable(self.values)))

    def power(self, exponent: float) -> "Factor":
        """Raise positive semi-definite matrices to a power; zero to a negative power is an error."""
        values, vectors = self.eigh()
        powered = positive_power(values, exponent, decompositions.round_off(values, self.eps))
        if vectors.kind == "identity":
            return Factor.diagonal(powered) if self.kind == "diagonal" else self._with_scale(powered[:, 0])
        return Factor.dense((vectors.values * powered.unsqueeze(1)) @ vectors.values.transpose(1, 2))

    def _with_scale(self, scale: Tensor) -> "Factor":
        return replace(self, scale=scale)

    def _inverse_of_scale(self, values: Tensor) -> "Factor":
        if (self.scale == 0).any():
            raise decompositions.UnitError(int((self.scale == 0).nonzero()[0]), "is singular: its scale is zero")
        return replace(self, values=values, scale=1 / self.scale.to(values.dtype))

    def _scale(self, like: Tensor) -> Tensor:
        return self.scale.reshape(-1, *[1] * (like.ndim - 1))


def positive_power(values: Tensor, exponent: float, noise: Tensor) -> Tensor:
    """Raise eigenvalues `[U, ...]` that are not negative, up to noise `[U]`, to a power.

    Raises:
        UnitError: If one is negative, or zero and the exponent is negative.
    """
    decompositions.check_definite(values, noise)
    if exponent >= 0:
        return values.clamp(min=0) ** exponent
    singular = (values <= noise.reshape(-1, *[1] * (values.ndim - 1))).flatten(1).any(1)
    if singular.any():
        raise decompositions.UnitError(int(singular.nonzero()[0]), "is singular, up to round-off")
    return values**exponent
