"""Copies of batches to a device: nobody waits for an accelerator."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfs.data import is_named_tuple, tensors_in, with_values


def move(x: Any, device: torch.device) -> Any:
    """Move all tensors in a batch's input to a device."""
    if isinstance(x, Mapping):
        return with_values(x, {key: move(value, device) for key, value in x.items()})
    if type(x) in {tuple, list}:
        return type(x)(move(value, device) for value in x)
    if isinstance(x, Tensor):
        # A copy to a GPU need not be waited for; see `copies_end`. One from there must be complete before it is read.
        return x.to(device, non_blocking=x.is_cpu and device.type == "cuda")
    if hasattr(x, "to"):  # packed sequences
        return x.to(device)
    return type(x)(*(move(value, device) for value in x)) if is_named_tuple(x) else x


def copies_end(x: Any, y: Tensor, device: torch.device) -> Callable[[], None]:
    """Return what waits until a batch that was just moved to a device may be overwritten where it was.

    Copies from pinned memory are made while the host goes on. A loader may use this memory for its next batch.
    """
    if device.type == "cuda" and any(t.is_pinned() for t in (*tensors_in(x), y)):  # pragma: no cover (tested on a GPU)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize
    return lambda: None
