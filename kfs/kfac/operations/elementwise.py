"""Parameters that are broadcast over the batch: added, multiplied, concatenated, or whatever else happens to them.

Such a parameter is expanded to the shape that it is broadcast to, and tapped there, so that its gradients are still
there for every datum and position. Sizes of one aside, the last axis of a parameter holds its features, and the
others are rows: it is like an embedding whose rows are all looked up once for every datum, and has the same factors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.errors import DataError
from kfs.kfac.batch_axis import BatchAxis
from kfs.kfac.blocks import Layout
from kfs.kfac.capture import Capture, Read, Receiver, is_in_place, tensors_of
from kfs.kfac.inputs import Rows
from kfs.kfac.views import Source


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
        receive, index = source.virtual.receiver(), _places(t, source, list(range(t.ndim)))
        return capture.tap(
            t, lambda g: receive(_scattered(g.flatten(1).unsqueeze(1), index, source.tensor.shape)[:, 0])
        )
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


def otherwise(capture: Capture, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation without rule.

    What is computed from one parameter and constants is a virtual parameter. Where data meet a parameter that was
    expanded over the batch before, it is tapped. All other uses are probed: one learns whether predictions depend on
    them.
    """
    inputs = tensors_of((*args, *kwargs.values()))
    tracked = [t for t in inputs if capture.sources.find(t) is not None]
    sources = [capture.sources.get(t) for t in tracked]
    names, operation = {source.name for source in sources}, getattr(func, "__name__", str(func))
    if is_in_place(func):  # nobody may look at the result, so that there is nothing to probe
        capture.unexplained.update((name, operation) for name in names)
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    outputs = [t for t in tensors_of([result]) if t.is_floating_point() or t.is_complex()]
    storages = {t.untyped_storage().data_ptr() for t in tracked}
    if not outputs or all(t.untyped_storage().data_ptr() in storages for t in outputs):
        return result  # a view of a parameter, or nothing to differentiate
    data = any(map(capture.is_data, inputs))
    if not data and len(tracked) == 1 and isinstance(result, Tensor) and is_followable(capture, tracked[0]):
        return _derived(capture, func, args, kwargs, tracked[0], result)
    if data and func in _BATCH_FIRST and all(_is_expanded(capture, t) and is_followable(capture, t) for t in tracked):
        swap = {id(t): follow(capture, t, t.shape, operation) for t in tracked}
        return func(*_replaced(args, swap), **{key: _replaced(value, swap) for key, value in kwargs.items()})
    before = any(source.virtual is not None for source in sources)
    return _probed(capture, result, names, f"{operation} before it meets the batch" if before else operation)


def _derived(capture: Capture, func: Any, args: Any, kwargs: Any, t: Tensor, result: Tensor) -> Tensor:
    """Follow what is computed from a parameter and constants; gradients go back through the operation, per datum."""
    source = capture.sources.get(t)
    index, shape = _places(t, source, list(range(t.ndim))), source.tensor.shape

    def again(value: Tensor) -> Tensor:
        swap = {id(t): value}
        out: Tensor = func(*_replaced(args, swap), **{key: _replaced(part, swap) for key, part in kwargs.items()})
        return out

    def record(with_batch: bool) -> Receiver:
        if source.virtual is None:
            receive = _record_entries_per_datum(capture, source, operation=getattr(func, "__name__", "operation"))
        else:
            receive = source.virtual.receiver() if with_batch else source.virtual.collector()
        pull_back = torch.func.vjp(again, t.detach())[1]

        def pass_on(g: Tensor) -> None:
            leading = g.shape[: g.ndim - result.ndim]
            (back,) = torch.func.vmap(pull_back)(g.reshape(-1, *result.shape))
            receive(_scattered(back.reshape(*leading, -1), index, shape))

        return pass_on

    return capture.record_virtual(result, source.name, record)


def _record_entries_per_datum(capture: Capture, source: Source, operation: str) -> Receiver:
    """Take note of a use of all entries of a parameter, once for every datum; gradients are `[columns, N, *shape]`."""
    layout = entries_layout(source)
    vectors = Rows(_all_rows(layout, source.tensor), layout.column_size, (capture.num_data,), source.tensor)

    def by_rows(g: Tensor) -> Tensor:
        rows_last: Tensor = g.flatten(2).unflatten(-1, (-1, layout.row_size))
        return rows_last

    return capture.uses.record(
        BatchAxis(capture.num_data, 0), operation, layout, vectors, by_rows, source.tensor, False, "A"
    )


def is_followable(capture: Capture, t: Tensor) -> bool:
    """Whether a tensor is a view of a parameter that is laid out by rows."""
    source = None if t is None else capture.sources.find(t)
    return source is not None and source.tensor.is_contiguous()


def follow(capture: Capture, t: Tensor, shape: torch.Size, operation: str) -> Tensor:
    """Expand (a view of) a parameter to a shape with batch axis, and return it with a tap."""
    source, z = capture.sources.get(t), t.expand(shape)
    own = [axis for axis in range(z.ndim) if z.stride(axis) != 0 and z.shape[axis] != 1]
    free = [axis for axis in range(z.ndim) if axis not in own]
    index = _places(z, source, own)

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
            collect(_scattered(summed, index, source.tensor.shape))

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
    receive = capture.uses.record(capture.batch, operation, layout, vectors, read, z, False, "A")
    return capture.tap(z, receive)


def record_entries(capture: Capture, out: Tensor, operation: str, source: Source, axes: int, read: Read) -> Tensor:
    """Take note of a use of a whole parameter with several axes, which are the last ones of what `read` returns."""
    layout = entries_layout(source)
    leading = tuple(out.shape[: out.ndim - axes])
    vectors = Rows(_all_rows(layout, out), layout.column_size, leading, out)

    def by_rows(g: Tensor) -> Tensor:
        rows_last: Tensor = read(g).flatten(1 + len(leading)).unflatten(-1, (-1, layout.row_size))
        return rows_last

    return capture.record(out, operation, layout, vectors, by_rows, ones=False)


def _all_rows(layout: Layout, like: Tensor) -> Tensor | None:
    return torch.arange(layout.column_size, device=like.device) if layout.column_size > 1 else None


def entries_layout(source: Source) -> Layout:
    """Return the layout of a parameter whose entries are used one by one: features along its last axis."""
    shape = tuple(source.tensor.shape) or (1,)
    features = max((axis for axis, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    order = (features, *(axis for axis in range(len(shape)) if axis != features))
    return Layout(source.name, shape, (0, shape[0]), order, 1)


def _places(t: Tensor, source: Source, axes: list[int]) -> Tensor:
    """Return which entry of a parameter is where in a view of it; axes over which it is broadcast are left out."""
    return torch.arange(source.tensor.numel()).as_strided(
        [t.shape[axis] for axis in axes],
        [t.stride(axis) for axis in axes],
        t.storage_offset() - source.tensor.storage_offset(),
    )


def _scattered(g: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Put entries `[..., k]` at their places in tensors of a shape, `[..., *shape]`."""
    full = g.new_zeros(*g.shape[:-1], shape.numel())
    return full.index_add_(-1, index.flatten().to(g.device), g).reshape(*g.shape[:-1], *shape)


def _is_expanded(capture: Capture, t: Tensor) -> bool:
    """Whether a parameter was expanded over the batch before; a batch of one shows only as a first axis of one."""
    if capture.num_data == 1:
        return t.ndim > 1 and t.shape[0] == 1
    return any(n == capture.num_data and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True))


def _probed(capture: Capture, result: Any, names: set[str], operation: str) -> Any:
    """Return results such that one learns whether gradients come back to them."""

    def fire(_: Tensor) -> None:
        capture.unexplained.update((name, operation) for name in names)

    if isinstance(result, Tensor):
        return capture.tap(result, fire)
    fire(tensors_of(result)[0])  # several results are not followed one by one
    return result


def _replaced(part: Any, swap: dict[int, Tensor]) -> Any:
    """Return arguments with some tensors replaced."""
    if isinstance(part, Tensor):
        return swap.get(id(part), part)
    return type(part)(_replaced(inner, swap) for inner in part) if type(part) in {tuple, list} else part


_NAMES = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide")
_OPERATORS = ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv")
# Operations that leave the first axis alone: an expanded first axis of a parameter is the batch axis there.
_BATCH_FIRST = {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.stack, F.scaled_dot_product_attention}
_COPIES = ("clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16")
RULES = (
    {getattr(torch, name): elementwise for name in _NAMES}
    | {getattr(Tensor, name): elementwise for name in _NAMES}
    | {getattr(Tensor, f"{name}_"): elementwise for name in _NAMES}
    | {getattr(Tensor, f"__{name}__"): elementwise for name in _OPERATORS}
    | {torch.where: elementwise, torch.rsub: elementwise, Tensor.repeat: repeat, torch.clone: copied}
    | {getattr(Tensor, name): copied for name in _COPIES}
)
