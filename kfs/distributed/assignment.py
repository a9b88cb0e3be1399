"""Which rank owns which block: longest processing time first, with a limit on bytes.

What has an owner is a *part*: a factor of a block, or its eigenvalues. A factor is never divided. The parts of a block
have one owner where that is possible, so that a product with the block needs one rank. A block that fits nowhere is
divided into its parts, which may then have different owners.

`place` goes from the largest block to the smallest one. Each goes to the rank that then has the smallest load, among
those with room. The load of a rank is its share of all bytes or of all work, whichever is larger. There is room as long
as a rank holds at most `limit` times the mean of all ranks. If a part fits nowhere, blocks go to the first rank with
room instead, which packs more tightly and balances less. If that fails, too, as it must if one part has more bytes than
that, the limit rises until one of both ways works.

All of it depends on names, bytes and work alone. So all ranks compute the same owners, and need not talk about them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from kfs.display.describe import readable_size
from kfs.errors import ModelError

LIMIT = 1.05
EIGENVALUES = "eigenvalues"  # the side of a part that is no factor
# An inverse takes d^3 operations: a third of them each for the Cholesky factor, for its inverse, and for the product of
# that with its transpose. All eigenvalues and eigenvectors take about so many times as much (Golub and Van Loan, Matrix
# Computations, section 8.3).
DECOMPOSITION = 9
_BISECTIONS = 12  # the smallest limit that works is found to a thousandth or so
_Side = Literal["A", "B"]


@dataclass(frozen=True)
class Part:
    """Something that has an owner: a factor, or the eigenvalues of a block.

    Attributes:
        block: The block's name.
        side: `"A"`, `"B"` or `"eigenvalues"`; pieces of a factor add their half-open range of rows, as in `"A[0:8]"`.
        size: Rows of the factor, or how many eigenvalues there are.
        groups: How many factors of this size there are, one for each group of channels.
        diagonal: For each sum that it consists of, whether that is only a diagonal. A weight with two roles has two
            sums on each side.
        itemsize: Bytes of a number.
        positions: Vectors that each example adds to each sum.
        eigen: Whether the owner of a factor keeps its eigenvectors, or its inverse.

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
        """Identifies it among all parts."""
        return self.block, self.side

    @property
    def is_dense(self) -> bool:
        """Whether it is stored as matrices."""
        return not all(self.diagonal)

    @property
    def is_factor(self) -> bool:
        """Whether it is a factor, or a piece of one."""
        return self.side != EIGENVALUES

    @property
    def computed(self) -> int:
        """Bytes of what is computed from it: an inverse, or eigenvectors."""
        if self.is_dense:
            return self.itemsize * self.groups * self.size**2
        # The eigenvectors of a diagonal are unit vectors, which nobody stores.
        return 0 if self.eigen else self.itemsize * self.groups * self.size

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the owner holds in the end: sums, and what is computed from them."""
        return self.summed + self.computed

    @cached_property
    def work(self) -> float:
        """Floating-point operations of the inverse."""
        return float(self.groups * self.size ** (3 if self.is_dense else 1))

    @property
    def summed(self) -> int:
        """Bytes of its sums, which every rank has while it goes through its data."""
        numbers = (self.size if one else self.size**2 for one in self.diagonal)
        return self.itemsize * self.groups * sum(numbers)

    @property
    def sent(self) -> int:
        """Bytes of its sums that have to be sent. Dense ones are symmetric, so one triangle is enough."""
        numbers = (self.size if one else self.size * (self.size + 1) // 2 for one in self.diagonal)
        return self.itemsize * self.groups * sum(numbers)

    @property
    def vectors(self) -> float:
        """Numbers for each example that could be sent in place of dense sums: inputs, or gradients of one column."""
        return self.positions * self.groups * self.size * self.diagonal.count(False)

    def pieces(self, width: int) -> "list[Part]":
        """Divide a dense factor into diagonal pieces of about one size, which have at most `width` rows."""
        if not self.is_dense or self.size <= width:
            return [self]
        number = -(-self.size // width)
        edges = [self.size * i // number for i in range(number + 1)]
        return [replace(self, side=f"{self.side}[{a}:{b}]", size=b - a) for a, b in pairwise(edges)]


class _Total(Protocol):
    """The numbers of a sum."""

    def element_size(self) -> int: ...


class _Sum(Protocol):
    """A sum of outer products."""

    diagonal: bool

    @property
    def total(self) -> _Total: ...

    @property
    def size(self) -> int: ...


class _Layout(Protocol):
    """How parameters become matrices."""

    @property
    def name(self) -> str: ...

    @property
    def matrix_shape(self) -> tuple[int, int, int]: ...


class Summed(Protocol):
    """The sums of a block: `kfs.factors.accumulate.block_sums.BlockSums`, with or without numbers."""

    @property
    def layout(self) -> _Layout:
        """How its parameters become matrices."""

    @property
    def terms(self) -> float:
        """Over how many positions gradients were summed."""

    def on_side(self, side: _Side, /) -> Sequence[_Sum]:
        """Return the sums on one side."""


def parts_of(block: Summed, num_data: int = 1, eigen: bool = False) -> list[Part]:
    """Describe the parts of a block by its sums, which may be on the meta device.

    Args:
        block: Its sums.
        num_data: How many examples they were taken over.
        eigen: Whether owners keep eigenvectors and corrected eigenvalues, or inverses.
    """
    groups, rows, columns = block.layout.matrix_shape
    name = block.layout.name
    parts = []
    sides: tuple[_Side, ...] = ("A", "B")
    for side in sides:
        sums = block.on_side(side)
        diagonal = tuple(one.diagonal for one in sums)
        itemsize = sums[0].total.element_size()
        positions = block.terms / len(sums) / num_data
        parts.append(Part(name, side, sums[0].size, groups, diagonal, itemsize, positions, eigen))
    return [*parts, eigenvalues(name, groups * rows * columns, itemsize)] if eigen else parts


def eigenvalues(block: str, count: int, itemsize: int = 4) -> Part:
    """Describe the corrected eigenvalues of a block."""
    return Part(block, EIGENVALUES, count, diagonal=(True,), itemsize=itemsize, eigen=True)


@dataclass(frozen=True)
class Placement:
    """Owners of all parts.

    Attributes:
        ranks: How many ranks there are.
        parts: All parts, in the order of their names.
        owners: The rank that owns a part, by block and side.
    """

    ranks: int
    parts: tuple[Part, ...]
    owners: Mapping[tuple[str, str], int]

    def total(self, quantity: Callable[[Part], float]) -> list[float]:
        """Return, for each rank, the sum over its parts."""
        totals = [0.0] * self.ranks
        for part in self.parts:
            totals[self.owners[part.key]] += quantity(part)
        return totals

    @property
    def divided(self) -> list[str]:
        """Blocks whose parts have different owners."""
        owners: dict[str, set[int]] = {}
        for (block, _), rank in self.owners.items():
            owners.setdefault(block, set()).add(rank)
        return sorted(block for block, ranks in owners.items() if len(ranks) > 1)

    @property
    def imbalance(self) -> float:
        """The most bytes that a rank holds, in units of the mean over ranks."""
        held = self.total(lambda part: part.nbytes)
        return max(held) * self.ranks / sum(held)


def place(parts: Iterable[Part], ranks: int, limit: float = LIMIT, divide: bool = True) -> Placement:
    """Choose owners.

    Args:
        parts: Parts of all blocks, in any order.
        ranks: How many ranks there are.
        limit: How many bytes a rank may hold, in units of the mean over ranks. It is exceeded only if no way to
            keep it was found.
        divide: Whether the parts of a block that fits nowhere may have different owners. `kfs.KFAC` does not do that.

    Raises:
        ModelError: If there is no rank or no part, or a part comes twice.

    Example:
        >>> placement = place([Part("1", "A", 4), Part("1", "B", 3), Part("2", "A", 5)], ranks=2)
        >>> placement.owners
        {('1', 'A'): 1, ('1', 'B'): 1, ('2', 'A'): 0}
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ModelError(f"ranks is {ranks!r}.", "Use an integer of at least 1.")
    # The order of names, and not that of the caller: it decides between parts of one size.
    ordered = sorted(parts, key=lambda part: part.key)
    if not ordered:
        raise ModelError("There is no block to place.", "kfs.inspect says which parameters are covered.")
    if len({part.key for part in ordered}) < len(ordered):
        raise ModelError("A part comes twice.", "Give blocks names of their own.")
    together: dict[str, int] = {}  # bytes of what has one owner
    for part in ordered:
        name = f"{part.block} {part.side}" if divide else part.block
        together[name] = together.get(name, 0) + part.nbytes
    # No limit below the largest of them can be kept.
    largest = ranks * max(together.values()) / sum(together.values())
    low = max(limit, largest)
    found = _within(ordered, ranks, low, divide)
    if found is None:
        # Some rank is at the mean or below, and has room for any of them.
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
    assert found is not None  # noqa: S101 (see above)
    return Placement(ranks, tuple(ordered), {part.key: found[part.key] for part in ordered})


def _within(parts: Sequence[Part], ranks: int, limit: float, divide: bool) -> dict[tuple[str, str], int] | None:
    """Choose owners such that a limit holds, in one of two ways; `None` if both fail."""
    for first_fit in (False, True):
        found = _Room(parts, ranks, limit, first_fit).owners(parts, divide)
        if found is not None:
            return found
    return None


class _Room:
    """What ranks hold so far, in units of the mean that they will hold in the end.

    Args:
        parts: All parts.
        ranks: How many ranks there are.
        limit: How many bytes a rank may hold, in these units.
        first_fit: Whether blocks go to the first rank with room, or to that with the smallest load.
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
        """Place all parts; `None` if one of them, or a block that may not be divided, fits nowhere."""
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
        """Return bytes and work of some parts."""
        parts = list(parts)
        nbytes = self.share_of_bytes * sum(part.nbytes for part in parts)
        return nbytes, self.share_of_work * sum(part.work for part in parts)

    def _size(self, parts: Iterable[Part]) -> float:
        """Return what blocks are sorted by. What fits is a matter of bytes; who is busiest, of bytes and work."""
        nbytes, work = self._shares(parts)
        return nbytes if self.first_fit else max(nbytes, work)

    def _add(self, parts: Iterable[Part]) -> int | None:
        """Give parts to one rank, and return which; `None` if they fit nowhere."""
        nbytes, work = self._shares(parts)
        held = self.held + nbytes
        has_room = held <= self.limit
        if not has_room.any():
            return None
        load = np.maximum(held, self.work + work)
        # Both functions return the first of several ranks that are equally good.
        rank = int(has_room.argmax() if self.first_fit else np.where(has_room, load, np.inf).argmin())
        self.held[rank] += nbytes
        self.work[rank] += work
        return rank


def passes(sizes: Mapping[str, int], memory: float) -> list[list[str]]:
    """Divide blocks into subsets that fit into memory, one subset at a time. There is one pass over the data for each.

    Args:
        sizes: Bytes that a block needs in its pass, by name.
        memory: Bytes that a pass may use.

    Returns:
        Names of blocks, subset by subset.

    Raises:
        ModelError: If one block does not fit.

    Example:
        >>> passes({"1": 64, "2": 100, "3": 16}, memory=100)
        [['2'], ['1', '3']]
    """
    subsets: list[list[str]] = []
    room: list[float] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] > memory:
            needs = f"Block {name!r} needs {readable_size(sizes[name])}"
            raise ModelError(
                f"{needs}, and a pass may use {readable_size(max(0, memory))}.",
                "Allow more memory, or use a smaller max_dim.",
            )
        subset = next((number for number, free in enumerate(room) if sizes[name] <= free), len(room))
        if subset == len(room):
            subsets.append([])
            room.append(memory)
        subsets[subset].append(name)
        room[subset] -= sizes[name]
    return subsets
