"""The memory of a device, and factors that are too large for it."""

import os
from functools import cache
from pathlib import Path

import torch

from kfs.display.describe import readable_size

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
