r"""Ownership: which datum a row of an activation belongs to, by measurement.

Send back vectors $v$, and the same vectors with those of datum $n$ multiplied by $c_n$. If a row influences the
prediction for datum $n$ alone, its gradient is multiplied by $c_n$, too: the ratio of its two gradients names its datum.
If it influences several predictions, the ratio is not one of the $c_n$, or its features disagree: data mix. Nothing is
guessed from lengths of axes.

The $c_n$ are powers of two, so that both gradients are rounded in the same way, and ratios are exact in any precision.
With more than eight data, the digits of $n$ (in base eight) are sent back one after the other.

Rows nearly always come in a regular order (see `Regular`), which is measured once, on a few data (see `audit`). It then
holds for batches of any size. Where the order depends on the data, every batch is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.kfac.sums.interface import Receiver
from kfs.kfac.sums.owners import Listed, Owners, Regular, by_length

BASE = 8
# Gradients of a row are looked at in so many directions.
_DIRECTIONS = 4
# A row whose gradient is smaller than this many times the precision, relative to the largest one, has none.
_NOTHING = 8
# Up to which relative misfit a row belongs to one datum. Powers of two leave no rounding errors, except where a GPU adds
# numbers up in varying order.
_MISFIT = {torch.float64: 1e-6, torch.float32: 1e-3}
_MISFIT_IN_HALF_PRECISION = 3e-2

# What happens at a place: the operation, and the parameter that it uses.
What = tuple[str, str]
# Does the result of an operation on a parameter and constants have a row for every datum? Identified by the operation,
# the parameter, and how often they were met before.
Question = tuple[Any, str, int]


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


def number_of_digits(num_data: int) -> int:
    """Return how many digits in base eight the index of a datum has."""
    digits = 1
    while BASE**digits < num_data:
        digits += 1
    return digits


@dataclass
class Measured:
    """What was measured about rows."""

    owners: Tensor  # the datum of each row; -1 if no gradient came back to it
    misfit: Tensor  # relative distance of each row's gradients from those of a row that belongs to one datum
    loud: Tensor  # whether a row's gradient is large enough for the misfit to mean something
    tolerance: float

    @property
    def has_votes(self) -> bool:
        """Whether any gradient came back."""
        return bool((self.owners >= 0).any())

    @property
    def worst(self) -> float:
        """The largest misfit of all rows with a gradient that is not tiny."""
        misfit = self.misfit[self.loud]
        return float(misfit.max()) if len(misfit) else 0.0

    @property
    def mixes(self) -> bool:
        """Whether a row influences the predictions for several data."""
        return self.worst > self.tolerance

    def of_groups(self, groups: int) -> Tensor | None:
        """Return owners of groups of consecutive rows; `None` if rows of one group belong to different data."""
        if groups == len(self.owners):
            return self.owners
        owners = self.owners.reshape(groups, -1)
        largest = owners.amax(1) if owners.numel() else owners.new_full((groups,), -1)
        agree = (owners == largest.unsqueeze(1)) | (owners < 0)
        return largest if bool(agree.all()) else None


def measured(gradients: Sequence[Tensor], num_data: int, dtype: torch.dtype) -> Measured:
    """Find the datum of each row.

    Args:
        gradients: For each vector of `probes`, a few numbers for each row, `[rows, directions]`.
        num_data: Number of data.
        dtype: The precision in which gradients were computed.
    """
    first = gradients[0]
    size = first.square().sum(1)
    eps, tolerance = torch.finfo(dtype).eps, _MISFIT.get(dtype, _MISFIT_IN_HALF_PRECISION)
    largest = size.max() if len(size) else size.new_zeros(())
    votes = size > (_NOTHING * eps) ** 2 * largest
    owners = torch.zeros_like(size, dtype=torch.long)
    misfit = torch.zeros_like(size)
    for place, other in enumerate(gradients[1:]):
        ratio = (first * other).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny)
        digit = ratio.clamp(min=1, max=2.0 ** (BASE - 1)).log2().round()
        expected = 2**digit
        distance = (other - expected.unsqueeze(1) * first).norm(dim=1) / (expected * size.sqrt())
        misfit = torch.maximum(misfit, distance.nan_to_num(nan=0.0))
        owners += digit.long() * BASE**place
    misfit[owners >= num_data] = torch.inf
    owners[~votes | (owners >= num_data)] = -1
    loud = size > (64 * eps / tolerance) ** 2 * largest
    return Measured(owners, misfit, loud & votes, tolerance)


def regular_order(owners: Tensor, num_data: int, leading: Sequence[int]) -> tuple[int | None, bool]:
    """Find the simplest regular order that rows obey, as far as a gradient came back to them.

    Args:
        owners: The datum of each row, or -1.
        num_data: Number of data.
        leading: Lengths of the leading axes.

    Returns:
        The number of consecutive rows of one datum, or `None` if there is no such order. And whether that is certain: no
        other order would do.
    """
    rows = len(owners)
    if rows == 0 or rows % num_data:
        return None, True
    voters = (owners >= 0).nonzero().squeeze(1)
    votes = owners[voters]
    found = None
    for inner in _candidates(num_data, leading):
        if torch.equal(voters // inner % num_data, votes):
            if found is not None:
                return found, False
            found = inner
            if len(voters) == rows:
                break
    return found, True


def _candidates(num_data: int, leading: Sequence[int]) -> Iterator[int]:
    """Generate possible numbers of consecutive rows of one datum: the simplest ones first."""
    shared = prod(leading) // num_data
    axes = [prod(leading[axis + 1 :]) for axis, length in enumerate(leading) if length == num_data]
    folded = [inner for inner in range(shared, 0, -1) if shared % inner == 0] if shared < 2**16 else [shared, 1]
    yield from dict.fromkeys((shared, *axes, *folded))


def nearest_order(gradients: Sequence[Tensor], num_data: int, leading: Sequence[int]) -> int | None:
    """Find the regular order that comes closest to what was measured, where data are allowed to mix."""
    first = gradients[0]
    if len(first) == 0 or len(first) % num_data:
        return None
    rows = torch.arange(len(first), device=first.device)
    best, smallest = None, torch.inf
    for inner in _candidates(num_data, leading):
        n = rows // inner % num_data
        distance = 0.0
        for other in gradients[1:]:
            distance += float((other - (2.0 ** (n % BASE)).unsqueeze(1).to(first.dtype) * first).square().sum())
            n = n // BASE
        if distance < (1 - 1e-6) * smallest:
            best, smallest = inner, distance
    return best


@dataclass(frozen=True)
class Placed:
    """What is known about a place from a measurement on a few data."""

    what: What
    leading: tuple[int, ...]  # there
    num_data: int  # there
    inner: int | None  # how many consecutive rows belong to a datum; `None` if that has to be measured anew

    def owners(self, num_data: int, leading: tuple[int, ...]) -> Regular | None:
        """Return the owners of rows in another batch; `None` if they have to be measured.

        Leading axes may differ only in the length of the batch axis, by as much as the number of data does.
        """
        if self.inner is None or len(leading) != len(self.leading):
            return None
        differing = [axis for axis, length in enumerate(leading) if length != self.leading[axis]]
        if not differing and num_data == self.num_data:
            return Regular(num_data, self.inner)
        if len(differing) != 1:
            return None
        axis = differing[0]
        tail = prod(leading[axis + 1 :])
        if leading[axis] * self.num_data != self.leading[axis] * num_data or self.inner % tail:
            return None
        fits = self.leading[axis] % (self.num_data * (self.inner // tail)) == 0
        return Regular(num_data, self.inner) if fits else None


@dataclass(frozen=True)
class Known:
    """What a measurement on a few data found."""

    uses: tuple[Placed, ...] = ()  # places of uses, in their order
    meetings: tuple[Placed, ...] = ()  # places at which a derived parameter meets the batch, in their order
    # Whether results that do not depend on data have a row for every datum.
    answers: Mapping[Question, bool] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()  # which inputs of the model are the same for all data, by their number
    unexplained: frozenset[tuple[str, str]] = (
        frozenset()
    )  # `(parameter, operation)` of uses that were missed or misread


@dataclass(eq=False)
class Site:
    """A place in a pass at which gradients arrive, and whose rows wait to be measured."""

    what: What
    leading: tuple[int, ...]
    start: Callable[[Owners], Receiver]  # takes the owners of rows, and returns what takes gradients
    sites: "Sites"
    meeting: bool  # whether a derived parameter meets the batch there
    receiver: Receiver | None = None
    probed: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    measured: Measured | None = None
    inner: int | None = None
    certain: bool = True

    def receive(self, g: Tensor) -> None:
        """Take gradients `[columns, *leading, ..., features]`: of probes, or later of vectors that count."""
        if self.receiver is not None:
            self.receiver(g)
            return
        g = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
        self.dtype = g.dtype
        rows = g[0].reshape(-1, g.shape[-1])
        rows = rows.to(torch.promote_types(g.dtype, torch.float32))
        self.probed.append(rows @ _directions(g.shape[-1], rows.dtype, rows.device))

    def settle(self, num_data: int, mixing: bool) -> None:
        """Find out whose the rows are, after all probes were sent back, and start."""
        rows = prod(self.leading)
        if len(self.probed) != 1 + number_of_digits(num_data):  # predictions do not depend on it
            self.certain = False
            self.receiver = self.start(guessed(num_data, self.leading, self.sites.axis))
            return
        self.measured = measured(self.probed, num_data, self.dtype)
        owners = self.measured.of_groups(rows)
        if mixing and self.measured.mixes:
            self.inner = nearest_order(self._by_group(rows), num_data, self.leading)
        elif owners is not None:
            self.inner, self.certain = regular_order(owners, num_data, self.leading)
        self.probed.clear()
        if self.inner is not None:
            self.receiver = self.start(Regular(num_data, self.inner))
        elif owners is not None:
            self.receiver = self.start(Listed(owners, num_data))
        else:
            operation, parameter = self.what
            error = DataError(
                f"One input of {operation} (parameter {parameter!r}) has positions that belong to different data.",
                "KFAC with sharing='expand' does not need to know whose they are; or leave the parameter out with "
                "params=.",
            )
            self.receiver = self.start(Unknown(error, num_data))

    def _by_group(self, groups: int) -> list[Tensor]:
        """Return gradients of groups of consecutive rows."""
        return [rows.reshape(groups, -1) for rows in self.probed]


class Unknown(Owners):
    """Rows of which one does not know whose they are: an error as soon as it matters."""

    def __init__(self, error: DataError, num_data: int) -> None:
        """Remember what to say."""
        self.error = error
        self.num_data = num_data

    def by_datum(self, t: Tensor, trailing: int = 1) -> Tensor:
        """Refuse."""
        raise self.error

    def counts(self, rows: int, like: Tensor) -> Tensor:
        """Refuse."""
        raise self.error

    def index(self, rows: int) -> Tensor:
        """Refuse."""
        raise self.error

    def in_order(self, rows: int) -> bool:
        """Say no."""
        return False


class Sites:
    """All places of one pass at which it matters which datum a row belongs to.

    Args:
        num_data: Number of data.
        axis: Where the batch axis is in activations, if somebody said so. It is used if nobody measures.
        known: What a measurement found. `None` to guess.
        measuring: Whether all places wait to be measured.
        mixing: Whether data may mix.
    """

    def __init__(
        self,
        num_data: int,
        axis: int | None = None,
        known: Known | None = None,
        measuring: bool = False,
        mixing: bool = False,
    ) -> None:
        """Start at the beginning of a pass."""
        self.num_data = num_data
        self.axis = axis
        self.measuring = measuring
        self.waiting: list[Site] = []
        self.observed: list[Site] = []
        self._known = known
        self._mixing = mixing
        self._next = [0, 0]

    def open(
        self, what: What, leading: tuple[int, ...], start: Callable[[Owners], Receiver], meeting: bool = False
    ) -> Receiver:
        """Open a place, and return what takes its gradients `[columns, *leading, ..., features]`.

        Args:
            what: What happens there.
            leading: Lengths of the leading axes.
            start: Takes the owners of rows as soon as they are known, and returns what takes gradients.
            meeting: Whether it is a place at which a derived parameter meets the batch, and not a use.
        """
        if self.num_data == 1:
            return start(Regular.batch_first(1, prod(leading)))
        if not self.measuring:
            if self._known is None:
                return start(guessed(self.num_data, leading, self.axis))
            known = self._known.meetings if meeting else self._known.uses
            owners = self._look_up(what, leading, known, meeting)
            if owners is not None:
                return start(owners)
        site = Site(what, leading, start, self, meeting)
        self.waiting.append(site)
        return site.receive

    def observe(self, what: What, shape: tuple[int, ...]) -> Receiver:
        """Measure a result number by number, and do nothing else with its gradients."""
        site = Site(what, shape, nothing, self, meeting=True)
        self.observed.append(site)
        return lambda g: site.receive(g.unsqueeze(-1))

    def settle(self) -> None:
        """Find out whose the rows are, after all probes were sent back."""
        for site in (*self.waiting, *self.observed):
            site.settle(self.num_data, self._mixing)

    def forget(self) -> None:
        """Forget all places, which may hold activations."""
        self.waiting.clear()
        self.observed.clear()

    def _look_up(self, what: What, leading: tuple[int, ...], known: Sequence[Placed], meeting: bool) -> Regular | None:
        """Return what is known about the next place; `None` if that is another one, or nothing."""
        place = self._next[meeting]
        self._next[meeting] += 1
        if place >= len(known) or known[place].what != what:
            return None
        return known[place].owners(self.num_data, leading)


def guessed(num_data: int, leading: tuple[int, ...], axis: int | None) -> Owners:
    """Guess owners by lengths; if that is not possible, it is an error as soon as somebody needs them."""
    try:
        return by_length(num_data, leading, axis)
    except DataError as error:
        return Unknown(error, num_data)


@lru_cache(maxsize=64)
def _directions(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return directions `[features, few]` to look at gradients in: all features if there are few."""
    if features <= _DIRECTIONS:
        return torch.eye(features, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(features)
    signs = torch.randint(2, (features, _DIRECTIONS), generator=generator) * 2 - 1
    return signs.to(device, dtype)


def nothing(_: Any) -> Receiver:
    """Return a receiver that does nothing, whoever the owners are."""
    return lambda _: None
