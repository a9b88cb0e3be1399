"""Tracking parameters: a tensor that lives in a parameter's storage belongs to it, whatever view of it it is.

Parameters are recognized by the identity of their storage and by their place in it, never by an address alone: memory
that was freed is used again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Tracked:
    """A tensor that is tracked: a parameter, a copy of one, or a derived parameter."""

    name: str  # the parameter's
    tensor: Tensor  # kept, so that its storage stays its own
    token: Any  # what identifies it in plans; the same for every batch
    derived: "Derived | None" = None  # how gradients of a derived parameter are taken
    start: int = field(init=False)  # half-open range of bytes in the storage
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        """Note which bytes of the storage it has."""
        t = self.tensor
        reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        self.start = int(t.storage_offset()) * t.element_size()
        self.stop = self.start + (reach + 1) * t.element_size()


class Derived:
    """How gradients of a *derived parameter* are taken: of what is computed from one parameter and constants alone.

    Args:
        add_use: Takes note of the use, and returns what takes gradients `[columns, N, *shape]`.
    """

    def __init__(self, add_use: Callable[[], Callable[[Tensor], None]]) -> None:
        """Decide nothing yet."""
        self._add_use = add_use
        self._receive: Callable[[Tensor], None] | None = None
        self._arrived: list[Tensor] = []

    def collector(self) -> Callable[[Tensor], None]:
        """Return what collects gradients `[columns, N, *shape]` of one of several operations that use it."""
        if self._receive is None:
            self._receive = self._add_use()
        return self._arrived.append

    def pass_on(self) -> None:
        """After a backward pass: pass on the sum of what was collected."""
        if self._receive is not None and self._arrived:
            total = self._arrived[0] if len(self._arrived) == 1 else torch.stack(self._arrived).sum(0)
            self._receive(total)
            self._arrived.clear()


class Tracker:
    """All tensors that are tracked, by the storage that they live in.

    Args:
        params: The parameters, by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """Start with parameters."""
        self.params = dict(params)
        self._by_storage: dict[int, list[Tracked]] = {}
        self._added: set[int] = set()
        self._register()

    def forget_batch(self) -> None:
        """Forget tensors that only a batch had: they may be large."""
        for storage in self._added:
            del self._by_storage[storage]
        self._added.clear()

    def has_moved(self) -> bool:
        """Look where parameters are now, and return whether they have other storages than before."""
        if [_place(p) for p in self.params.values()] == self._places:
            return False
        self._register()
        return True

    def add(self, tracked: Tracked) -> None:
        """Track another tensor with a storage of its own, for this batch."""
        storage = _storage(tracked.tensor)
        self._by_storage[storage] = [tracked]
        self._added.add(storage)

    def find(self, t: Tensor) -> Tracked | None:
        """Return what a tensor is a view of; `None` also if it was detached from a trainable parameter."""
        if t.layout is not torch.strided:
            return None
        inside = self._by_storage.get(t.untyped_storage()._cdata)
        if inside is None:
            return None
        at = t.storage_offset() * t.element_size()
        for tracked in inside:
            if tracked.start <= at < tracked.stop and (t.requires_grad or not tracked.tensor.requires_grad):
                return tracked
        return None

    def get(self, t: Tensor) -> Tracked:
        """Return what a tensor is a view of; it must be tracked."""
        tracked = self.find(t)
        assert tracked is not None  # noqa: S101 (whoever asks has found it before)
        return tracked

    def _register(self) -> None:
        """Note where parameters are."""
        self._by_storage.clear()
        self._places = [_place(p) for p in self.params.values()]
        for name, p in self.params.items():
            if p.numel():
                self._by_storage.setdefault(_storage(p), []).append(Tracked(name, p, name))


def _storage(t: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    identity: int = t.untyped_storage()._cdata
    return identity


def _place(t: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is, and how it is read."""
    return t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype
