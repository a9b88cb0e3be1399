"""Parameters that are combined with the batch indirectly: broadcast parameters, derived parameters, copies."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kfs.factors.rows.row_map import Receiver, RowMap, RowQuery, StridedRows
from kfs.factors.trace.plan import Argument, Broadcast, Call
from kfs.factors.trace.tracking import Derived, Tracked
from kfs.runtime.precision import full_precision

if TYPE_CHECKING:
    from kfs.factors.trace.discovery import Discovery


class Spread:
    """Entries of a parameter spread over a tensor, whose gradients are mapped back to per-example gradients.

    Args:
        shape: The tensor's shape.
        index: The parameter entry at each position of the tensor, of the tensor's shape.
        source: The parameter's shape.
        own: The axes of the tensor along which entries differ, if known. Along the other axes, entries repeat.
        along_own_axes: The entries along these axes. By default, those of the whole tensor, which may be large.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        index: Tensor,
        source: tuple[int, ...],
        own: tuple[int, ...] | None = None,
        along_own_axes: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.index = index
        self.source = source
        self.own = own
        self.along_own_axes = index.flatten() if along_own_axes is None else along_own_axes
        self._readers: dict[StridedRows, Callable[[Tensor], Tensor]] = {}

    @classmethod
    def expanded(cls, t: Argument, shape: tuple[int, ...]) -> "Spread":
        """Describe (a view of) a parameter that is expanded to a shape."""
        assert t.source is not None  # noqa: S101 (only called for tracked arguments)
        padded = (1,) * (len(shape) - t.ndim) + t.shape
        strides = (0,) * (len(shape) - t.ndim) + t.stride
        strides = tuple(0 if n == 1 else stride for n, stride in zip(padded, strides, strict=True))
        own = tuple(axis for axis, stride in enumerate(strides) if stride != 0 and shape[axis] != 1)
        places = torch.arange(max(prod(t.source[0]), 1))
        index = places.as_strided(shape, strides, t.offset)  # a view
        lengths, steps = [shape[axis] for axis in own], [strides[axis] for axis in own]
        along_own_axes = places.as_strided(lengths, steps, t.offset).flatten()
        return cls(shape, index, t.source[0], own, along_own_axes)

    @property
    def free(self) -> tuple[int, ...]:
        """The axes along which entries repeat."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in (self.own or ()))

    def reader(self, row_map: RowMap) -> Callable[[Tensor], Tensor]:
        """Return a function that maps gradients `[columns, *shape]` to `[columns, N, *source]`."""
        if not isinstance(row_map, StridedRows):
            return self._by_number(row_map)
        if row_map not in self._readers:
            self._readers[row_map] = self._by_axes(row_map) or self._data_by_data(row_map) or self._by_number(row_map)
        return self._readers[row_map]

    def _by_axes(self, row_map: StridedRows) -> Callable[[Tensor], Tensor] | None:
        """Return a reader that sums over repeated axes; `None` if entries differ along the batch axis."""
        if self.own is None:
            return None
        rows = self._rows(row_map)
        if rows is None:
            return None
        order = (*self.free, *self.own)
        entries = self.along_own_axes
        index = None if _in_order(entries, prod(self.source)) else entries

        def read(g: Tensor) -> Tensor:
            columns = g.permute(0, *(1 + axis for axis in order)).reshape(len(g), -1, len(entries))
            sums = torch.stack([rows.by_datum(column).sum(1) for column in columns])
            return scattered(sums, index, self.source)

        return read

    def _rows(self, row_map: StridedRows) -> StridedRows | None:
        """Return the row map along the repeated axes; `None` if examples differ along other axes."""
        free = self.free
        for place, axis in enumerate(free):
            tail = prod(self.shape[axis + 1 :])
            inner = row_map.inner // max(tail, 1)  # how many consecutive indices of this axis belong to an example
            if inner and inner * tail == row_map.inner and self.shape[axis] % (row_map.num_data * inner) == 0:
                return StridedRows(row_map.num_data, inner * prod(self.shape[other] for other in free[place + 1 :]))
        return None

    def _data_by_data(self, row_map: StridedRows) -> Callable[[Tensor], Tensor] | None:
        """Return a reader that reshapes; `None` unless each example is contiguous and all have the same entries."""
        index = self.index.reshape(-1, row_map.inner)
        if len(index) != row_map.num_data or not torch.equal(index, index[:1].expand_as(index)):
            return None
        entries = None if _in_order(index[0], prod(self.source)) else index[0]
        return lambda g: scattered(g.reshape(len(g), row_map.num_data, -1), entries, self.source)

    def _by_number(self, row_map: RowMap) -> Callable[[Tensor], Tensor]:
        """Return a reader that scatters gradients one by one, for any row map."""
        data = row_map.index(prod(self.shape))
        size = prod(self.source)
        counted = (data >= 0).nonzero().flatten()
        places = (data * size + self.index.flatten().to(data.device))[counted]

        def read(g: Tensor) -> Tensor:
            numbers = g.reshape(len(g), -1).index_select(1, on_device(counted, g.device))
            sums = g.new_zeros(len(g), row_map.num_data * size)
            sums.index_add_(1, on_device(places, g.device), numbers)
            return sums.reshape(len(g), row_map.num_data, *self.source)

        return read


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """Return indices on a device. Copies are cached, because recorded passes cannot copy from the host."""
    if index.device == device:
        return index
    values = index.cpu().contiguous().numpy().tobytes()  # pragma: no cover (tested on a GPU)
    return _copied(values, tuple(index.shape), device)  # pragma: no cover


@lru_cache(maxsize=256)
def _copied(values: bytes, shape: tuple[int, ...], device: torch.device) -> Tensor:  # pragma: no cover (as above)
    # This does not synchronize: unpinned memory is read before the call returns.
    return torch.frombuffer(bytearray(values), dtype=torch.int64).reshape(shape).to(device, non_blocking=True)


def scattered(g: Tensor, index: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Scatter-add entries `[..., k]` into tensors of a shape, `[..., *shape]`."""
    if index is None:
        return g.reshape(*g.shape[:-1], *shape)
    full = g.new_zeros(*g.shape[:-1], prod(shape))
    return full.index_add_(-1, on_device(index, g.device), g).reshape(*g.shape[:-1], *shape)


def tap_broadcast(seen: "Discovery", step: Broadcast, t: Tensor, call: Call) -> Tensor:
    """Expand (a view of) a parameter to a shape with a batch axis, and return it with a tap."""
    z = t.expand(step.shape)
    if step.plan is None:
        derived = seen.tracker.get(t).derived
        assert derived is not None  # noqa: S101 (without a plan, it is a derived parameter)
        with full_precision(z.device.type):
            collect = derived.collector()
        return tap_spread(seen, z, (call.name, step.argument.name or ""), step.spread, collect)
    with full_precision(z.device.type):
        (plan,) = seen.trace.settled(step.plan, [step.plan], call, z)
        receive = seen.use(plan, None)
    return seen.tap(z, receive)


def saved_as_before(pairs: Sequence[tuple[Tensor, Tensor]]) -> AbstractContextManager[Any]:
    """Return a context in which hooks on saved tensors get parameters in place of their expanded copies.

    An activation checkpoint runs the model again without taps, and compares the shapes of the tensors that both runs
    save. Derivatives broadcast a parameter by themselves.

    Args:
        pairs: Expanded tensors with taps, and the tensors that they replace.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    before = {(z.data_ptr(), z.shape, z.stride()): t.detach() for z, t in pairs}
    return saved_tensors_hooks(lambda z: pack(before.get((z.data_ptr(), z.shape, z.stride()), z)), unpack)


def tap_spread(
    seen: "Discovery", z: Tensor, what: tuple[str, str], spread: Spread, collect: Callable[[Tensor], None]
) -> Tensor:
    """Return a tensor of parameter entries with a tap that collects per-example gradients."""

    def start(row_map: RowMap) -> Receiver:
        read = spread.reader(row_map)
        return lambda g: collect(read(g.squeeze(-1)))

    # Every number is a row of its own, because the batch axis may be any axis.
    receive = seen.rows.receiver(RowQuery(what, tuple(z.shape), meeting=True), start)
    return seen.tap(z, lambda g: receive(g.unsqueeze(-1)))


def add_derived(
    seen: "Discovery",
    out: Tensor,
    name: str,
    token: Any,
    operation: str,
    add_use: Callable[[], Receiver],
    also: Collection[str] = (),
) -> Tensor:
    """Track the output of an operation that does not depend on data yet; `add_use` is as in `Derived`."""
    out = out.contiguous()
    measure = seen.rows.observe((operation, name), tuple(out.shape)) if seen.num_data > 1 else None
    if measure is not None:
        out = seen.tap(out, measure)
    derived = Derived(add_use)
    seen.derived.append(derived)
    seen.tracker.add(Tracked(name, out, ("derived", token, out.shape), derived, frozenset(also)))
    return out


def _in_order(entries: Tensor, size: int) -> bool:
    return len(entries) == size and torch.equal(entries, torch.arange(size))
