r"""The gradients of data as sums over rows of outer products: the algebra that needs no more than the vectors.

The gradient of a parameter for datum $n$ is $G_n = \sum_s g_{n,s}\, x_{n,s}^\top$, and so

$$
\langle G_n, G_m \rangle = \sum_{s,t} (x_{n,s}^\top x_{m,t})\, (g_{n,s}^\top g_{m,t}).
$$

If there are few rows, this takes far fewer operations than matrices $G$ do, which have `d_B * d_A` numbers each. If
there are many, matrices take fewer. `cheaper` counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kfs.kfac.sums.row_vectors import PlainVectors, RowVectors, UnitVectors, at_a_time, joined

Way = Literal["rows", "matrices"]


def cheaper(
    pairs: tuple[int, int], rows: tuple[int, int], work: tuple[int, int], numbers: int, formed: tuple[bool, bool]
) -> Way:
    """Return what takes fewer multiplications to compute all inner products between the gradients of two sets of data.

    Args:
        pairs: How many data both sets have.
        rows: How many rows each datum has in them.
        work: How many multiplications an inner product takes, on the input side and on the gradient side.
        numbers: How many numbers a matrix has.
        formed: Whether the matrices of a set are there already.

    Example:
        >>> cheaper((100, 100), (1, 1), (257, 256), 257 * 256, (False, False))
        'rows'
        >>> cheaper((100, 100), (64, 64), (257, 256), 257 * 256, (False, False))
        'matrices'
    """
    by_rows = pairs[0] * rows[0] * pairs[1] * rows[1] * sum(work)
    forming = sum(0 if done else n * s for n, s, done in zip(pairs, rows, formed, strict=True))
    by_matrices = (pairs[0] * pairs[1] + forming) * numbers
    return "rows" if by_rows <= by_matrices else "matrices"


def cheaper_within(rows: tuple[int, int], work: tuple[int, int], numbers: int) -> Way:
    """Return what takes fewer multiplications for the inner product of two gradients of one datum; as `cheaper`."""
    by_rows = rows[0] * rows[1] * sum(work)
    return "rows" if by_rows <= (1 + sum(rows)) * numbers else "matrices"


@dataclass(frozen=True)
class RowProducts:
    """Each datum's sum over rows of outer products `g x^T`.

    Attributes:
        x: On the input side, with `d_A` coordinates.
        g: On the gradient side, with `d_B` coordinates.
    """

    x: RowVectors
    g: RowVectors

    @property
    def num_data(self) -> int:
        """Number of data."""
        return self.x.num_data

    @property
    def shared(self) -> int:
        """Number of rows of each datum."""
        return self.x.shared

    @property
    def units(self) -> tuple[bool, bool]:
        """Whether vectors are unit vectors, on the input side and on the gradient side."""
        return isinstance(self.x, UnitVectors), isinstance(self.g, UnitVectors)

    @property
    def work(self) -> tuple[int, int]:
        """How many multiplications an inner product takes on each side; on both together with groups."""
        return self.x.work * self.x.groups, self.g.work * self.x.groups

    @property
    def numbers(self) -> int:
        """How many numbers the matrix of a datum has."""
        return self.x.groups * self.x.size * self.g.size

    @property
    def stored(self) -> int:
        """How many numbers are stored for a datum."""
        return self.x.numbers + self.g.numbers

    @property
    def like(self) -> Tensor:
        """A tensor on their device."""
        side = self.g if isinstance(self.g, PlainVectors) else self.x
        return side.values if isinstance(side, PlainVectors) else side.dense()

    def some(self, data: slice) -> "RowProducts":
        """Return those of some data."""
        return RowProducts(self.x.some(data), self.g.some(data))

    def to(self, dtype: torch.dtype) -> "RowProducts":
        """Convert all numbers."""
        return RowProducts(self.x.to(dtype), self.g.to(dtype))

    def times(self, Q_A: Tensor | None, Q_B: Tensor | None) -> "RowProducts":
        """Return `Q_B^T G Q_A`. `None` stands for the identity."""
        x = self.x if Q_A is None else self.x.times(Q_A)
        g = self.g if Q_B is None else self.g.times(Q_B)
        return RowProducts(x, g)

    def matrices(self) -> Iterator[Tensor]:
        """Form matrices, `[some data, groups, d_B, d_A]`, of a few data at a time."""
        for part in self._parts(self.numbers):
            yield part._matrices()

    def inner(self, other: "RowProducts") -> Tensor:
        """Return the inner products of all pairs, `[n, m]`, by rows."""
        return torch.cat([_summed(*both, by_row=False) for both in self._pairs(other)], 1)

    def inner_by_row(self, other: "RowProducts") -> Tensor:
        """Return the part that each row of the other gradients has in inner products, `[n, m, shared]`."""
        return torch.cat([_summed(*both, by_row=True) for both in self._pairs(other)], 1)

    def inner_within(self, other: "RowProducts") -> Tensor:
        """Return the inner products of two gradients of every datum, `[n]`, by rows."""
        step = at_a_time(self.like, 2 * self.x.groups * self.shared * other.shared)
        sums = []
        for start in range(0, self.num_data, step):
            mine, theirs = (one.some(slice(start, start + step)) for one in (self, other))
            sums.append((mine.x.dots_within(theirs.x) * mine.g.dots_within(theirs.g)).sum((0, 2, 3)))
        return torch.cat(sums)

    def _pairs(self, other: "RowProducts") -> Iterator[tuple["RowProducts", "RowProducts"]]:
        """Yield pairs such that their inner products by rows are not too many numbers."""
        step = at_a_time(self.like, 2 * self.x.groups * self.num_data * self.shared * other.shared)
        for start in range(0, other.num_data, step):
            yield self, other.some(slice(start, start + step))

    def _parts(self, numbers: int) -> Iterator["RowProducts"]:
        step = at_a_time(self.like, numbers)
        if step >= self.num_data:
            yield self
            return
        for start in range(0, self.num_data, step):
            yield self.some(slice(start, start + step))

    def _matrices(self) -> Tensor:
        """Form all matrices, `[n, groups, d_B, d_A]`."""
        if isinstance(self.x, UnitVectors):
            return _scattered(self.x, self.g.dense()[0]).transpose(1, 2).unsqueeze(1)
        if isinstance(self.g, UnitVectors):
            return _scattered(self.g, self.x.dense()[0]).unsqueeze(1)
        assert isinstance(self.x, PlainVectors)  # noqa: S101 (there is no third kind)
        g = self.g.dense()
        # A product entry by entry is faster than one of matrices with a single column.
        product = g.transpose(2, 3) * self.x.values if self.shared == 1 else g.transpose(2, 3) @ self.x.values
        if self.x.last is not None:
            product = torch.cat([product, self.x.last * g.sum(2).unsqueeze(3)], 3)
        return product.transpose(0, 1)


def joined_products(parts: Sequence[RowProducts]) -> RowProducts:
    """Put those of several batches one after the other."""
    return RowProducts(joined([part.x for part in parts]), joined([part.g for part in parts]))


def matrix_inner(matrices: Tensor, parts: Sequence[RowProducts]) -> Tensor:
    """Return the inner products of matrices `[n, groups, d_B, d_A]` with sums of plain rows, `[n, m]`.

    A few rows of the other matrices are formed at a time, for all data. These fit into a cache, and large products of
    matrices use them at once.
    """
    first = parts[0]
    num_data = first.num_data
    result = matrices.new_zeros(len(matrices), num_data)
    gradients = [part.g.dense() for part in parts]
    for group in range(first.x.groups):
        step = at_a_time(matrices, 2 * num_data * first.x.size)
        for start in range(0, first.g.size, step):
            rows = matrices[:, group, start : start + step]
            some = None
            for part, g in zip(parts, gradients, strict=True):
                one = _plain_matrices(part.x, g[group, :, :, start : start + step], group)
                some = one if some is None else some.add_(one)
            assert some is not None  # noqa: S101 (there are parts)
            result.addmm_(rows.flatten(1), some.flatten(1).T)
    return result


def _plain_matrices(x: RowVectors, g: Tensor, group: int) -> Tensor:
    """Form `[n, d_B, d_A]` from gradients `[n, shared, d_B]` and plain vectors of a group."""
    assert isinstance(x, PlainVectors)  # noqa: S101 (whoever calls this has asked)
    values = x.values[group]
    extra = 0 if x.last is None else 1
    matrices = g.new_empty(g.shape[0], g.shape[2], values.shape[2] + extra)
    inner = matrices[:, :, : values.shape[2]]
    if g.shape[1] == 1:  # a product entry by entry is faster than one of matrices with a single column
        torch.mul(g.transpose(1, 2), values, out=inner)
    else:
        inner.copy_(g.transpose(1, 2) @ values)
    if x.last is not None:
        matrices[:, :, -1] = x.last * g.sum(1)
    return matrices


def matrix_inner_by_row(matrices: Tensor, other: RowProducts) -> Tensor:
    """Return the part of each row in the inner products of matrices `[n, groups, d_B, d_A]` with rows: `[n, m, S]`."""
    products = matrices @ other.x.dense().flatten(1, 2).transpose(1, 2)
    summed = (products * other.g.dense().flatten(1, 2).transpose(1, 2)).sum((1, 2))
    shares: Tensor = summed.unflatten(1, (other.num_data, other.shared))
    return shares


def _summed(mine: RowProducts, theirs: RowProducts, by_row: bool) -> Tensor:
    """Multiply the inner products on both sides, and sum over groups and rows."""
    products = mine.x.dots(theirs.x).mul_(mine.g.dots(theirs.g))
    if not by_row and mine.shared == theirs.shared == 1:
        return products.sum(0)
    shape = (mine.num_data, mine.shared, theirs.num_data, theirs.shared)
    return products.reshape(mine.x.groups, *shape).sum((0, 2) if by_row else (0, 2, 4))


def _scattered(unit: UnitVectors, values: Tensor) -> Tensor:
    """Add vectors `[n, shared, d]` to the places of unit vectors, `[n, size, d]`."""
    full = values.new_zeros(len(values), unit.size, values.shape[2])
    return full.scatter_add_(1, unit.index.unsqueeze(2).expand_as(values), values)
