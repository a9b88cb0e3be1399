"""Synchronization of the host with an accelerator, and checks of data without synchronization.

A pass over data reads numbers from a device only through this module.

An accelerator runs behind the host. If the host reads a number, it waits until the accelerator has finished all
operations before it. The accelerator then idles until the host has launched new ones. Therefore, checks set flags on
the device, counts stay on the device, and both are read together at the end of a pass.

`DeferredChecks` records only the first example that failed a check of values. If the record has an example at the end,
its data are checked again, for an error that says what is wrong with them. On a CPU, there is nothing to wait for, and
checks are made at once.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

T = TypeVar("T")
_constants: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}
_MOST = 64  # maximum number of cached constants
_ERROR = 2  # PyTorch's debug mode in which synchronizing operations raise errors


def is_asynchronous(device: torch.device) -> bool:
    """Return whether reading a number from a device synchronizes the host with it."""
    return device.type not in {"cpu", "meta"}


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of zero-dimensional tensors, with a single synchronization for all of them.

    Example:
        >>> numbers([torch.tensor(2), torch.tensor(0.5)])
        [2.0, 0.5]
    """
    if not tensors:
        return []
    device = tensors[0].device
    with allow_sync():
        values: list[float] = torch.stack([t.to(device, torch.float64) for t in tensors]).tolist()
    return values


class Message:
    """An asynchronous copy of booleans from a device to the host.

    Args:
        flags: The booleans, `[n]`. They may be changed afterwards.

    Example:
        >>> message = Message(torch.tensor([True, False]))
        >>> message.read()
        [True, False]
    """

    def __init__(self, flags: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if flags.is_cuda:  # pragma: no cover (tested on a GPU)
            self._flags = flags.to("cpu", non_blocking=True)  # PyTorch allocates pinned memory for this
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(flags.device))
        else:
            self._flags = flags.clone()

    def read(self) -> list[bool]:
        """Return the booleans, and wait for the copy if it is not complete."""
        with allow_sync():
            if self._event is not None:  # pragma: no cover (tested on a GPU)
                self._event.synchronize()
            flags: list[bool] = self._flags.tolist()
        return flags


def counting(size: int, device: torch.device) -> Tensor:
    """Return `torch.arange(size)`. The result may be cached; do not modify it."""
    return _kept(("counting", size, torch.int64, device), lambda: torch.arange(size, device=device))


def ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of ones. The result may be cached; do not modify it."""
    return _kept(("ones", size, dtype, device), lambda: torch.ones(size, dtype=dtype, device=device))


def _kept(key: tuple[str, int, torch.dtype, torch.device], make: Callable[[], Tensor]) -> Tensor:
    """Return a constant, and cache it if it is on an accelerator."""
    found = _constants.get(key)
    if found is None:
        found = unwrapped(make())
        # Do not cache a tensor that is created during a CUDA graph capture: it has no values yet.
        if is_asynchronous(key[3]) and not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            _constants[key] = found
            if len(_constants) > _MOST:
                _constants.pop(next(iter(_constants)), None)  # another thread may have removed it already
    return found


def unwrapped(constant: Tensor) -> Tensor:
    """Strip functorch wrappers, so that a cached tensor is valid outside of the `torch.func` transform."""
    while is_functorch_wrapped_tensor(constant):
        constant = get_unwrapped(constant)
    return constant


def number(value: float | Tensor) -> float:
    """Return a Python number, reading it from the device if it is a zero-dimensional tensor."""
    return numbers([value])[0] if isinstance(value, Tensor) else value


def side_by_side(one: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
    """Run two independent functions and return both results; a CUDA graph runs them concurrently."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return one(), other()
    # Shared inputs exist before the fork, and results are read only after both streams are joined.
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()  # pragma: no cover (tested on a GPU)
    side.wait_stream(main)  # pragma: no cover
    with torch.cuda.stream(side):  # pragma: no cover
        first = one()
    second = other()  # pragma: no cover
    main.wait_stream(side)  # pragma: no cover
    return first, second  # pragma: no cover


@contextmanager
def allow_sync() -> Iterator[None]:
    """Disable PyTorch's debug mode for synchronization in this context, for intended synchronization."""
    before = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if not before:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")  # pragma: no cover (tested on a GPU)
    try:  # pragma: no cover
        yield
    finally:  # pragma: no cover
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def detect_syncs() -> Iterator[list[str]]:  # pragma: no cover (tested on a GPU)
    """Collect PyTorch's warnings about synchronizing operations in this context; other warnings are emitted again.

    The list is complete when the context has ended. It stays empty if PyTorch's debug mode turns synchronizing
    operations into errors.
    """
    waits: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    if before == _ERROR:
        yield waits
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        text = str(one.message)
        if text.startswith("called a synchronizing"):
            waits.append(text)
        elif not text.startswith("Synchronization debug mode is a prototype"):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# Larger than the index of any example, and exact in float64.
_NONE = 2**52


class DeferredChecks:
    """Records the first example that failed a check, on the device and without synchronization.

    Args:
        device: Device of the record.

    Example:
        >>> flags = DeferredChecks(torch.device("cpu"))
        >>> flags.note(torch.tensor([False, True, True]), first=10)
        >>> flags.first_failure()
        11
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), _NONE, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Clear the record in place, so that CUDA graphs keep using the same memory."""
        self._first.fill_(_NONE)

    def note(self, bad: Tensor | None, first: int | Tensor) -> None:
        """Record examples that failed a check.

        Args:
            bad: Booleans, `[N]`, true for examples that failed; `None` if no example can fail.
            first: Index of the first of these examples; a tensor in a CUDA graph.
        """
        if bad is None:
            return
        index = counting(len(bad), bad.device) + first
        found = torch.where(bad, index, _NONE).amin()
        torch.minimum(self._first, found.to(self._first.device), out=self._first)

    def first_failure(self) -> int | None:
        """Return the index of the first example that failed a check, or `None`. This synchronizes with the device."""
        (first,) = numbers([self._first])
        return None if first == _NONE else int(first)


def not_finite(f: Tensor) -> Tensor:
    """Return booleans `[N]`: which predictions `[N, ...]` have NaN or positive infinity (negative infinity is a mask).

    Example:
        >>> not_finite(torch.tensor([[0.0, -torch.inf], [torch.nan, 1.0]])).tolist()
        [False, True]
    """
    if f[:1].numel() == 0:
        return torch.zeros(len(f), dtype=torch.bool, device=f.device)
    largest = f.amax(tuple(range(1, f.ndim))) if f.ndim > 1 else f
    return (largest < torch.inf).logical_not_()
