"""Parameters that are broadcast over the batch: added, multiplied, repeated. And copies of parameters.

Such a parameter is expanded to the shape that it is broadcast to, and tapped there, so that its gradients are still
there for every datum and position. Sizes of one aside, the last axis of a parameter holds its features, and the
others are rows: it is like an embedding whose rows are all looked up once for every datum, and has the same factors.
"""

from typing import Any

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.kfac.capture.mode import Capture, Read, is_in_place
from kfs.kfac.capture.parameters import Source
from kfs.kfac.capture.uses import Use
from kfs.kfac.layout import Layout
from kfs.kfac.sums.inputs import Rows


def elementwise(capture: Capture, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that broadcasts its tensors to one shape."""
    args = (*args, *(kwargs.pop(key) for key in ("other", "input", "self") if key in kwargs))
    inputs = [t for t in args if isinstance(t, Tensor)]
    tracked = [t for t in inputs if capture.sources.find(t) is not None]
    in_place = is_in_place(func) and tracked[0] is args[0]
    if in_place or not any(map(capture.is_data, inputs)) or not all(is_followable(capture, t) for t in tracked):
        return NotImplemented
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    swap = {}
    for t in tracked:
        tapped = meet_batch(capture, t, shape, func.__name__.strip("_"))
        if tapped is None:
            return NotImplemented  # nothing is broadcast, so there is no batch axis
        swap[id(t)] = tapped
    return func(*(swap.get(id(t), t) for t in args), **kwargs)


def meet_batch(capture: Capture, t: Tensor, shape: torch.Size, operation: str) -> Tensor | None:
    """Tap (a view of) a parameter that is combined with data of some shape; nothing if one does not see how."""
    source = capture.sources.get(t)
    aligned = t.ndim == len(shape) and t.shape[0] == shape[0] == capture.num_data > 1
    if aligned and source.virtual is not None and source.tensor.shape[0] == capture.num_data:
        # Its first axis has turned out to be the batch axis, as that of zeros for a first state.
        receive, index = source.virtual.receiver(), places_in(t, source, list(range(t.ndim)))
        return capture.tap(t, lambda g: receive(scattered(g.flatten(1).unsqueeze(1), index, source.tensor.shape)[:, 0]))
    if capture.num_data > 1 and [1] * (len(shape) - t.ndim) + list(t.shape) == list(shape):
        return None
    return follow(capture, t, shape, operation)


def repeat(capture: Capture, func: Any, t: Tensor, *sizes: Any) -> Any:
    """Repeat over the batch, along one axis of length one, which is the same as expanding."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    repeated = [axis for axis, size in enumerate(sizes) if size != 1] or [0]
    over_batch = len(sizes) == t.ndim > 1 and len(repeated) == 1 and sizes[repeated[0]] == capture.num_data
    if not over_batch or t.shape[repeated[0]] != 1 or not is_followable(capture, t):
        return NotImplemented
    shape = torch.Size([n * size for n, size in zip(t.shape, sizes, strict=True)])
    return follow(capture, t, shape, "repeat").clone()


def copied(capture: Capture, func: Any, t: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copy a whole parameter, perhaps into another precision, and take the copy for it."""
    result, source = func(t, *args, **kwargs), capture.sources.get(t)
    if not isinstance(result, Tensor) or result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
        return result
    view = capture.sources.view(t)
    if view is None or view.transposed or t.shape != source.tensor.shape:
        return NotImplemented
    capture.sources.add(Source(source.name, result))
    return result


def is_followable(capture: Capture, t: Tensor) -> bool:
    """Whether a tensor is a view of a parameter that is laid out by rows."""
    source = None if t is None else capture.sources.find(t)
    return source is not None and source.tensor.is_contiguous()


def follow(capture: Capture, t: Tensor, shape: torch.Size, operation: str) -> Tensor:
    """Expand (a view of) a parameter to a shape with batch axis, and return it with a tap."""
    source, z = capture.sources.get(t), t.expand(shape)
    own = [axis for axis in range(z.ndim) if z.stride(axis) != 0 and z.shape[axis] != 1]
    free = [axis for axis in range(z.ndim) if axis not in own]
    index = places_in(z, source, own)

    def own_last(g: Tensor) -> Tensor:
        return g.permute(0, *(1 + axis for axis in (*free, *own))).flatten(1 + len(free)) if own else g.unsqueeze(-1)

    if source.virtual is not None:
        lengths, collect = [z.shape[axis] for axis in free], source.virtual.collector()
        if capture.num_data not in lengths:
            raise DataError(
                f"A result that does not depend on the data is combined with them in the shape {list(shape)}, in which "
                f"the batch of {capture.num_data} data is not found.",
                "Put the batch axis first, or leave the parameter out with params=.",
            )
        batch = capture.batch.axis if capture.batch.axis in free else free[lengths.index(capture.num_data)]
        others = [1 + free.index(axis) for axis in free if axis != batch]

        def pass_on(g: Tensor) -> None:
            summed = own_last(g)
            summed = summed.sum(others) if others else summed  # [columns, N, entries]
            collect(scattered(summed, index, source.tensor.shape))

        return capture.tap(z, pass_on)
    layout = entries_layout(source)
    features, places, device = layout.row_size, index.flatten(), z.device
    rows, order = torch.unique(places // features, return_inverse=True)
    places = order * features + places % features  # among the rows that are used
    in_order = torch.equal(places, torch.arange(len(rows) * features))

    def read(g: Tensor) -> Tensor:
        g = own_last(g)
        if not in_order:
            full = g.new_zeros(*g.shape[:-1], len(rows) * features)
            g = full.index_add_(-1, places.to(device), g)
        rows_last: Tensor = g.unflatten(-1, (-1, features))
        return rows_last

    used = rows.to(device) if layout.column_size > 1 else None
    vectors = Rows(used, layout.column_size, tuple(z.shape[axis] for axis in free), z)
    receive = capture.uses.record(Use(capture.batch, operation, layout, vectors, read, z, False, "A"))
    return capture.tap(z, receive)


def record_entries(capture: Capture, out: Tensor, operation: str, source: Source, axes: int, read: Read) -> Tensor:
    """Take note of a use of a whole parameter with several axes, which are the last ones of what `read` returns."""
    layout = entries_layout(source)
    leading = tuple(out.shape[: out.ndim - axes])
    vectors = Rows(all_rows(layout, out), layout.column_size, leading, out)

    def by_rows(g: Tensor) -> Tensor:
        rows_last: Tensor = read(g).flatten(1 + len(leading)).unflatten(-1, (-1, layout.row_size))
        return rows_last

    return capture.record(out, operation, layout, vectors, by_rows, ones=False)


def all_rows(layout: Layout, like: Tensor) -> Tensor | None:
    """Return the indices of all rows of a parameter; nothing if there is only one."""
    return torch.arange(layout.column_size, device=like.device) if layout.column_size > 1 else None


def entries_layout(source: Source) -> Layout:
    """Return the layout of a parameter whose entries are used one by one: features along its last axis."""
    shape = tuple(source.tensor.shape) or (1,)
    features = max((axis for axis, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    order = (features, *(axis for axis in range(len(shape)) if axis != features))
    return Layout(source.name, shape, (0, shape[0]), order, 1)


def places_in(t: Tensor, source: Source, axes: list[int]) -> Tensor:
    """Return which entry of a parameter is where in a view of it; axes over which it is broadcast are left out."""
    return torch.arange(source.tensor.numel()).as_strided(
        [t.shape[axis] for axis in axes],
        [t.stride(axis) for axis in axes],
        t.storage_offset() - source.tensor.storage_offset(),
    )


def scattered(g: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Put entries `[..., k]` at their places in tensors of a shape, `[..., *shape]`."""
    full = g.new_zeros(*g.shape[:-1], shape.numel())
    return full.index_add_(-1, index.flatten().to(g.device), g).reshape(*g.shape[:-1], *shape)


_NAMES = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide")
_OPERATORS = ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv")
_COPIES = ("clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16")
RULES = (
    {getattr(torch, name): elementwise for name in _NAMES}
    | {getattr(Tensor, name): elementwise for name in _NAMES}
    | {getattr(Tensor, f"{name}_"): elementwise for name in _NAMES}
    | {getattr(Tensor, f"__{name}__"): elementwise for name in _OPERATORS}
    | {torch.where: elementwise, torch.rsub: elementwise, Tensor.repeat: repeat, torch.clone: copied}
    | {getattr(Tensor, name): copied for name in _COPIES}
)
