"""What to do with operations that have no rule: follow what is computed from parameters alone, and probe the rest.

A probe tells, in the backward pass, whether predictions depend on a use that nobody explains.
"""

from typing import Any

import torch
from torch import Tensor

from kfs.kfac.capture.derived import add_derived, settled
from kfs.kfac.capture.mode import Capture, tensors_of
from kfs.kfac.capture.plan import Argument, Call, Plan, is_in_place
from kfs.kfac.rules.elementwise import all_rows, entries_layout, scattered
from kfs.kfac.sums.batch_axis import BatchAxis
from kfs.kfac.sums.inputs import Rows
from kfs.kfac.sums.interface import Receiver


def without_rule(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation without rule.

    What is computed from one parameter and constants is a derived parameter. All other uses are probed: one learns
    whether predictions depend on them.
    """
    inputs = tensors_of((*args, *kwargs.values()))
    tracked = [t for t in inputs if capture.tracker.find(t) is not None]
    parameters = [capture.tracker.get(t) for t in tracked]
    names = {parameter.name for parameter in parameters}
    operation = getattr(func, "__name__", str(func))
    result = func(*args, **kwargs)
    if is_in_place(func):  # nobody may look at the result, so that there is nothing to probe
        capture.unexplained.update((name, operation) for name in names)
        return result
    outputs = [t for t in tensors_of([result]) if t.is_floating_point() or t.is_complex()]
    storages = {t.untyped_storage()._cdata for t in tracked}
    if not outputs or all(t.untyped_storage()._cdata in storages for t in outputs):
        return result  # a view of a parameter, or nothing to differentiate
    if len(tracked) == 1 and isinstance(result, Tensor) and not any(map(capture.is_data, inputs)):
        argument = Argument.of((), tracked[0], parameters[0], data=False)
        if argument.by_rows:
            return _derived(capture, func, args, kwargs, tracked[0], argument, result)
    before = any(parameter.derived is not None for parameter in parameters)
    return _probed(capture, result, names, f"{operation} before it meets the batch" if before else operation)


def _derived(
    capture: Capture,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    t: Tensor,
    argument: Argument,
    result: Tensor,
) -> Tensor:
    """Follow what is computed from a parameter and constants; gradients go back through the operation, per datum."""
    parameter = capture.tracker.get(t)
    index = argument.entries(tuple(range(t.ndim)))
    shape = tuple(parameter.tensor.shape)
    call = Call(func, BatchAxis(capture.num_data, 0))

    def again(value: Tensor) -> Tensor:
        swap = {id(t): value}
        out: Tensor = func(*_replaced(args, swap), **{key: _replaced(part, swap) for key, part in kwargs.items()})
        return out

    def add_use(with_batch: bool) -> Receiver:
        if parameter.derived is None:
            receive = _use_per_datum(capture, call, argument, parameter.tensor)
        else:
            receive = parameter.derived.receiver() if with_batch else parameter.derived.collector()
        pull_back: list[Any] = []  # made when gradients arrive: inside of a checkpoint, PyTorch refuses to make it

        def pass_on(g: Tensor) -> None:
            if not pull_back:
                pull_back.append(torch.func.vjp(again, t.detach())[1])
            leading = g.shape[: g.ndim - result.ndim]
            (back,) = torch.func.vmap(pull_back[0])(g.reshape(-1, *result.shape))
            receive(scattered(back.reshape(*leading, -1), index, shape))

        return pass_on

    token = (func, parameter.token, argument.offset, argument.shape, argument.stride)
    return add_derived(capture, result, parameter.name, token, add_use)


def _use_per_datum(capture: Capture, call: Call, argument: Argument, like: Tensor) -> Receiver:
    """Take note of a use of all entries of a parameter, once for every datum; gradients are `[columns, N, *shape]`."""
    layout = entries_layout(argument)
    device = argument.device

    def by_rows(g: Tensor, _: Any) -> Tensor:
        rows_last: Tensor = g.reshape(*g.shape[:2], -1, layout.row_size)
        return rows_last

    plans, key = capture.session.plans, ("per datum", call.func, layout, call.num_data)
    if key not in plans:
        inputs = Rows(all_rows(layout, device), layout.column_size, (call.num_data,), argument.dtype, device)
        plans[key] = Plan(call.name, layout, inputs, read=by_rows)
    (plan,) = settled(capture, plans[key], call, like)
    return capture.use(plan, None)


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
