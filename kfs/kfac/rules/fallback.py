"""What to do with operations that have no rule: follow what is computed from parameters alone, and probe the rest.

A probe tells, in the backward pass, whether predictions depend on a use that nobody explains.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.capture.derived import Spread, add_derived, on_device, scattered, settled, tap_spread
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.plan import Argument, Call, Plan
from kfs.kfac.capture.session import no_rule
from kfs.kfac.capture.tracking import Tracked, is_in_place, tensors_of
from kfs.kfac.rules import elementwise
from kfs.kfac.rules.elementwise import all_rows, entries_layout
from kfs.kfac.sums.inputs import Rows
from kfs.kfac.sums.interface import Receiver
from kfs.kfac.sums.outer_products import full_precision
from kfs.kfac.sums.owners import Owners

# Operations whose results consist of entries of their first argument.
_MOVE_NAMES = (
    *("repeat", "tile", "index_select", "gather", "take", "take_along_dim", "repeat_interleave", "reshape", "flatten"),
    *("flip", "roll", "clone", "contiguous", "__getitem__", "broadcast_to", "stack", "cat", "concat", "concatenate"),
)
_MOVES = {getattr(owner, name) for name in _MOVE_NAMES for owner in (torch, Tensor) if hasattr(owner, name)}
_CASTS = {getattr(Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16")}
_ELEMENTWISE = {func for func, rule in elementwise.RULES.items() if rule is elementwise.elementwise}


def without_rule(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation without rule.

    What is computed from one parameter and constants is a derived parameter, unless it has a row for every datum. All
    other uses are probed: one learns whether predictions depend on them.
    """
    inputs = tensors_of((*args, *kwargs.values()))
    tracked = [t for t in inputs if capture.tracker.find(t) is not None]
    parameters = [capture.tracker.get(t) for t in tracked]
    names = {parameter.name for parameter in parameters}
    has_data = any(map(capture.is_data, inputs))
    result = func(*args, **kwargs)
    if is_in_place(func):  # nobody may look at the result, so that there is nothing to probe
        why = _why_not(capture, func, parameters, has_data)
        capture.unexplained.update((name, why) for name in names)
        return result
    outputs = [t for t in tensors_of([result]) if t.is_floating_point() or t.is_complex()]
    storages = {t.untyped_storage()._cdata for t in tracked}
    if not outputs or all(t.untyped_storage()._cdata in storages for t in outputs):
        return result  # a view of a parameter, or nothing to differentiate
    if capture.tracker.as_other_numbers(tracked):
        operation = getattr(func, "__name__", str(func))
        return _probed(capture, result, names, no_rule(f"{operation} as other numbers (view_as_complex)"))
    same = all(t is tracked[0] for t in tracked)
    if same and isinstance(result, Tensor) and not has_data:
        argument = Argument.of((), tracked[0], parameters[0], data=False)
        if argument.by_rows:
            return _Following(capture, func, args, kwargs, tracked[0], argument, parameters[0], result).result()
    expanded = [t for t, parameter in zip(tracked, parameters, strict=True) if _may_have_rows(capture, t, parameter)]
    if expanded and (len(names) > 1 or has_data):
        # With one datum, everything may be a row of it. What larger batches are like is known from an audit.
        guess = capture.num_data > 1 or not has_data
        with capture.places().question(func, capture.tracker.get(expanded[0]).name, guess) as has_rows:
            if has_rows:
                return _with_expanded(capture, func, args, kwargs, expanded[0])
    return _probed(capture, result, names, _why_not(capture, func, parameters, has_data))


def _why_not(capture: Capture, func: Any, parameters: list[Tracked], has_data: bool) -> str:
    """Say why a use is not covered: there is no rule for it, or there is one that does not take such arguments."""
    operation = getattr(func, "__name__", str(func))
    others = " together with another parameter" if len({one.name for one in parameters}) > 1 and not has_data else ""
    before = " before it meets the batch" if any(one.derived is not None for one in parameters) else ""
    if func in capture.session.rules and not others + before:
        return f"it is used by {operation} with arguments that the rule for it does not take"
    return no_rule(operation + others + before)


def _may_have_rows(capture: Capture, t: Tensor, parameter: Tracked) -> bool:
    """Whether (a view of) a parameter may have a row for every datum, as learned queries that were expanded."""
    argument = Argument.of((), t, parameter, data=False)
    computed = parameter.derived is not None and capture.num_data == 1
    return argument.by_rows and (computed or elementwise.is_expanded(capture.num_data, argument))


def _with_expanded(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor) -> Any:
    """Run an operation on (a view of) a parameter that was expanded over the batch: as on data."""
    parameter = capture.tracker.get(t)
    argument = Argument.of((), t, parameter, data=False)
    call = Call(func, capture.num_data)
    collect = _per_datum_receiver(capture, call, argument, parameter)
    spread = Spread.expanded(argument, tuple(t.shape))
    # A copy does not live where the parameter does, so that it is not taken for it again.
    swap = {id(t): tap_spread(capture, t, (call.name, parameter.name), spread, collect).clone()}
    named = {key: _replaced(part, swap) for key, part in kwargs.items()}
    with capture:
        return func(*_replaced(args, swap), **named)


class _Following:
    """An operation on one parameter and constants, and what gradients of its result mean for the parameter."""

    def __init__(
        self,
        capture: Capture,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        t: Tensor,
        argument: Argument,
        parameter: Tracked,
        result: Tensor,
    ) -> None:
        self.capture = capture
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.t = t
        self.argument = argument
        self.parameter = parameter
        self.plain = result
        self.call = Call(func, capture.num_data)
        self.what = (self.call.name, parameter.name)
        self.shape = tuple(parameter.tensor.shape)

    def result(self) -> Tensor:
        """Return the result such that its gradients are brought to the parameter, datum by datum."""
        num_data = self.capture.num_data
        # Without an audit: there is an axis as long as the batch that was not there before.
        guess = num_data > 1 and self.plain.shape.count(num_data) > self.t.shape.count(num_data)
        with self.capture.places().question(self.func, self.parameter.name, guess) as has_data:
            return self.capture.marks.mark(self._with_rows_of_data()) if has_data else self._derived()

    def _with_rows_of_data(self) -> Tensor:
        """Tap the result: it has a row for every datum, so that gradients are still there for each of them."""
        capture, shape = self.capture, tuple(self.plain.shape)
        if self.func in _ELEMENTWISE:
            spread = Spread.expanded(self.argument, shape)
            z = tap_spread(capture, self.t.expand(shape), self.what, spread, self._receiver())
            return self._again(z)
        if self.func in _MOVES or self.func in _CASTS:
            spread = Spread(shape, self._entries_of_result(), self.shape)
            return tap_spread(capture, self.plain, self.what, spread, self._receiver())
        receive, pull_back = self._receiver(), self._pull_back()

        def start(owners: Owners) -> Receiver:
            data = on_device(owners.index(self.plain.numel()), self.plain.device).reshape(shape)
            mine = [data == n for n in range(capture.num_data)]
            return lambda g: receive(torch.stack([pull_back(g.squeeze(-1) * of_datum) for of_datum in mine], 1))

        opened = capture.open(self.what, shape, start, meeting=True)
        return capture.tap(self.plain, lambda g: opened(g.unsqueeze(-1)))

    def _derived(self) -> Tensor:
        """Follow the result; gradients go back through the operation when they have arrived for every datum."""

        def add_use() -> Receiver:
            receive = self._receiver()
            pull_back = self._pull_back()
            return lambda g: receive(pull_back(g))

        token = (self.func, self.parameter.token, self.argument.offset, self.argument.shape, self.argument.stride)
        return add_derived(self.capture, self.plain, self.parameter.name, token, self.call.name, add_use)

    def _receiver(self) -> Receiver:
        """Return what takes gradients `[columns, N, *shape of the parameter]`."""
        return _per_datum_receiver(self.capture, self.call, self.argument, self.parameter)

    def _pull_back(self) -> Callable[[Tensor], Tensor]:
        """Return what takes gradients `[..., *shape of the result]` back to the parameter."""
        made: list[Any] = []  # made when gradients arrive: inside of a checkpoint, PyTorch refuses to make it
        index = self.argument.entries(tuple(range(self.t.ndim)))
        t, result = self.t.detach(), self.plain

        def pull_back(g: Tensor) -> Tensor:
            if not made:
                made.append(torch.func.vjp(self._again, t)[1])
            leading = g.shape[: g.ndim - result.ndim]
            (back,) = torch.func.vmap(made[0])(g.reshape(-1, *result.shape))
            return scattered(back.reshape(*leading, -1), index, self.shape)

        return pull_back

    def _again(self, value: Tensor) -> Tensor:
        """Run the operation with another tensor in place of the parameter."""
        swap = {id(self.t): value}
        named = {key: _replaced(part, swap) for key, part in self.kwargs.items()}
        out: Tensor = self.func(*_replaced(self.args, swap), **named)
        return out

    def _entries_of_result(self) -> Tensor:
        """Return which entry of the parameter each number of the result is."""
        if self.t.is_meta:  # there are no numbers
            return torch.zeros((), dtype=torch.long).expand(self.plain.shape)
        # On the CPU, unless there are indices elsewhere: an accelerator would have to be waited for.
        alone = len(tensors_of((*self.args, *self.kwargs.values()))) == 1
        places = torch.arange(self.t.numel(), device="cpu" if alone else self.t.device).reshape(self.t.shape)
        if self.func not in _CASTS:
            places = self._again(places)
        places = places.cpu()
        index = self.argument.entries(tuple(range(self.t.ndim)))
        return places if index is None else index[places]


def _per_datum_receiver(capture: Capture, call: Call, argument: Argument, parameter: Tracked) -> Receiver:
    """Return what takes gradients `[columns, N, *shape]` of a parameter, or of a derived one."""
    with full_precision(argument.device.type):
        if parameter.derived is None:
            return _use_per_datum(capture, call, argument, parameter.tensor)
        return parameter.derived.collector()


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
    return capture.use(plan, None, by_construction=True)


def _probed(capture: Capture, result: Any, names: set[str], why: str) -> Any:
    """Return results such that one learns whether gradients come back to them."""

    def fire(_: Tensor) -> None:
        capture.unexplained.update((name, why) for name in names)

    if isinstance(result, Tensor):
        return capture.tap(result, fire, probed=True)
    fire(tensors_of(result)[0])  # several results are not followed one by one
    return result


def _replaced(part: Any, swap: dict[int, Tensor]) -> Any:
    """Return arguments with some tensors replaced."""
    if isinstance(part, Tensor):
        return swap.get(id(part), part)
    return type(part)(_replaced(inner, swap) for inner in part) if type(part) in {tuple, list} else part
