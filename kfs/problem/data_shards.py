"""Splits data over ranks: consecutive examples, without padding; each example keeps its index among all data."""

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from kfs.distributed.ranks import Group, Ranks
from kfs.errors import DataError, DistributedError
from kfs.problem.data import as_batches, axis_to_cut, default_unpack, fingerprint, repeatably, unpacked
from kfs.runtime.nested import mapped, tensors_in

Unpack = Callable[[Any], tuple[Any, Tensor]]
_SAME_DATA = (
    "Pass all data to kfs.shard, the same in all processes. If each process has data of its own, pass them to "
    "EmpiricalRisk(..., group=group) as they are."
)


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """The data of this process as a part of all data. Returned by `shard`; pass it to `EmpiricalRisk`.

    Attributes:
        batches: The batches of this process; may be empty.
        ranks: The processes that share the data.
        start: Index of the first example among all data.
        stop: End of the half-open range of examples, `start` to `stop`.
        num_data: Total number of examples.
    """

    batches: Iterable[Any]
    ranks: Ranks
    start: int
    stop: int
    num_data: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        which = f"examples {self.start} to {self.stop - 1}" if self.stop > self.start else "no examples"
        return f"Shard of rank {self.ranks.rank} of {self.ranks.size}: {which} of {self.num_data}"


def shard(data: object, group: Group | None, unpack: Unpack | None = None) -> Shard:
    """Split data over the processes of a group: each rank gets consecutive examples, and each example has one rank.

    A single batch, `(X, y)` or a mapping, is sliced along its batch axis, without copies. For a `DataLoader`, the
    indices that it would load are split: each process loads only its own examples, in batches of the same size, in the
    order in which the loader would give them to a single process. Other iterables are split between batches, as evenly
    as the batch sizes allow, and each process iterates over all batches to find its own.

    Args:
        data: All data, the same in all processes, as for `EmpiricalRisk`.
        group: A process group such as `torch.distributed.group.WORLD`, or a device mesh with one axis. If `None`, this
            process keeps all data.
        unpack: As for `EmpiricalRisk`.

    Returns:
        The data of this process. It stores the group, so `EmpiricalRisk(model, loss, shard)` needs no `group=`.

    Raises:
        DataError: If the data cannot be split, or were split by a `DistributedSampler`.
        DistributedError: If data differ between processes, or `torch.distributed` was not initialized.

    Example:
        >>> import torch
        >>> shard((torch.rand(10, 3), torch.rand(10, 2)), None)
        Shard of rank 0 of 1: examples 0 to 9 of 10
    """
    if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DistributedError(
            f"There are {os.environ['WORLD_SIZE']} processes, but torch.distributed was not initialized.",
            "Call torch.distributed.init_process_group() first; before, torch.distributed.group.WORLD is None.",
        )
    if isinstance(data, Shard):
        raise DataError("The data are already a shard.", "Pass all data to kfs.shard.")
    ranks = Ranks(group)
    with ranks.agreed("kfs.shard"):
        refuse_distributed_sampler(data)
        batches = as_batches(data)
        if batches is not data:
            return _of_one_batch(data, ranks, unpack or default_unpack)
        if isinstance(data, DataLoader) and _loads_by_index(data):
            return _of_loader(data, ranks)
        return _of_batches(batches, ranks, unpack or default_unpack)


def data_of_rank(data: object, group: Group | None) -> tuple[Ranks, object, int | None]:
    """Return the ranks, the data of this process, and the index of its first example (`None` if unknown).

    Args:
        data: A shard, or the data of this process.
        group: The group that was passed with the data. A shard stores its own group.

    Raises:
        DistributedError: If `group` differs from the group of the shard.
        DataError: If the data were split by a `DistributedSampler`.
    """
    ranks = Ranks(group)
    if isinstance(data, Shard):
        if group is not None and ranks.group is not data.ranks.group:
            raise DistributedError(
                "The data are a shard for a different group of processes.",
                "Leave group= out, or pass the group of kfs.shard(data, group).",
            )
        return data.ranks, data.batches, data.start
    if not ranks.are_several:
        return ranks, data, 0
    with ranks.agreed("data of a risk"):
        refuse_distributed_sampler(data)
    return ranks, data, None


def refuse_distributed_sampler(data: object) -> None:
    """Raise an error if a loader has a `DistributedSampler`, which interleaves examples and repeats some of them.

    Raises:
        DataError: If the sampler is a `DistributedSampler`.
    """
    owners = (data, getattr(data, "batch_sampler", None))
    if any(isinstance(getattr(owner, "sampler", None), DistributedSampler) for owner in owners):
        raise DataError(
            "The loader has a DistributedSampler, which repeats data until all processes have the same number of "
            "examples, and does not keep their order.",
            "Leave the sampler out, and pass the loader of all data to kfs.shard(loader, group).",
        )


def _loads_by_index(loader: "DataLoader[Any]") -> bool:
    """Return whether the loader's batches are exactly those that its batch sampler selects from the data set."""
    as_usual = type(loader).__iter__ is DataLoader.__iter__ and not isinstance(loader.dataset, IterableDataset)
    return as_usual and loader.batch_sampler is not None


def _bounds(ranks: Ranks, num_data: int) -> tuple[int, int]:
    """Return the half-open range of examples of this rank; lengths differ by at most one."""
    return ranks.rank * num_data // ranks.size, (ranks.rank + 1) * num_data // ranks.size


def _of_one_batch(batch: Any, ranks: Ranks, unpack: Unpack) -> Shard:
    """Slice a single batch along its batch axis."""
    x, y = unpacked(unpack, batch)
    ranks.same("The data", fingerprint(x, y), _SAME_DATA)
    start, stop = _bounds(ranks, len(y))
    if all(axis_to_cut(t.shape, len(y), None) is None for t in tensors_in(x)):
        raise DataError(
            f"No tensor of the inputs has an axis of length {len(y)}, one for every target.",
            "Pass a list of batches, which is split between batches.",
        )

    def cut(t: Tensor) -> Tensor:
        axis = axis_to_cut(t.shape, len(y), None)
        return t if axis is None else t.narrow(axis, start, stop - start)

    return Shard([mapped(batch, cut)] if stop > start else [], ranks, start, stop, len(y))


def _of_loader(loader: "DataLoader[Any]", ranks: Ranks) -> Shard:
    """Split the indices that a loader would load."""
    of_indices = DataLoader(_Indices(), batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator)
    order = list(repeatably(of_indices))

    # All ranks must draw the same order.
    digest = hashlib.blake2b(repr(order).encode(), digest_size=16).hexdigest()
    num_data = sum(map(len, order))
    ranks.same("The data", {"data": num_data, "order": digest}, _SAME_DATA)

    # Intersect each batch of indices with the range of this rank.
    start, stop = _bounds(ranks, num_data)
    mine = []
    ends = list(accumulate(map(len, order)))
    for indices, end in zip(order, ends, strict=True):
        first = end - len(indices)
        mine.append(indices[max(start - first, 0) : max(stop - first, 0)])
    own = DataLoader(
        loader.dataset,
        batch_sampler=[indices for indices in mine if indices],
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    return Shard(own, ranks, start, stop, num_data)


def _of_batches(batches: Iterable[Any], ranks: Ranks, unpack: Unpack) -> Shard:
    """Split an iterable of batches between batches."""
    sizes = []
    first = None
    for batch in repeatably(batches):
        x, y = unpacked(unpack, batch)
        first = fingerprint(x, y) if first is None else first
        sizes.append(len(y))
    ranks.same("The data", {"batches": sizes, "first batch": first}, _SAME_DATA)
    edges = [0, *accumulate(sizes)]
    num_data = edges[-1]
    places = [_nearest(edges, bound) for bound in _bounds(ranks, num_data)]
    return Shard(_Some(batches, *places), ranks, edges[places[0]], edges[places[1]], num_data)


def _nearest(edges: Sequence[int], bound: int) -> int:
    """Return the index of the edge nearest to a bound; the last bound maps to the last edge."""
    place = bisect_left(edges, bound)
    if bound - edges[max(place - 1, 0)] < edges[place] - bound:
        place -= 1
    return len(edges) - 1 if bound == edges[-1] else place


@dataclass(frozen=True)
class _Some:
    """Consecutive batches of an iterable; each iteration starts a new pass over the iterable."""

    batches: Iterable[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.start, self.stop)


class _Indices(Dataset[Any]):
    """A data set whose examples are their own indices."""

    def __getitem__(self, index: Any) -> Any:
        return index
