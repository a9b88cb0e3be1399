"""One side of a Kronecker product: dense, diagonal or identity matrices, a stack of them at once.

`Stackable` is the base of all objects that are stacked, sliced, moved and stored field by field.
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from kfs.display.describe import shaped
from kfs.factors.blocks import decompositions
from kfs.files import UnfitError

# Metadata of a field that files do not have, because something else in the file determines it.
NOT_STORED = {"stored": False}
S = TypeVar("S", bound="Stackable")


class Stackable:
    """Several blocks, or factors of blocks, of one size."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # subclasses are dataclasses

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts that have equal keys. A single part is returned as it is, without copying."""
        return parts[0] if len(parts) == 1 else _combined(torch.cat, parts)

    def __getitem__(self, part: slice) -> Self:
        """Return some of the blocks; tensors are views."""
        return _combined(lambda tensors: tensors[0][part], [self])

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __repr__(self) -> str:
        """Return all fields; of tensors, only shape, dtype and device."""
        return f"{type(self).__name__}({', '.join(f'{f.name}={_shown(getattr(self, f.name))}' for f in fields(self))})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        return _combined(lambda tensors: tensors[0].to(device=device, dtype=dtype), [self])

    def empty_on(self, device: torch.device | str) -> Self:
        """Return blocks of the same sizes, with numbers that are not set yet, also of those on the meta device."""
        return _combined(lambda tensors: torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=device), [self])

    def overwrite(self, other: Self, where: Tensor | None = None) -> None:
        """Write the blocks of another stack of the same key over these, in place.

        Args:
            other: What to write.
            where: Which blocks to write, `[stack]`; all by default.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Stackable):
                mine.overwrite(theirs, where)
            # What is one expanded number, such as the diagonal of an identity, is the same in both.
            elif isinstance(mine, Tensor) and 0 not in mine.stride():
                if where is not None:
                    theirs = torch.where(where.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)
                mine.copy_(theirs)

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for blocks to be stacked: sizes, kinds and the device."""
        return type(self).__name__, *(_key(getattr(self, f.name)) for f in fields(self))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, except those with one number per block and those that are one expanded number."""
        values = [part for f in fields(self) for part in _parts(getattr(self, f.name))]
        nested = sum(value.nbytes for value in values if isinstance(value, Stackable))
        return nested + sum(t.nbytes for t in values if isinstance(t, Tensor) and t.ndim > 1 and t.stride(-1) > 0)

    def state(self) -> dict[str, Any]:
        """Return what a file stores, by field."""
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata != NOT_STORED}
        return {n: v.state() if isinstance(v, Stackable) else v for n, v in stored.items()}


def check_shape(t: Tensor, *shape: int) -> Tensor:
    """Return a tensor from a file if it has the expected shape; raise an `UnfitError` otherwise."""
    if t.shape != shape:
        raise UnfitError(f"a tensor has shape {list(t.shape)} instead of {list(shape)}")
    return t


def _combined(function: Callable[[list[Tensor]], Tensor], parts: Sequence[S]) -> S:
    """Combine parts into one object. The function takes the tensors that one field has in all parts."""
    result: dict[str, Any] = {}
    for f in fields(parts[0]):
        values = [getattr(part, f.name) for part in parts]
        if isinstance(values[0], Stackable):
            result[f.name] = _combined(function, values)
        elif isinstance(values[0], tuple):
            result[f.name] = tuple(_combined(function, same) for same in zip(*values, strict=True))
        elif isinstance(values[0], Tensor):
            result[f.name] = function(values)
        else:
            # A stack has a property (to be symmetric) if all of its blocks have it. Other values are equal, by the key.
            result[f.name] = all(values) if isinstance(values[0], bool) else values[0]
    return type(parts[0])(**result)


def _parts(value: Any) -> tuple[Any, ...]:
    """Return what a field consists of: itself, or the members of a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _key(value: Any) -> Any:
    """Return what must be equal in one field."""
    if isinstance(value, Stackable):
        return value.key
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    if isinstance(value, Tensor):
        return value.shape[1:], value.device
    return None if isinstance(value, bool) else value


def _shown(value: Any) -> str:
    return f"({shaped(value)})" if isinstance(value, Tensor) else repr(value)


Kind = Literal["dense", "diagonal", "identity"]
_FEW = 32  # On a CPU, matrices with fewer columns than this are multiplied side by side.


@dataclass(frozen=True, eq=False, repr=False)
class Factor(Stackable):
    """A stack of matrices: scales times dense, diagonal or identity matrices.

    Attributes:
        values: `[stack, d, d]` for dense matrices, `[stack, d]` for diagonals. For identities, `[stack, d]` of ones,
            which are expanded and take no memory.
        scale: `[stack]`.
        kind: `"dense"`, `"diagonal"` or `"identity"`.
        symmetric: Whether matrices equal their transposes.
        eps: Precision that values were stored in. `None` for that of their dtype.
    """

    values: Tensor
    scale: Tensor
    kind: Kind
    symmetric: bool = True
    eps: float | None = field(default=None, metadata=NOT_STORED)

    def __post_init__(self) -> None:
        """Expand the ones of identities again, if concatenation or conversion has stored them."""
        if self.kind == "identity" and self.values.stride(-1) != 0:
            object.__setattr__(self, "values", self.scale.new_ones(()).expand(self.values.shape))

    @classmethod
    def dense(cls, values: Tensor, scale: Tensor | None = None, symmetric: bool = True) -> "Factor":
        """Wrap matrices `[stack, d, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "dense", symmetric)

    @classmethod
    def diagonal(cls, values: Tensor, scale: Tensor | None = None) -> "Factor":
        """Wrap diagonals `[stack, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "diagonal")

    @classmethod
    def identity(cls, size: int, scale: Tensor) -> "Factor":
        """Make multiples of the identity, with scales `[stack]`."""
        return cls(scale.new_ones(()).expand(len(scale), size), scale, "identity")

    def state(self) -> dict[str, Any]:
        """Return what a file stores. Identities store their size instead of their values."""
        return super().state() | ({"values": self.size} if self.kind == "identity" else {})

    @classmethod
    def from_state(cls, state: Any, count: int, size: int) -> Self:
        """Undo `state`, for a number of matrices of some size."""
        kind = state["kind"]
        scale = check_shape(state["scale"], count)
        values = scale.new_ones(count, int(state["values"])) if kind == "identity" else state["values"]
        shape = (size, size) if kind == "dense" else (size,)
        return cls(check_shape(values, count, *shape), scale, kind, bool(state["symmetric"]))

    @property
    def size(self) -> int:
        """Rows of a matrix."""
        return self.values.shape[-1]

    @property
    def is_multiple_of_identity(self) -> bool:
        """Whether one can tell from kind and size that all matrices are multiples of the identity."""
        return self.kind == "identity" or self.size == 1

    @property
    def T(self) -> "Factor":  # noqa: N802
        """The transposes."""
        return self if self.symmetric else replace(self, values=self.values.transpose(1, 2))

    def to_dense(self) -> Tensor:
        """Return `[stack, d, d]`."""
        values = self.values if self.kind == "dense" else torch.diag_embed(self.values)
        return values * self.scale.reshape(-1, 1, 1)

    def entries(self) -> Tensor:
        """Return the diagonals, `[stack, d]`."""
        values = self.values.diagonal(dim1=1, dim2=2) if self.kind == "dense" else self.values
        return values * self.scale.unsqueeze(1)

    def left(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, d, e]` from the left with the matrices, without their scales."""
        if self.kind == "diagonal":
            return self.values[:, None, :, None] * M
        if self.kind == "identity":
            return M
        if M.shape[1] == 1:
            return (self.values @ M.squeeze(1)).unsqueeze(1)
        is_on_cpu = M.device.type == "cpu"
        if is_on_cpu and M.shape[3] < _FEW:
            # Thin products would read the whole factor once per column.
            return self.right(M.transpose(2, 3)).transpose(2, 3)
        if len(self.values) == 1 or not is_on_cpu:
            return self.values.unsqueeze(1) @ M
        # On a CPU, the product above would copy each matrix once per column.
        return torch.stack([matrix @ columns for matrix, columns in zip(self.values, M, strict=True)])

    def right(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, e, d]` from the right with the transposes, without their scales."""
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
        eps = self._common_eps(other)
        if self.kind == other.kind == "diagonal":
            return replace(Factor.diagonal(self.values * other.values, scale), eps=eps)
        if self.kind == "diagonal":
            product = self.values.unsqueeze(2) * other.values
        elif other.kind == "diagonal":
            product = self.values * other.values.unsqueeze(1)
        else:
            product = self.values @ other.values
        return replace(Factor.dense(product, scale, symmetric=False), eps=eps)

    def plus(self, other: "Factor") -> "Factor":
        """Add matrix by matrix."""
        if self.kind == other.kind == "identity":
            return replace(self, scale=self.scale + other.scale)
        eps = self._common_eps(other)
        if "dense" not in {self.kind, other.kind}:
            return replace(Factor.diagonal(self.entries() + other.entries()), eps=eps)
        symmetric = self.symmetric and other.symmetric
        return replace(Factor.dense(self.to_dense() + other.to_dense(), symmetric=symmetric), eps=eps)

    def _common_eps(self, other: "Factor") -> float | None:
        """Return the precision of a product or a sum: the worse one of both."""
        return max(self.eps or 0.0, other.eps or 0.0) or None

    def shift(self, delta: Tensor) -> "Factor":
        """Add multiples `[stack]` of the identity."""
        if self.kind != "dense":
            return self.plus(Factor.identity(self.size, delta.to(self.scale)))
        values = self.to_dense()
        values.diagonal(dim1=1, dim2=2).add_(delta.to(values).unsqueeze(1))
        return Factor.dense(values, symmetric=self.symmetric)

    def scaled(self, factor: Tensor | float) -> "Factor":
        """Scale all matrices by a number, or by one each, `[stack]`."""
        return replace(self, scale=self.scale * factor)

    def unscaled(self) -> "Factor":
        """Replace all scales by one."""
        return replace(self, scale=torch.ones_like(self.scale))

    def equals(self, other: "Factor") -> bool:
        """Whether all matrices are the same, up to scales."""
        if self.kind != other.kind:
            return False
        return self.values is other.values or torch.equal(self.values, other.values)

    def trace(self) -> Tensor:
        """Return the traces, `[stack]`."""
        return self.entries().sum(1)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, `[stack]`."""
        return self.values.square().flatten(1).sum(1) * self.scale.square()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, `[stack]` each."""
        if self.kind == "dense":
            sign, log = decompositions.slogdet(self.values, self.symmetric, self.eps)
        else:
            sign = self.values.sign().prod(1)
            log = self.values.abs().log().sum(1)
        return sign * self.scale.sign() ** self.size, log + self.size * self.scale.abs().log()

    @cached_property
    def _unscaled_eigh(self) -> "tuple[Tensor, Factor]":
        """Eigenvalues and eigenvectors without scales, decomposed once for all uses of the factor."""
        if self.kind == "dense":
            values, vectors = decompositions.eigh(self.values)
            return values, Factor.dense(vectors, symmetric=False)
        decompositions.check_finite(self.values)
        return self.values, Factor.identity(self.size, torch.ones_like(self.scale))

    def eigh(self) -> "tuple[Tensor, Factor]":
        """Return eigenvalues `[stack, d]` and eigenvectors of symmetric matrices."""
        values, vectors = self._unscaled_eigh
        return values * self.scale.unsqueeze(1), vectors

    def inverse(self) -> "Factor":
        """Invert, by Cholesky factors if matrices are symmetric."""
        decompositions.check_each(self.scale != 0, "is singular: its scale is zero")
        values: Tensor = self.values
        if self.kind == "diagonal":
            decompositions.check_finite(values)
            decompositions.check_each((values != 0).all(1), "is singular: a diagonal entry is zero")
            values = 1 / values
        elif self.kind == "dense" and self.symmetric:
            values = decompositions.inverse(values)
        elif self.kind == "dense":
            values = decompositions.general_inverse(values, self.eps)
        return replace(self, values=values, scale=1 / self.scale.to(values.dtype))

    def power(self, exponent: float) -> "Factor":
        """Raise positive semi-definite matrices to a power. A negative power of zero is an error."""
        values, vectors = self.eigh()
        powered = positive_power(values, exponent, decompositions.round_off(values, self.eps))
        if self.kind == "identity":
            return replace(self, scale=powered[:, 0])
        if self.kind == "diagonal":
            return Factor.diagonal(powered)
        rotated = vectors.values * powered.unsqueeze(1)
        return Factor.dense(rotated @ vectors.values.transpose(1, 2))


def kronecker_product(B: Factor, A: Factor) -> Tensor:
    """Return the matrices of `B (x) A`, `[stack, d_B * d_A, d_B * d_A]`."""
    product = torch.einsum("uij,ukl->uikjl", B.to_dense(), A.to_dense())
    return product.reshape(len(A), A.size * B.size, -1)


def positive_power(values: Tensor, exponent: float, noise: Tensor) -> Tensor:
    """Raise eigenvalues that are not negative, up to noise, to a power.

    Args:
        values: `[stack, ...]`.
        exponent: Any number.
        noise: Bound on the round-off in the eigenvalues: `[stack]`, or one for each of them.

    Raises:
        BlockError: If one is negative, or zero and the exponent is negative.
    """
    decompositions.check_definite(values, noise)
    if exponent >= 0:
        return values.clamp(min=0) ** exponent
    above_noise = values.flatten(1) > noise.reshape(len(values), -1)
    decompositions.check_each(above_noise.all(1), "is singular, up to round-off")
    return values**exponent
