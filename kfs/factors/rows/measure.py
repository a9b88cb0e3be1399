r"""Measurement of row maps: which example a row of an activation belongs to.

Send back vectors $v$, and the same vectors with the entries of example $n$ multiplied by $c_n$. If a row influences the
prediction for example $n$ alone, its gradient is multiplied by $c_n$, too: the ratio of its two gradients identifies
its example. If it influences several predictions, the ratio is not one of the $c_n$, or its features disagree: examples
mix.

The $c_n$ are powers of two, so both gradients are rounded in the same way, and ratios are exact in any precision.
With more than eight examples, the digits of $n$ in base eight are sent back one after the other.

Rows nearly always come in a regular order (see `StridedRows`), which is measured once, on a few examples (see
`kfs.factors.audit`). It then holds for batches of any size. If the order depends on the data, every batch is measured.

Here are the computations. `RowSource`, in `kfs.factors.rows.row_map`, sends the vectors back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kfs.runtime.precision import at_least_float32

BASE = 8
# Not a power of two, so that both gradients are rounded in different ways.
MULTIPLE = 3
# Gradients of a row are projected to this many directions.
_DIRECTIONS = 4
# A row whose gradient is smaller than this many times the precision, relative to the largest one, has none: it is what
# remains if a few larger terms cancel, and its ratio is meaningless.
_NOTHING = 8
# A row with a larger gradient than this always has one. In half precision, eight times the precision would be 6 % of
# the largest gradient, and gradients of different examples differ by more than that.
_SMALLEST = 1e-3
# A row's gradient may be off by this many rounding errors of the largest one. Errors of k terms add up to about the
# root of k: this is for 4096 terms. In half precision, sums are rounded once they are complete, once for each of the
# two gradients that are compared. A larger tolerance would leave too few digits to detect anything.
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
_ROUNDINGS_IN_HALF_PRECISION = 2
# The largest relative misfit with which a row belongs to one example. Powers of two leave no rounding errors, except
# that a GPU may add numbers in varying order; the tolerance is far above that. If examples mix in equal parts, the
# misfit is about one, because factors differ by two or more. In half precision, it is four times the precision of
# bfloat16.
_MISFIT = {torch.float64: 1e-6, torch.float32: 1e-3}
_MISFIT_IN_HALF_PRECISION = 3e-2
# If the same vector gives other gradients in a second run, the tolerance is this many times their difference, and at
# most the second number: orders of additions on a GPU change last digits, which many layers in half precision enlarge.
_TIMES_VARIATION, _MOST_VARIATION = 4.0, 0.3


def probes(f: Tensor, num_data: int) -> Iterator[Tensor]:
    """Generate probe vectors for predictions `[N, ...]`: a random one, then copies of it scaled by example."""
    generator = torch.Generator(f.device).manual_seed(0)
    v = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
    v = torch.where(f.detach().isfinite(), v, 0)  # a masked class has no gradient
    yield v
    n = torch.arange(num_data, device=f.device)
    digits = 0
    while digits == 0 or BASE**digits < num_data:
        factors = (2.0 ** (n % BASE)).to(f.dtype)
        yield v * factors.reshape(-1, *[1] * (f.ndim - 1))
        n //= BASE
        digits += 1


def gradient_sizes(g: Tensor, of_multiple: Tensor) -> Tensor:
    """Return the size of each row's gradient, and that of what does not scale with the vector, `[2, ...]`.

    Args:
        g: Gradients of a vector, `[..., features]`.
        of_multiple: Gradients of `MULTIPLE` times the vector.
    """
    rest = torch.sub(of_multiple, g, alpha=MULTIPLE)
    wide = torch.promote_types(g.dtype, torch.float32)
    sizes: Tensor = torch.linalg.vector_norm(torch.stack((g, rest)), dim=-1, dtype=wide)
    return sizes


def are_gradients(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which rows have a gradient, given `gradient_sizes` of gradients in this dtype.

    Rounding errors of a vanishing gradient, such as that of a query with a single key, do not scale with the vector.
    """
    size, rest = sizes
    # A rounding error is off by about its own size. Other gradients are off by some roundings: far below 5 %, or, in
    # half precision, by up to some tens of them, each 0.8 % in bfloat16.
    tolerance = 0.05 if torch.finfo(dtype).bits > 16 else 0.3
    found: Tensor = (size > 0) & (rest <= tolerance * MULTIPLE * size)
    return found


@dataclass(frozen=True)
class Measured:
    """The measured row map of some rows, and how well it fits."""

    row_map: Tensor  # the example of each row; -1 if no gradient came back to it
    has_votes: bool  # whether any row has a gradient
    worst: float  # largest relative distance of a row's gradients from those of a row that belongs to one example
    mixes: bool  # whether a row influences the predictions for several examples
    is_precise: bool  # whether gradients had more than half precision

    @property
    def number_of_owners(self) -> int:
        """The number of different examples that rows belong to."""
        return len(set(self.row_map[self.row_map >= 0].tolist()))


def measured(
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    num_data: int,
    dtype: torch.dtype,
    precision: torch.dtype | None = None,
    again: Tensor | None = None,
) -> list[Measured]:
    """Measure the example of each row, for the rows of several queries together.

    Args:
        gradients: For each vector of `probes`, projected gradients of all rows, `[rows of all queries, directions]`.
        lengths: Number of rows of each query.
        num_data: Number of examples.
        dtype: The dtype of gradients.
        precision: The lowest precision that they passed through, if it is another one, as under `autocast`.
        again: Gradients of the first vector, computed once more. If they differ, results of this device vary.

    Returns:
        The measurement of each query.
    """
    first = gradients[0]
    size = first.square().sum(1)
    precision = precision or dtype
    eps, tolerance = torch.finfo(precision).eps, _MISFIT.get(precision, _MISFIT_IN_HALF_PRECISION)
    # Rows are compared with the largest row of the same query.
    maxima = torch.stack([part.max() if len(part) else part.new_zeros(()) for part in size.split(list(lengths))])
    largest = maxima.repeat_interleave(torch.tensor(lengths))
    # Numbers close to the smallest normal one have larger relative errors. In half precision, dividing by the precision
    # would exclude too much: gradients in float16 are often that small.
    smallest = torch.finfo(dtype).tiny * (4 if torch.finfo(dtype).bits == 16 else 1 / torch.finfo(dtype).eps)
    votes = (size > min(_NOTHING * eps, _SMALLEST) ** 2 * largest) & (size > smallest**2)
    roundings = _ROUNDINGS.get(precision, _ROUNDINGS_IN_HALF_PRECISION)
    noise = roundings * eps * (largest / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt()
    row_map = torch.zeros_like(size, dtype=torch.long)
    misfit = torch.zeros_like(size)
    for position, other in enumerate(gradients[1:]):
        ratio = (first * other).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny)
        digit = ratio.clamp(min=1, max=2.0 ** (BASE - 1)).log2().round()
        expected = 2**digit
        distance = (other - expected.unsqueeze(1) * first).norm(dim=1) / (expected * size.sqrt())
        misfit = torch.maximum(misfit, distance.nan_to_num(nan=0.0))
        row_map += digit.long() * BASE**position
    misfit[row_map >= num_data] = torch.inf
    row_map[~votes | (row_map >= num_data)] = -1
    # A tiny gradient is too noisy for its misfit to mean anything.
    misfit = torch.where(votes & ((noise <= tolerance) | (misfit > noise)), misfit, 0)
    if again is not None and (misfit > 0).any():
        varies = float(((again - first).square().sum(1) / size)[misfit > 0].sqrt().max())
        tolerance = max(tolerance, min(_TIMES_VARIATION * varies, _MOST_VARIATION))
    found = []
    for examples, distances in zip(row_map.split(list(lengths)), misfit.split(list(lengths)), strict=True):
        worst = float(distances.max()) if len(distances) else 0.0
        has_votes, is_precise = bool((examples >= 0).any()), precision in _MISFIT
        found.append(Measured(examples, has_votes, worst, worst > tolerance, is_precise))
    return found


def regular_order(row_map: Tensor, num_data: int, leading: Sequence[int]) -> tuple[int | None, bool]:
    """Return the simplest regular order of the rows that have a gradient.

    Args:
        row_map: The example of each row, or -1.
        num_data: Number of examples.
        leading: Lengths of the leading axes.

    Returns:
        The number of consecutive rows of one example, or `None` if there is no regular order; and whether this is
        certain, because no other order fits.
    """
    rows = len(row_map)
    if rows == 0 or rows % num_data:
        return None, True
    all_measured = bool((row_map >= 0).all())
    along_axes, every = _candidates(num_data, leading)
    obeyed = []
    for inner in every:
        if obeys(row_map, inner, num_data):
            obeyed.append(inner)
            if all_measured:
                break
    # An axis as long as the batch is a better explanation than a part of a longer axis.
    chosen = [inner for inner in obeyed if inner in along_axes] or obeyed
    return (chosen[0] if chosen else None), len(chosen) == 1


def obeys(row_map: Tensor, inner: int, num_data: int) -> bool:
    """Whether all rows that have a gradient are in a regular order."""
    voters = (row_map >= 0).nonzero().squeeze(1)
    return torch.equal(voters // inner % num_data, row_map[voters])


def _candidates(num_data: int, leading: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return candidates for the number of consecutive rows of one example.

    Returns:
        One for each axis that is as long as the batch; and these with all others, simplest first.
    """
    shared = prod(leading) // num_data
    along_axes = [prod(leading[axis + 1 :]) for axis, length in enumerate(leading) if length == num_data]
    folded = [inner for inner in range(shared, 0, -1) if shared % inner == 0] if shared < 2**16 else [shared, 1]
    return along_axes, list(dict.fromkeys((shared, *along_axes, *folded)))


def nearest_order(gradients: Sequence[Tensor], num_data: int, leading: Sequence[int]) -> int | None:
    """Return the regular order closest to the measurement, for models in which examples may mix."""
    groups = prod(leading)
    if groups == 0 or groups % num_data:
        return None
    first, *others = (rows.reshape(groups, -1) for rows in gradients)
    rows = torch.arange(groups, device=first.device)
    best, smallest = None, torch.inf
    for inner in _candidates(num_data, leading)[1]:
        n = rows // inner % num_data
        distance = 0.0
        for other in others:
            factors = (2.0 ** (n % BASE)).unsqueeze(1).to(first.dtype)
            distance += float((other - factors * first).square().sum())
            n = n // BASE
        if distance < (1 - 1e-6) * smallest:  # of equal ones, up to rounding errors, take the simplest
            best, smallest = inner, distance
    return best


def project(g: Tensor) -> Tensor:
    """Project gradients `[*leading, ..., features]` to a few directions, `[rows, directions]`."""
    rows = g.reshape(-1, g.shape[-1])
    rows = rows.to(at_least_float32(g.dtype))
    return rows @ _directions(g.shape[-1], rows.dtype, rows.device)


@lru_cache(maxsize=64)
def _directions(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random directions `[features, directions]`; the identity if there are few features."""
    if features <= _DIRECTIONS:
        return torch.eye(features, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(features)
    signs = torch.randint(2, (features, _DIRECTIONS), generator=generator) * 2 - 1
    return signs.to(device, dtype)
