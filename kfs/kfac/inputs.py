"""The input side of a parametric operation: what it multiplies its parameter with, one vector per shared position.

Axes are canonical: `[batch, shared, features]`. An input knows how to add its vectors' outer products to a moment
(weight sharing `expand`), and how to sum them over the shared positions of each datum (`reduce`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from kfs.kfac.moments import Moment

# Brings a tensor with any leading axes into the form [N, S, ...], given how many of its axes lead.
Canonical = Callable[[Tensor, int], Tensor]


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


class Vectors(Input):
    """Vectors that are there: `x` of shape `[..., features]`."""

    def __init__(self, x: Tensor) -> None:
        """Store the vectors, detached."""
        self.x = x.detach()
        self.size, self.positions = x.shape[-1], x[..., 0].numel()

    def add_to(self, moment: Moment, ones: bool) -> None:
        """Add their covariance."""
        x = self.x
        moment.add(x if x.ndim == 3 else x.reshape(1, -1, self.size), ones)

    def sums(self, canonical: Canonical) -> tuple[Tensor, Tensor]:
        """Sum over positions."""
        x = canonical(self.x, self.x.ndim - 1)
        sums = x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return sums, sums.new_full((len(x),), x.shape[1])


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
