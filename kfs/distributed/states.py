"""States of several ranks as one: nested dictionaries and lists of tensors, most of which other ranks have.

A state is what `kfs.storage` writes. Each rank has one with some items of certain lists. All of them together are one
state, in which every tensor is fetched from the rank that has it when somebody needs it, one at a time.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kfs.distributed.ranks import Ranks, connected
from kfs.storage import Elsewhere, in_file_order, with_tensors, write


def joined(ranks: Ranks, state: Mapping[str, Any], lists: Iterable[str], root: int | None = None) -> dict[str, Any]:
    """Return the state of all ranks together, without any tensor of it. All ranks call it.

    Args:
        ranks: Who takes part. One process alone gets its state back.
        state: That of this rank.
        lists: Names of items that are lists, of which each rank has a part. Other items are those of rank 0.
        root: The rank that gets tensors when they are fetched. By default all of them do.

    Returns:
        A state with an `Elsewhere` for every tensor. All ranks must fetch all of them, in the order in which
        `kfs.storage.write` and `fetched` do.

    Example:
        >>> joined(Ranks(None), {"blocks": [1, 2]}, ["blocks"])
        {'blocks': [1, 2]}
    """
    if not ranks.are_several:
        return dict(state)
    mine: list[Tensor] = []

    def numbered(t: Tensor) -> "_Place":
        mine.append(t)
        return _Place(ranks.rank, len(mine) - 1, tuple(t.shape), t.dtype, t.device.type)

    every = ranks.gather("state", with_tensors(dict(state), numbered))
    names = set(lists)
    result = {n: [item for one in every for item in one[n]] if n in names else v for n, v in every[0].items()}

    def elsewhere(place: "_Place") -> Elsewhere:
        def fetch() -> Tensor:
            # Whoever failed to write the tensor before says so here.
            ranks.gather("tensors", None)
            return _transferred(ranks, place, mine[place.number] if place.rank == ranks.rank else None, root)

        return Elsewhere(place.shape, place.dtype, fetch)

    found: dict[str, Any] = with_tensors(result, elsewhere, _Place)
    return found


class _Place:
    """Where a tensor is: the rank, its number there, and what it looks like."""

    def __init__(self, rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        self.rank = rank
        self.number = number
        self.shape = shape
        self.dtype = dtype
        self.kind = kind


def _transferred(ranks: Ranks, place: _Place, t: Tensor | None, root: int | None) -> Tensor:
    """Send a tensor from the rank that has it to the root, or to all, and return it there; elsewhere, an empty one."""
    device = ranks.device_for(torch.device(place.kind))
    if t is not None:
        travelling = t.detach().contiguous().to(device)
    elif root in {None, ranks.rank}:
        travelling = torch.empty(place.shape, dtype=place.dtype, device=device)
    else:
        return torch.empty(0)
    with connected("tensors"):
        if root is None:
            dist.broadcast(travelling, group=ranks.group, group_src=place.rank)
        elif place.rank != root:
            if t is None:
                dist.recv(travelling, group=ranks.group, group_src=place.rank)
            else:
                dist.send(travelling, group=ranks.group, group_dst=root)
    return travelling.to(place.kind)


def fetched(state: Any) -> Any:
    """Return a state with all tensors that were elsewhere, in the order in which a file has them.

    Example:
        >>> fetched({"weight": Elsewhere((2,), torch.float32, lambda: torch.ones(2))})
        {'weight': tensor([1., 1.])}
    """
    tensors = {id(one): one.fetch() for one in in_file_order(state) if isinstance(one, Elsewhere)}
    return with_tensors(state, lambda one: tensors[id(one)], Elsewhere)


def write_joined(ranks: Ranks, path: str | Path, about: Mapping[str, Any], state: Any, root: int = 0) -> None:
    """Let one rank write a file with a state that was `joined` for it. All ranks call it.

    Args:
        ranks: Who takes part.
        path: Where.
        about: What people want to see in the header, by name.
        state: From `joined`, on all ranks, or something that has it.
        root: The rank that writes.

    Raises:
        StorageError: If the file cannot be written. Call it where ranks agree on errors.
    """
    if ranks.rank == root:
        write(path, about, state)
    else:
        fetched(state)
