"""Recognising parameters: a tensor that lives in a parameter's memory belongs to it, whatever view of it it is."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Source:
    """A tensor that is followed: a parameter, or a virtual one (see `capture`).

    Attributes:
        name: The parameter's name.
        tensor: The parameter, or the virtual one; kept, so that its memory stays its own.
        virtual: How a virtual parameter's gradients are taken.
    """

    name: str
    tensor: Tensor
    virtual: "Virtual | None" = None
    start: int = field(init=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        """Note where in memory it is."""
        self.start = self.tensor.data_ptr()
        reach = sum((n - 1) * stride for n, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        self.stop = self.start + (reach + 1) * self.tensor.element_size()


class Virtual:
    """How gradients of a virtual parameter are taken, which is decided by the operation that makes it meet the data.

    Args:
        record: Takes note of the use, and returns what receives gradients. Its argument says whether the first axis
            of the result turned out to be the batch axis (as for zeros of shape `[N, ...]`). If not, gradients are
            `[columns, N, *shape]`.
    """

    def __init__(self, record: Callable[[bool], Callable[[Tensor], None]]) -> None:
        """Decide nothing yet."""
        self._record = record
        self._receive: Callable[[Tensor], None] | None = None
        self._arrived: list[Tensor] = []

    def collector(self) -> Callable[[Tensor], None]:
        """Return what collects gradients `[columns, N, *shape]` of one of several operations that broadcast it."""
        if self._receive is None:
            self._receive = self._record(False)
        return self._arrived.append

    def receiver(self) -> Callable[[Tensor], None]:
        """Return what receives gradients `[columns, *shape]`, if the first axis is the batch axis."""
        return self._record(True)

    def pass_on(self) -> None:
        """After a backward pass: pass on the sum of what was collected."""
        if self._receive is not None and self._arrived:
            self._receive(torch.stack(self._arrived).sum(0))
            self._arrived.clear()


@dataclass(frozen=True)
class View:
    """Some consecutive rows of a parameter, perhaps transposed."""

    source: Source
    rows: tuple[int, int]
    transposed: bool


class Sources:
    """All tensors that are followed, by the memory that they live in."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        """Start with parameters."""
        self._by_storage: dict[int, list[Source]] = {}
        for name, p in params.items():
            self.add(Source(name, p))

    def add(self, source: Source) -> None:
        """Follow another tensor."""
        if source.tensor.numel():
            self._by_storage.setdefault(source.tensor.untyped_storage().data_ptr(), []).append(source)

    def find(self, t: Tensor) -> Source | None:
        """Return what a tensor is a view of; nothing for a tensor that was detached from a trainable parameter."""
        if t.layout != torch.strided:
            return None
        inside = self._by_storage.get(t.untyped_storage().data_ptr(), ())
        for source in inside:
            if source.start <= t.data_ptr() < source.stop and (t.requires_grad or not source.tensor.requires_grad):
                return source
        return None

    def get(self, t: Tensor) -> Source:
        """Return what a tensor is a view of; it must be followed."""
        source = self.find(t)
        assert source is not None  # noqa: S101 (whoever asks has found it before)
        return source

    def view(self, t: Tensor | None) -> View | None:
        """Return which rows of a parameter a tensor is, or nothing if it is not such a simple view of a parameter."""
        source = None if t is None else self.find(t)
        if t is None or source is None or source.virtual is not None or t.dtype != source.tensor.dtype:
            return None
        for transposed in (False, True):
            p, q = source.tensor, t.T if transposed and t.ndim == 2 else t
            if q.ndim == p.ndim > 0 and q.shape[1:] == p.shape[1:] and q.stride() == p.stride():
                first = (q.storage_offset() - p.storage_offset()) // max(p.stride(0), 1)
                return View(source, (first, first + len(q)), transposed)
        return None
