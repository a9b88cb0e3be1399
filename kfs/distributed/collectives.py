"""Collective operations: sums over ranks in place, sums at an owner rank, copies from an owner rank, gathered states.

Agreement between ranks before tensors are sent lives in `kfs.distributed.ranks`.

`add_up` sums tensors in place, in a few large buckets. Each number is summed once, by one rank, and then copied to the
others. So there is one order of additions, and every rank gets the same bits. Before the sum, ranks can compare the
values that they compute tensors from (`check_same`): tensors by a checksum, other values as they are.

`add_up_at` sums tensors for one owner rank, which takes half of the traffic of a sum for all ranks. `copy_from` copies
tensors from an owner rank to all others, and `start_copies` does so in the background. Ranks must have agreed on shapes
and owners before: these functions check nothing.

`joined` makes one state from the states of all ranks. A state consists of nested dictionaries and lists of tensors, as
in files of `kfs.files`. Each rank has some items of certain lists. In the joined state, every tensor is fetched from
its rank when it is needed, one at a time.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from kfs.display.suggestions import few
from kfs.distributed.ranks import Ranks, connected, shown
from kfs.errors import DistributedError
from kfs.files import Elsewhere, in_file_order, with_tensors, write
from kfs.runtime import sync

# Large enough to make the latency of a collective negligible, and small enough to make the memory of a few buckets
# negligible.
BUCKET_BYTES = 2**25
_UNDER_WAY = 2  # number of buckets that are being summed while the next one is filled
# Number of panels of rows in which a triangle is sent. Together, they contain 1/64 of the square below the diagonal.
_PANELS = 32
# Integer dtypes by size in bytes, for reading the bits of numbers. Larger numbers are read as several integers: see
# `_checksum`.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# The constants of splitmix64, as signed integers.
_SCRAMBLE = tuple(number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ROW = 2**14  # length of the rows in which a checksum arranges integers
_ROWS_AT_ONCE = 2**9  # limits the memory of products to 64 MiB
_multipliers: dict[torch.device, Tensor] = {}  # a multiplier for each column; 128 KiB for each device


class _Bucket(NamedTuple):
    """Tensors that are summed or copied in one collective operation, and its handle."""

    parts: list[Tensor]
    flat: Tensor
    work: Any


def add_up(ranks: Ranks, where: str, parts: Iterable[Tensor]) -> None:
    """Replace tensors by their sums over all ranks, in place.

    Args:
        ranks: The participating ranks. A single process does nothing.
        where: Description of the tensors, for messages.
        parts: Tensors or views, with the same shapes and dtypes on all ranks, in the same order.

    Raises:
        DistributedError: If shapes or dtypes differ between ranks.
        Exception: The error of another rank that failed before this call.

    Example:
        >>> total = torch.ones(2, 3)
        >>> add_up(Ranks(None), "ones", [total])
    """
    if not ranks.are_several:
        return
    # Compare shapes and dtypes first: a collective operation on different shapes would hang or fail.
    found = list(parts)
    shapes = [f"{list(part.shape)} {part.dtype}" for part in found]
    digest = hashlib.blake2b(" ".join(shapes).encode(), digest_size=16).hexdigest()
    summary = {"tensors": len(found), "numbers": sum(part.numel() for part in found), "shapes": digest}
    ranks.same(f"The tensors of {where}", summary, "Use the same model, parameters and settings in all processes.")

    # Pipeline: fill a bucket while earlier ones are being summed.
    under_way: deque[Transfers] = deque()
    for some in buckets(found):
        flat = flattened(ranks, some)
        with connected("sums"):
            work = dist.all_reduce(flat, group=ranks.group, async_op=True)
        under_way.append(Transfers(True, [_Bucket(some, flat, work)]))
        if len(under_way) > _UNDER_WAY:
            under_way.popleft().wait()
    for one in under_way:
        one.wait()


def added_up(ranks: Ranks, where: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums over all ranks by name, without changing the given tensors, which may share memory.

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
    """Return, for each flag, whether it is true on all ranks. The result stays on the device, without synchronization.

    All ranks must be at the same place of the program. On a CPU, the error of another rank is raised here. On an
    accelerator, no messages are exchanged, so errors are not reported.

    Example:
        >>> all_true(Ranks(None), torch.tensor(True))
        tensor(True)
    """
    if not ranks.are_several:
        return flag
    if not sync.is_asynchronous(flag.device):
        return torch.tensor(ranks.gather("flags", flag.tolist())).all(0)
    number = flag.to(ranks.device_for(flag.device), torch.int32, copy=True)
    with connected("flags"):
        dist.all_reduce(number, dist.ReduceOp.MIN, group=ranks.group)
    return number.to(flag.device, torch.bool)


def largest(ranks: Ranks, sizes: Tensor) -> Tensor:
    """Return the largest of each size over all ranks; infinite if it is not finite on one of them.

    The result stays on the device, without synchronization. Like `all_true`, it exchanges messages on a CPU.

    Example:
        >>> largest(Ranks(None), torch.ones(2))
        tensor([1., 1.])
    """
    if not ranks.are_several:
        return sizes
    finite = torch.where(sizes.isfinite(), sizes, torch.inf)
    if not sync.is_asynchronous(sizes.device):
        return torch.stack(ranks.gather("sizes", finite)).amax(0)
    found = finite.to(ranks.device_for(sizes.device), copy=True)
    with connected("sizes"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks.group)
    return found.to(sizes.device)


class Same(NamedTuple):
    """Values that must be the same on all ranks.

    Attributes:
        values: Tensors, or small values with a meaningful `repr`, by name.
        way_out: How to fix it if they differ.
    """

    values: Mapping[str, Any]
    way_out: str


def check_same(ranks: Ranks, where: str, facts: Mapping[str, Same]) -> None:
    """Raise an error on all ranks if values differ between ranks. Only digests are sent, and details if they differ.

    Args:
        ranks: The participating ranks. A single process does nothing.
        where: Description of the computation, for messages.
        facts: Values that must be the same, by their name at the start of a sentence, such as `"Parameters"`.

    Raises:
        DistributedError: If values differ. The message names the tensors or the values.

    Example:
        >>> check_same(Ranks(None), "sums", {"Settings": Same({"seed": 0}, "Pass the same seed in all processes.")})
    """
    if ranks.are_several:
        refuse_different(ranks, facts, ranks.gather(where, digest_of(facts)))


def digest_of(facts: Mapping[str, Same]) -> bytes:
    """Return a digest of facts, with a single synchronization.

    Example:
        >>> digest_of({"Settings": Same({"seed": 0}, "")}) == digest_of({"Settings": Same({"seed": 1}, "")})
        False
    """
    tensors = [[t for t in fact.values.values() if isinstance(t, Tensor)] for fact in facts.values()]
    described = [(what, _details(fact.values)) for what, fact in facts.items()]
    return hashlib.blake2b(repr((described, checksums(tensors))).encode(), digest_size=16).digest()


def refuse_different(ranks: Ranks, facts: Mapping[str, Same], every: Sequence[bytes]) -> None:
    """Raise an error on all ranks if facts differ, given the digests of all ranks.

    Raises:
        DistributedError: If facts differ. The message names the tensors or the values.

    Example:
        >>> refuse_different(Ranks(None), {}, [digest_of({})])
    """
    if len(set(every)) == 1:
        return
    by_kind = ranks.gather("what differs", {what: digest_of({what: fact}) for what, fact in facts.items()})
    for what, fact in facts.items():
        if any(one.get(what) != by_kind[0].get(what) for one in by_kind):
            raise _difference(ranks, what, fact)


def _details(values: Mapping[str, Any], sums: Iterable[int] = ()) -> dict[str, Any]:
    """Return values by name, with each tensor replaced by its shape, dtype and, if given, checksum."""
    numbers = iter(sums)
    return {
        name: (list(value.shape), value.dtype, *islice(numbers, 1)) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _difference(ranks: Ranks, what: str, fact: Same) -> DistributedError:
    """Return the error for values that differ, after exchanging their details between all ranks."""
    each = [[value] for value in fact.values.values() if isinstance(value, Tensor)]
    every = ranks.gather(f"differences of {what}", _details(fact.values, checksums(each)))
    missing = object()
    for rank, other in enumerate(every):
        both = [(name, every[0].get(name, missing), other.get(name, missing)) for name in {**every[0], **other}]
        found = {name: (mine, theirs) for name, mine, theirs in both if mine != theirs}
        if not found:
            continue
        tensors = [name for name in found if isinstance(fact.values.get(name), Tensor)]
        if tensors:
            text = f"{few(tensors)} of rank {rank} {'differs' if len(tensors) == 1 else 'differ'} from rank 0"
        else:
            mine, theirs = (
                ", ".join(f"{name}={shown(pair[side])}" for name, pair in found.items() if pair[side] is not missing)
                for side in (0, 1)
            )
            text = f"rank 0 has {mine or 'nothing'}, and rank {rank} has {theirs or 'nothing'}"
        return DistributedError(f"{what} differ between processes: {text}.", fact.way_out)
    return DistributedError(f"{what} differ between processes: their order is different.", fact.way_out)


def checksum(t: Tensor) -> int:
    """Return a checksum of the bits of a tensor, which distinguishes it from other tensors of the same shape.

    Example:
        >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
        False
    """
    return checksums([[t]])[0]


def checksums(lists: Iterable[Sequence[Tensor]]) -> list[int]:
    """Return a checksum for each list of tensors, with a single synchronization.

    Numbers are read as integers of 32 bits or fewer. Each integer is multiplied by a 64-bit constant that depends on
    its position, and all products are added up modulo 2^64. A sum of integers does not depend on the order of summation
    on a device. A float32 number takes 28 bytes of memory traffic: it is copied into a bucket, and its product is
    written and read.

    Example:
        >>> one, other = checksums([[torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]])
        >>> one == other
        False
    """
    plain = [[t for t in tensors if _has_plain_bits(t)] for tensors in lists]
    sums = [[_checksum(place, some) for place, some in enumerate(buckets(tensors))] for tensors in plain]
    found = [one for some in sums for one in some]
    with sync.allow_sync():
        numbers = iter(torch.stack([one.to(found[0].device) for one in found]).tolist() if found else ())
    return [sum(islice(numbers, len(some))) for some in sums]


def _has_plain_bits(t: Tensor) -> bool:
    """Return whether a tensor is a plain dense array; the values of other tensors are not part of a checksum."""
    return type(t) in {Tensor, Parameter} and t.layout is torch.strided and not (t.is_meta or t.is_quantized)


def _checksum(place: int, parts: Sequence[Tensor]) -> Tensor:
    """Return the checksum of a bucket, given its position in the list of buckets."""
    flat = torch.cat([part.detach().resolve_conj().resolve_neg().reshape(-1) for part in parts])
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    # Read 32-bit integers: the product with a 64-bit constant keeps all their bits. The product of a 64-bit integer
    # would keep its sign only in the highest bit, where the signs of two numbers cancel each other.
    integers = flat.view(_INTEGERS[min(flat.element_size(), 4)])
    if flat.device not in _multipliers:
        _multipliers[flat.device] = _scrambled(torch.arange(_ROW, device=flat.device))

    # Weight the integers within each row by their column.
    columns = _multipliers[flat.device]
    whole = len(integers) // _ROW * _ROW
    pieces = [*integers[:whole].reshape(-1, _ROW).split(_ROWS_AT_ONCE), integers[whole:].unsqueeze(0)]
    rows = torch.cat([(piece * columns[: piece.shape[1]]).sum(1) for piece in pieces])
    # Weight the rows by other constants: column constants start at counter zero, row constants of each bucket far away.
    return (rows * _scrambled(torch.arange(len(rows), device=rows.device) + (place + 1) * 2**40)).sum()


def _scrambled(z: Tensor) -> Tensor:
    """Return a pseudo-random odd number for each integer: the output of splitmix64 with its last bit set."""
    z = z * _SCRAMBLE[0]
    for shift, factor in zip((30, 27), _SCRAMBLE[1:], strict=True):
        z = (z ^ _shifted(z, shift)) * factor
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift integers to the right as if they were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def upper_triangle(matrices: Tensor) -> Iterator[Tensor]:
    """Yield views of matrices `[..., D, D]` that together cover the diagonal and all entries above it.

    Example:
        >>> [list(panel.shape) for panel in upper_triangle(torch.eye(3))]
        [[1, 3], [1, 2], [1, 1]]
    """
    for start, stop in _panels(matrices.shape[-1]):
        yield matrices[..., start:stop, start:]


def fill_lower_triangle(matrices: Tensor) -> None:
    """Mirror the panels of `upper_triangle` of matrices `[..., D, D]` to below the diagonal, in place."""
    for start, stop in _panels(matrices.shape[-1]):
        matrices[..., stop:, start:stop] = matrices[..., start:stop, stop:].mT


def _panels(size: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of rows that divide a matrix into panels."""
    height = max(1, -(-size // _PANELS))
    for start in range(0, size, height):
        yield start, min(start + height, size)


def buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors by dtype and device into buckets; a bucket is full when it has at least `BUCKET_BYTES`."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        bucket = filling.setdefault((part.dtype, part.device), [])
        bucket.append(part)
        if sum(one.numel() * one.element_size() for one in bucket) >= BUCKET_BYTES:
            yield bucket
            filling[part.dtype, part.device] = []
    yield from filter(None, filling.values())


def flattened(ranks: Ranks, parts: list[Tensor]) -> Tensor:
    """Return all tensors concatenated into one vector, on a device from which the backend can send it."""
    flat = torch.cat([part.detach().reshape(-1) for part in parts])
    return flat.to(ranks.device_for(flat.device))


def copy_back(flat: Tensor, parts: list[Tensor]) -> None:
    """Copy a vector from `flattened` back into the tensors, in place."""
    for part, numbers in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.detach().copy_(numbers.view(part.shape))


class Transfers:
    """Tensors that are sent in the background.

    Args:
        receives: Whether tensors of this rank get new values.
        under_way: Tensors that are sent together, in memory that they are received in.
    """

    def __init__(self, receives: bool, under_way: Sequence[_Bucket]) -> None:
        self._receives = receives
        self._buckets = under_way

    def wait(self) -> None:
        """Wait until the tensors of this rank have their values. Later calls do nothing."""
        for bucket in self._buckets:
            with connected("sums and copies"):
                bucket.work.wait()
            if self._receives:
                copy_back(bucket.flat, bucket.parts)
        self._buckets = ()


def start_copies(ranks: Ranks, owner: int, parts: Iterable[Tensor]) -> Transfers:
    """Start the copies of `copy_from`, in the background.

    Example:
        >>> start_copies(Ranks(None), 0, [torch.ones(2, 3)]).wait()
    """
    under_way = []
    for some in buckets(list(parts)) if ranks.are_several else ():
        flat = flattened(ranks, some)
        with connected("copies from owners"):
            work = dist.broadcast(flat, group=ranks.group, group_src=owner, async_op=True)
        under_way.append(_Bucket(some, flat, work))
    return Transfers(ranks.rank != owner, under_way)


def add_up_at(ranks: Ranks, owner: int, parts: Iterable[Tensor]) -> None:
    """Sum tensors over all ranks in place: the owner rank gets the sums, and all other ranks get zeros.

    The sum over all ranks does not change.

    Args:
        ranks: The participating ranks. A single process does nothing.
        owner: The rank that gets the sums.
        parts: Tensors or views, with the same shapes and dtypes on all ranks, in the same order.

    Example:
        >>> total = torch.ones(2, 3)
        >>> add_up_at(Ranks(None), 0, [total])
    """
    add_up_at_owners(ranks, {owner: parts})


def add_up_at_owners(ranks: Ranks, parts: Mapping[int, Iterable[Tensor]]) -> None:
    """Sum tensors over all ranks like `add_up_at`, for several owners: given their tensors.

    Example:
        >>> add_up_at_owners(Ranks(None), {0: [torch.ones(2, 3)]})
    """
    under_way: deque[Transfers] = deque()
    for owner, some in parts.items() if ranks.are_several else ():
        for bucket in buckets(list(some)):
            flat = flattened(ranks, bucket)
            if ranks.rank != owner:
                torch._foreach_zero_([part.detach() for part in bucket])
            with connected("sums for owners"):
                work = dist.reduce(flat, group=ranks.group, group_dst=owner, async_op=True)
            under_way.append(Transfers(ranks.rank == owner, [_Bucket(bucket, flat, work)]))
            if len(under_way) > _UNDER_WAY:
                under_way.popleft().wait()
    for one in under_way:
        one.wait()


def copy_from(ranks: Ranks, owner: int, parts: Iterable[Tensor]) -> None:
    """Broadcast tensors from an owner rank to all ranks, in place.

    Args:
        ranks: The participating ranks. A single process does nothing.
        owner: The rank that has the values.
        parts: Tensors or views, with the same shapes and dtypes on all ranks, in the same order.

    Example:
        >>> inverse = torch.ones(2, 3)
        >>> copy_from(Ranks(None), 0, [inverse])
    """
    start_copies(ranks, owner, parts).wait()


def joined(ranks: Ranks, state: Mapping[str, Any], lists: Iterable[str], root: int | None = None) -> dict[str, Any]:
    """Gather the state of all ranks without its tensors, which are fetched later. All ranks must call it.

    Args:
        ranks: The participating ranks. A single process gets a copy of its state, with its tensors.
        state: The state of this rank.
        lists: Names of items that are lists and are concatenated over ranks. All other items are taken from rank 0.
        root: The rank that receives tensors when they are fetched. By default, all ranks receive them.

    Returns:
        The joint state with an `Elsewhere` for each tensor. All ranks must fetch all tensors, in the order of
        `kfs.files.write` and `fetched`.

    Example:
        >>> joined(Ranks(None), {"blocks": [1, 2]}, ["blocks"])
        {'blocks': [1, 2]}
    """
    if not ranks.are_several:
        return dict(state)
    # Replace each tensor by a description of its place, and gather the descriptions.
    mine: list[Tensor] = []

    def numbered(t: Tensor) -> "_RemoteTensor":
        mine.append(t)
        return _RemoteTensor(ranks.rank, len(mine) - 1, tuple(t.shape), t.dtype, t.device.type)

    every = ranks.gather("state", with_tensors(dict(state), numbered))
    names = set(lists)
    result = {n: [item for one in every for item in one[n]] if n in names else v for n, v in every[0].items()}

    def elsewhere(place: "_RemoteTensor") -> Elsewhere:
        def fetch() -> Tensor:
            # If a rank failed to write the previous tensor, all ranks raise its error here.
            ranks.gather("tensors", None)
            return _transferred(ranks, place, mine[place.number] if place.rank == ranks.rank else None, root)

        return Elsewhere(place.shape, place.dtype, fetch)

    found: dict[str, Any] = with_tensors(result, elsewhere, _RemoteTensor)
    return found


class _RemoteTensor:
    """Place of a tensor: its rank and index there, with its shape, dtype and device type."""

    def __init__(self, rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        self.rank = rank
        self.number = number
        self.shape = shape
        self.dtype = dtype
        self.kind = kind


def _transferred(ranks: Ranks, place: _RemoteTensor, t: Tensor | None, root: int | None) -> Tensor:
    """Send a tensor to the root or to all ranks, and return it there; return an empty tensor on other ranks."""
    device = ranks.device_for(torch.device(place.kind))
    if t is not None:
        buffer = t.detach().contiguous().to(device)
    elif root in {None, ranks.rank}:
        buffer = torch.empty(place.shape, dtype=place.dtype, device=device)
    else:
        return torch.empty(0)
    with connected("tensors"):
        if root is None:
            dist.broadcast(buffer, group=ranks.group, group_src=place.rank)
        elif place.rank != root:
            if t is None:
                dist.recv(buffer, group=ranks.group, group_src=place.rank)
            else:
                dist.send(buffer, group=ranks.group, group_dst=root)
    return buffer.to(place.kind)


def fetched(state: Any) -> Any:
    """Return a state in which each `Elsewhere` is replaced by its tensor, fetched in the order of a file.

    Example:
        >>> fetched({"weight": Elsewhere((2,), torch.float32, lambda: torch.ones(2))})
        {'weight': tensor([1., 1.])}
    """
    tensors = {id(one): one.fetch() for one in in_file_order(state) if isinstance(one, Elsewhere)}
    return with_tensors(state, lambda one: tensors[id(one)], Elsewhere)


def write_joined(ranks: Ranks, path: str | Path, about: Mapping[str, Any], state: Any, root: int = 0) -> None:
    """Write a state from `joined` into a file on one rank. All ranks must call it.

    Args:
        ranks: The participating ranks.
        path: Path of the file.
        about: Information for readers of the header, by name.
        state: A state from `joined`, or a container that includes one, on all ranks.
        root: The rank that writes.

    Raises:
        StorageError: If the file cannot be written. Call this function inside of `Ranks.agreed`.
    """
    if ranks.rank == root:
        write(path, about, state)
    else:
        fetched(state)
