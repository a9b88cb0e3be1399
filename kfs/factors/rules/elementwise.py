"""Parameters that are broadcast over the batch (added, multiplied, concatenated), and copies of parameters.

Such a parameter is expanded to the shape that it is broadcast to, and tapped there, where gradients are still separate
for every example and position. Apart from axes of length one, the last axis of a parameter holds its features, and the
others are rows: it is like an embedding whose rows are all looked up once for every example, and has the same factors.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfs.factors.accumulate.inputs import Rows
from kfs.factors.layout import Layout
from kfs.factors.trace.derived import Spread, on_device
from kfs.factors.trace.plan import Argument, Broadcast, Call, Copy, Plan, Planned
from kfs.factors.trace.tracking import is_in_place


def elementwise(call: Call, *args: Any, **named: Any) -> Planned:
    """Plan an operation that broadcasts its tensors to one shape."""
    inputs = [part for part in (*args, *named.values()) if isinstance(part, Argument)]
    tracked = [t for t in inputs if t.tracked]
    changed = is_in_place(call.func) and args[0] is tracked[0]
    if changed or not any(t.data for t in inputs) or not all(t.by_rows for t in tracked):
        return None
    shape = np.broadcast_shapes(*(t.shape for t in inputs))
    return tuple(broadcast(t, tuple(shape), call.name.strip("_")) for t in tracked)


def joined(call: Call, *args: Any, **named: Any) -> Planned:
    """Plan an operation that preserves the first axis: an expanded first axis of a parameter is the batch axis."""
    parts = (*args, *named.values())
    flat = [inner for part in parts for inner in (part if isinstance(part, tuple) else (part,))]
    inputs = [part for part in flat if isinstance(part, Argument)]
    tracked = [t for t in inputs if t.tracked]
    if not any(t.data for t in inputs) or not all(is_expanded(call.num_data, t) and t.by_rows for t in tracked):
        return None
    return tuple(broadcast(t, t.shape, call.name) for t in tracked)


def copied(call: Call, input: Argument, *args: Any, **named: Any) -> Planned:
    """Plan a copy of a whole parameter, perhaps in another precision."""
    view = input.view
    if view is None or view.transposed or input.shape != view.shape:
        return None
    return Copy(view.name)


def broadcast(t: Argument, shape: tuple[int, ...], operation: str) -> Broadcast:
    """Plan the expansion of (a view of) a parameter to the shape of data."""
    spread = Spread.expanded(t, shape)
    if t.derived:
        return Broadcast(t, shape, None, spread)
    own = spread.own or ()
    free = spread.free
    layout = entries_layout(t)
    rows, places = _rows_and_places(spread.along_own_axes, layout)

    order = (0, *(1 + axis for axis in (*free, *own)))

    def read(g: Tensor, _: Any) -> Tensor:
        g = g.permute(order).flatten(1 + len(free)) if own else g.unsqueeze(-1)  # [columns, *free axes, entries]
        if places is not None:
            full = g.new_zeros(*g.shape[:-1], len(rows) * layout.row_size)
            g = full.index_add_(-1, on_device(places, g.device), g)
        rows_last: Tensor = g.unflatten(-1, (-1, layout.row_size))
        return rows_last

    leading = tuple(shape[axis] for axis in free)
    used = on_device(rows, t.device) if layout.column_size > 1 else None
    inputs = Rows(used, layout.column_size, leading, t.dtype, t.device)
    return Broadcast(t, shape, Plan(operation, layout, inputs, read=read))


def all_rows(t: Argument, layout: Layout, leading: tuple[int, ...]) -> Rows:
    """Return the inputs of a parameter all rows of which are read at every place."""
    rows = torch.arange(layout.column_size, device=t.device) if layout.column_size > 1 else None
    return Rows(rows, layout.column_size, leading, t.dtype, t.device)


def entries_layout(t: Argument) -> Layout:
    """Return the layout of a parameter whose entries are used one by one, with features along its last axis."""
    assert t.source is not None and t.name is not None  # noqa: PT018, S101 (only called for tracked arguments)
    shape = t.source[0] or (1,)
    features = max((axis for axis, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    order = (features, *(axis for axis in range(len(shape)) if axis != features))
    return Layout(t.name, shape, (0, shape[0]), order, 1)


def is_expanded(num_data: int, t: Argument) -> bool:
    """Whether a parameter is expanded over the batch; for a batch of one, whether its first axis has length one."""
    if num_data == 1:
        return t.ndim > 1 and t.shape[0] == 1
    repeated = (n for n, stride in zip(t.shape, t.stride, strict=True) if stride == 0)
    return any(n > 1 and n % num_data == 0 for n in repeated)


def _rows_and_places(index: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return the used rows of a parameter, and the positions of entries in them; `None` if they are in order."""
    features = layout.row_size
    first, count = (int(index[0]), len(index)) if len(index) else (0, 0)
    if first % features == 0 and count % features == 0 and torch.equal(index, torch.arange(first, first + count)):
        return torch.arange(first // features, (first + count) // features), None
    # NumPy, because PyTorch's function imports its compiler, which takes seconds.
    unique, inverse = np.unique((index // features).numpy(), return_inverse=True)
    rows, order = torch.from_numpy(unique), torch.from_numpy(inverse)
    places = order * features + index % features
    in_order = torch.equal(places, torch.arange(len(rows) * features))
    return rows, None if in_order else places


_NAMES = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide")
_OPERATORS = ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv")
_COPIES = ("clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16")
_JOINS = ("cat", "concat", "concatenate", "hstack", "stack")
RULES = (
    {getattr(torch, name): elementwise for name in _NAMES}
    | {getattr(Tensor, name): elementwise for name in _NAMES}
    | {getattr(Tensor, f"{name}_"): elementwise for name in _NAMES}
    | {getattr(Tensor, f"__{name}__"): elementwise for name in _OPERATORS}
    | {torch.where: elementwise, torch.rsub: elementwise, torch.clone: copied}
    | {getattr(Tensor, name): copied for name in _COPIES}
    | {getattr(torch, name): joined for name in _JOINS}
)
