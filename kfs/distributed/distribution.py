"""Distributions of blocks over ranks: all blocks in every process, or each block on its owner rank.

Algebra with blocks is written for the blocks of one process. An operator's distribution turns the results of one
process into the results of all: `sum` and `concat` for numbers, `union` for lists, `fetch` and `write` for states.

With `Replicated` blocks, every process has all results already, and no method communicates. With `Owned` blocks, all
ranks call the same methods. Each rank computes the results of its own blocks, and has zeros for the others. So the sum
over ranks is the result, with the same bits on all of them.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfs import files
from kfs.distributed.assignment import EIGENVALUES, Part, place
from kfs.distributed.collectives import Same, add_up, check_same, fetched, joined, write_joined
from kfs.distributed.ranks import Ranks
from kfs.errors import DistributedError

T = TypeVar("T")
_SAME_VECTORS = "Broadcast vectors, or draw them from the same seed in all processes."


class Replicated:
    """All blocks in every process.

    Attributes:
        ranks: This process alone.
        owners: Empty: no block has an owner.
        rank: The owner of all blocks of this process; `None`.
        is_complete: Whether each process has all blocks.

    Example:
        >>> everywhere = Replicated()
        >>> everywhere.has("weight"), everywhere.concat("traces", torch.ones(2))
        (True, tensor([1., 1.]))
    """

    ranks = Ranks()
    owners: Mapping[str, int] = {}
    rank: int | None = None
    is_complete = True

    def has(self, name: str) -> bool:
        """Whether this process has a block."""
        return True

    def shares(self, other: "Distribution") -> bool:
        """Whether the blocks of another operator are on the same ranks."""
        return other.is_complete

    def check(self, ranks: Ranks) -> None:
        """Raise if data belong to other processes than the blocks: never, because each process has all blocks."""

    def check_complete(self, formula: str) -> None:
        """Raise if this process does not have all blocks of an operator: never."""

    def agree(self, where: str, ranks: Ranks | None = None) -> AbstractContextManager[None]:
        """Return a context for computations with blocks, and with the data of other ranks, if these are given."""
        return nullcontext() if ranks is None else ranks.agreed(where)

    def same(self, formula: str, **arguments: object) -> None:
        """Raise if the arguments of a method differ between ranks: never."""

    def same_vectors(self, columns: Mapping[str, Tensor]) -> None:
        """Raise if vectors differ between ranks: never."""

    def empty_like(self, t: Tensor) -> Tensor:
        """Return a tensor that all blocks write their parts into, before a `sum`."""
        return torch.empty_like(t)

    def sum(self, formula: str, parts: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in place."""

    def concat(self, where: str, numbers: Tensor) -> Tensor:
        """Return the numbers of all blocks, given those of the blocks of this process, as vectors."""
        return numbers

    def union(self, where: str, items: list[T]) -> list[T]:
        """Return the items of all ranks, given those of this process."""
        return items

    def all(self, where: str, flag: bool) -> bool:
        """Whether a flag is true on all ranks."""
        return flag

    def fetch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state, whose lists are about the blocks of this process, with the items of all ranks in lists."""
        return dict(state)

    def write(self, path: str | Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write a state, as in `fetch`, into one file; `about` is its header for readers."""
        files.write(path, about, state)


class Owned:
    """Each block on its owner rank.

    Methods are those of `Replicated`. All ranks must call them.

    Args:
        ranks: The ranks that own blocks.
        owners: The rank that owns each block, by name. Rank 0 owns blocks without an entry.
    """

    is_complete = False

    def __init__(self, ranks: Ranks, owners: Mapping[str, int]) -> None:
        self.ranks = ranks
        self.owners = owners
        self.rank: int | None = ranks.rank

    def has(self, name: str) -> bool:
        """Whether this rank owns a block."""
        return self.owners.get(name, 0) == self.ranks.rank

    def shares(self, other: "Distribution") -> bool:
        """Whether the blocks of another operator are on the same ranks."""
        return self.ranks.group is other.ranks.group

    def check(self, ranks: Ranks) -> None:
        """Raise if data belong to other processes than the blocks.

        Raises:
            DistributedError: If the process groups differ.
        """
        if self.ranks.group is not ranks.group:
            raise DistributedError(
                f"The blocks are owned by {self.ranks.size} processes, but the risk has another process group.",
                "Pass a risk whose data are split over the same group, or use K.gathered().",
            )

    def check_complete(self, formula: str) -> None:
        """Raise because this process does not have all blocks of an operator.

        Raises:
            DistributedError: Always.
        """
        raise DistributedError(
            f"The blocks of {formula} are owned by {self.ranks.size} processes, and this needs all of them in each "
            "process.",
            "Call K.gathered() in all processes, which copies all blocks to each of them, or compute K with "
            "placement='replicated'.",
        )

    def agree(self, where: str, ranks: Ranks | None = None) -> AbstractContextManager[None]:
        """Return a context that ends in the same way on all ranks that own blocks; see `Ranks.agreed`."""
        return self.ranks.agreed(where)

    def same(self, formula: str, **arguments: object) -> None:
        """Raise if arguments differ between ranks. Otherwise, each block would use those of its owner."""
        # Compare text, because NaN differs from itself. The order of a dictionary does not matter.
        texts = {n: sorted(map(repr, v.items())) if isinstance(v, Mapping) else repr(v) for n, v in arguments.items()}
        self.ranks.same(f"The arguments for {formula}", texts, "Pass the same arguments in all processes.")

    def same_vectors(self, columns: Mapping[str, Tensor]) -> None:
        """Raise if vectors differ between ranks."""
        check_same(self.ranks, "product", {"The vectors to multiply with": Same(columns, _SAME_VECTORS)})

    def empty_like(self, t: Tensor) -> Tensor:
        """Return zeros, because parts of blocks on other ranks must be zero before a `sum`."""
        return torch.zeros_like(t)

    def sum(self, formula: str, parts: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in place."""
        add_up(self.ranks, formula, parts)

    def concat(self, where: str, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, in their order."""
        found = self.ranks.gather(where, (len(numbers), numbers.dtype))
        sizes = [size for size, _ in found]
        start = sum(sizes[: self.rank])
        # A rank without blocks does not know the precision of the others.
        result = numbers.new_zeros(sum(sizes), dtype=reduce(torch.promote_types, [dtype for _, dtype in found]))
        result[start : start + len(numbers)] = numbers
        self.sum(where, [result])
        return result

    def union(self, where: str, items: list[T]) -> list[T]:
        """Return the items of all ranks, in their order."""
        return [item for some in self.ranks.gather(where, items) for item in some]

    def all(self, where: str, flag: bool) -> bool:
        """Whether a flag is true on all ranks."""
        return all(self.ranks.gather(where, flag))

    def fetch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the items of all ranks in lists, and with copies of all their tensors."""
        found: dict[str, Any] = fetched(joined(self.ranks, state, _lists(state)))
        return found

    def write(self, path: str | Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write one file on rank 0, which holds one tensor of other ranks at a time."""
        write_joined(self.ranks, path, about, joined(self.ranks, state, _lists(state), root=0))


Distribution = Replicated | Owned
REPLICATED = Replicated()


def by_bytes(ranks: Ranks, sizes: Mapping[str, int]) -> Distribution:
    """Distribute blocks over ranks by their bytes; a single process has all blocks."""
    if not ranks.are_several:
        return REPLICATED
    parts = [Part(name, EIGENVALUES, size, diagonal=(True,), itemsize=1, eigen=True) for name, size in sizes.items()]
    return Owned(ranks, {name: rank for (name, _), rank in place(parts, ranks.size).owners.items()})


def _lists(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the items of a state that are about the blocks of one rank."""
    return [name for name, value in state.items() if isinstance(value, list)]
