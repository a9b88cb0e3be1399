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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

# Temporary results, computed for a few examples at a time, fill about this many bytes.
_BYTES = {False: 2**24, True: 2**28}  # on a CPU, on an accelerator


def at_a_time(like: Tensor, numbers: int) -> int:
    """Return how many examples to process together, given how many numbers are stored for each."""
    return max(1, _BYTES[like.device.type != "cpu"] // (4 * max(numbers, 1)))


class PlainVectors:
    """Vectors of all rows, stored explicitly.

    Args:
        values: `[groups, batch, shared, features]`.
        last: Value of an additional coordinate for the bias: one if the bias was used, zero if not. `None` if there is
            no such coordinate.

    Attributes:
        groups: Number of groups of channels.
        num_data: Number of examples.
        shared: Number of rows of each example.
        size: Number of coordinates.
        work: Number of multiplications per inner product.
        numbers: Number of stored values per example.
    """

    def __init__(self, values: Tensor, last: float | None = None) -> None:
        self.values = values
        self.last = last
        self.groups, self.num_data, self.shared, self.work = values.shape
        self.size = self.work + (last is not None)
        self.numbers = self.groups * self.shared * self.work

    def dense(self) -> Tensor:
        """Return all coordinates, `[groups, batch, shared, size]`."""
        return self.values if self.last is None else pad(self.values, (0, 1), value=self.last)

    def times(self, Q: Tensor) -> "PlainVectors":
        """Multiply every vector with a matrix from the right, `[groups, size, any]`."""
        features = self.values.shape[3]
        flat = self.values.flatten(1, 2)
        # A plain product is faster than a batched one with a batch of one.
        product = (flat[0] @ Q[0, :features]).unsqueeze(0) if self.groups == 1 else flat @ Q[:, :features]
        if self.last:
            product = product + self.last * Q[:, features:]
        return PlainVectors(product.unflatten(1, self.values.shape[1:3]))

    def some(self, data: slice) -> "PlainVectors":
        """Return the vectors of some examples."""
        return PlainVectors(self.values[:, data], self.last)

    def together(self) -> "PlainVectors":
        """Return the vectors of all examples as those of a single one."""
        return PlainVectors(self.values.flatten(1, 2).unsqueeze(1), self.last)

    def to(self, dtype: torch.dtype) -> "PlainVectors":
        """Return the vectors in another dtype."""
        return PlainVectors(self.values.to(dtype), self.last)

    def dots(self, other: "RowVectors") -> Tensor:
        """Return inner products of pairs of vectors of the same example, `[groups, batch, shared, shared of other]`."""
        if isinstance(other, UnitVectors):
            return other.dots(self).transpose(2, 3)
        if self.work != other.work:  # only one of both stores its last coordinate explicitly
            return self.dense() @ other.dense().transpose(2, 3)
        mine, theirs = self.values, other.values
        # A plain product is faster than a batched one with a batch of one.
        one = mine.shape[:2] == (1, 1)
        products = (mine[0, 0] @ theirs[0, 0].T)[None, None] if one else mine @ theirs.transpose(2, 3)
        last = (self.last or 0.0) * (other.last or 0.0)
        return products.add_(last) if last else products


class UnitVectors:
    """Unit vectors of all rows. There is a single group; other attributes are those of `PlainVectors`.

    Args:
        index: The coordinate that is one, `[batch, shared]`.
        size: Number of coordinates.
        dtype: Dtype of results that are computed from them.
    """

    groups = 1
    work = 1

    def __init__(self, index: Tensor, size: int, dtype: torch.dtype) -> None:
        self.index = index
        self.size = size
        self.dtype = dtype
        self.num_data, self.shared = index.shape
        self.numbers = self.shared

    def dense(self) -> Tensor:
        """Return the vectors as zeros and ones, `[1, batch, shared, size]`."""
        zeros = torch.zeros(*self.index.shape, self.size, dtype=self.dtype, device=self.index.device)
        return zeros.scatter_(2, self.index.unsqueeze(2), 1.0).unsqueeze(0)

    def times(self, Q: Tensor) -> PlainVectors:
        """Multiply every vector with a matrix from the right, by selecting its rows."""
        return PlainVectors(Q[:, self.index])

    def some(self, data: slice) -> "UnitVectors":
        """Return the vectors of some examples."""
        return UnitVectors(self.index[data], self.size, self.dtype)

    def together(self) -> "UnitVectors":
        """Return the vectors of all examples as those of a single one."""
        return UnitVectors(self.index.reshape(1, -1), self.size, self.dtype)

    def to(self, dtype: torch.dtype) -> "UnitVectors":
        """Return the vectors with another dtype of results."""
        return UnitVectors(self.index, self.size, dtype)

    def dots(self, other: "RowVectors") -> Tensor:
        """Return inner products as `PlainVectors.dots` does: compare indices, or look entries up."""
        if isinstance(other, UnitVectors):
            return (self.index.unsqueeze(2) == other.index.unsqueeze(1)).to(self.dtype).unsqueeze(0)
        theirs = other.dense()
        index = self.index[None, :, None].expand(len(theirs), -1, theirs.shape[2], -1)
        return theirs.gather(3, index).transpose(2, 3)

    def scattered(self, values: Tensor) -> Tensor:
        """Sum outer products with vectors `[batch, shared, d]` over rows, by adding to rows of `[batch, size, d]`."""
        full = values.new_zeros(len(values), self.size, values.shape[2])
        return full.scatter_add_(1, self.index.unsqueeze(2).expand_as(values), values)


# Vectors on one side of rows, `[groups, batch, shared, size]`.
RowVectors = PlainVectors | UnitVectors


def joined(parts: Sequence[RowVectors]) -> RowVectors:
    """Concatenate the vectors of several batches, which have equal sizes and groups.

    If the examples of a batch have fewer rows than others, they are padded: unit vectors with index 0, plain vectors
    with zeros. The other side of padded rows must be zero.
    """
    most = max(part.shared for part in parts)
    units = [part for part in parts if isinstance(part, UnitVectors)]
    if len(units) == len(parts):
        index = torch.cat([pad(part.index, (0, most - part.shared)) for part in units])
        return UnitVectors(index, units[0].size, units[0].dtype)
    plain = [part if isinstance(part, PlainVectors) else PlainVectors(part.dense()) for part in parts]
    if len({part.last for part in plain}) > 1:
        plain = [PlainVectors(part.dense()) for part in plain]
    values = torch.cat([pad(part.values, (0, 0, 0, most - part.shared)) for part in plain], 1)
    return PlainVectors(values, plain[0].last)


Way = Literal["rows", "matrices"]


def cheaper(pairs: tuple[int, int], rows: tuple[int, int], work: tuple[int, int], numbers: int) -> Way:
    """Return the way to compute all inner products between the gradients of two datasets with fewer multiplications.

    Args:
        pairs: Number of examples in each dataset.
        rows: Number of rows per example in each dataset.
        work: Multiplications per inner product, on the input side and on the gradient side.
        numbers: Number of entries of a matrix.

    Example:
        >>> cheaper((100, 100), (1, 1), (257, 256), 257 * 256)
        'rows'
        >>> cheaper((100, 100), (64, 64), (257, 256), 257 * 256)
        'matrices'
    """
    by_rows = pairs[0] * rows[0] * pairs[1] * rows[1] * sum(work)
    by_matrices = (pairs[0] * pairs[1] + pairs[0] * rows[0] + pairs[1] * rows[1]) * numbers
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
        for part in self._parts(at_a_time(self.like, self.x.groups * self.x.size * self.g.size)):
            if isinstance(part.x, UnitVectors):
                yield part.x.scattered(part.g.dense()[0]).transpose(1, 2).unsqueeze(1)
            elif isinstance(part.g, UnitVectors):
                yield part.g.scattered(part.x.dense()[0]).unsqueeze(1)
            else:
                yield _matrices(part.x, part.g.dense()).transpose(0, 1)

    def _parts(self, most: int) -> Iterator["RowProducts"]:
        """Yield the rows of at most so many examples at a time."""
        if self.num_data <= most:
            yield self
            return
        for start in range(0, self.num_data, most):
            yield self.some(slice(start, start + most))

    def inner(self, other: "RowProducts", by_row: bool = False) -> Tensor:
        """Return the inner products of all pairs of gradients, computed from rows.

        They are `[n, m]`, or `[n, m, shared]` if `by_row`: the contribution of each row of the other gradients.
        """
        step = at_a_time(self.like, 2 * self.x.groups * self.num_data * self.shared * other.shared)
        x, g = self.x.together(), self.g.together()
        sums = []
        for theirs in other._parts(step):
            products = x.dots(theirs.x.together()).mul_(g.dots(theirs.g.together()))
            shape = (self.num_data, self.shared, theirs.num_data, theirs.shared)
            sums.append(products.reshape(self.x.groups, *shape).sum((0, 2) if by_row else (0, 2, 4)))
        return torch.cat(sums, 1)

    def inner_within(self, other: "RowProducts") -> Tensor:
        """Return the inner product of two gradients of each example, `[n]`, computed from rows."""
        step = at_a_time(self.like, 2 * self.x.groups * self.shared * other.shared)
        sums = []
        for start in range(0, self.num_data, step):
            mine, theirs = (one.some(slice(start, start + step)) for one in (self, other))
            sums.append((mine.x.dots(theirs.x) * mine.g.dots(theirs.g)).sum((0, 2, 3)))
        return torch.cat(sums)


def joined_products(parts: Sequence[RowProducts]) -> RowProducts:
    """Concatenate the rows of several batches."""
    return RowProducts(joined([part.x for part in parts]), joined([part.g for part in parts]))


def _matrices(x: PlainVectors, g: Tensor) -> Tensor:
    """Sum outer products of gradients `[groups, n, shared, d_B]` and vectors over rows: `[groups, n, d_B, d_A]`."""
    g_T, one = g.transpose(2, 3), x.shared == 1  # for one row, elementwise multiplication is faster than a product
    if x.last is None:
        return g_T * x.values if one else g_T @ x.values
    matrices = g.new_empty(*g.shape[:2], g.shape[3], x.size)
    if one:
        torch.mul(g_T, x.values, out=matrices[..., :-1])
    else:
        matrices[..., :-1] = g_T @ x.values
    matrices[..., -1] = x.last * g.sum(2)
    return matrices


def matrix_inner(matrices: Tensor, parts: Sequence[RowProducts]) -> Tensor:
    """Return the inner products of matrices `[n, groups, d_B, d_A]` with sums over `parts` of plain rows, `[n, m]`.

    The matrices of `parts` are formed a few of their rows at a time, for all examples. These fit into the processor's
    cache, where a large matrix product uses them immediately.
    """
    first = parts[0]
    result = matrices.new_zeros(len(matrices), first.num_data)
    sides = [(part.x, part.g.dense()) for part in parts]
    for group in range(first.x.groups):
        step = at_a_time(matrices, 2 * first.num_data * first.x.size)
        for start in range(0, first.g.size, step):
            total: Tensor | None = None
            for x, g in sides:
                assert isinstance(x, PlainVectors)  # noqa: S101 (the caller has checked it)
                of_group = PlainVectors(x.values[group, None], x.last)
                some = _matrices(of_group, g[group, None, :, :, start : start + step])[0]
                total = some if total is None else total.add_(some)
            assert total is not None  # noqa: S101 (there are parts)
            result.addmm_(matrices[:, group, start : start + step].flatten(1), total.flatten(1).T)
    return result


def matrix_inner_by_row(matrices: Tensor, other: RowProducts) -> Tensor:
    """Return the contribution of each row to the inner products with matrices `[n, groups, d_B, d_A]`: `[n, m, S]`."""
    products = matrices @ other.x.dense().flatten(1, 2).transpose(1, 2)
    summed = (products * other.g.dense().flatten(1, 2).transpose(1, 2)).sum((1, 2))
    shares: Tensor = summed.unflatten(1, (other.num_data, other.shared))
    return shares
