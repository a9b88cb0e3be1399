"""Factors of Kronecker products: stacks of dense, diagonal or identity matrices.

Kronecker products of two factors live in `kfs.factors.blocks.kronecker`.

`Stackable` is the base class of frozen dataclasses of tensors that are stacked, sliced, moved and stored field by
field. An object stands for several blocks (or factors) of one size. Its tensors have a leading *stack* axis, with one
entry per block. Fields that are `Stackable` themselves, or tuples of such objects, follow the same rule. All other
fields hold for the whole stack.

A `Factor` is one side of a stack of Kronecker products. Its methods act on all matrices of size `d` at once. Each
matrix has its own scale.
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

# Metadata of a field that is not stored in files, because other content of the file determines it.
NOT_STORED = {"stored": False}
S = TypeVar("S", bound="Stackable")


class Stackable:
    """Base of stacks of blocks, or of factors, of one size."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # subclasses are dataclasses

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Concatenate parts that have equal keys. A single part is returned as it is, without copying."""
        return parts[0] if len(parts) == 1 else _combined(torch.cat, parts)

    def __getitem__(self, part: slice) -> Self:
        return _combined(lambda tensors: tensors[0][part], [self])

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f.name}={_shown(getattr(self, f.name))}' for f in fields(self))})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the same blocks on a device, or in another precision."""
        return _combined(lambda tensors: tensors[0].to(device=device, dtype=dtype), [self])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same blocks with a function applied to all tensors."""
        return _combined(lambda tensors: function(tensors[0]), [self])

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        found: list[Tensor] = []

        def add(t: Tensor) -> Tensor:
            found.append(t)
            return t

        self.mapped(add)
        return found

    def empty_on(self, device: torch.device | str) -> Self:
        """Return uninitialized blocks of the same sizes on a device. This also works for blocks on the meta device."""
        return _combined(lambda tensors: torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=device), [self])

    def overwrite(self, other: Self, where: Tensor | None = None) -> None:
        """Overwrite these blocks in place with the blocks of another stack that has the same key.

        Args:
            other: The blocks to write.
            where: Mask of blocks to write, `[stack]`; all by default.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Stackable):
                mine.overwrite(theirs, where)
            # A single expanded number, such as the diagonal of an identity, is equal in both stacks.
            elif isinstance(mine, Tensor) and 0 not in mine.stride():
                if where is not None:
                    theirs = torch.where(where.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)
                mine.copy_(theirs)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of blocks that can be stacked: sizes, kinds and the device."""
        return type(self).__name__, *(_key(getattr(self, f.name)) for f in fields(self))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, except tensors with one number per block and expanded ones."""
        values = [part for f in fields(self) for part in _parts(getattr(self, f.name))]
        nested = sum(value.nbytes for value in values if isinstance(value, Stackable))
        return nested + sum(t.nbytes for t in values if isinstance(t, Tensor) and t.ndim > 1 and t.stride(-1) > 0)

    def state(self) -> dict[str, Any]:
        """Return the fields as the content of a file."""
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata != NOT_STORED}
        return {n: v.state() if isinstance(v, Stackable) else v for n, v in stored.items()}


def check_shape(t: Tensor, *shape: int) -> Tensor:
    """Return a tensor from a file if it has the expected shape; raise an `UnfitError` otherwise."""
    if t.shape != shape:
        raise UnfitError(f"a tensor has shape {list(t.shape)} instead of {list(shape)}")
    return t


def _combined(function: Callable[[list[Tensor]], Tensor], parts: Sequence[S]) -> S:
    """Combine parts into one object, by applying a function to the tensors of each field."""
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
            # A stack is symmetric if all of its blocks are. Other values are equal, because keys are.
            result[f.name] = all(values) if isinstance(values[0], bool) else values[0]
    return type(parts[0])(**result)


def _parts(value: Any) -> tuple[Any, ...]:
    """Return the members of a tuple, or the value itself as the only member."""
    return value if isinstance(value, tuple) else (value,)


def _key(value: Any) -> Any:
    """Return the contribution of one field to `Stackable.key`."""
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
_FEW = 32  # on a CPU, several matrices with fewer columns than this are joined for one product


@dataclass(frozen=True, eq=False, repr=False)
class Factor(Stackable):
    """A stack of scaled matrices: dense, diagonal or identity.

    Attributes:
        values: `[stack, d, d]` for dense matrices, `[stack, d]` for diagonals. For identities, `[stack, d]` of ones,
            which are expanded and need no memory.
        scale: `[stack]`.
        kind: `"dense"`, `"diagonal"` or `"identity"`.
        symmetric: Whether matrices equal their transposes.
        eps: Precision in which values were stored; `None` for the precision of their dtype.
    """

    values: Tensor
    scale: Tensor
    kind: Kind
    symmetric: bool = True
    eps: float | None = field(default=None, metadata=NOT_STORED)

    def __post_init__(self) -> None:
        # Concatenation or conversion may have allocated the ones of an identity.
        if self.kind == "identity" and self.values.stride(-1) != 0:
            object.__setattr__(self, "values", self.scale.new_ones(()).expand(self.values.shape))

    @classmethod
    def dense(cls, values: Tensor, scale: Tensor | None = None, symmetric: bool = True) -> "Factor":
        """Return factors with the given matrices, `[stack, d, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "dense", symmetric)

    @classmethod
    def diagonal(cls, values: Tensor, scale: Tensor | None = None) -> "Factor":
        """Return diagonal factors with the given entries, `[stack, d]`."""
        return cls(values, values.new_ones(len(values)) if scale is None else scale, "diagonal")

    @classmethod
    def identity(cls, size: int, scale: Tensor) -> "Factor":
        """Return multiples of the identity with the given scales, `[stack]`."""
        return cls(scale.new_ones(()).expand(len(scale), size), scale, "identity")

    def state(self) -> dict[str, Any]:
        """Return the factors as the content of a file. Identities store their size instead of their values."""
        return super().state() | ({"values": self.size} if self.kind == "identity" else {})

    @classmethod
    def from_state(cls, state: Any, count: int, size: int) -> Self:
        """Load the result of `state`, for `count` matrices of the given size."""
        kind = state["kind"]
        scale = check_shape(state["scale"], count)
        values = scale.new_ones(count, int(state["values"])) if kind == "identity" else state["values"]
        shape = (size, size) if kind == "dense" else (size,)
        return cls(check_shape(values, count, *shape), scale, kind, bool(state["symmetric"]))

    @property
    def size(self) -> int:
        """Number of rows of each matrix."""
        return self.values.shape[-1]

    @property
    def is_multiple_of_identity(self) -> bool:
        """Whether kind and size imply that all matrices are multiples of the identity."""
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
        """Multiply `[stack, columns, d, e]` from the left with the unscaled matrices."""
        if self.kind == "diagonal":
            return self.values[:, None, :, None] * M
        if self.kind == "identity":
            return M
        if M.shape[1] == 1:
            return (self.values @ M.squeeze(1)).unsqueeze(1)
        is_on_cpu = M.device.type == "cpu"
        if is_on_cpu and M.shape[3] < _FEW:
            # Otherwise, each thin product would read the whole factor.
            return self.right(M.transpose(2, 3)).transpose(2, 3)
        if len(self.values) == 1 or not is_on_cpu:
            return self.values.unsqueeze(1) @ M
        # On a CPU, the product above would copy each matrix once per column.
        return torch.stack([matrix @ columns for matrix, columns in zip(self.values, M, strict=True)])

    def right(self, M: Tensor) -> Tensor:
        """Multiply `[stack, columns, e, d]` from the right with the transposed, unscaled matrices."""
        if self.kind == "diagonal":
            return self.values[:, None, None, :] * M
        if self.kind == "identity":
            return M
        return (M.flatten(1, 2) @ self.values.transpose(1, 2)).reshape(M.shape)

    def compose(self, other: "Factor") -> "Factor":
        """Return the products, matrix by matrix."""
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
        """Return the sums, matrix by matrix."""
        if self.kind == other.kind == "identity":
            return replace(self, scale=self.scale + other.scale)
        eps = self._common_eps(other)
        if "dense" not in {self.kind, other.kind}:
            return replace(Factor.diagonal(self.entries() + other.entries()), eps=eps)
        symmetric = self.symmetric and other.symmetric
        return replace(Factor.dense(self.to_dense() + other.to_dense(), symmetric=symmetric), eps=eps)

    def _common_eps(self, other: "Factor") -> float | None:
        """Return the precision of a product or sum: the larger `eps` of both."""
        return max(self.eps or 0.0, other.eps or 0.0) or None

    def shift(self, delta: Tensor) -> "Factor":
        """Add multiples `[stack]` of the identity."""
        if self.kind != "dense":
            return self.plus(Factor.identity(self.size, delta.to(self.scale)))
        values = self.to_dense()
        values.diagonal(dim1=1, dim2=2).add_(delta.to(values).unsqueeze(1))
        return Factor.dense(values, symmetric=self.symmetric)

    def scaled(self, factor: Tensor | float) -> "Factor":
        """Multiply all matrices by one number, or each by its own, `[stack]`."""
        return replace(self, scale=self.scale * factor)

    def unscaled(self) -> "Factor":
        """Return the matrices with scales of one."""
        return replace(self, scale=torch.ones_like(self.scale))

    def equals(self, other: "Factor") -> bool:
        """Whether all matrices are equal, up to scales."""
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
        """Eigenvalues and eigenvectors of the unscaled matrices, computed once per factor."""
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
        """Return the inverses, using Cholesky factors if matrices are symmetric."""
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
        """Return powers of positive semi-definite matrices. Negative powers of singular ones raise an error."""
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
    """Return powers of eigenvalues, which must not be negative beyond noise.

    Args:
        values: `[stack, ...]`.
        exponent: Any number.
        noise: Bound on the round-off in the eigenvalues: `[stack]`, or one number for each of them.

    Raises:
        BlockError: If an eigenvalue is negative, or if it is zero and the exponent is negative.
    """
    decompositions.check_definite(values, noise)
    if exponent >= 0:
        return values.clamp(min=0) ** exponent
    above_noise = values.flatten(1) > noise.reshape(len(values), -1)
    decompositions.check_each(above_noise.all(1), "is singular, up to round-off")
    return values**exponent
