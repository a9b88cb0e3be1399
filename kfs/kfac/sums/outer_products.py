"""Running sums of outer products of one side of a block: dense, or only their diagonal."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.sums.gram import add_gram, add_squares, mirror
from kfs.storage import UnfitError


@dataclass
class Moment:
    """A sum of outer products of vectors.

    Attributes:
        total: `[D, D]`, or only the diagonal `[D]`; with groups of features `[G, D, D]` or `[G, D]`. Of dense totals
            the upper triangle counts.
        diagonal: Which of the two.
        bias: Whether the last of the `D` coordinates stands for a bias: it is one (or zero) in every vector.
    """

    total: Tensor
    diagonal: bool
    bias: bool = False
    _whole: bool = False  # the bias coordinate was added with the others
    _ones: float = 0.0  # sum over the bias coordinate that the total's last entry lacks
    _upper: bool = False  # only the upper triangle is complete

    @classmethod
    def zeros(
        cls, size: int, groups: int, diagonal: bool, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> "Moment":
        """Start a sum for vectors of some size (without the bias coordinate) and dtype, in float32 or better."""
        size += bias
        width = -(-size // 16) * 16  # rows that start at multiples of 64 bytes are faster to write
        shape = [width] if diagonal else [size, width]
        dtype = torch.promote_types(dtype, torch.float32)
        total = torch.zeros([groups, *shape] if groups > 1 else shape, dtype=dtype, device=device)
        return cls(total[..., :size], diagonal, bias)

    @property
    def size(self) -> int:
        """The number of coordinates, the bias included."""
        return self.total.shape[-1]

    @property
    def entries(self) -> Tensor:
        """The total's diagonal, to write to."""
        return self.total if self.diagonal else self.total.diagonal()

    @property
    def inner(self) -> Tensor:
        """The part of the total without the bias."""
        if not self.bias:
            return self.total
        return self.total[..., :-1] if self.diagonal else self.total[..., :-1, :-1]

    def add(self, x: Tensor, ones: bool = False) -> None:
        """Add vectors `[N, P, D]` (or `[N, P, G, D]`), whose bias coordinate, if there is one, is one or zero."""
        self.add_inner(x)
        if ones:
            self.add_ones(x.sum((0, 1), dtype=self.total.dtype), x.shape[0] * x.shape[1])

    def add_inner(self, x: Tensor) -> None:
        """Add vectors without their bias coordinate."""
        if self.diagonal:
            add_squares(self.inner, x)
        else:
            self._upper |= add_gram(self.inner, x)

    def add_ones(self, sums: Tensor, count: float) -> None:
        """Add what vectors have with their bias coordinate of one: their sum, and their number."""
        if self.diagonal:
            self.total[..., -1] += count
        else:
            self.total[..., :-1, -1] += sums
            self._ones += count

    def add_whole(self, x: Tensor) -> None:
        """Add vectors `[N, P, D]` (or `[N, P, G, D]`) that have all coordinates, the bias coordinate included."""
        if self.diagonal:
            add_squares(self.total, x)
        else:
            self._upper |= add_gram(self.total, x)
        self._whole = True

    def finish(self, dtype: torch.dtype | None = None) -> None:
        """Fill in what is below the diagonal, and convert to another precision if asked for."""
        if not self.diagonal:
            if self._upper:
                mirror(self.total if self._whole else self.inner)
            if self.bias and not self._whole:
                self.total[..., -1, :-1] = self.total[..., :-1, -1]
                self.total[..., -1, -1] += self._ones
        self._whole, self._upper, self._ones = False, False, 0.0
        self.total = self.total.to(dtype or self.total.dtype)

    def near(self, device: torch.device) -> "Moment":
        """Return a moment on a device to add vectors to: this one, or a new one that `absorb` takes."""
        if self.total.device == device:
            return self
        groups = len(self.total) if self.total.ndim > (1 if self.diagonal else 2) else 1
        return Moment.zeros(self.size - self.bias, groups, self.diagonal, self.bias, self.total.dtype, device)

    def absorb(self, other: "Moment") -> None:
        """Add what `near` returned, after vectors were added to it."""
        if other is not self:
            self.total += other.total.to(self.total.device)
            self._whole, self._upper = self._whole | other._whole, self._upper | other._upper
            self._ones += other._ones

    def state(self) -> dict[str, Any]:
        """Return everything, also of a sum that is not finished, for a file."""
        return {
            "total": self.total,
            "diagonal": self.diagonal,
            "bias": self.bias,
            "whole": self._whole,
            "upper": self._upper,
            "ones": self._ones,
        }

    @classmethod
    def from_state(cls, state: Any, size: int, groups: int) -> "Moment":
        """Undo `state`, for vectors of a size (without the bias coordinate)."""
        total, diagonal, bias = state["total"], bool(state["diagonal"]), bool(state["bias"])
        moment = cls.zeros(size, groups, diagonal, bias, total.dtype, total.device)
        if moment.total.shape != total.shape or not total.is_floating_point():
            raise UnfitError(f"a factor has shape {list(total.shape)} instead of {list(moment.total.shape)}")
        moment.total.copy_(total)  # rows start where they did before: results are the same to the last bit
        if total.dtype != moment.total.dtype:
            moment.total = total
        moment._whole, moment._upper, moment._ones = bool(state["whole"]), bool(state["upper"]), float(state["ones"])
        return moment

    def merge(self, other: "Moment") -> "Moment":
        """Return the sum of two finished moments of the same vectors."""
        dtype = torch.promote_types(self.total.dtype, torch.float32)
        total = self.total.to(dtype) + other.total.to(self.total.device, dtype)
        return Moment(total.to(self.total.dtype), self.diagonal, self.bias)
