"""Copies of batches to a device: nobody waits for an accelerator."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfs.data import Batch, is_named_tuple, tensors_in, with_values
from kfs.errors import DataError


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


def moved(x: Any, y: Tensor, first: int, device: torch.device, count: Callable[[Tensor], float | Tensor]) -> Batch:
    """Return a batch on a device.

    Args:
        x: Inputs.
        y: Targets.
        first: Index of the first datum.
        device: Where to.
        count: Counts what a mean over the targets divides by.

    Raises:
        DataError: If they have no values.
    """
    try:
        y = move(y, device)
        return Batch(move(x, device), y, first, count(y))
    except NotImplementedError as error:
        if "meta" not in str(error):
            raise
        raise DataError(
            "A batch is on the meta device, where tensors have shapes but no values.",
            f"Pass data with values: the model is on {device}.",
        ) from error


def copies_end(x: Any, y: Tensor, device: torch.device) -> Callable[[], None]:
    """Return what waits until a batch that was just moved to a device may be overwritten where it was.

    Copies from pinned memory are made while the host goes on. A loader may use this memory for its next batch.
    """
    if device.type == "cuda" and any(t.is_pinned() for t in (*tensors_in(x), y)):  # pragma: no cover (tested on a GPU)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize
    return lambda: None
