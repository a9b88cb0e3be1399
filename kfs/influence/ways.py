r"""Ways to multiply gradients with the inverse of a block between them, and how many operations each takes.

A score is $\langle G_q, H^{-1} G_n \rangle$, for each query $q$ and each training datum $n$. Gradients of queries are
multiplied once, and kept:

- `"rows"`: as rows, which inverses that are Kronecker products leave rows.
- `"terms"`: as rows, by an inverse $Q_B (V \odot Q_B^\top G Q_A) Q_A^\top$ that is replaced by a few Kronecker
  products, up to round-off: $V$ is a sum of few outer products, for KFAC with damping often of ten or twenty.
- `"matrices"`: as matrices, to be multiplied with gradients of training data as they are.
- `"rotated"`: as matrices in the basis of the inverse, where gradients of training data are rotated, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kfs.kfac.block_gradients import BlockGradients, sides_of
from kfs.kfac.structures import Congruence, Eigenbasis, Kronecker, Structure
from kfs.kfac.sums import PlainVectors, RowProducts, UnitVectors

Way = Literal["rows", "terms", "matrices", "rotated"]
# Values are as good as a sum of outer products if no entry is off by more than this many units of round-off.
_CLOSE = 16.0


@dataclass(frozen=True)
class Sizes:
    """What the number of operations for one block depends on.

    Attributes:
        queries: Number of queries.
        train: Number of training data.
        rows: Rows of each datum.
        d_A: Coordinates on the input side.
        d_B: Coordinates on the gradient side.
        groups: Groups of channels.
    """

    queries: int
    train: int
    rows: int
    d_A: int
    d_B: int
    groups: int = 1

    @property
    def numbers(self) -> int:
        """How many numbers a gradient has."""
        return self.groups * self.d_A * self.d_B

    @property
    def rotation(self) -> int:
        """Multiplications to rotate a gradient, its rows or its matrix, whichever takes fewer."""
        of_rows = self.rows * self.groups * (self.d_A**2 + self.d_B**2)
        return min(of_rows, self.numbers * (self.d_A + self.d_B))

    @property
    def decomposition(self) -> int:
        """Multiplications for the singular value decomposition of a matrix `[d_B, d_A]`."""
        return 20 * self.numbers * min(self.d_A, self.d_B)


def multiplications(way: Way, sizes: Sizes, terms: int = 1) -> int:
    """Return how many multiplications all scores of a block take in one of the ways.

    Args:
        way: Which one.
        sizes: Numbers of data and coordinates.
        terms: Number of Kronecker products, for `"terms"`.

    Example:
        >>> sizes = Sizes(queries=297, train=1500, rows=1, d_A=257, d_B=256)
        >>> multiplications("terms", sizes, 12) < multiplications("rotated", sizes) < multiplications("matrices", sizes)
        True
    """
    Q, N, S = sizes.queries, sizes.train, sizes.rows
    if way in {"rows", "terms"}:
        pair = terms * S * S * sizes.groups * (sizes.d_A + sizes.d_B)
        once = Q * (1 + terms) * S * sizes.groups * (sizes.d_A**2 + sizes.d_B**2)
        return Q * N * pair + once + (sizes.decomposition if way == "terms" else 0)
    forming = (Q + N) * S * sizes.numbers
    products = Q * N * sizes.numbers
    rotations = (2 * Q if way == "matrices" else Q + N) * sizes.rotation
    return products + forming + rotations


@dataclass(frozen=True)
class Chosen:
    """How gradients of one block are multiplied.

    Attributes:
        way: One of the ways.
        structure: The block's inverse.
        factors: For `"terms"`, the outer products; see `few_terms`.
    """

    way: Way
    structure: Structure
    factors: tuple[Tensor, Tensor] | None = None

    def of_queries(self, gradients: BlockGradients) -> BlockGradients:
        """Multiply gradients of queries with the inverse."""
        if self.way == "rows":
            return gradients.multiplied(self.structure)
        if self.way == "matrices":
            return gradients.multiplied(self.structure).formed()
        assert isinstance(self.structure, (Eigenbasis, Congruence))  # noqa: S101 (others have no basis)
        if self.way == "rotated":
            inside = rotated(gradients, self.structure).dense()
            return replace(gradients, uses=(), whole=inside * self.structure.values)
        assert self.factors is not None  # noqa: S101 (they were found)
        Q_A, Q_B = sides_of(self.structure)
        inside_parts = [_in_terms(part.times(Q_A, Q_B), *self.factors) for part in gradients.parts]
        return replace(gradients, uses=tuple(part.times(_back(Q_A), _back(Q_B)) for part in inside_parts))

    def of_train(self, gradients: BlockGradients) -> BlockGradients:
        """Return gradients of training data such that inner products with those of queries are scores."""
        if self.way != "rotated":
            return gradients
        assert isinstance(self.structure, (Eigenbasis, Congruence))  # noqa: S101 (as above)
        return rotated(gradients, self.structure)

    def bytes_of(self, gradients: BlockGradients) -> int:
        """Return how many bytes are kept for each query."""
        if self.way in {"matrices", "rotated"}:
            return gradients.numbers * gradients.dtype.itemsize
        terms = 1 if self.factors is None else self.factors[0].shape[2]
        return terms * sum(part.stored for part in gradients.parts) * gradients.dtype.itemsize


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
    if isinstance(structure, (Eigenbasis, Congruence)):
        costs["rotated"] = multiplications("rotated", sizes)
    if gradients.whole is None and _keeps_rows(gradients, structure):
        costs["rows"] = multiplications("rows", sizes)
    best = min(costs, key=lambda way: costs[way])
    if isinstance(structure, (Eigenbasis, Congruence)) and _has_plain_rows(gradients):
        # With how many terms does it pay?
        most = 0
        while multiplications("terms", sizes, most + 1) < costs[best]:
            most += 1
        factors = few_terms(structure.values, most, gradients.dtype) if most else None
        if factors is not None:
            return Chosen("terms", structure, factors)
    return Chosen(best, structure)


def few_terms(values: Tensor, most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Write matrices as sums of few outer products, up to round-off in every entry.

    Args:
        values: `[groups, d_B, d_A]`, positive.
        most: How many outer products there may be.
        dtype: Its round-off counts.

    Returns:
        The factors `[groups, d_B, terms]` and `[groups, terms, d_A]`; `None` if more would be needed.
    """
    values = values.double()
    # Entries differ by orders of magnitude. Rows and columns are scaled, so that small ones get as many digits.
    rows = values.square().mean(2, keepdim=True).sqrt()
    columns = (values / rows).square().mean(1, keepdim=True).sqrt()
    U, s, V = torch.linalg.svd(values / rows / columns, full_matrices=False)
    U = U * s.unsqueeze(1) * rows
    V = V * columns
    tolerance = _CLOSE * torch.finfo(dtype).eps
    for terms in range(1, min(most, s.shape[1]) + 1):
        # The first singular value that is left out says whether it can be close enough.
        if terms < s.shape[1] and bool((s[:, terms] > tolerance * s[:, 0] * 1e3).any()):
            continue
        error = (U[:, :, :terms] @ V[:, :terms] - values).abs()
        if bool((error <= tolerance * values).all()):
            return U[:, :, :terms].to(dtype), V[:, :terms].to(dtype)
    return None


def rotated(gradients: BlockGradients, basis: Eigenbasis | Congruence) -> BlockGradients:
    """Rotate gradients into a basis: their rows, or their matrices if that takes fewer operations."""
    groups, d_B, d_A = gradients.layout.matrix_shape
    of_rows = gradients.shared * groups * (d_A**2 + d_B**2)
    of_matrices = groups * d_A * d_B * (d_A + d_B)
    return (gradients if of_rows <= of_matrices else gradients.formed()).rotated(basis)


def self_products(gradients: BlockGradients, structure: Structure) -> Tensor:
    """Return `<G, H^-1 G>` for every datum, `[n]`."""
    if not isinstance(structure, (Eigenbasis, Congruence)) or _keeps_rows(gradients, structure):
        return gradients.multiplied(structure).inner_within(gradients)
    inside = rotated(gradients, structure)
    if len(inside.parts) == 1 and inside.whole is None and inside.shared == 1:
        # The square of an outer product is the outer product of squares.
        x, g = (side.dense().squeeze(2).square() for side in (inside.parts[0].x, inside.parts[0].g))
        return ((g @ structure.values) * x).sum((0, 2))
    return (inside.dense().square() * structure.values).flatten(1).sum(1)


def _keeps_rows(gradients: BlockGradients, structure: Structure) -> bool:
    """Whether rows that are multiplied with the inverse stay rows."""
    if isinstance(structure, Kronecker):
        return True
    if not isinstance(structure, (Eigenbasis, Congruence)):
        return False
    Q_A, Q_B = sides_of(structure)
    on_units: Callable[[RowProducts], bool] = lambda part: (  # noqa: E731
        (isinstance(part.x, UnitVectors) and Q_A is None) or (isinstance(part.g, UnitVectors) and Q_B is None)
    )
    return bool(gradients.parts) and all(map(on_units, gradients.parts))


def _has_plain_rows(gradients: BlockGradients) -> bool:
    """Whether gradients consist of rows whose vectors are written down."""
    sides = [side for part in gradients.parts for side in (part.x, part.g)]
    return bool(sides) and gradients.whole is None and all(isinstance(side, PlainVectors) for side in sides)


def _in_terms(part: RowProducts, left: Tensor, right: Tensor) -> RowProducts:
    """Multiply rows with each of some outer products, entry by entry: as many rows more."""
    x = part.x.dense().unsqueeze(2) * right[:, None, :, None]  # [groups, n, terms, shared, d_A]
    g = part.g.dense().unsqueeze(2) * left.transpose(1, 2)[:, None, :, None]
    return RowProducts(PlainVectors(x.flatten(2, 3)), PlainVectors(g.flatten(2, 3)))


def _back(Q: Tensor | None) -> Tensor | None:
    return None if Q is None else Q.transpose(1, 2)
