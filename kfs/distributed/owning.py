"""Tensors that one rank owns: sums over all ranks that it alone gets, and copies of what it has for all others.

A sum for one rank is half of the traffic of a sum for all. Ranks must have agreed on shapes and owners before: nothing
is checked here. Sums that all ranks get live in `summing`.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from kfs.distributed.ranks import Ranks, connected
from kfs.distributed.summing import buckets, copy_back, flattened


def add_up_at(ranks: Ranks, owner: int, parts: Iterable[Tensor]) -> None:
    """Add tensors up over all ranks, in place: the owner gets the sums, and others get zeros.

    So the sum over ranks stays what it was.

    Args:
        ranks: Who takes part. One process alone has nothing to do.
        owner: The rank that gets the sums.
        parts: Tensors, or views of them; of the same shapes and dtypes on all ranks, in the same order.

    Example:
        >>> total = torch.ones(2, 3)
        >>> add_up_at(Ranks(None), 0, [total])
    """
    if not ranks.are_several:
        return
    for some in buckets(list(parts)):
        flat = flattened(ranks, some)
        with connected("sums for owners"):
            dist.reduce(flat, group=ranks.group, group_dst=owner)
        if ranks.rank == owner:
            copy_back(flat, some)
        else:
            torch._foreach_zero_([part.detach() for part in some])


def copy_from(ranks: Ranks, owner: int, parts: Iterable[Tensor]) -> None:
    """Write the tensors of one rank over those of all others.

    Args:
        ranks: Who takes part. One process alone has nothing to do.
        owner: The rank that has the numbers.
        parts: Tensors, or views of them; of the same shapes and dtypes on all ranks, in the same order.

    Example:
        >>> inverse = torch.ones(2, 3)
        >>> copy_from(Ranks(None), 0, [inverse])
    """
    if not ranks.are_several:
        return
    for some in buckets(list(parts)):
        flat = flattened(ranks, some)
        with connected("copies from owners"):
            dist.broadcast(flat, group=ranks.group, group_src=owner)
        if ranks.rank != owner:
            copy_back(flat, some)
