r"""Ways to compute inner products of gradients with the inverse of a block, their costs, and low-rank gradients.

The forms in which an index stores gradients of training data live in `kfs.influence.stored`.

A score is $\langle G_q, H^{-1} G_n \rangle$, for each query $q$ and each training example $n$. Gradients of queries are
multiplied by the inverse once, and kept in one of these ways:

- `"rows"`: as rows. Inverses that are Kronecker products map rows to rows.
- `"matrices"`: as matrices, to be multiplied with the unchanged gradients of training data.
- `"rotated"`: as matrices in the basis of the inverse. Gradients of training data are rotated, too.
- `"low rank"`: as the leading singular vectors of those matrices, which are rows, too (Grosse et al., 2023).

`choose` returns the way with the fewest multiplications.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kfs.factors.accumulate import PlainVectors, RowProducts, at_a_time
from kfs.factors.blocks import Structure
from kfs.factors.per_example import Basis, BlockGradients
from kfs.runtime.precision import full_precision


@dataclass(frozen=True)
class Truncated:
    """Low-rank approximations of gradients.

    Attributes:
        kept: The best low-rank approximation of every example's gradient, as rows.
        left_out: Frobenius norm of the approximation error of every example, `[n]`: the root of the sum of squares of
            the truncated singular values.
    """

    kept: BlockGradients
    left_out: Tensor


def truncated(gradients: BlockGradients, rank: int) -> Truncated:
    """Keep the leading singular vectors of every example's gradient matrix, separately for every group.

    Gradients with at most `rank` rows are returned unchanged. If there are fewer rows than coordinates, the matrices
    are not formed: after QR decompositions of the rows on both sides, the singular values are those of a small matrix.
    """
    nothing = torch.zeros(gradients.num_data, dtype=gradients.dtype, device=gradients.device)
    if gradients.whole is None and gradients.shared <= rank:
        return Truncated(gradients, nothing)
    groups, d_B, d_A = gradients.layout.matrix_shape
    by_rows = gradients.whole is None and gradients.shared < min(d_A, d_B)
    # Decompose a few examples at a time to bound the memory.
    step = at_a_time(nothing, 3 * groups * (gradients.shared * (d_A + d_B) if by_rows else d_A * d_B))
    found = []
    for start in range(0, gradients.num_data, step):
        some = gradients if step >= gradients.num_data else gradients.some(slice(start, start + step))
        found.append(_by_rows(some) if by_rows else torch.linalg.svd(some.dense().transpose(0, 1), full_matrices=False))
    U, s, Vh = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    g = (U * s.unsqueeze(-2))[..., :rank].transpose(2, 3)
    rows = RowProducts(PlainVectors(Vh[..., :rank, :].contiguous()), PlainVectors(g.contiguous()))
    left_out = s[..., rank:].square().sum((0, 2)).sqrt()
    return Truncated(replace(gradients, uses=(rows,), whole=None), left_out)


def _by_rows(gradients: BlockGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition of `G = g^T x` without forming it, `[groups, n, ...]`."""
    x = torch.cat([part.x.dense() for part in gradients.parts], 2)
    g = torch.cat([part.g.dense() for part in gradients.parts], 2)
    Q_x, R_x = torch.linalg.qr(x.transpose(2, 3))
    Q_g, R_g = torch.linalg.qr(g.transpose(2, 3))
    U, s, Vh = torch.linalg.svd(R_g @ R_x.transpose(2, 3), full_matrices=False)
    return Q_g @ U, s, Vh @ Q_x.transpose(2, 3)


Way = Literal["rows", "matrices", "rotated", "low rank"]
# A singular value decomposition of an m x n matrix, m >= n, takes about 10 m n^2 multiplications (Golub & Van Loan).
_DECOMPOSITION = 10


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the number of operations for one block.

    Attributes:
        queries: Number of queries.
        train: Number of training data.
        rows: Number of rows of each example.
        columns: `d_A`, the number of coordinates on the input side.
        matrix_rows: `d_B`, the number of coordinates on the gradient side.
        groups: Number of groups of channels.
        query_rank: Number of singular vectors of queries to keep; zero without compression.
    """

    queries: int
    train: int
    rows: int
    columns: int
    matrix_rows: int
    groups: int = 1
    query_rank: int = 0

    @classmethod
    def of(cls, gradients: BlockGradients, queries: int, train: int, query_rank: int = 0) -> "Sizes":
        """Return the sizes of a block, assuming that training data have as many rows as the given gradients."""
        groups, d_B, d_A = gradients.layout.matrix_shape
        return cls(queries, train, max(gradients.shared, 1), d_A, d_B, groups, query_rank)

    @property
    def numbers(self) -> int:
        """Number of entries of a gradient."""
        return self.groups * self.columns * self.matrix_rows

    @property
    def rotation_of_rows(self) -> int:
        """Number of multiplications to multiply the rows of a gradient by a matrix on each side."""
        return self.rows * self.groups * (self.columns**2 + self.matrix_rows**2)

    @property
    def rotation_of_matrices(self) -> int:
        """Number of multiplications to multiply the matrix of a gradient by a matrix on each side."""
        return self.numbers * (self.columns + self.matrix_rows)


@dataclass(frozen=True)
class Work:
    """Number of multiplications for the scores of a block.

    Attributes:
        queries: To multiply the gradients of queries by the inverse, once.
        train: To convert the gradients of training data, in every pass over them.
        products: For the inner products of all pairs.
    """

    queries: int
    train: int
    products: int

    @property
    def total(self) -> int:
        """Number of multiplications with one pass over the training data."""
        return self.queries + self.train + self.products


def work(way: Way, sizes: Sizes) -> Work:
    """Return the number of multiplications for all scores of a block, by phase."""
    Q = sizes.queries
    N = sizes.train
    S = sizes.rows
    sides = sizes.groups * (sizes.columns + sizes.matrix_rows)
    if way == "rows":
        return Work(Q * sizes.rotation_of_rows, 0, Q * N * S**2 * sides)
    forming = S * sizes.numbers
    there_and_back = 2 * sizes.rotation_of_matrices
    if way == "low rank":
        decomposition = _DECOMPOSITION * sizes.numbers * min(sizes.columns, sizes.matrix_rows)
        return Work(Q * (forming + there_and_back + decomposition), 0, Q * N * S * sizes.query_rank * sides)
    products = Q * N * sizes.numbers
    if way == "matrices":
        return Work(Q * (forming + there_and_back), N * forming, products)
    each = forming + min(sizes.rotation_of_rows, sizes.rotation_of_matrices)
    return Work(Q * each, N * each, products)


def multiplications(way: Way, sizes: Sizes) -> int:
    """Return the number of multiplications for all scores of a block, with one pass over the training data.

    Example:
        >>> sizes = Sizes(queries=297, train=1500, rows=1, columns=257, matrix_rows=256)
        >>> multiplications("rows", sizes) < multiplications("rotated", sizes) < multiplications("matrices", sizes)
        True
    """
    return work(way, sizes).total


@dataclass(frozen=True)
class Chosen:
    """The chosen way to multiply gradients of one block.

    Attributes:
        way: One of the ways.
        query_rank: Number of singular vectors of queries to keep, for `"low rank"`.
    """

    way: Way
    query_rank: int = 0

    def of_queries(self, gradients: BlockGradients, structure: Structure) -> BlockGradients:
        """Multiply gradients of queries by the inverse, given the structure of its block."""
        if self.way == "rows":
            return gradients.multiplied(structure)
        if self.way == "matrices":
            return gradients.multiplied(structure).formed()
        if self.way == "low rank":
            return truncated(gradients.multiplied(structure), self.query_rank).kept
        assert isinstance(structure, Basis)  # noqa: S101 (by `choose`)
        inside = rotated(gradients, structure).dense()
        return replace(gradients, uses=(), whole=inside * structure.values)

    def of_train(
        self, gradients: BlockGradients, structure: Structure | None, keep_rows: bool = False
    ) -> BlockGradients:
        """Convert gradients of training data, so that inner products with the result of `of_queries` are scores.

        Args:
            gradients: The gradients.
            structure: The structure of the block, which `"rotated"` needs.
            keep_rows: Whether rows stay rows, even if matrices take fewer operations.
        """
        if self.way != "rotated":
            return gradients
        assert isinstance(structure, Basis)  # noqa: S101 (by `choose`)
        return gradients.rotated(structure) if keep_rows else rotated(gradients, structure)

    def bytes_of(self, gradients: BlockGradients) -> int:
        """Return the number of bytes per query."""
        numbers = gradients.numbers
        if self.way == "rows":
            numbers = sum(part.stored for part in gradients.parts)
        elif self.way == "low rank":
            numbers = self.query_rank * sum(gradients.layout.matrix_shape[1:]) * gradients.layout.groups
        return numbers * gradients.dtype.itemsize


def choose(
    structure: Structure,
    gradients: BlockGradients,
    queries: int,
    train: int,
    query_rank: int | None = None,
    rotate: bool = True,
) -> Chosen:
    """Choose the way with the fewest multiplications for a block.

    Args:
        structure: The inverse of the block.
        gradients: Gradients of some queries. Training data are assumed to have as many rows.
        queries: Number of queries.
        train: Number of training data.
        query_rank: Number of singular vectors of queries to keep, if that takes fewer multiplications; `None` for all.
        rotate: Whether gradients of training data may be rotated.
    """
    sizes = Sizes.of(gradients, queries, train, query_rank or 0)
    ways: list[Way] = ["matrices"]
    if rotate and isinstance(structure, Basis):
        ways.append("rotated")
    if gradients.keeps_rows(structure):
        ways.append("rows")
    if query_rank is not None:
        ways.append("low rank")
    return Chosen(min(ways, key=lambda way: multiplications(way, sizes)), sizes.query_rank)


def rotated(gradients: BlockGradients, basis: Basis) -> BlockGradients:
    """Rotate gradients into a basis, as rows or as matrices, whichever takes fewer operations."""
    sizes = Sizes.of(gradients, 0, 0)
    by_rows = sizes.rotation_of_rows <= sizes.rotation_of_matrices
    return (gradients if by_rows else gradients.formed()).rotated(basis)


def self_products(gradients: BlockGradients, structure: Structure) -> Tensor:
    """Return `<G, H^-1 G>` for every example, `[n]`."""
    if not isinstance(structure, Basis) or gradients.keeps_rows(structure):
        return gradients.multiplied(structure).inner_within(gradients)
    inside = rotated(gradients, structure)
    if len(inside.uses) == 1 and inside.whole is None and inside.shared == 1:
        # The square of an outer product is the outer product of squares.
        x, g = (side.dense().squeeze(2).square() for side in (inside.parts[0].x, inside.parts[0].g))
        with full_precision(gradients.device.type):
            return ((g @ structure.values) * x).sum((0, 2))
    return (inside.dense().square() * structure.values).flatten(1).sum(1)
