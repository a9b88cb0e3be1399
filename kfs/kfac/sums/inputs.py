"""The input side of a parametric operation: what it multiplies its parameter with, one vector per shared position.

Axes are canonical: `[batch, shared, features]`. An input knows how to add its vectors' outer products to a moment
(weight sharing `expand`), how to sum them over the shared positions of each datum (`reduce`), and how to combine them
with gradients to those of the parameter, datum by datum (eigenvalue correction).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from kfs.kfac.sums.outer_products import Moment

# Brings a tensor with any leading axes into the form [N, S, ...], given how many of its axes lead.
Canonical = Callable[[Tensor, int], Tensor]
# Per-datum gradients of a parameter are formed for so many data at a time that they fill about this many bytes.
_GRADIENT_BYTES = {False: 2**24, True: 2**28}  # on a CPU, on an accelerator


class Input(ABC):
    """What every kind of input offers.

    Attributes:
        size: Number of features (of one group).
        groups: Number of groups of features.
        sparse: Whether outer products have nothing off the diagonal, so that only the diagonal is kept.
        positions: Number of vectors.
    """

    size: int
    groups: int = 1
    sparse: bool = False
    positions: float

    @abstractmethod
    def add_to(self, moment: Moment, ones: bool) -> None:
        """Add all vectors' outer products to a moment, with a bias coordinate of one if asked for."""

    @abstractmethod
    def sums(self, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Return each datum's sum of vectors, `[N, D]` (or `[N, G, D]`), and its number of positions, `[N]`."""

    @abstractmethod
    def gradients(self, g: Tensor, canonical: Canonical, ones: bool) -> Iterator[Tensor]:
        """Yield each datum's sum of outer products of gradients and vectors, a few data at a time.

        Args:
            g: Gradients of one column, `[*leading, d_B]` (or `[*leading, G, d_B]`).
            canonical: Finds the batch axis.
            ones: Whether vectors have a bias coordinate of one.

        Yields:
            The parameter's gradients as matrices, `[n, G, d_B, d_A]`.
        """

    def add_squares(
        self, total: Tensor, g: Tensor, canonical: Canonical, ones: bool, Q_A: Tensor | None, Q_B: Tensor | None
    ) -> None:
        """Add squared per-datum gradients, seen in other bases, to a total `[G, d_B, d_A]`.

        Args:
            total: Changed in place.
            g: As in `gradients`.
            canonical: As in `gradients`.
            ones: As in `gradients`.
            Q_A: Basis of the input side, the columns of `[G, d_A, d_A]`; nothing for the standard basis.
            Q_B: Basis of the gradient side, `[G, d_B, d_B]`.
        """
        for gradients in self.gradients(g, canonical, ones):
            add_rotated_squares(total, gradients, Q_A, Q_B)


def add_rotated_squares(total: Tensor, gradients: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
    """Add squares of gradients `[n, G, d_B, d_A]`, seen in other bases, to a total `[G, d_B, d_A]`."""
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
    if total.device.type != "cpu":  # pragma: no cover (few operations are faster there)
        total += gradients.square().sum(0)
        return
    for gradient in gradients:  # squares are never written down
        total.addcmul_(gradient, gradient)


def at_a_time(like: Tensor, numbers: int) -> int:
    """Return for how many data to form per-datum gradients together, given how many numbers each has."""
    return max(1, _GRADIENT_BYTES[like.device.type != "cpu"] // (4 * numbers))


class Vectors(Input):
    """Vectors that are there: `x` of shape `[..., features]`."""

    def __init__(self, x: Tensor) -> None:
        """Store the vectors, detached."""
        self.x = x.detach()
        self.size, self.positions = x.shape[-1], x[..., 0].numel()
        self._rotated: Tensor | None = None

    def add_to(self, moment: Moment, ones: bool) -> None:
        """Add their covariance."""
        x = self.x
        moment.add(x if x.ndim == 3 else x.reshape(1, -1, self.size), ones)

    def sums(self, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Sum over positions."""
        x = canonical(self.x, self.x.ndim - 1)
        sums = x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return sums, sums.new_full((len(x),), x.shape[1])

    def gradients(self, g: Tensor, canonical: Canonical, ones: bool) -> Iterator[Tensor]:
        """Multiply datum by datum."""
        x, g = self.both(g, canonical)
        step = at_a_time(x, x.shape[2] * g.shape[2])
        for some_x, some_g in zip(x.split(step), g.split(step), strict=True):
            gradients = some_g.transpose(1, 2) @ some_x
            if ones:
                gradients = torch.cat([gradients, some_g.sum(1).unsqueeze(2)], 2)
            yield gradients.unsqueeze(1)

    def add_squares(
        self, total: Tensor, g: Tensor, canonical: Canonical, ones: bool, Q_A: Tensor | None, Q_B: Tensor | None
    ) -> None:
        """Rotate vectors before they are multiplied, on each side where that is cheaper than rotating the product."""
        x, g = (t.to(total.dtype) for t in self.both(g, canonical))
        if Q_B is not None and x.shape[1] <= x.shape[2]:
            g, Q_B = g @ Q_B[0], None
        if Q_A is not None and x.shape[1] <= g.shape[2]:
            x, Q_A, ones = self._rotated_by(x, Q_A[0], ones), None, False
        if x.shape[1] == 1 and Q_A is None and Q_B is None:  # squares of an outer product are an outer product
            squares, weights = x.squeeze(1).square(), g.squeeze(1).square()
            total[0, :, : squares.shape[1]].addmm_(weights.T, squares)
            if ones:
                total[0, :, -1] += weights.sum(0)
            return
        for gradients in Vectors(x).gradients(g, lambda t, _: t, ones):
            add_rotated_squares(total, gradients, Q_A, Q_B)

    def _rotated_by(self, x: Tensor, Q: Tensor, ones: bool) -> Tensor:
        """Return the vectors in another basis, computed for the first column only; a last row of it is the bias'."""
        if self._rotated is None:
            main = x.flatten(0, 1) @ Q[: x.shape[2]]
            self._rotated = (main + Q[-1] if ones else main).unflatten(0, x.shape[:2])
        return self._rotated

    def both(self, g: Tensor, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Return vectors and gradients as `[N, S, features]`."""
        x = canonical(self.x, self.x.ndim - 1)
        g = canonical(g, g.ndim - 1)
        dtype = torch.promote_types(x.dtype, g.dtype)
        return x.to(dtype), g.to(dtype)


class OneHot(Input):
    """Indices `[...]` that stand for unit vectors; some positions may not count, and have the zero vector."""

    sparse = True

    def __init__(self, index: Tensor, size: int, counts: Tensor | None, dtype: torch.dtype) -> None:
        """Store indices and which of them count (a boolean tensor shaped like them)."""
        self.index, self.size, self.dtype = index, size, dtype
        self.counts = torch.ones_like(index, dtype=torch.bool) if counts is None else counts
        self.positions = index.numel() if counts is None else float(counts.sum())

    def add_to(self, moment: Moment, ones: bool) -> None:
        """Count every index."""
        moment.entries.index_add_(0, self.index.flatten(), self.counts.flatten().to(moment.total.dtype))

    def sums(self, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Count every index, datum by datum."""
        index, counts = (canonical(t.unsqueeze(-1), t.ndim).squeeze(-1) for t in (self.index, self.counts))
        counts = counts.to(self.dtype)
        sums = torch.zeros(len(index), self.size, dtype=self.dtype, device=index.device)
        return sums.scatter_add(1, index, counts), counts.sum(1)

    def gradients(self, g: Tensor, canonical: Canonical, ones: bool) -> Iterator[Tensor]:
        """Add gradients to the columns of their tokens."""
        index, g = self._both(g, canonical)
        step = at_a_time(g, self.size * g.shape[2])
        for some_index, some_g in zip(index.split(step), g.split(step), strict=True):
            full = some_g.new_zeros(len(some_g), self.size, g.shape[2])
            full.scatter_add_(1, some_index.unsqueeze(2).expand_as(some_g), some_g)
            yield full.transpose(1, 2).unsqueeze(1)

    def add_squares(
        self, total: Tensor, g: Tensor, canonical: Canonical, ones: bool, Q_A: Tensor | None, Q_B: Tensor | None
    ) -> None:
        """Sum over equal tokens of a datum, and look at tokens that occur only; their factor is diagonal."""
        index, g = self._both(g, canonical)
        pairs = index + self.size * torch.arange(len(index), device=index.device).unsqueeze(1)
        pairs, places = torch.unique(pairs, return_inverse=True)
        sums = g.new_zeros(len(pairs), g.shape[2], dtype=total.dtype)
        sums.index_add_(0, places.flatten(), g.flatten(0, 1).to(total.dtype))
        sums = sums if Q_B is None else sums @ Q_B[0]
        total[0].index_add_(1, pairs % self.size, sums.square().T)

    def _both(self, g: Tensor, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Return indices `[N, S]` and gradients `[N, S, d_B]`; those at positions that do not count are zero."""
        g = canonical(g, g.ndim - 1)
        index, counts = (canonical(t.unsqueeze(-1), t.ndim).squeeze(-1) for t in (self.index, self.counts))
        return index, g * counts.unsqueeze(2)


class Rows(Input):
    """Every use touches the same rows of a parameter once: unit vectors in order, at `leading` places.

    Args:
        rows: Which rows, `[r]`; nothing if there is only one. Then the input is the number one.
        size: How many rows the parameter has.
        leading: The axes over which the parameter was broadcast.
        like: Has the device, and the dtype from which that of the sums follows.
    """

    def __init__(self, rows: Tensor | None, size: int, leading: tuple[int, ...], like: Tensor) -> None:
        """Count the places."""
        self.rows, self.size, self.leading = rows, size, leading
        self.dtype, self.device = torch.promote_types(like.dtype, torch.float32), like.device
        self.sparse = size > 1
        self.places = prod(leading)
        self.positions = self.places * (1 if rows is None else len(rows))

    def add_to(self, moment: Moment, ones: bool) -> None:
        """Count the places."""
        if self.rows is None:
            moment.total += self.places
        else:
            moment.entries[self.rows] += self.places

    def sums(self, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Count the places of each datum."""
        like = torch.empty((), dtype=self.dtype, device=self.device)
        places = canonical(like.expand(*self.leading, 1), len(self.leading)).shape[1]
        num_data = self.places // places
        if self.rows is None:
            return like.new_full((num_data, 1), places), like.new_full((num_data,), places)
        sums = like.new_zeros(self.size).index_fill(0, self.rows, places)
        return sums.expand(num_data, -1), like.new_full((num_data,), places * len(self.rows))

    def gradients(self, g: Tensor, canonical: Canonical, ones: bool) -> Iterator[Tensor]:
        """Sum over the places of each datum."""
        leading = len(self.leading)
        g = g if g.ndim == leading + 2 else g.unsqueeze(-2)  # [*leading, rows, d_B]
        sums = canonical(g, leading).sum(1, dtype=self.dtype)
        if self.rows is not None:
            sums = sums.new_zeros(len(sums), self.size, sums.shape[2]).index_add_(1, self.rows, sums)
        yield sums.transpose(1, 2).unsqueeze(1)
