"""The input side of a parametric operation: the vectors that it multiplies with its parameter, one per position.

An `Inputs` reads vectors from an activation `x`. It adds their outer products to a sum (weight sharing `expand`), sums
them over the shared positions of each example (`reduce`), and combines them with gradients to per-example gradients of
the parameter (eigenvalue correction). It belongs to a plan and holds no data. Axes are named as in `row_map`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.accumulate.row_products import PlainVectors, RowProducts, UnitVectors, at_a_time
from kfs.factors.rows.row_map import RowMap, StridedRows
from kfs.runtime import sync
from kfs.runtime.precision import at_least_float32


class Inputs(ABC):
    """Reads the vectors of one kind of input."""

    size: int  # number of features (of one group)
    groups: int = 1  # number of groups of features
    sparse: bool = False  # whether outer products are diagonal, so that only the diagonal is kept
    unit: bool = False  # whether rows are unit vectors
    per_row: int = 1  # number of positions of each row
    overlap: int = 1  # number of vectors that contain each entry of the activation; if several, vectors need memory

    @abstractmethod
    def add_to(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor | None = None) -> float | Tensor:
        """Add the outer products of vectors to a sum, with a bias coordinate of one if `ones`.

        Args:
            total: The sum.
            x: The activation that vectors are read from.
            ones: Whether vectors have a bias coordinate of one.
            counted: The mask of the positions that count, `[rows, positions of a row]`. By default, all do.

        Returns:
            The number of vectors; a tensor if it depends on data.
        """

    @abstractmethod
    def leading(self, x: Any) -> tuple[int, ...]:
        """Return the lengths of the leading axes, along which a row belongs to one example."""

    def not_padding(self, x: Any) -> Tensor | None:
        """Return the mask of positions that are not padding, `[rows, positions of a row]`; `None` if all are."""
        return None

    @abstractmethod
    def sums(self, x: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
        """Return each example's sum of vectors, `[batch, groups, features]`, and its number of positions, `[batch]`.

        Both exclude positions that do not count.
        """

    @abstractmethod
    def rows(self, use: "Use", g: Tensor, by_place: bool = False) -> RowProducts:
        """Return each example's rows: vectors and gradients, the outer products of which sum to its gradient.

        Args:
            use: The vectors.
            g: Gradients of one column, `[*leading, groups * d_B]`.
            by_place: Whether places with equal vectors get separate rows.
        """

    def shared(self, use: "Use") -> int:
        """Return the number of rows per example, without forming them."""
        return use.row_map.most(prod(self.leading(use.x)))

    def gradients(self, use: "Use", g: Tensor) -> Iterator[Tensor]:
        """Yield each example's sum of outer products of gradients and vectors, a few examples at a time.

        They are the parameter's gradients as matrices, `[some data, groups, d_B, d_A]`. Arguments are those of `rows`.
        """
        return self.rows(use, g).matrices()

    def add_squares(self, total: Tensor, use: "Use", g: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
        """Add squared per-example gradients, expressed in other bases, to a total `[groups, d_B, d_A]`, in place.

        `Q_A` (input side, `[groups, d_A, d_A]`) and `Q_B` (gradient side, `[groups, d_B, d_B]`) have the basis vectors
        as columns; `None` stands for the standard basis.
        """
        for gradients in self.gradients(use, g):
            add_rotated_squares(total, gradients, Q_A, Q_B)


@dataclass
class Use:
    """One use of a parameter: its inputs, shared by all columns of gradients that come back to it."""

    inputs: Inputs  # how vectors are read
    x: Tensor  # the activation that they are read from
    row_map: RowMap  # the example of each row
    ones: bool  # whether vectors have a bias coordinate of one
    cache: dict[str, Tensor] = field(default_factory=dict)  # intermediate results that all columns share

    def gradients(self, g: Tensor) -> Iterator[Tensor]:
        """Yield the parameter's gradients for one column; see `Inputs.gradients`."""
        return self.inputs.gradients(self, g)


def chosen(vectors: Tensor, counted: Tensor) -> tuple[Tensor, float | Tensor]:
    """Return the vectors `[n, features]` selected by the mask `counted`, `[n]`, and their number.

    On an accelerator, selecting would synchronize with it. There, the other vectors are set to zero instead, and the
    number stays on the device.
    """
    if sync.is_asynchronous(vectors.device):
        return torch.where(counted.unsqueeze(1), vectors, 0), counted.sum()
    vectors = vectors[counted]
    return vectors, len(vectors)


def add_rotated_squares(total: Tensor, gradients: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
    """Add squares of gradients `[n, groups, d_B, d_A]`, expressed in other bases, to a total `[groups, d_B, d_A]`."""
    gradients = gradients.to(total.dtype)
    if gradients.shape[3] < total.shape[2]:  # a bias that was not used
        gradients = torch.nn.functional.pad(gradients, (0, 1))
    if gradients.shape[1] == 1:  # products with one matrix need no copies of it
        gradients = gradients.squeeze(1)
        gradients = gradients if Q_A is None else gradients @ Q_A[0]
        gradients = gradients if Q_B is None else Q_B[0].T @ gradients
        total = total[0]
    else:
        gradients = gradients if Q_A is None else gradients @ Q_A
        gradients = gradients if Q_B is None else Q_B.transpose(1, 2) @ gradients
    # An accelerator is faster with few large operations. On a CPU, the squares need not be stored.
    if total.device.type != "cpu":  # pragma: no cover (tested on a GPU)
        total += gradients.square().sum(0)[..., : total.shape[-1]]
        return
    for gradient in gradients:
        total.addcmul_(gradient, gradient)


def _aligned(Q: Tensor) -> Tensor:
    """Pad a basis on a GPU with zero columns, because tensor cores need rows with a multiple of 8 entries."""
    more = -Q.shape[1] % 8
    if more and Q.is_cuda:  # pragma: no cover (tested on a GPU)
        return torch.nn.functional.pad(Q, (0, more))
    return Q


class Vectors(Inputs):
    """Vectors that are stored explicitly: `x` of shape `[*leading, features]`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def add_to(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor | None = None) -> float | Tensor:
        """Add the vectors at positions that count."""
        if counted is None:
            return total.add(x, ones)
        vectors, number = chosen(x.reshape(-1, x.shape[-1]), counted.flatten())
        total.add(vectors, ones, number)
        return number

    def leading(self, x: Tensor) -> tuple[int, ...]:
        """All axes but the last one."""
        return tuple(x.shape[:-1])

    def sums(self, x: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
        """Sum the vectors of each example over its positions."""
        dtype = at_least_float32(x.dtype)
        if row_map.counted is None:
            sums = row_map.by_datum(x).sum(1, dtype=dtype)
            return sums.unsqueeze(1), row_map.counts(prod(x.shape[:-1]), sums)
        rows = row_map.by_datum(torch.where(row_map.counted, x.reshape(-1, x.shape[-1]), 0))
        return rows.sum(1, dtype=dtype).unsqueeze(1), row_map.numbers_counted(dtype).sum((1, 2))

    def rows(self, use: Use, g: Tensor, by_place: bool = False) -> RowProducts:
        """Return the vectors and gradients, grouped by example."""
        return _as_rows(*self.both(use, g), use.ones)

    def gradients(self, use: Use, g: Tensor) -> Iterator[Tensor]:
        """Yield sums of outer products; for a single example, as audits have it, the sum is one product."""
        if use.row_map.num_data > 1 or use.row_map.counted is not None:
            yield from super().gradients(use, g)
            return
        dtype = torch.promote_types(use.x.dtype, g.dtype)
        vectors, g = use.x.reshape(-1, self.size).to(dtype), g.reshape(-1, g.shape[-1]).to(dtype)
        products = [g.T @ vectors, g.sum(0).unsqueeze(1)] if use.ones else [g.T @ vectors]
        yield torch.cat(products, 1)[None, None]

    def add_squares(self, total: Tensor, use: Use, g: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
        """Add squares, rotating vectors instead of their products on each side where that is cheaper."""
        if not g.is_cuda and isinstance(use.row_map, StridedRows) and use.x.shape[:-1].numel() == use.row_map.num_data:
            self._add_squares_of_rows(total[0], use, g, Q_A, Q_B)
            return
        x, g = (t.to(total.dtype) for t in self.both(use, g))
        ones = use.ones
        # Rotating is cheaper before the product if there are no more vectors than rows (or columns) of the product.
        if Q_B is not None and x.shape[1] <= x.shape[2]:
            g, Q_B = g @ Q_B[0], None
        if Q_A is not None and x.shape[1] <= g.shape[2]:
            if "rotated" not in use.cache:
                vectors = PlainVectors(x.unsqueeze(0), 1.0 if ones else None)
                use.cache["rotated"] = vectors.times(_aligned(Q_A[0]).unsqueeze(0)).values.squeeze(0)
            x = use.cache["rotated"]
            Q_A = None
            ones = False  # the coordinate of the bias is part of the rotated vectors
        if x.shape[1] == 1 and Q_A is None and Q_B is None:  # squares of an outer product are an outer product
            squares, weights = x.squeeze(1).square()[:, : total.shape[2]], g.squeeze(1).square()
            total[0, :, : squares.shape[1]].addmm_(weights.T, squares)
            if ones:
                total[0, :, -1] += weights.sum(0)
            return
        for gradients in _as_rows(x, g, ones).matrices():
            add_rotated_squares(total, gradients, Q_A, Q_B)

    def _add_squares_of_rows(self, total: Tensor, use: Use, g: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
        """Add squares for examples with one row each: squares of an outer product are an outer product."""
        weights = g.reshape(-1, g.shape[-1]).to(total.dtype)
        weights = weights.square() if Q_B is None else (weights @ Q_B[0]).square_()
        squares = use.cache.get("squares")
        if squares is None:
            x = use.x.reshape(-1, use.x.shape[-1]).to(total.dtype)
            if Q_A is None:
                squares = x.square()
            else:
                squares = x @ Q_A[0, : self.size]
                squares = (squares.add_(Q_A[0, self.size :]) if use.ones else squares).square_()
            use.cache["squares"] = squares
        total[:, : squares.shape[1]].addmm_(weights.T, squares)
        if use.ones and Q_A is None:
            total[:, -1] += weights.sum(0)

    def both(self, use: Use, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors and gradients as `[batch, shared, features]`, in one precision."""
        x, g = use.row_map.by_datum(use.x), use.row_map.by_datum(g)
        dtype = torch.promote_types(x.dtype, g.dtype)
        return x.to(dtype), g.to(dtype)


def _as_rows(x: Tensor, g: Tensor, ones: bool) -> RowProducts:
    """Return vectors and gradients `[batch, shared, features]` as rows of a single group."""
    return RowProducts(PlainVectors(x.unsqueeze(0), 1.0 if ones else None), PlainVectors(g.unsqueeze(0)))


# The index of positions that look up rows of other tables; such a position does not count.
OTHERS = -1


class OneHot(Inputs):
    """Indices `[*leading]` that stand for unit vectors.

    Args:
        size: Number of different indices.
        dtype: The parameter's dtype; sums are in float32 or better.
        padding: Positions with this index do not count; their vector is zero. It may be `OTHERS`.
    """

    sparse = True
    unit = True

    def __init__(self, size: int, dtype: torch.dtype, padding: int | None = None) -> None:
        self.size = size
        self.padding = padding
        self.dtype = at_least_float32(dtype)

    def counted(self, index: Tensor) -> Tensor:
        """Return the boolean mask of positions that count."""
        if self.padding is None:
            return torch.ones_like(index, dtype=torch.bool)
        return index != self.padding

    def not_padding(self, x: Tensor) -> Tensor | None:
        """Return the mask of positions that do not have the padding index."""
        return None if self.padding is None else self.counted(x).reshape(-1, 1)

    def masked(self, g: Tensor, index: Tensor) -> Tensor:
        """Return gradients `[columns, *leading, features]` with zeros at positions that do not count."""
        return g if self.padding is None else g * self.counted(index).unsqueeze(-1)

    def add_to(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor | None = None) -> float | Tensor:
        """Count how often each index occurs at positions that count."""
        counts = self.counted(x).flatten()
        if counted is not None:
            counts = counts & counted.flatten()
        total.entries[0].index_add_(0, self._places(x).flatten(), counts.to(total.total.dtype))
        return x.numel() if self.padding is None and counted is None else counts.sum()

    def leading(self, x: Tensor) -> tuple[int, ...]:
        """All axes."""
        return tuple(x.shape)

    def sums(self, x: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
        """Count how often each index occurs in each example."""
        counted = self.counted(x)
        if row_map.counted is not None:
            counted = counted & row_map.counted.reshape(x.shape)
        # Examples with fewer positions than others are filled up with index 0 and a count of zero.
        counts = row_map.by_datum(counted.to(self.dtype), trailing=0)
        index = self._places(row_map.by_datum(x, trailing=0))
        sums = torch.zeros(len(index), self.size, dtype=self.dtype, device=index.device)
        return sums.scatter_add(1, index, counts).unsqueeze(1), counts.sum(1)

    def rows(self, use: Use, g: Tensor, by_place: bool = False) -> RowProducts:
        """Return tokens as unit vectors."""
        index, g = self._both(use, g)
        return RowProducts(UnitVectors(index, self.size, g.dtype), PlainVectors(g.unsqueeze(0)))

    def add_squares(self, total: Tensor, use: Use, g: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
        """Add squares after summing over equal tokens of an example. `Q_A` is not used: the factor is diagonal."""
        if sync.is_asynchronous(g.device):
            self._add_squares_without_sync(total, use, g, Q_B)
            return
        # Number the pairs of example and token, so that only tokens that occur need memory.
        index, g = self._both(use, g)
        pairs = index + self.size * torch.arange(len(index), device=index.device).unsqueeze(1)
        pairs, places = torch.unique(pairs, return_inverse=True)
        sums = g.new_zeros(len(pairs), g.shape[2], dtype=total.dtype)
        sums.index_add_(0, places.flatten(), g.flatten(0, 1).to(total.dtype))
        sums = sums if Q_B is None else sums @ Q_B[0]
        total[0].index_add_(1, pairs % self.size, sums.square().T)

    def _add_squares_without_sync(self, total: Tensor, use: Use, g: Tensor, Q_B: Tensor | None) -> None:
        """Add squares using tensors of sizes that do not depend on how many different tokens occur.

        There is one row for every position. All positions of an example that have the same token are added to one row,
        and their remaining rows stay zero. On a CPU, squaring these zeros makes it slower than `torch.unique`.
        """
        index, g = self._both(use, g)
        shared, width = g.shape[1:]
        if "tokens" not in use.cache:
            use.cache["tokens"], use.cache["rows"] = _rows_by_token(index)
        step = at_a_time(g, shared * width)
        parts = (t.split(step) for t in (use.cache["tokens"], use.cache["rows"], g))
        for tokens, rows, some_g in zip(*parts, strict=True):
            rows_of_all = rows + shared * torch.arange(len(rows), device=rows.device).unsqueeze(1)
            sums = some_g.new_zeros(rows.numel(), width, dtype=total.dtype)
            sums.index_add_(0, rows_of_all.flatten(), some_g.flatten(0, 1).to(total.dtype))
            sums = sums if Q_B is None else sums @ Q_B[0]
            total[0].index_add_(1, tokens.flatten(), sums.square().T)

    def _both(self, use: Use, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices `[batch, shared]` and gradients `[batch, shared, d_B]`, zero where they do not count."""
        index = use.row_map.by_datum(use.x, trailing=0)
        return self._places(index), self.masked(use.row_map.by_datum(g), index)

    def _places(self, index: Tensor) -> Tensor:
        """Return indices that exist; those of positions that do not count may be any."""
        return index.clamp(min=0) if self.padding == OTHERS else index


def _rows_by_token(index: Tensor) -> tuple[Tensor, Tensor]:
    """Assign one row to all positions of an example that have the same token, given tokens `[batch, shared]`.

    Returns the token of each row, and the row of each position. Unused rows have the token of some position, too.

    Example:
        >>> tokens, rows = _rows_by_token(torch.tensor([[7, 5, 7, 6]]))
        >>> tokens.tolist(), rows.tolist()
        ([[5, 6, 7, 7]], [[2, 0, 2, 1]])
    """
    tokens, order = index.sort(dim=1)
    is_new = torch.ones_like(tokens, dtype=torch.bool)
    is_new[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    positions = torch.arange(index.shape[1], device=index.device)
    first = torch.where(is_new, positions, 0).cummax(1).values
    return tokens, torch.empty_like(first).scatter_(1, order, first)


class Rows(Inputs):
    """Inputs of a broadcast parameter: each use reads the same rows of it once, at each of `leading` places.

    The vectors are unit vectors in a fixed order and do not depend on any activation. Gradients are
    `[columns, *leading, rows, features]`; the axis of rows may be missing if there is only one.

    Args:
        rows: Indices of the rows, `[r]`; `None` if the parameter has only one row. Then the input is the number one.
        size: Number of rows of the parameter.
        leading: The axes over which the parameter was broadcast.
        dtype: The parameter's dtype; sums are in float32 or better.
        device: The parameter's device.
    """

    def __init__(
        self,
        rows: Tensor | None,
        size: int,
        leading: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows_used = rows
        self.size = size
        self._leading = leading
        self.sparse = size > 1
        self.unit = rows is not None
        self.per_row = 1 if rows is None else len(rows)
        self.zero = torch.zeros((), dtype=at_least_float32(dtype), device=device)
        self.places = prod(leading)

    def add_to(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor | None = None) -> float | Tensor:
        """Count each row once per place that counts."""
        places = self.places if counted is None else counted.sum(0)  # of each row
        if self.rows_used is None:
            total.total.add_(places)
        else:
            total.entries[0, self.rows_used] += places
        return self.places * self.per_row if counted is None else counted.sum()

    def leading(self, x: Any) -> tuple[int, ...]:
        """The axes over which the parameter was broadcast."""
        return self._leading

    def sums(self, x: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
        """Count how often each example reads each row."""
        if row_map.counted is not None:
            counts = row_map.numbers_counted(self.zero.dtype).sum(1)  # [batch, rows used]
            if self.rows_used is None:
                return counts.unsqueeze(1), counts.sum(1)
            sums = counts.new_zeros(len(counts), self.size).index_add_(1, self.rows_used, counts)
            return sums.unsqueeze(1), counts.sum(1)
        places = row_map.counts(self.places, self.zero)
        if self.rows_used is None:
            return places.reshape(-1, 1, 1), places
        touched = self.zero.new_zeros(self.size).index_fill(0, self.rows_used, 1)
        return (places.unsqueeze(1) * touched).unsqueeze(1), places * len(self.rows_used)

    def shared(self, use: Use) -> int:
        """Return the number of vectors of a place."""
        return self.per_row

    def rows(self, use: Use, g: Tensor, by_place: bool = False) -> RowProducts:
        """Return unit vectors, or ones. Gradients are summed over places unless `by_place`: their vectors are equal."""
        g = g if g.ndim == len(self._leading) + 2 else g.unsqueeze(-2)
        places = use.row_map.by_datum(g, trailing=2)  # [batch, places, rows, features]
        places = places if by_place else places.sum(1, keepdim=True, dtype=self.zero.dtype)
        gradients = places.flatten(1, 2)
        if self.rows_used is None:
            return _as_rows(gradients.new_ones(*gradients.shape[:2], 1), gradients, ones=False)
        index = self.rows_used.to(gradients.device).repeat(len(gradients), places.shape[1])
        return RowProducts(UnitVectors(index, self.size, gradients.dtype), PlainVectors(gradients.unsqueeze(0)))
