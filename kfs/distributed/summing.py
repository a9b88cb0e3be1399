"""Tensors added up over all ranks, in place, in a few large buckets: every rank gets the same numbers, bit by bit.

Each number is added up once, by one rank, and then copied to the others, so that there is one order of additions. Sums
for one rank alone, and copies of what one rank has, live in `owning`.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kfs.distributed.ranks import Ranks, connected
from kfs.waiting import waiting_allowed

# Large enough that starting an exchange does not count, and small enough that copies of a few buckets do not either.
BUCKET_BYTES = 2**25
# A triangle travels as so many panels of rows. They have 1/64 of the square below the diagonal.
_PANELS = 32
# For numbers of so many bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The constants of splitmix64, as signed integers.
_SCRAMBLE = tuple(number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class _Bucket(NamedTuple):
    """Parts that travel together."""

    parts: list[Tensor]
    flat: Tensor
    work: Any


def add_up(ranks: Ranks, where: str, parts: Iterable[Tensor]) -> None:
    """Replace tensors by their sums over all ranks, in place.

    Args:
        ranks: Who takes part. One process alone has nothing to do.
        where: What is added up, in words.
        parts: Tensors, or views of them; of the same shapes and dtypes on all ranks, in the same order.

    Raises:
        DistributedError: If shapes or dtypes differ between ranks.
        Exception: The error that another rank has met instead of getting here.

    Example:
        >>> total = torch.ones(2, 3)
        >>> add_up(Ranks(None), "ones", [total])
    """
    if not ranks.are_several:
        return
    found = list(parts)
    shapes = [f"{list(part.shape)} {part.dtype}" for part in found]
    digest = hashlib.blake2b(" ".join(shapes).encode(), digest_size=16).hexdigest()
    summary = {"tensors": len(found), "numbers": sum(part.numel() for part in found), "shapes": digest}
    ranks.same(f"The tensors of {where}", summary, "Use the same model, parameters and settings in all processes.")
    under_way: deque[_Bucket] = deque()
    for some in buckets(found):
        under_way.append(_start(ranks, some))
        if len(under_way) > 2:  # while one is exchanged, the next one is filled
            _finish(under_way.popleft())
    while under_way:
        _finish(under_way.popleft())


def added_up(ranks: Ranks, where: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums over all ranks by name; what is given is not changed, and may share memory.

    Example:
        >>> added_up(Ranks(None), "ones", {"weight": torch.ones(2)})
        {'weight': tensor([1., 1.])}
    """
    if not ranks.are_several:
        return dict(tensors)
    copies = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    add_up(ranks, where, copies.values())
    return copies


def all_true(ranks: Ranks, flag: Tensor) -> Tensor:
    """Return whether a flag, or each of several, is true on all ranks: a tensor on its device, which nobody waits for.

    All ranks must be at the same place of the program; nothing is exchanged before.

    Example:
        >>> all_true(Ranks(None), torch.tensor(True))
        tensor(True)
    """
    if not ranks.are_several:
        return flag
    number = flag.to(ranks.device_for(flag.device), torch.int32, copy=True)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=ranks.group)
    return number.to(flag.device, torch.bool)


def checksum(t: Tensor) -> int:
    """Return a number that tells a tensor from others of its shape, and is the same for the same bits.

    Example:
        >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
        False
    """
    z = t.detach().contiguous().reshape(-1).view(_INTEGERS[t.element_size()]).to(torch.int64)
    # Each number is scrambled together with its place (splitmix64; integers are modulo 2^64), and all are added up: a
    # sum of integers does not depend on the order in which a device takes it.
    z = z + torch.arange(len(z), device=z.device) * _SCRAMBLE[0]
    for shift, factor in zip((30, 27), _SCRAMBLE[1:], strict=True):
        z = (z ^ _shifted(z, shift)) * factor
    with waiting_allowed():
        return int((z ^ _shifted(z, 31)).sum())


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, as if integers had no sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def upper_triangle(matrices: Tensor) -> Iterator[Tensor]:
    """Yield views of matrices `[..., D, D]` that together have everything on and above the diagonal.

    Example:
        >>> [list(panel.shape) for panel in upper_triangle(torch.eye(3))]
        [[1, 3], [1, 2], [1, 1]]
    """
    for start, stop in _panels(matrices.shape[-1]):
        yield matrices[..., start:stop, start:]


def fill_lower_triangle(matrices: Tensor) -> None:
    """Copy what `upper_triangle` has above the diagonal of matrices `[..., D, D]` to below it, in place."""
    for start, stop in _panels(matrices.shape[-1]):
        matrices[..., stop:, start:stop] = matrices[..., start:stop, stop:].mT


def _panels(size: int) -> Iterator[tuple[int, int]]:
    """Return half-open ranges of rows."""
    height = max(1, -(-size // _PANELS))
    for start in range(0, size, height):
        yield start, min(start + height, size)


def buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Put tensors of one kind and device together, up to some size."""
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        bucket = waiting.setdefault((part.dtype, part.device), [])
        bucket.append(part)
        if sum(one.numel() * one.element_size() for one in bucket) >= BUCKET_BYTES:
            yield bucket
            waiting[part.dtype, part.device] = []
    yield from filter(None, waiting.values())


def _start(ranks: Ranks, parts: list[Tensor]) -> _Bucket:
    """Copy tensors into a bucket, and let it be added up."""
    flat = torch.cat([part.detach().reshape(-1) for part in parts])
    flat = flat.to(ranks.device_for(flat.device))
    with connected("sums"):
        return _Bucket(parts, flat, dist.all_reduce(flat, group=ranks.group, async_op=True))


def _finish(bucket: _Bucket) -> None:
    """Wait for a bucket, and copy it back."""
    with connected("sums"):
        bucket.work.wait()
    sizes = [part.numel() for part in bucket.parts]
    for part, total in zip(bucket.parts, bucket.flat.split(sizes), strict=True):
        part.detach().copy_(total.view(part.shape))
