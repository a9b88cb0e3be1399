r"""Per-example gradients as sums of outer products over rows: algebra on the vectors, without forming matrices.

The gradients of whole blocks, with several uses and products with curvature, live in `kfs.factors.per_example`.

The gradient of a parameter for example $n$ is $G_n = \sum_s g_{n,s}\, x_{n,s}^\top$, and so

$$
\langle G_n, G_m \rangle = \sum_{s,t} (x_{n,s}^\top x_{m,t})\, (g_{n,s}^\top g_{m,t}).
$$

If there are few rows, this takes far fewer operations than matrices $G$, which have `d_B * d_A` numbers each. If there
are many rows, matrices take fewer. `cheaper` counts the multiplications.

The vectors on one side of rows are plain ones, perhaps with a coordinate for the bias (`PlainVectors`), or unit
vectors, given by their index (`UnitVectors`). Rows are in the form `[batch, shared]` (see `kfs.factors.rows.row_map`):
each example has the same number of rows, and missing ones are zero. Groups of channels are one more axis in front.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Temporary results, computed for a few examples at a time, fill about this many bytes.
_BYTES = {False: 2**24, True: 2**28}  # on a CPU, on an accelerator


def at_a_time(like: Tensor, numbers: int) -> int:
    """Return how many examples to process together, given how many numbers are stored for each."""
    return max(1, _BYTES[like.device.type != "cpu"] // (4 * max(numbers, 1)))


class RowVectors(ABC):
    """Vectors of all rows, `[groups, batch, shared, size]`.

    Attributes:
        groups: Number of groups of channels.
        num_data: Number of examples.
        shared: Number of rows of each example.
        size: Number of coordinates.
        work: Number of multiplications per inner product.
        numbers: Number of stored values per example.
    """

    groups: int
    num_data: int
    shared: int
    size: int
    work: int
    numbers: int

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all coordinates, `[groups, batch, shared, size]`."""

    @abstractmethod
    def times(self, Q: Tensor) -> "PlainVectors":
        """Multiply every vector with a matrix from the right, `[groups, size, any]`."""

    @abstractmethod
    def some(self, data: slice) -> "RowVectors":
        """Return the vectors of some data."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "RowVectors":
        """Return the vectors in another dtype."""

    def dots(self, other: "RowVectors") -> Tensor:
        """Return the inner products of all pairs of vectors, `[groups, rows, rows of the other]`."""
        return self.dense().flatten(1, 2) @ other.dense().flatten(1, 2).transpose(1, 2)

    def dots_within(self, other: "RowVectors") -> Tensor:
        """Return the inner products of pairs of vectors of the same example, `[groups, batch, shared, shared]`."""
        return self.dense() @ other.dense().transpose(2, 3)


@dataclass(frozen=True)
class PlainVectors(RowVectors):
    """Vectors that are stored explicitly.

    Attributes:
        values: `[groups, batch, shared, features]`.
        last: Value of an additional coordinate for the bias: one if the bias was used, zero if not. `None` if there is
            no such coordinate.
    """

    values: Tensor
    last: float | None = None

    def __post_init__(self) -> None:
        shape = self.values.shape
        counts = {
            "groups": shape[0],
            "num_data": shape[1],
            "shared": shape[2],
            "size": shape[3] + (self.last is not None),
            "work": shape[3],
            "numbers": shape[0] * shape[2] * shape[3],
        }
        for name, number in counts.items():
            object.__setattr__(self, name, number)

    def dense(self) -> Tensor:
        """Return all coordinates, including that of the bias."""
        if self.last is None:
            return self.values
        return torch.nn.functional.pad(self.values, (0, 1), value=self.last)

    def times(self, Q: Tensor) -> "PlainVectors":
        """Multiply every vector with a matrix from the right; its last row belongs to the bias."""
        features = self.values.shape[3]
        flat = self.values.flatten(1, 2)
        # A plain product is faster than a batched one with a batch of one.
        product = (flat[0] @ Q[0, :features]).unsqueeze(0) if self.groups == 1 else flat @ Q[:, :features]
        if self.last:
            product = product + self.last * Q[:, features:]
        return PlainVectors(product.unflatten(1, self.values.shape[1:3]))

    def some(self, data: slice) -> "PlainVectors":
        """Return the vectors of some data."""
        return PlainVectors(self.values[:, data], self.last)

    def to(self, dtype: torch.dtype) -> "PlainVectors":
        """Return the vectors in another dtype."""
        return PlainVectors(self.values.to(dtype), self.last)

    def dots(self, other: RowVectors) -> Tensor:
        """Multiply, or look entries up."""
        if isinstance(other, UnitVectors):
            return other.dots(self).transpose(1, 2)
        if not isinstance(other, PlainVectors) or self._differs(other):
            return super().dots(other)
        mine, theirs = self.values.flatten(1, 2), other.values.flatten(1, 2)
        both = (mine[0] @ theirs[0].T).unsqueeze(0) if self.groups == 1 else mine @ theirs.transpose(1, 2)
        return both.add_(self._product_of_last(other)) if self._product_of_last(other) else both

    def dots_within(self, other: RowVectors) -> Tensor:
        """Multiply, or look entries up."""
        if isinstance(other, UnitVectors):
            return other.dots_within(self).transpose(2, 3)
        if not isinstance(other, PlainVectors) or self._differs(other):
            return super().dots_within(other)
        return self.values @ other.values.transpose(2, 3) + self._product_of_last(other)

    def _differs(self, other: "PlainVectors") -> bool:
        """Whether only one of both stores its last coordinate explicitly."""
        return self.values.shape[3] != other.values.shape[3]

    def _product_of_last(self, other: "PlainVectors") -> float:
        return (self.last or 0.0) * (other.last or 0.0)


@dataclass(frozen=True)
class UnitVectors(RowVectors):
    """Unit vectors, given by the index of the coordinate that is one. There is a single group.

    Attributes:
        index: `[batch, shared]`.
        size: Number of coordinates.
        dtype: Dtype of results that are computed from them.
    """

    index: Tensor
    size: int
    dtype: torch.dtype
    groups = 1
    work = 1

    def __post_init__(self) -> None:
        num_data, shared = self.index.shape
        for name, number in {"num_data": num_data, "shared": shared, "numbers": shared}.items():
            object.__setattr__(self, name, number)

    def dense(self) -> Tensor:
        """Return the vectors as zeros and ones."""
        zeros = torch.zeros(*self.index.shape, self.size, dtype=self.dtype, device=self.index.device)
        return zeros.scatter_(2, self.index.unsqueeze(2), 1.0).unsqueeze(0)

    def times(self, Q: Tensor) -> PlainVectors:
        """Multiply every vector with a matrix from the right, by selecting its rows."""
        return PlainVectors(Q[:, self.index])

    def some(self, data: slice) -> "UnitVectors":
        """Return the vectors of some data."""
        return UnitVectors(self.index[data], self.size, self.dtype)

    def to(self, dtype: torch.dtype) -> "UnitVectors":
        """Return the vectors with another dtype of results."""
        return UnitVectors(self.index, self.size, dtype)

    def dots(self, other: RowVectors) -> Tensor:
        """Look entries up, or compare indices."""
        mine = self.index.flatten()
        if isinstance(other, UnitVectors):
            return (mine.unsqueeze(1) == other.index.flatten()).to(self.dtype).unsqueeze(0)
        return other.dense().flatten(1, 2)[..., mine].transpose(1, 2)

    def dots_within(self, other: RowVectors) -> Tensor:
        """Look entries up, or compare indices."""
        if isinstance(other, UnitVectors):
            return (self.index.unsqueeze(2) == other.index.unsqueeze(1)).to(self.dtype).unsqueeze(0)
        theirs = other.dense()
        index = self.index[None, :, None].expand(1, -1, theirs.shape[2], -1)
        return theirs.gather(3, index).transpose(2, 3)


def joined(parts: Sequence[RowVectors]) -> RowVectors:
    """Concatenate the vectors of several batches, which have equal sizes and groups.

    If the examples of a batch have fewer rows than others, they are padded: unit vectors with index 0, plain vectors
    with zeros. The other side of padded rows must be zero.
    """
    if len(parts) == 1:
        return parts[0]
    most = max(part.shared for part in parts)
    if all(isinstance(part, UnitVectors) for part in parts):
        units = [part for part in parts if isinstance(part, UnitVectors)]
        index = torch.cat([torch.nn.functional.pad(part.index, (0, most - part.shared)) for part in units])
        return UnitVectors(index, units[0].size, units[0].dtype)
    plain = [part if isinstance(part, PlainVectors) else PlainVectors(part.dense()) for part in parts]
    if len({part.last for part in plain}) > 1:
        plain = [PlainVectors(part.dense()) for part in plain]
    values = torch.cat([torch.nn.functional.pad(part.values, (0, 0, 0, most - part.shared)) for part in plain], 1)
    return PlainVectors(values, plain[0].last)


Way = Literal["rows", "matrices"]


def cheaper(
    pairs: tuple[int, int], rows: tuple[int, int], work: tuple[int, int], numbers: int, formed: tuple[bool, bool]
) -> Way:
    """Return the way to compute all inner products between the gradients of two datasets with fewer multiplications.

    Args:
        pairs: Number of examples in each dataset.
        rows: Number of rows per example in each dataset.
        work: Multiplications per inner product, on the input side and on the gradient side.
        numbers: Number of entries of a matrix.
        formed: Whether the matrices of each dataset have been formed already.

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
    """Return the cheaper way to compute the inner product of two gradients of the same example; see `cheaper`."""
    by_rows = rows[0] * rows[1] * sum(work)
    return "rows" if by_rows <= (1 + sum(rows)) * numbers else "matrices"


@dataclass(frozen=True)
class RowProducts:
    """Each example's sum over rows of outer products `g x^T`.

    Attributes:
        x: Vectors on the input side, with `d_A` coordinates.
        g: Vectors on the gradient side, with `d_B` coordinates.
    """

    x: RowVectors
    g: RowVectors

    @property
    def num_data(self) -> int:
        """Number of examples."""
        return self.x.num_data

    @property
    def shared(self) -> int:
        """Number of rows of each example."""
        return self.x.shared

    @property
    def units(self) -> tuple[bool, bool]:
        """Whether vectors are unit vectors, on the input side and on the gradient side."""
        return isinstance(self.x, UnitVectors), isinstance(self.g, UnitVectors)

    @property
    def work(self) -> tuple[int, int]:
        """Multiplications per inner product of rows, on the input side and on the gradient side, for all groups."""
        return self.x.work * self.x.groups, self.g.work * self.x.groups

    @property
    def numbers(self) -> int:
        """Number of entries of an example's matrix."""
        return self.x.groups * self.x.size * self.g.size

    @property
    def stored(self) -> int:
        """Number of stored values per example."""
        return self.x.numbers + self.g.numbers

    @property
    def like(self) -> Tensor:
        """A tensor on the device of the vectors."""
        side = self.g if isinstance(self.g, PlainVectors) else self.x
        return side.values if isinstance(side, PlainVectors) else side.dense()

    def some(self, data: slice) -> "RowProducts":
        """Return the rows of some examples."""
        return RowProducts(self.x.some(data), self.g.some(data))

    def to(self, dtype: torch.dtype) -> "RowProducts":
        """Return the rows in another dtype."""
        return RowProducts(self.x.to(dtype), self.g.to(dtype))

    def times(self, Q_A: Tensor | None, Q_B: Tensor | None) -> "RowProducts":
        """Return `Q_B^T G Q_A` for the gradients `G`. `None` stands for the identity."""
        x = self.x if Q_A is None else self.x.times(Q_A)
        g = self.g if Q_B is None else self.g.times(Q_B)
        return RowProducts(x, g)

    def matrices(self) -> Iterator[Tensor]:
        """Yield the gradients as matrices, `[some examples, groups, d_B, d_A]`, a few examples at a time."""
        for part in self._parts(self.numbers):
            yield part._matrices()

    def inner(self, other: "RowProducts") -> Tensor:
        """Return the inner products of all pairs of gradients, `[n, m]`, computed from rows."""
        return torch.cat([_summed(*both, by_row=False) for both in self._pairs(other)], 1)

    def inner_by_row(self, other: "RowProducts") -> Tensor:
        """Return the contribution of each row of the other gradients to the inner products, `[n, m, shared]`."""
        return torch.cat([_summed(*both, by_row=True) for both in self._pairs(other)], 1)

    def inner_within(self, other: "RowProducts") -> Tensor:
        """Return the inner product of two gradients of each example, `[n]`, computed from rows."""
        step = at_a_time(self.like, 2 * self.x.groups * self.shared * other.shared)
        sums = []
        for start in range(0, self.num_data, step):
            mine, theirs = (one.some(slice(start, start + step)) for one in (self, other))
            sums.append((mine.x.dots_within(theirs.x) * mine.g.dots_within(theirs.g)).sum((0, 2, 3)))
        return torch.cat(sums)

    def _pairs(self, other: "RowProducts") -> Iterator[tuple["RowProducts", "RowProducts"]]:
        """Yield pairs of parts that limit the memory for the inner products of rows."""
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
        # With a single row, elementwise multiplication is faster than a matrix product.
        product = g.transpose(2, 3) * self.x.values if self.shared == 1 else g.transpose(2, 3) @ self.x.values
        if self.x.last is not None:
            product = torch.cat([product, self.x.last * g.sum(2).unsqueeze(3)], 3)
        return product.transpose(0, 1)


def joined_products(parts: Sequence[RowProducts]) -> RowProducts:
    """Concatenate the rows of several batches."""
    return RowProducts(joined([part.x for part in parts]), joined([part.g for part in parts]))


def matrix_inner(matrices: Tensor, parts: Sequence[RowProducts]) -> Tensor:
    """Return the inner products of matrices `[n, groups, d_B, d_A]` with sums over `parts` of plain rows, `[n, m]`.

    The matrices of `parts` are formed a few of their rows at a time, for all examples. These fit into the processor's
    cache, where a large matrix product uses them immediately.
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
    assert isinstance(x, PlainVectors)  # noqa: S101 (the caller has checked it)
    values = x.values[group]
    extra = 0 if x.last is None else 1
    matrices = g.new_empty(g.shape[0], g.shape[2], values.shape[2] + extra)
    inner = matrices[:, :, : values.shape[2]]
    if g.shape[1] == 1:  # with a single row, elementwise multiplication is faster than a matrix product
        torch.mul(g.transpose(1, 2), values, out=inner)
    else:
        inner.copy_(g.transpose(1, 2) @ values)
    if x.last is not None:
        matrices[:, :, -1] = x.last * g.sum(1)
    return matrices


def matrix_inner_by_row(matrices: Tensor, other: RowProducts) -> Tensor:
    """Return the contribution of each row to the inner products with matrices `[n, groups, d_B, d_A]`: `[n, m, S]`."""
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
    """Sum outer products of unit vectors with vectors `[n, shared, d]`, by adding to rows: `[n, size, d]`."""
    full = values.new_zeros(len(values), unit.size, values.shape[2])
    return full.scatter_add_(1, unit.index.unsqueeze(2).expand_as(values), values)
