"""Which data were seen: half-open ranges of indices, and a digest that does not depend on batches or ranks.

Each datum has a digest of its index, its inputs and its target. The digest of several data is the sum of theirs, so
that it can be computed in parts, by different processes, whatever the batches are.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kfs.data import Batch, axis_to_cut
from kfs.nested import plain, tensors_in

Range = tuple[int, int]
_MODULUS = 2**128


@dataclass
class SeenData:
    """Some data, by their indices.

    Attributes:
        ranges: Half-open ranges of indices, in order, which do not touch each other.
        digest: The sum of the digests of all of them.

    Example:
        >>> seen = SeenData()
        >>> seen.add((0, 4), 1)
        >>> seen.add((6, 8), 2)
        >>> seen.add((4, 5), 3)
        >>> seen.ranges, seen.number, seen.gaps((3, 9)), seen.common((3, 9))
        ([(0, 5), (6, 8)], 7, [(5, 6), (8, 9)], [(3, 5), (6, 8)])
    """

    ranges: list[Range] = field(default_factory=list)
    digest: int = 0

    @property
    def number(self) -> int:
        """How many data these are."""
        return sum(stop - start for start, stop in self.ranges)

    def add(self, some: Range, digest: int) -> None:
        """Add data that were not seen before."""
        self.digest = (self.digest + digest) % _MODULUS
        ranges: list[Range] = []
        for start, stop in sorted([*self.ranges, some]):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        self.ranges = ranges

    def add_all(self, other: "SeenData") -> None:
        """Add all of some other data."""
        for some in other.ranges:
            self.add(some, 0)
        self.digest = (self.digest + other.digest) % _MODULUS

    def common(self, some: Range) -> list[Range]:
        """Return what was seen of a range."""
        found = [(max(start, some[0]), min(stop, some[1])) for start, stop in self.ranges]
        return [(start, stop) for start, stop in found if start < stop]

    def gaps(self, some: Range) -> list[Range]:
        """Return what was not seen of a range."""
        edges = [some[0], *(edge for common in self.common(some) for edge in common), some[1]]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, stop) for start, stop in pairs if start < stop]

    def overlaps(self, other: "SeenData") -> bool:
        """Whether some datum is in both."""
        return any(self.common(some) for some in other.ranges)


def digests_of(batch: Batch, batch_axis: int | None) -> list[int]:
    """Return a digest for each datum of a batch.

    What has no batch axis counts for each of them: it must be the same in other batches of the same data.
    """
    number = len(batch.y)
    shared = hashlib.blake2b(text_of(plain(batch.x)).encode(), digest_size=32)
    rows: list[Any] = [_bytes_by_datum(batch.y, 0)]
    for t in tensors_in(batch.x):
        axis = axis_to_cut(t.shape, number, batch_axis)
        if axis is None:
            shared.update(bytes_of(t))
        else:
            rows.append(_bytes_by_datum(t, axis))
    digests = []
    for place in range(number):
        hashed = hashlib.blake2b(shared.digest(), digest_size=16)
        hashed.update((batch.first + place).to_bytes(8, "little"))
        for row in rows:
            hashed.update(row[place])
        digests.append(int.from_bytes(hashed.digest(), "little"))
    return digests


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of all values."""
    hashed = hashlib.blake2b(digest_size=32)
    for t in tensors:
        hashed.update(bytes_of(t))
    return hashed.hexdigest()


def bytes_of(t: Tensor) -> Any:
    """Return the values of a tensor as bytes."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _bytes_by_datum(t: Tensor, axis: int) -> Any:
    """Return the values of a tensor as bytes, `[batch, bytes]`."""
    return bytes_of(t.movedim(axis, 0)).reshape(t.shape[axis], -1)


def text_of(value: object) -> str:
    """Describe something that is not a tensor, without its address in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
