r"""The gradients of every datum with respect to one block, as sums over rows of outer products, and what they multiply.

Matrices `[n, groups, d_B, d_A]` are formed only where that takes fewer operations; see `kfs.kfac.sums.row_products`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kfs.describing import Described, Description, counted, kind, times
from kfs.errors import ShapeError
from kfs.kfac.layout import Layout
from kfs.kfac.structures import Congruence, Eigenbasis, Factor, Kronecker, Structure
from kfs.kfac.sums import (
    Captured,
    PlainVectors,
    RowProducts,
    RowVectors,
    UnitVectors,
    at_a_time,
    cheaper,
    cheaper_within,
    full_precision,
    joined_products,
    matrix_inner,
    matrix_inner_by_row,
)

Basis = Eigenbasis | Congruence
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate["BlockGradients", Arguments], Result]


def precisely(method: Method[Arguments, Result]) -> Method[Arguments, Result]:
    """Let a method compute in the precision of the gradients, also where the caller's `autocast` is on."""

    @wraps(method)
    def run(gradients: "BlockGradients", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with full_precision(gradients.device.type):
            return method(gradients, *args, **kwargs)

    return run


@dataclass(frozen=True, repr=False)
class BlockGradients(Described):
    """The gradients of some data with respect to the parameters of one block.

    They are the sum of all parts. A gradient is a matrix `[d_B, d_A]` for each group of channels, as the block's layout
    has it: inputs are on the side of `d_A`, with a one for the bias.

    Attributes:
        layout: How the parameter becomes a matrix.
        num_data: Number of data.
        dtype: Dtype of all numbers, float32 or better.
        device: Device of all numbers.
        uses: One part for each use of the parameter: what was captured, or rows.
        whole: A part that consists of matrices, `[n, groups, d_B, d_A]`. `None` if there is none.
    """

    layout: Layout
    num_data: int
    dtype: torch.dtype
    device: torch.device
    uses: tuple[Captured | RowProducts, ...] = ()
    whole: Tensor | None = None

    def describe(self) -> Description:
        """Describe block, data and parts; rows are not counted, since that may take memory."""
        groups, rows, columns = self.layout.matrix_shape
        size = times((groups, rows, columns) if groups > 1 else (rows, columns))
        title = (
            f"Gradients of {self.num_data:,} data, block {self.layout.name!r}: {size}, {kind(self.dtype, self.device)}"
        )
        parts = [f"rows of {counted(len(self.uses), 'use')}"] if self.uses else []
        parts += [] if self.whole is None else ["matrices"]
        return Description(title, (" + ".join(parts) or "zero: the parameter was not used",))

    @cached_property
    def parts(self) -> tuple[RowProducts, ...]:
        """The rows of all uses: each has vectors `x` and `g`, `[groups, n, rows of a datum, d_A]` and `[..., d_B]`.

        Data that have fewer rows than others have rows of zeros. `x.dense()` writes unit vectors and the coordinate of
        the bias down.
        """
        return tuple((use.rows if isinstance(use, Captured) else use).to(self.dtype) for use in self.uses)

    def by_place(self) -> "BlockGradients":
        """Return the same gradients, where places at which a parameter was broadcast have rows of their own."""
        return replace(self, uses=tuple(use.by_place() if isinstance(use, Captured) else use for use in self.uses))

    @property
    def shared(self) -> int:
        """Number of rows of each datum, of all parts together; none is written down to count them."""
        return sum(use.shared for use in self.uses)

    @property
    def numbers(self) -> int:
        """How many numbers the gradient of a datum has."""
        groups, rows, columns = self.layout.matrix_shape
        return groups * rows * columns

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for all data."""
        stored = sum(part.stored for part in self.parts) + (0 if self.whole is None else self.numbers)
        return self.num_data * stored * self.dtype.itemsize

    @precisely
    def some(self, data: slice) -> "BlockGradients":
        """Return the gradients of some data."""
        num_data = len(range(*data.indices(self.num_data)))
        whole = None if self.whole is None else self.whole[data]
        return replace(self, num_data=num_data, uses=tuple(part.some(data) for part in self.parts), whole=whole)

    @precisely
    def dense(self) -> Tensor:
        """Form matrices, `[n, groups, d_B, d_A]`."""
        total = self.whole
        for use in self.uses:
            matrices = torch.cat(list(use.matrices())).to(self.dtype)
            total = matrices if total is None else total + matrices
        if total is None:
            return torch.zeros(self.num_data, *self.layout.matrix_shape, dtype=self.dtype, device=self.device)
        return total

    def formed(self) -> "BlockGradients":
        """Return the same gradients as matrices."""
        return replace(self, uses=(), whole=self.dense())

    def tensors(self) -> dict[str, Tensor]:
        """Return the gradients by the names of parameters, `[n, *shape]`; rows that other blocks have are zero."""
        shapes = self.layout.param_shapes()
        result = {
            name: torch.zeros(self.num_data, *shape, dtype=self.dtype, device=self.device)
            for name, shape in shapes.items()
        }
        self.layout.write(self.dense(), result)
        return result

    @precisely
    def inner(self, other: "BlockGradients") -> Tensor:
        """Return inner products with the gradients of other data, `[n, m]`, in the way that takes fewer operations."""
        self._check_block(other)
        total = torch.zeros(self.num_data, other.num_data, dtype=self.dtype, device=self.device)
        if not (self._has_parts and other._has_parts):
            return total
        if self._way(other) == "rows":
            for mine in self.parts:
                for theirs in other.parts:
                    total += mine.inner(theirs)
            return total
        matrices = self.dense()
        if other._has_plain_rows:
            return matrix_inner(matrices, other.parts)
        flat = matrices.flatten(1)
        place = 0
        for some in other._matrices():
            total[:, place : place + len(some)] = flat @ some.flatten(1).T
            place += len(some)
        return total

    @precisely
    def inner_by_row(self, other: "BlockGradients") -> list[Tensor]:
        """Return the share of each row of the other gradients in inner products, `[n, m, rows]`, part by part.

        The other gradients have nothing but rows.
        """
        self._check_block(other)
        shares = []
        for theirs in other.parts:
            share = torch.zeros(self.num_data, other.num_data, theirs.shared, dtype=self.dtype, device=self.device)
            for mine in self.parts:
                share += mine.inner_by_row(theirs)
            if self.whole is not None:
                step = at_a_time(self.whole, other.num_data * theirs.shared * theirs.g.size * theirs.g.groups)
                parts = [matrix_inner_by_row(some, theirs) for some in self.whole.split(step)]
                share += torch.cat(parts)
            shares.append(share)
        return shares

    @precisely
    def inner_within(self, other: "BlockGradients") -> Tensor:
        """Return the inner products of two gradients of every datum, `[n]`."""
        self._check_block(other)
        if not (self._has_parts and other._has_parts):
            return torch.zeros(self.num_data, dtype=self.dtype, device=self.device)
        by_rows = self.whole is None and other.whole is None
        if by_rows and cheaper_within((self.shared, other.shared), self._work(other), self.numbers) == "rows":
            return torch.stack([mine.inner_within(theirs) for mine in self.parts for theirs in other.parts]).sum(0)
        return (self.dense() * other.dense()).flatten(1).sum(1)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every datum's gradient, `[n]`."""
        return self.inner_within(self)

    @precisely
    def multiplied(self, structure: Structure) -> "BlockGradients":
        """Multiply with a block of a curvature matrix, or of an inverse: the structure of this block alone.

        Rows stay rows where they can: under Kronecker products, and on the side of unit vectors under diagonal bases.
        """
        structure = structure.to(self.device, self.dtype)
        if self.keeps_rows(structure):
            return replace(self, uses=tuple(_multiplied_rows(part, structure) for part in self.parts))
        product = structure.multiply(self.dense().transpose(0, 1)).transpose(0, 1)
        return replace(self, uses=(), whole=product)

    def keeps_rows(self, structure: Structure) -> bool:
        """Whether rows that are multiplied with a block stay rows: if they can, and if that takes fewer operations."""
        if self.whole is not None:
            return False
        if isinstance(structure, Kronecker):
            groups, rows, columns = self.layout.matrix_shape
            of_rows = self.shared * groups * (rows**2 + columns**2)
            return of_rows <= self.numbers * (self.shared + rows + columns)
        if not isinstance(structure, Basis):
            return False
        # A unit vector is an eigenvector of a diagonal side, and picks the eigenvalues on the other side.
        Q_A, Q_B = sides_of(structure)
        picks = [(x and Q_A is None) or (g and Q_B is None) for x, g in (use.units for use in self.uses)]
        return bool(picks) and all(picks)

    @precisely
    def rotated(self, basis: Basis) -> "BlockGradients":
        """Return the gradients as they are in a basis, `Q_B^T G Q_A`."""
        Q_A, Q_B = sides_of(basis.to(self.device, self.dtype))
        parts = tuple(part.times(Q_A, Q_B) for part in self.parts)
        if self.whole is None:
            return replace(self, uses=parts)
        whole = self.whole if Q_A is None else self.whole @ Q_A
        whole = whole if Q_B is None else Q_B.transpose(1, 2) @ whole
        return replace(self, uses=parts, whole=whole)

    @property
    def _has_plain_rows(self) -> bool:
        """Whether gradients consist of rows of plain vectors, which are there or take little memory."""
        written = [use for use in self.uses if isinstance(use, RowProducts) or use.plan.inputs.overlap == 1]
        if self.whole is not None or len(written) < len(self.uses):
            return False
        return all(isinstance(side, PlainVectors) for part in self.parts for side in (part.x, part.g))

    @property
    def _has_parts(self) -> bool:
        return bool(self.uses) or self.whole is not None

    def _work(self, other: "BlockGradients") -> tuple[int, int]:
        """Return how many multiplications inner products of vectors take, on each side."""
        pairs = [(mine.work, theirs.work) for mine in self.uses for theirs in other.uses]
        return max(min(a[0], b[0]) for a, b in pairs), max(min(a[1], b[1]) for a, b in pairs)

    def _way(self, other: "BlockGradients") -> str:
        """Return how to compute inner products: by rows, or by matrices."""
        if self.whole is not None or other.whole is not None:
            return "matrices"
        rows = (self.shared, other.shared)
        pairs = (self.num_data, other.num_data)
        return cheaper(pairs, rows, self._work(other), self.numbers, (False, False))

    def _matrices(self) -> Iterator[Tensor]:
        """Form matrices, a few data at a time if there is a single part."""
        if len(self.uses) == 1 and self.whole is None:
            yield from (some.to(self.dtype) for some in self.uses[0].matrices())
        else:
            yield self.dense()

    def _check_block(self, other: "BlockGradients") -> None:
        if self.layout != other.layout:
            raise ShapeError(
                f"Gradients of block {self.layout.name!r} have no inner product with those of {other.layout.name!r}, "
                "or these have another layout.",
                "Use the same block of the same model.",
            )


def joined_gradients(parts: Sequence[BlockGradients]) -> BlockGradients:
    """Put the gradients of several batches one after the other, with as many parts as the batches have."""
    first = parts[0]
    if len(parts) == 1:
        return first
    num_data = sum(part.num_data for part in parts)
    numbers_of_uses = {len(part.uses) for part in parts}
    if len(numbers_of_uses) > 1 or any(part.whole is not None for part in parts):
        return replace(first, num_data=num_data, uses=(), whole=torch.cat([part.dense() for part in parts]))
    uses = tuple(joined_products(same) for same in zip(*(part.parts for part in parts), strict=True))
    return replace(first, num_data=num_data, uses=uses)


def sides_of(basis: Basis) -> tuple[Tensor | None, Tensor | None]:
    """Return a basis on both sides, `[groups, d, d]`; `None` for the standard basis."""
    both = (basis.Q_A, basis.Q_B) if isinstance(basis, Eigenbasis) else (basis.T_A, basis.T_B)
    Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in both)
    return Q_A, Q_B


def _multiplied_rows(part: RowProducts, structure: Structure) -> RowProducts:
    """Multiply rows with a block that leaves them rows; see `BlockGradients.keeps_rows`."""
    if isinstance(structure, Kronecker):
        rows = _times_factors(part, structure.A, structure.B)
        return _scaled(rows, (structure.A.scale * structure.B.scale).reshape(-1, 1, 1, 1))
    assert isinstance(structure, Basis)  # noqa: S101 (there is no third kind)
    Q_A, Q_B = sides_of(structure)
    if isinstance(part.x, UnitVectors) and Q_A is None:
        return RowProducts(part.x, _filtered(part.g, Q_B, structure.values[0].T[part.x.index]))
    assert isinstance(part.g, UnitVectors)  # noqa: S101 (one side has unit vectors)
    return RowProducts(_filtered(part.x, Q_A, structure.values[0][part.g.index]), part.g)


def _filtered(vectors: RowVectors, Q: Tensor | None, values: Tensor) -> PlainVectors:
    """Go to a basis, multiply coordinates with values `[n, shared, size]`, and go back."""
    inside = (vectors if Q is None else vectors.times(Q)).dense() * values
    return PlainVectors(inside) if Q is None else PlainVectors(inside).times(Q.transpose(1, 2))


def _times_factors(part: RowProducts, A: Factor, B: Factor) -> RowProducts:
    """Return `B G A^T`, without scales of the factors."""
    x, g = part.x, part.g
    if isinstance(x, UnitVectors) and A.kind == "diagonal":
        # The entry of the diagonal is a number, which the other side may take.
        g = PlainVectors(g.dense() * A.values[:, x.index].unsqueeze(3))
    else:
        x = _times_factor(x, A)
    if isinstance(g, UnitVectors) and B.kind == "diagonal":
        x = PlainVectors(x.dense() * B.values[:, g.index].unsqueeze(3))
    else:
        g = _times_factor(g, B)
    return RowProducts(x, g)


def _times_factor(vectors: RowVectors, factor: Factor) -> RowVectors:
    """Multiply vectors with matrices, without their scales."""
    if factor.kind == "identity":
        return vectors
    if factor.kind == "diagonal":
        return PlainVectors(vectors.dense() * factor.values[:, None, None])
    return vectors.times(factor.values.transpose(1, 2))


def _scaled(rows: RowProducts, scale: Tensor) -> RowProducts:
    """Multiply gradients with a number for each group, `[groups, 1, 1, 1]`, on a side that has numbers."""
    if isinstance(rows.g, PlainVectors):
        return RowProducts(rows.x, PlainVectors(rows.g.dense() * scale))
    return RowProducts(PlainVectors(rows.x.dense() * scale), rows.g)
