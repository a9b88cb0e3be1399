"""Collective operations: sums over ranks in place, sums at an owner, copies from an owner, states that are gathered.

Agreement between ranks before tensors travel lives in `kfs.distributed.ranks`.
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

# Large enough that starting an exchange does not count, and small enough that copies of a few buckets do not either.
BUCKET_BYTES = 2**25
# A triangle travels as so many panels of rows. They have 1/64 of the square below the diagonal.
_PANELS = 32
# Numbers of so many bytes are read as such integers. Larger ones are read as several of them: see `_checksum`.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# The constants of splitmix64, as signed integers.
_SCRAMBLE = tuple(number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ROW = 2**14  # For a checksum, integers are arranged in rows of so many.
_ROWS_AT_ONCE = 2**9  # so that products take 64 MiB at most
_multipliers: dict[torch.device, Tensor] = {}  # one for each place of a row; 128 KiB for each device


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

    All ranks must be at the same place of the program. For an accelerator, nothing is exchanged before; others hear of
    errors here.

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


class Same(NamedTuple):
    """Something that must be the same on all ranks.

    Attributes:
        values: Tensors, or small values with a `repr` that says what they are, by name.
        way_out: What to do if they differ.
    """

    values: Mapping[str, Any]
    way_out: str


def check_same(ranks: Ranks, where: str, facts: Mapping[str, Same]) -> None:
    """Refuse what differs between ranks, on all of them. A small message travels, and another one if something differs.

    Args:
        ranks: Who takes part. One process alone has nothing to do.
        where: What is about to be computed, in words.
        facts: What must be the same, by what it is called at the start of a sentence, such as `"Parameters"`.

    Raises:
        DistributedError: If something differs. It names the tensors, or the values.

    Example:
        >>> check_same(Ranks(None), "sums", {"Settings": Same({"seed": 0}, "Pass the same seed in all processes.")})
    """
    if ranks.are_several:
        refuse_different(ranks, facts, ranks.gather(where, digest_of(facts)))


def digest_of(facts: Mapping[str, Same]) -> bytes:
    """Return what tells facts from others, for a message. An accelerator is asked once.

    Example:
        >>> digest_of({"Settings": Same({"seed": 0}, "")}) == digest_of({"Settings": Same({"seed": 1}, "")})
        False
    """
    tensors = [[t for t in fact.values.values() if isinstance(t, Tensor)] for fact in facts.values()]
    described = [(what, _details(fact.values)) for what, fact in facts.items()]
    return hashlib.blake2b(repr((described, checksums(tensors))).encode(), digest_size=16).digest()


def refuse_different(ranks: Ranks, facts: Mapping[str, Same], every: Sequence[bytes]) -> None:
    """Refuse facts that differ, given the digests of all ranks.

    Raises:
        DistributedError: If something differs. It names the tensors, or the values.

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
    """Return values by name; in place of tensors, shapes and dtypes, with their checksums if these are given."""
    numbers = iter(sums)
    return {
        name: (list(value.shape), value.dtype, *islice(numbers, 1)) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _difference(ranks: Ranks, what: str, fact: Same) -> DistributedError:
    """Return the error for something that differs. All ranks tell each other all details of it."""
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
            text = f"{few(tensors)} of rank {rank} {'is' if len(tensors) == 1 else 'are'} not as on rank 0"
        else:
            mine, theirs = (
                ", ".join(f"{name}={shown(pair[side])}" for name, pair in found.items() if pair[side] is not missing)
                for side in (0, 1)
            )
            text = f"rank 0 has {mine or 'nothing'}, and rank {rank} has {theirs or 'nothing'}"
        return DistributedError(f"{what} differ between processes: {text}.", fact.way_out)
    return DistributedError(f"{what} differ between processes: they have another order.", fact.way_out)


def checksum(t: Tensor) -> int:
    """Return a number that tells a tensor from others of its shape, and is the same for the same bits.

    Example:
        >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
        False
    """
    return checksums([[t]])[0]


def checksums(lists: Iterable[Sequence[Tensor]]) -> list[int]:
    """Return a checksum for each list of tensors. An accelerator is asked once for all of them.

    Numbers are read as integers of 32 bits or fewer, each is multiplied by a 64-bit constant that depends on its place,
    and all products are added up, modulo 2^64: a sum of integers does not depend on the order in which a device takes
    it. A number in float32 takes 28 bytes of traffic: it is copied into a bucket, and its product is written and read.

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
    """Whether a tensor is an array in memory. Of others, such as sparse or quantized ones, shapes are compared."""
    return type(t) in {Tensor, Parameter} and t.layout is torch.strided and not (t.is_meta or t.is_quantized)


def _checksum(place: int, parts: Sequence[Tensor]) -> Tensor:
    """Return the checksum of a bucket, which depends on its place among others."""
    flat = torch.cat([part.detach().resolve_conj().resolve_neg().reshape(-1) for part in parts])
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    # A product with a 64-bit number of 32 bits keeps all of them. Of 64 bits, it would keep the sign of a number in its
    # highest bit alone, where the signs of two numbers cancel each other.
    integers = flat.view(_INTEGERS[min(flat.element_size(), 4)])
    if flat.device not in _multipliers:
        _multipliers[flat.device] = _scrambled(torch.arange(_ROW, device=flat.device))
    columns = _multipliers[flat.device]
    whole = len(integers) // _ROW * _ROW
    pieces = [*integers[:whole].reshape(-1, _ROW).split(_ROWS_AT_ONCE), integers[whole:].unsqueeze(0)]
    rows = torch.cat([(piece * columns[: piece.shape[1]]).sum(1) for piece in pieces])
    # Rows have constants of their own. Those of columns start at zero, and those of buckets are far from each other.
    return (rows * _scrambled(torch.arange(len(rows), device=rows.device) + (place + 1) * 2**40)).sum()


def _scrambled(z: Tensor) -> Tensor:
    """Return a random odd number for each integer: the outputs of splitmix64, where integers are modulo 2^64."""
    z = z * _SCRAMBLE[0]
    for shift, factor in zip((30, 27), _SCRAMBLE[1:], strict=True):
        z = (z ^ _shifted(z, shift)) * factor
    return (z ^ _shifted(z, 31)) | 1


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
    sync: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        bucket = sync.setdefault((part.dtype, part.device), [])
        bucket.append(part)
        if sum(one.numel() * one.element_size() for one in bucket) >= BUCKET_BYTES:
            yield bucket
            sync[part.dtype, part.device] = []
    yield from filter(None, sync.values())


def flattened(ranks: Ranks, parts: list[Tensor]) -> Tensor:
    """Return a copy of the numbers of all parts, on a device from which they can travel."""
    flat = torch.cat([part.detach().reshape(-1) for part in parts])
    return flat.to(ranks.device_for(flat.device))


def copy_back(flat: Tensor, parts: list[Tensor]) -> None:
    """Undo `flattened`, in place."""
    for part, numbers in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.detach().copy_(numbers.view(part.shape))


def _start(ranks: Ranks, parts: list[Tensor]) -> _Bucket:
    """Copy tensors into a bucket, and let it be added up."""
    flat = flattened(ranks, parts)
    with connected("sums"):
        return _Bucket(parts, flat, dist.all_reduce(flat, group=ranks.group, async_op=True))


def _finish(bucket: _Bucket) -> None:
    """Wait for a bucket, and copy it back."""
    with connected("sums"):
        bucket.work.wait()
    copy_back(bucket.flat, bucket.parts)


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


def joined(ranks: Ranks, state: Mapping[str, Any], lists: Iterable[str], root: int | None = None) -> dict[str, Any]:
    """Return the state of all ranks together, without any tensor of it. All ranks call it.

    Args:
        ranks: Who takes part. One process alone gets its state back.
        state: That of this rank.
        lists: Names of items that are lists, of which each rank has a part. Other items are those of rank 0.
        root: The rank that gets tensors when they are fetched. By default all of them do.

    Returns:
        A state with an `Elsewhere` for every tensor. All ranks must fetch all of them, in the order in which
        `kfs.files.write` and `fetched` do.

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
