"""What to do with operations that have no rule: follow what is computed from parameters alone, and probe the rest.

A probe tells, in the backward pass, whether predictions depend on a use that nobody explains.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.kfac.capture.mode import Capture, Receiver, is_in_place, tensors_of
from kfs.kfac.capture.parameters import Source
from kfs.kfac.capture.uses import Use
from kfs.kfac.rules.elementwise import all_rows, entries_layout, follow, is_followable, places_in, scattered
from kfs.kfac.sums.batch_axis import BatchAxis
from kfs.kfac.sums.inputs import Rows

# Operations that leave the first axis alone: an expanded first axis of a parameter is the batch axis there.
_BATCH_FIRST = {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.stack, F.scaled_dot_product_attention}


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
    index, shape = places_in(t, source, list(range(t.ndim))), source.tensor.shape

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
            receive(scattered(back.reshape(*leading, -1), index, shape))

        return pass_on

    return capture.record_virtual(result, source.name, record)


def _record_entries_per_datum(capture: Capture, source: Source, operation: str) -> Receiver:
    """Take note of a use of all entries of a parameter, once for every datum; gradients are `[columns, N, *shape]`."""
    layout = entries_layout(source)
    vectors = Rows(all_rows(layout, source.tensor), layout.column_size, (capture.num_data,), source.tensor)

    def by_rows(g: Tensor) -> Tensor:
        rows_last: Tensor = g.reshape(*g.shape[:2], -1, layout.row_size)
        return rows_last

    use = Use(BatchAxis(capture.num_data, 0), operation, layout, vectors, by_rows, source.tensor, False, "A")
    return capture.uses.record(use)


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
