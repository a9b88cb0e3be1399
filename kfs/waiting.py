"""Where the host waits for an accelerator: here, and nowhere else in a pass over data.

An accelerator runs behind the host. Who asks it for a number waits until it has caught up, and it idles while the host
makes up its mind. So checks set flags on the device, counts stay there, and both are read together at the end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def runs_behind(device: torch.device) -> bool:
    """Whether asking a device for a number means to wait for it."""
    return device.type not in {"cpu", "meta"}


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors without axes; an accelerator is asked once for all of them.

    Example:
        >>> numbers([torch.tensor(2), torch.tensor(0.5)])
        [2.0, 0.5]
    """
    if not tensors:
        return []
    device = tensors[0].device
    with waiting_allowed():
        values: list[float] = torch.stack([t.to(device, torch.float64) for t in tensors]).tolist()
    return values


@contextmanager
def waiting_allowed() -> Iterator[None]:
    """Wait on purpose: PyTorch's debug mode for synchronisation says nothing in this context."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()  # pragma: no cover (tested on a GPU)
    torch.cuda.set_sync_debug_mode("default")  # pragma: no cover
    try:  # pragma: no cover
        yield
    finally:  # pragma: no cover
        torch.cuda.set_sync_debug_mode(before)
