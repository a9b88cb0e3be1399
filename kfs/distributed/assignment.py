"""Assigns blocks to owner ranks: longest processing time first, with a limit on bytes.

The unit with an owner rank is a *part*: a factor of a block, or its eigenvalues. A factor is never divided. All parts
of a block have the same owner if possible, so that a product with the block needs one rank. A block that fits on no
rank is divided into its parts, which may then have different owners.

`place` assigns blocks from the largest to the smallest. Each block goes to the rank with the smallest resulting load,
among the ranks with room. The load of a rank is its share of all bytes or of all work, whichever is larger. A rank has
room if it holds at most `limit` times the mean over all ranks. If a part fits on no rank, blocks are assigned again, to
the first rank with room, which packs more tightly but balances less. If this fails, too (for example, because a single
part exceeds the limit), the limit is increased until one of the two methods succeeds.

If owners keep nothing, only work counts: see `longest_first`.

The result depends only on names, bytes and work. All ranks therefore compute the same owners without communication.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapreplace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from kfs.display.describe import readable_size
from kfs.errors import ModelError

LIMIT = 1.05
EIGENVALUES = "eigenvalues"  # side of a part that is not a factor
# An inverse takes d^3 operations: one third each for the Cholesky factor, its inverse, and the product of the inverse
# with its transpose. An eigendecomposition takes about this many times as much (Golub and Van Loan, Matrix
# Computations, section 8.3).
DECOMPOSITION = 9
_BISECTIONS = 12  # the smallest limit that works is found with a precision of about one thousandth


@dataclass(frozen=True)
class Part:
    """A unit with an owner rank: a factor, or the eigenvalues of a block.

    Attributes:
        block: The block's name.
        side: `"A"`, `"B"` or `"eigenvalues"`; pieces of a factor add their half-open range of rows, as in `"A[0:8]"`.
        size: Number of rows of the factor, or number of eigenvalues.
        groups: Number of factors of this size, one for each group of channels.
        diagonal: For each sum of the factor, whether only its diagonal is stored. A weight that is used in two roles
            has two sums on each side.
        itemsize: Bytes of a number.
        positions: Number of vectors that each example adds to each sum.
        eigen: Whether the owner of a factor keeps its eigenvectors instead of its inverse.

    Example:
        >>> dense = Part("fc", "A", 4)
        >>> dense.nbytes, dense.summed, dense.sent, dense.work  # with its inverse; 16 numbers; 10 of them; 4^3
        (128, 64, 40, 64.0)
        >>> Part("fc", "A", 4, diagonal=(True,)).sent
        16
    """

    block: str
    side: str
    size: int
    groups: int = 1
    diagonal: tuple[bool, ...] = (False,)
    itemsize: int = 4
    positions: float = 1.0
    eigen: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Block and side, which identify the part."""
        return self.block, self.side

    @property
    def is_dense(self) -> bool:
        """Whether at least one sum of the part is a dense matrix."""
        return not all(self.diagonal)

    @property
    def is_factor(self) -> bool:
        """Whether the part is a factor or a piece of a factor."""
        return self.side != EIGENVALUES

    @property
    def computed(self) -> int:
        """Bytes of the inverse or the eigenvectors."""
        if self.is_dense:
            return self.itemsize * self.groups * self.size**2
        # The eigenvectors of a diagonal matrix are unit vectors, which are not stored.
        return 0 if self.eigen else self.itemsize * self.groups * self.size

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the owner holds in the end: sums, and inverses or eigenvectors."""
        return self.summed + self.computed

    @cached_property
    def work(self) -> float:
        """Floating-point operations of the inverse."""
        return float(self.groups * self.size ** (3 if self.is_dense else 1))

    @property
    def summed(self) -> int:
        """Bytes of the sums, which every rank holds during a pass over its data."""
        numbers = (self.size if one else self.size**2 for one in self.diagonal)
        return self.itemsize * self.groups * sum(numbers)

    @property
    def sent(self) -> int:
        """Bytes of the sums that must be sent. Dense sums are symmetric, so one triangle suffices."""
        numbers = (self.size if one else self.size * (self.size + 1) // 2 for one in self.diagonal)
        return self.itemsize * self.groups * sum(numbers)

    @property
    def vectors(self) -> float:
        """Numbers per example that could be sent instead of dense sums: inputs or output gradients."""
        return self.positions * self.groups * self.size * self.diagonal.count(False)

    def pieces(self, width: int) -> "list[Part]":
        """Divide a dense factor into diagonal pieces of about equal size with at most `width` rows."""
        if not self.is_dense or self.size <= width:
            return [self]
        number = -(-self.size // width)
        edges = [self.size * i // number for i in range(number + 1)]
        return [replace(self, side=f"{self.side}[{a}:{b}]", size=b - a) for a, b in pairwise(edges)]


def eigenvalues(block: str, count: int, itemsize: int = 4) -> Part:
    """Return the part for the corrected eigenvalues of a block."""
    return Part(block, EIGENVALUES, count, diagonal=(True,), itemsize=itemsize, eigen=True)


@dataclass(frozen=True)
class Placement:
    """Owner ranks of all parts.

    Attributes:
        ranks: Number of ranks.
        parts: All parts, sorted by name.
        owners: Owner rank of each part, by block and side.
    """

    ranks: int
    parts: tuple[Part, ...]
    owners: Mapping[tuple[str, str], int]

    def total(self, quantity: Callable[[Part], float]) -> list[float]:
        """Return the sum of a quantity over the parts of each rank."""
        totals = [0.0] * self.ranks
        for part in self.parts:
            totals[self.owners[part.key]] += quantity(part)
        return totals

    @property
    def divided(self) -> list[str]:
        """Names of blocks with parts on several ranks."""
        owners: dict[str, set[int]] = {}
        for (block, _), rank in self.owners.items():
            owners.setdefault(block, set()).add(rank)
        return sorted(block for block, ranks in owners.items() if len(ranks) > 1)

    @property
    def imbalance(self) -> float:
        """Largest number of bytes on a rank, divided by the mean over ranks."""
        held = self.total(lambda part: part.nbytes)
        return max(held) * self.ranks / sum(held)


def place(parts: Iterable[Part], ranks: int, limit: float = LIMIT, divide: bool = True) -> Placement:
    """Choose owner ranks of all parts.

    Args:
        parts: Parts of all blocks, in any order.
        ranks: Number of ranks.
        limit: Maximum number of bytes on a rank, in units of the mean over ranks. It is exceeded only if no assignment
            within it was found.
        divide: Whether the parts of a block that fits on no rank may have different owners. `kfs.KFAC` does not do
            that.

    Returns:
        The owner ranks.

    Raises:
        ModelError: If there is no rank or no part, or if a part is given twice.

    Example:
        >>> placement = place([Part("1", "A", 4), Part("1", "B", 3), Part("2", "A", 5)], ranks=2)
        >>> placement.owners
        {('1', 'A'): 1, ('1', 'B'): 1, ('2', 'A'): 0}
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ModelError(f"ranks is {ranks!r}.", "Use an integer of at least 1.")
    # Sort by name, since the order decides between parts of equal size.
    ordered = sorted(parts, key=lambda part: part.key)
    if not ordered:
        raise ModelError("There is no block to place.", "kfs.inspect says which parameters are covered.")
    if len({part.key for part in ordered}) < len(ordered):
        raise ModelError("A part is given twice.", "Give each block a unique name.")

    # Lower bound on the limit: the largest unit that must have a single owner.
    together: dict[str, int] = {}  # bytes by unit
    for part in ordered:
        name = f"{part.block} {part.side}" if divide else part.block
        together[name] = together.get(name, 0) + part.nbytes
    largest = ranks * max(together.values()) / sum(together.values())
    low = max(limit, largest)
    found = _within(ordered, ranks, low, divide)
    if found is None:
        # Bisect between the lower bound and a limit that always works: some rank holds at most the mean, so it has room
        # for any unit.
        high = 1 + largest
        found = _within(ordered, ranks, high, divide)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            better = _within(ordered, ranks, middle, divide)
            if better is None:
                low = middle
            else:
                found = better
                high = middle
    assert found is not None  # noqa: S101 (the first value of `high` always works)
    return Placement(ranks, tuple(ordered), {part.key: found[part.key] for part in ordered})


def _within(parts: Sequence[Part], ranks: int, limit: float, divide: bool) -> dict[tuple[str, str], int] | None:
    """Choose owners within a limit, using the smallest load first and then first fit; `None` if both fail."""
    for first_fit in (False, True):
        found = _Room(parts, ranks, limit, first_fit).owners(parts, divide)
        if found is not None:
            return found
    return None


class _Room:
    """Bytes and work assigned to each rank so far, in units of the final mean over ranks.

    Args:
        parts: All parts.
        ranks: Number of ranks.
        limit: Maximum number of bytes on a rank, in these units.
        first_fit: Whether blocks go to the first rank with room instead of the rank with the smallest load.
    """

    def __init__(self, parts: Iterable[Part], ranks: int, limit: float, first_fit: bool) -> None:
        parts = list(parts)
        self.limit = limit + 1e-9  # sums of shares are rounded
        self.first_fit = first_fit
        self.held = np.zeros(ranks)
        self.work = np.zeros(ranks)
        self.share_of_bytes = ranks / sum(part.nbytes for part in parts)
        self.share_of_work = ranks / sum(part.work for part in parts)

    def owners(self, parts: Iterable[Part], divide: bool) -> dict[tuple[str, str], int] | None:
        """Assign all parts; return `None` if a part, or a block that may not be divided, fits on no rank."""
        blocks: dict[str, list[Part]] = {}
        for part in parts:
            blocks.setdefault(part.block, []).append(part)
        owners: dict[tuple[str, str], int] = {}
        for block in sorted(blocks.values(), key=self._size, reverse=True):
            rank = self._add(block)
            if rank is not None:
                owners |= {part.key: rank for part in block}
                continue
            for part in sorted(block, key=lambda part: part.nbytes, reverse=True):
                rank = self._add([part]) if divide else None
                if rank is None:
                    return None
                owners[part.key] = rank
        return owners

    def _shares(self, parts: Iterable[Part]) -> tuple[float, float]:
        """Return bytes and work of parts, in units of the mean over ranks."""
        parts = list(parts)
        nbytes = self.share_of_bytes * sum(part.nbytes for part in parts)
        return nbytes, self.share_of_work * sum(part.work for part in parts)

    def _size(self, parts: Iterable[Part]) -> float:
        """Return the sort key of blocks: bytes for first fit, else bytes or work, whichever is larger."""
        nbytes, work = self._shares(parts)
        return nbytes if self.first_fit else max(nbytes, work)

    def _add(self, parts: Iterable[Part]) -> int | None:
        """Assign parts to one rank, and return the rank; `None` if they fit on no rank."""
        nbytes, work = self._shares(parts)
        held = self.held + nbytes
        has_room = held <= self.limit
        if not has_room.any():
            return None
        load = np.maximum(held, self.work + work)
        # `argmax` and `argmin` return the first of several equally good ranks.
        rank = int(has_room.argmax() if self.first_fit else np.where(has_room, load, np.inf).argmin())
        self.held[rank] += nbytes
        self.work[rank] += work
        return rank


K = TypeVar("K")


def longest_first(work: Mapping[K, float], ranks: int) -> dict[K, int]:
    """Divide work among ranks: the longest first, each for the rank with the least work so far.

    Args:
        work: Work by name; names can be sorted.
        ranks: Number of ranks.

    Example:
        >>> longest_first({"1": 1.0, "2": 3.0, "3": 1.0}, ranks=2)
        {'2': 0, '1': 1, '3': 1}
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    found: dict[K, int] = {}
    for name in sorted(work, key=lambda name: (-work[name], name)):
        load, found[name] = loads[0]
        heapreplace(loads, (load + work[name], found[name]))
    return found


def subsets_of(sizes: Mapping[str, int], memory: float) -> list[list[str]]:
    """Divide blocks into subsets that fit into memory, one pass over the data for each subset.

    Args:
        sizes: Bytes that a block needs in its pass, by name.
        memory: Bytes that are available for a pass.

    Returns:
        Names of the blocks of each subset.

    Raises:
        ModelError: If one block does not fit.

    Example:
        >>> subsets_of({"1": 64, "2": 100, "3": 16}, memory=100)
        [['2'], ['1', '3']]
    """
    subsets: list[list[str]] = []
    room: list[float] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] > memory:
            needs = f"Block {name!r} needs {readable_size(sizes[name])}"
            raise ModelError(
                f"{needs}, but only {readable_size(max(0, memory))} are available for a pass.",
                "Allow more memory, or use a smaller max_dim.",
            )
        subset = next((number for number, free in enumerate(room) if sizes[name] <= free), len(room))
        if subset == len(room):
            subsets.append([])
            room.append(memory)
        subsets[subset].append(name)
        room[subset] -= sizes[name]
    return subsets
