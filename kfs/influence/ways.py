r"""Ways to multiply gradients with the inverse of a block between them, and how many operations each takes.

A score is $\langle G_q, H^{-1} G_n \rangle$, for each query $q$ and each training datum $n$. Gradients of queries are
multiplied once, and kept:

- `"rows"`: as rows, which inverses that are Kronecker products leave rows.
- `"matrices"`: as matrices, to be multiplied with gradients of training data as they are.
- `"rotated"`: as matrices in the basis of the inverse, where gradients of training data are rotated, too.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kfs.kfac.block_gradients import Basis, BlockGradients
from kfs.kfac.structures import Structure
from kfs.kfac.sums import full_precision

Way = Literal["rows", "matrices", "rotated"]


@dataclass(frozen=True)
class Sizes:
    """What the number of operations for one block depends on.

    Attributes:
        queries: Number of queries.
        train: Number of training data.
        rows: Rows of each datum.
        columns: `d_A`, coordinates on the input side.
        matrix_rows: `d_B`, coordinates on the gradient side.
        groups: Groups of channels.
    """

    queries: int
    train: int
    rows: int
    columns: int
    matrix_rows: int
    groups: int = 1

    @property
    def numbers(self) -> int:
        """How many numbers a gradient has."""
        return self.groups * self.columns * self.matrix_rows

    @property
    def rotation_of_rows(self) -> int:
        """Multiplications to multiply the rows of a gradient with a matrix on each side."""
        return self.rows * self.groups * (self.columns**2 + self.matrix_rows**2)

    @property
    def rotation_of_matrices(self) -> int:
        """Multiplications to multiply the matrix of a gradient with a matrix on each side."""
        return self.numbers * (self.columns + self.matrix_rows)


def multiplications(way: Way, sizes: Sizes) -> int:
    """Return how many multiplications all scores of a block take in one of the ways.

    Args:
        way: Which one.
        sizes: Numbers of data and coordinates.

    Example:
        >>> sizes = Sizes(queries=297, train=1500, rows=1, columns=257, matrix_rows=256)
        >>> multiplications("rows", sizes) < multiplications("rotated", sizes) < multiplications("matrices", sizes)
        True
    """
    Q, N, S = sizes.queries, sizes.train, sizes.rows
    if way == "rows":
        return Q * N * S**2 * sizes.groups * (sizes.columns + sizes.matrix_rows) + Q * sizes.rotation_of_rows
    products = Q * N * sizes.numbers
    forming = (Q + N) * S * sizes.numbers
    if way == "matrices":
        return products + forming + 2 * Q * sizes.rotation_of_matrices
    return products + forming + (Q + N) * min(sizes.rotation_of_rows, sizes.rotation_of_matrices)


@dataclass(frozen=True)
class Chosen:
    """How gradients of one block are multiplied.

    Attributes:
        way: One of the ways.
        structure: The block's inverse.
    """

    way: Way
    structure: Structure

    def of_queries(self, gradients: BlockGradients) -> BlockGradients:
        """Multiply gradients of queries with the inverse."""
        if self.way == "rows":
            return gradients.multiplied(self.structure)
        if self.way == "matrices":
            return gradients.multiplied(self.structure).formed()
        assert isinstance(self.structure, Basis)  # noqa: S101 (others have no basis)
        inside = rotated(gradients, self.structure).dense()
        return replace(gradients, uses=(), whole=inside * self.structure.values)

    def of_train(self, gradients: BlockGradients, keep_rows: bool = False) -> BlockGradients:
        """Return gradients of training data such that inner products with those of queries are scores.

        Args:
            gradients: The gradients.
            keep_rows: Whether rows have to stay rows, even if matrices take fewer operations.
        """
        if self.way != "rotated":
            return gradients
        assert isinstance(self.structure, Basis)  # noqa: S101 (as above)
        return gradients.rotated(self.structure) if keep_rows else rotated(gradients, self.structure)

    def bytes_of(self, gradients: BlockGradients) -> int:
        """Return how many bytes are kept for each query."""
        numbers = gradients.numbers if self.way != "rows" else sum(part.stored for part in gradients.parts)
        return numbers * gradients.dtype.itemsize


def choose(structure: Structure, gradients: BlockGradients, queries: int, train: int) -> Chosen:
    """Choose the way that takes fewest multiplications for a block.

    Args:
        structure: The block's inverse.
        gradients: Some of the queries' gradients. Those of training data are taken to have as many rows.
        queries: Number of queries.
        train: Number of training data.
    """
    groups, d_B, d_A = gradients.layout.matrix_shape
    sizes = Sizes(queries, train, max(gradients.shared, 1), d_A, d_B, groups)
    costs: dict[Way, int] = {"matrices": multiplications("matrices", sizes)}
    if isinstance(structure, Basis):
        costs["rotated"] = multiplications("rotated", sizes)
    if gradients.keeps_rows(structure):
        costs["rows"] = multiplications("rows", sizes)
    return Chosen(min(costs, key=lambda way: costs[way]), structure)


def rotated(gradients: BlockGradients, basis: Basis) -> BlockGradients:
    """Rotate gradients into a basis: their rows, or their matrices if that takes fewer operations."""
    groups, d_B, d_A = gradients.layout.matrix_shape
    sizes = Sizes(0, 0, gradients.shared, d_A, d_B, groups)
    by_rows = sizes.rotation_of_rows <= sizes.rotation_of_matrices
    return (gradients if by_rows else gradients.formed()).rotated(basis)


def self_products(gradients: BlockGradients, structure: Structure) -> Tensor:
    """Return `<G, H^-1 G>` for every datum, `[n]`."""
    if not isinstance(structure, Basis) or gradients.keeps_rows(structure):
        return gradients.multiplied(structure).inner_within(gradients)
    inside = rotated(gradients, structure)
    if len(inside.uses) == 1 and inside.whole is None and inside.shared == 1:
        # The square of an outer product is the outer product of squares.
        x, g = (side.dense().squeeze(2).square() for side in (inside.parts[0].x, inside.parts[0].g))
        with full_precision(gradients.device.type):
            return ((g @ structure.values) * x).sum((0, 2))
    return (inside.dense().square() * structure.values).flatten(1).sum(1)
