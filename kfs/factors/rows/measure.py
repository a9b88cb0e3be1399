r"""Ownership: which example a row of an activation belongs to, by measurement.

Send back vectors $v$, and the same vectors with those of example $n$ multiplied by $c_n$. If a row influences the
prediction for example $n$ alone, its gradient is multiplied by $c_n$, too: the ratio of its two gradients names its
example. If it influences several predictions, the ratio is not one of the $c_n$, or its features disagree: data mix.
Nothing is guessed from lengths of axes.

The $c_n$ are powers of two, so that both gradients are rounded in the same way, and ratios are exact in any precision.
With more than eight data, the digits of $n$ (in base eight) are sent back one after the other.

Rows nearly always come in a regular order (see `Regular`), which is measured once, on a few examples (see `audit`). It
then holds for batches of any size. Where the order depends on the data, every batch is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kfs.runtime.precision import at_least_float32

BASE = 8
# No power of two: both gradients are to be rounded in different ways.
MULTIPLE = 3
# Gradients of a row are looked at in so many directions.
_DIRECTIONS = 4
# A row whose gradient is smaller than this many times the precision, relative to the largest one, has none: that little
# is left where a few larger terms cancel, and it may look as if it belonged to anybody.
_NOTHING = 8
# But a row with more than this has one. In half precision, eight times the precision would be 6 % of the largest
# gradient, and gradients of different data differ by more than that.
_SMALLEST = 1e-3
# A row's gradient may be off by this many roundings of the largest one. Roundings of k terms add up to about the root
# of k: these are 4096 terms. In half precision, sums are rounded when they are complete, once for each of the two
# gradients that are compared; with more, so few digits would be left that one would not notice anything.
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
_ROUNDINGS_IN_HALF_PRECISION = 2
# Up to which relative misfit a row belongs to one example. Powers of two leave no rounding errors, except where a GPU
# adds numbers up in varying order, so that this is far above them. Where data mix in equal parts, the misfit is about
# one, since factors differ by two or more. In half precision, it is four times the precision of bfloat16.
_MISFIT = {torch.float64: 1e-6, torch.float32: 1e-3}
_MISFIT_IN_HALF_PRECISION = 3e-2


def probes(f: Tensor, num_data: int) -> Iterator[Tensor]:
    """Generate vectors that tell data apart, for predictions `[N, ...]`: random ones, then multiples by data."""
    generator = torch.Generator(f.device).manual_seed(0)
    v = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
    v = torch.where(f.detach().isfinite(), v, 0)  # a class that is masked has no gradient
    yield v
    n = torch.arange(num_data, device=f.device)
    for _ in range(number_of_digits(num_data)):
        factors = (2.0 ** (n % BASE)).to(f.dtype)
        yield v * factors.reshape(-1, *[1] * (f.ndim - 1))
        n //= BASE


def has_gradient(g: Tensor, of_multiple: Tensor) -> Tensor:
    """Return which rows have a gradient, `[..., features]` to `[...]`, given those of a vector and of a `MULTIPLE`.

    What rounding leaves of a gradient that vanishes, as that of a query with a single key, is no multiple of anything.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    size = torch.linalg.vector_norm(g, dim=-1, dtype=wide)
    distance = torch.linalg.vector_norm(of_multiple - MULTIPLE * g, dim=-1, dtype=wide)
    # Round-off is off by about its own size. Others are off by some roundings: far below 5 %, or, in half precision,
    # by up to some tens of them, each 0.8 % in bfloat16.
    tolerance = 0.05 if torch.finfo(g.dtype).bits > 16 else 0.3
    found: Tensor = (size > 0) & (distance <= tolerance * MULTIPLE * size)
    return found


def number_of_digits(num_data: int) -> int:
    """Return how many digits in base eight the index of an example has."""
    digits = 1
    while BASE**digits < num_data:
        digits += 1
    return digits


@dataclass
class Measured:
    """What was measured about rows."""

    row_map: Tensor  # the example of each row; -1 if no gradient came back to it
    misfit: Tensor  # relative distance of each row's gradients from those of a row that belongs to one example
    loud: Tensor  # whether a row's gradient is large enough for the misfit to mean something
    tolerance: float

    @property
    def has_votes(self) -> bool:
        """Whether any gradient came back."""
        return bool((self.row_map >= 0).any())

    @property
    def worst(self) -> float:
        """The largest misfit of all rows with a gradient that is not tiny."""
        misfit = self.misfit[self.loud]
        return float(misfit.max()) if len(misfit) else 0.0

    @property
    def mixes(self) -> bool:
        """Whether a row influences the predictions for several examples."""
        return self.worst > self.tolerance

    @property
    def is_precise(self) -> bool:
        """Whether gradients had more digits than those of half precision."""
        return self.tolerance < _MISFIT_IN_HALF_PRECISION

    @property
    def number_of_owners(self) -> int:
        """The number of different data that rows belong to."""
        return len(set(self.row_map[self.row_map >= 0].tolist()))

    def of_groups(self, groups: int) -> Tensor | None:
        """Return owners of groups of consecutive rows; `None` if rows of one group belong to different data."""
        if groups == len(self.row_map):
            return self.row_map
        row_map = self.row_map.reshape(groups, -1)
        largest = row_map.amax(1) if row_map.numel() else row_map.new_full((groups,), -1)
        agree = (row_map == largest.unsqueeze(1)) | (row_map < 0)
        return largest if bool(agree.all()) else None


def measured(
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    num_data: int,
    dtype: torch.dtype,
    precision: torch.dtype | None = None,
) -> list[Measured]:
    """Find the example of each row, for the rows of several places together.

    Args:
        gradients: For each vector of `probes`, a few numbers for each row, `[rows of all places, directions]`.
        lengths: How many rows each place has.
        num_data: Number of examples.
        dtype: The dtype of gradients.
        precision: The lowest precision on their way, if it is another one, as under `autocast`.

    Returns:
        What was measured at each place.
    """
    first = gradients[0]
    size = first.square().sum(1)
    precision = precision or dtype
    eps, tolerance = torch.finfo(precision).eps, _MISFIT.get(precision, _MISFIT_IN_HALF_PRECISION)
    # Rows are compared with the largest one at their place.
    maxima = torch.stack([part.max() if len(part) else part.new_zeros(()) for part in size.split(list(lengths))])
    largest = maxima.repeat_interleave(torch.tensor(lengths))
    # Numbers that are nearly too small for their precision are not rounded as larger ones are. In half precision, one
    # over the precision would be too much: gradients in float16 are often that small.
    smallest = torch.finfo(dtype).tiny * (4 if torch.finfo(dtype).bits == 16 else 1 / torch.finfo(dtype).eps)
    votes = (size > min(_NOTHING * eps, _SMALLEST) ** 2 * largest) & (size > smallest**2)
    roundings = _ROUNDINGS.get(precision, _ROUNDINGS_IN_HALF_PRECISION)
    noise = roundings * eps * (largest / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt()
    row_map = torch.zeros_like(size, dtype=torch.long)
    misfit = torch.zeros_like(size)
    for place, other in enumerate(gradients[1:]):
        ratio = (first * other).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny)
        digit = ratio.clamp(min=1, max=2.0 ** (BASE - 1)).log2().round()
        expected = 2**digit
        distance = (other - expected.unsqueeze(1) * first).norm(dim=1) / (expected * size.sqrt())
        misfit = torch.maximum(misfit, distance.nan_to_num(nan=0.0))
        row_map += digit.long() * BASE**place
    misfit[row_map >= num_data] = torch.inf
    row_map[~votes | (row_map >= num_data)] = -1
    loud = votes & ((noise <= tolerance) | (misfit > noise))
    parts = zip(*(t.split(list(lengths)) for t in (row_map, misfit, loud)), strict=True)
    return [Measured(datum, distance, counts, tolerance) for datum, distance, counts in parts]


def regular_order(row_map: Tensor, num_data: int, leading: Sequence[int]) -> tuple[int | None, bool]:
    """Find the simplest regular order that rows obey, as far as a gradient came back to them.

    Args:
        row_map: The example of each row, or -1.
        num_data: Number of examples.
        leading: Lengths of the leading axes.

    Returns:
        The number of consecutive rows of one example, or `None` if there is no such order. And whether that is certain:
        no other order would do.
    """
    rows = len(row_map)
    if rows == 0 or rows % num_data:
        return None, True
    everybody = bool((row_map >= 0).all())
    obeyed = []
    for inner in _candidates(num_data, leading):
        if obeys(row_map, inner, num_data):
            obeyed.append(inner)
            if everybody:
                break
    # An axis that is as long as the batch explains more than a part of a longer one.
    along_axes = [inner for inner in obeyed if inner in _axes(num_data, leading)]
    chosen = along_axes or obeyed
    return (chosen[0] if chosen else None), len(chosen) == 1


def obeys(row_map: Tensor, inner: int, num_data: int) -> bool:
    """Whether rows are in a regular order, as far as a gradient came back to them."""
    voters = (row_map >= 0).nonzero().squeeze(1)
    return torch.equal(voters // inner % num_data, row_map[voters])


def _candidates(num_data: int, leading: Sequence[int]) -> Iterator[int]:
    """Generate possible numbers of consecutive rows of one example: the simplest ones first."""
    shared = prod(leading) // num_data
    folded = [inner for inner in range(shared, 0, -1) if shared % inner == 0] if shared < 2**16 else [shared, 1]
    yield from dict.fromkeys((shared, *_axes(num_data, leading), *folded))


def _axes(num_data: int, leading: Sequence[int]) -> list[int]:
    """Return how many consecutive rows one example has if an axis as long as the batch is the batch axis."""
    return [prod(leading[axis + 1 :]) for axis, length in enumerate(leading) if length == num_data]


def nearest_order(gradients: Sequence[Tensor], num_data: int, leading: Sequence[int]) -> int | None:
    """Find the regular order that comes closest to what was measured, where data are allowed to mix."""
    groups = prod(leading)
    if groups == 0 or groups % num_data:
        return None
    first, *others = (rows.reshape(groups, -1) for rows in gradients)
    rows = torch.arange(groups, device=first.device)
    best, smallest = None, torch.inf
    for inner in _candidates(num_data, leading):
        n = rows // inner % num_data
        distance = 0.0
        for other in others:
            factors = (2.0 ** (n % BASE)).unsqueeze(1).to(first.dtype)
            distance += float((other - factors * first).square().sum())
            n = n // BASE
        if distance < (1 - 1e-6) * smallest:  # among equal ones, up to rounding errors, the simplest wins
            best, smallest = inner, distance
    return best


def project(g: Tensor) -> Tensor:
    """Return a few numbers for each row of gradients `[*leading, ..., features]`, `[rows, few]`."""
    rows = g.reshape(-1, g.shape[-1])
    rows = rows.to(at_least_float32(g.dtype))
    return rows @ _directions(g.shape[-1], rows.dtype, rows.device)


@lru_cache(maxsize=64)
def _directions(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return directions `[features, few]` to look at gradients in: all features if there are few."""
    if features <= _DIRECTIONS:
        return torch.eye(features, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(features)
    signs = torch.randint(2, (features, _DIRECTIONS), generator=generator) * 2 - 1
    return signs.to(device, dtype)
