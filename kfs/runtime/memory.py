"""The memory of a device, factors that are too large for it, and copies from host memory to a device."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kfs.display.describe import readable_size

T = TypeVar("T")
Move = Callable[[Tensor], Tensor]
# A factor and its inverse are stored together, so one of them may take half of the memory.
SHARE = 2
# Limits of control groups, as containers have them, of both versions.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@cache
def total_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a device, used or not; `None` if they are unknown. `meta` has those of the CPU."""
    if device.type == "cuda":  # pragma: no cover (tested on a GPU)
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type not in {"cpu", "meta"}:
        return None
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # not on every system
        return None
    for file in _LIMITS:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdigit() else []  # "max" is no limit
    return min(found)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a GPU that are free, or that PyTorch has reserved; `None` for other devices."""
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]  # pragma: no cover (tested on a GPU)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # pragma: no cover
    return int(free + reserved)  # pragma: no cover


def copied(items: Iterable[T], device: torch.device, copy: Callable[[T, Move], T]) -> Iterator[T]:
    """Yield copies of items on a device. On a GPU, each is copied while the caller computes with the one before.

    Args:
        items: Items with tensors, in host memory.
        device: The device.
        copy: Returns a copy of an item, given a function that copies one of its tensors to the device.
    """
    if device.type != "cuda":
        yield from (copy(item, lambda t: t.to(device)) for item in items)
        return
    yield from _copied_ahead(items, device, copy)  # pragma: no cover (tested on a GPU)


@cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover
    """Return the stream of copies to a GPU, always the same one, because memory is reserved by stream."""
    return torch.cuda.Stream(device)


def _copied_ahead(  # pragma: no cover
    items: Iterable[T], device: torch.device, copy: Callable[[T, Move], T]
) -> Iterator[T]:
    """Yield copies of items on a GPU, one ahead. Copies from pinned memory run beside computations."""
    stream = _stream_of_copies(device)
    ahead: tuple[T, torch.cuda.Event, list[Tensor]] | None = None
    for item in chain(items, [None]):
        ready, ahead = ahead, None
        if item is not None:
            sent: list[Tensor] = []

            def send(t: Tensor, sent: list[Tensor] = sent) -> Tensor:
                sent.append(t.contiguous().pin_memory().to(device, non_blocking=True) if t.is_cpu else t.to(device))
                return sent[-1]

            with torch.cuda.stream(stream):
                ahead = copy(item, send), stream.record_event(), sent
        if ready is not None:
            here = torch.cuda.current_stream(device)
            here.wait_event(ready[1])
            for t in ready[2]:
                t.record_stream(here)  # its memory is not given away before the caller has used it
            yield ready[0]


def beyond_memory(name: str, nbytes: int, device: torch.device) -> str:
    """Return a sentence if the dense factors of a block take more than half of a device's memory, else `""`.

    Args:
        name: Name of the block.
        nbytes: Bytes of its dense factors.
        device: The device that stores them.
    """
    memory = total_memory(device)
    if memory is None or nbytes <= memory // SHARE:
        return ""
    return (
        f"The dense factors of block {name!r} take {readable_size(nbytes)}, more than half of the memory of "
        f"{'cpu' if device.type == 'meta' else device.type} ({readable_size(memory)})."
    )
