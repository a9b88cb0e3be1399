"""The distribution of blocks over processes: replicated, or each block on its owner rank.

Algebra with blocks is written for the blocks of one process. An operator's distribution turns the results of one
process into the results of all: `sum` and `concat` for numbers, `union` for lists, `fetch` and `write` for states.

With `Replicated` blocks, every process has all results already, and no method communicates. With `Owned` blocks, all
ranks call the same methods. Each rank computes the results of its own blocks, and has zeros for the others. So the sum
over ranks is the result, with the same bits on all of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfs.distributed.assignment import EIGENVALUES, Part, place
from kfs.distributed.collectives import Same, add_up, check_same, fetched, joined, write_joined
from kfs.distributed.ranks import Ranks
from kfs.errors import DistributedError

T = TypeVar("T")
K = TypeVar("K", int, str)
_SAME_VECTORS = "Broadcast vectors, or draw them from the same seed in all processes."


class Distribution:
    """Base of `Replicated` and `Owned`. All ranks must call the methods, which do nothing in a single process.

    Args:
        ranks: The ranks that own blocks; this process alone if each process has all blocks.
        owners: The rank that owns each block, by name. Rank 0 owns blocks without an entry.

    Attributes:
        is_complete: Whether each process has all blocks.
        rank: The rank of this process among the owners; `None` if blocks have no owners.
    """

    def __init__(self, ranks: Ranks, owners: Mapping[str, int]) -> None:
        self.ranks = ranks
        self.owners = owners
        self.is_complete = not ranks.are_several
        self.rank = None if self.is_complete else ranks.rank

    def has(self, name: str) -> bool:
        """Whether this process has a block."""
        return self.is_complete or self.owners.get(name, 0) == self.rank

    def shares(self, other: "Distribution") -> bool:
        """Whether the blocks of another operator are in the same processes."""
        return self.ranks.group is other.ranks.group

    def check(self, ranks: Ranks) -> None:
        """Raise if data belong to other processes than those that own blocks.

        Raises:
            DistributedError: If the process groups differ.
        """
        if not self.is_complete and self.ranks.group is not ranks.group:
            raise DistributedError(
                f"The blocks are owned by {self.ranks.size} processes, but the risk has another process group.",
                "Pass a risk whose data are split over the same group, or use K.gathered().",
            )

    def check_complete(self, formula: str) -> None:
        """Raise if this process does not have all blocks of an operator.

        Raises:
            DistributedError: If blocks have owners.
        """
        if not self.is_complete:
            raise DistributedError(
                f"The blocks of {formula} are owned by {self.ranks.size} processes, and this needs all of them in each "
                "process.",
                "Call K.gathered() in all processes, which copies all blocks to each of them, or compute K with "
                "placement='replicated'.",
            )

    def agree(self, where: str, of_data: Ranks | None = None) -> AbstractContextManager[None]:
        """Return a context that ends in the same way in all processes; see `Ranks.agreed`.

        Args:
            where: Description of the computation.
            of_data: The ranks that share the data. They must agree if no process owns blocks.
        """
        return (of_data if self.is_complete and of_data is not None else self.ranks).agreed(where)

    def same(self, formula: str, **arguments: object) -> None:
        """Raise if arguments differ between ranks. Otherwise, each block would use those of its owner."""
        # Compare text, because NaN differs from itself. The order of a dictionary does not matter.
        texts = {n: sorted(map(repr, v.items())) if isinstance(v, Mapping) else repr(v) for n, v in arguments.items()}
        self.ranks.same(f"The arguments for {formula}", texts, "Pass the same arguments in all processes.")

    def same_vectors(self, columns: Mapping[str, Tensor]) -> None:
        """Raise if vectors differ between ranks."""
        check_same(self.ranks, "product", {"The vectors to multiply with": Same(columns, _SAME_VECTORS)})

    def empty_like(self, t: Tensor) -> Tensor:
        """Return a tensor for blocks to write their parts into, before a `sum`: parts of other ranks are zero."""
        return torch.empty_like(t) if self.is_complete else torch.zeros_like(t)

    def sum(self, formula: str, parts: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in place."""
        add_up(self.ranks, formula, parts)

    def concat(self, where: str, numbers: Tensor) -> Tensor:
        """Return the numbers of all blocks, given those of the blocks of this process, as vectors."""
        if self.is_complete:
            return numbers
        found = self.ranks.gather(where, (len(numbers), numbers.dtype))
        sizes = [size for size, _ in found]
        start = sum(sizes[: self.ranks.rank])
        # A rank without blocks does not know the precision of the others.
        result = numbers.new_zeros(sum(sizes), dtype=reduce(torch.promote_types, [dtype for _, dtype in found]))
        result[start : start + len(numbers)] = numbers
        self.sum(where, [result])
        return result

    def union(self, where: str, items: list[T]) -> list[T]:
        """Return the items of all ranks, given those of this process, in the order of ranks."""
        return [item for some in self.ranks.gather(where, items) for item in some]

    def all(self, where: str, flag: bool) -> bool:
        """Whether a flag is true on all ranks."""
        return all(self.ranks.gather(where, flag))

    def fetch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state, whose lists are about the blocks of this process, with the items and tensors of all ranks."""
        found: dict[str, Any] = fetched(joined(self.ranks, state, _lists(state)))
        return found

    def each(self, items: list[tuple[K, Any]]) -> Iterator[tuple[K, Any]]:
        """Yield the items of all ranks, given those of this process, sorted by their keys.

        The tensors of one item at a time are sent, so that all ranks must iterate together.

        Args:
            items: Keys, which differ between all items, with states.
        """
        found = joined(self.ranks, {"items": items}, ["items"])["items"]
        for key, state in sorted(found, key=itemgetter(0)):
            yield key, fetched(state)

    def write(self, path: str | Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write a state, as in `fetch`, into one file. Rank 0 writes it, and holds one tensor of others at a time."""
        write_joined(self.ranks, path, about, joined(self.ranks, state, _lists(state), root=0))


class Replicated(Distribution):
    """All blocks in every process.

    Example:
        >>> everywhere = Replicated()
        >>> everywhere.has("weight"), everywhere.concat("traces", torch.ones(2))
        (True, tensor([1., 1.]))
    """

    def __init__(self) -> None:
        super().__init__(Ranks(), {})


class Owned(Distribution):
    """Each block on its owner rank."""


REPLICATED = Replicated()


def by_bytes(ranks: Ranks, sizes: Mapping[str, int]) -> Distribution:
    """Distribute blocks over ranks by their bytes; a single process has all of them."""
    if not ranks.are_several:
        return REPLICATED
    parts = [Part(name, EIGENVALUES, n, diagonal=(True,), itemsize=1, eigen=True) for name, n in sizes.items()]
    return Owned(ranks, {name: rank for (name, _), rank in place(parts, ranks.size).owners.items()})


def _lists(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the items of a state that are about the blocks of one rank."""
    return [name for name, value in state.items() if isinstance(value, list)]
