"""The fallback for operations without a rule: track results of parameters and constants, and probe everything else.

A probe is a tap that reports, in the backward pass, whether predictions depend on a use that is not covered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import Rows
from kfs.factors.accumulate.outer_products import full_precision
from kfs.factors.rows.row_map import Receiver, RowMap, RowQuery
from kfs.factors.rules import elementwise, linear
from kfs.factors.rules.elementwise import all_rows, entries_layout
from kfs.factors.trace.derived import Spread, add_derived, on_device, scattered, tap_spread
from kfs.factors.trace.discovery import Discovery, prepared, takes
from kfs.factors.trace.plan import Argument, Broadcast, Call, Plan, argument_at
from kfs.factors.trace.trace import no_rule
from kfs.factors.trace.tracking import Derived, Tracked, is_in_place, tensors_of

# Operations whose results consist of entries of their first argument.
_MOVE_NAMES = (
    *("repeat", "tile", "index_select", "gather", "take", "take_along_dim", "repeat_interleave", "reshape", "flatten"),
    *("flip", "roll", "clone", "contiguous", "__getitem__", "broadcast_to", "stack", "cat", "concat", "concatenate"),
)
_MOVES = {getattr(owner, name) for name in _MOVE_NAMES for owner in (torch, Tensor) if hasattr(owner, name)}
_CASTS = {getattr(Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16")}
_ELEMENTWISE = {func for func, rule in elementwise.RULES.items() if rule is elementwise.elementwise}
# Products and lookups: discovery has already asked whether constants have a row for every example.
_PRODUCTS = {linear.linear, linear.addmm, linear.matmul, linear.mm, linear.rmatmul}
_FOLLOW = {func for func, rule in linear.RULES.items() if rule in _PRODUCTS} | {F.embedding}
# Operations that treat all vectors of their inputs alike, so inputs may have one more leading axis.
_BY_ROWS = _FOLLOW | _ELEMENTWISE | {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}


def without_rule(seen: Discovery, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has no rule.

    A result of parameters and constants is tracked as a derived parameter, unless it has a row for every example. All
    other uses are probed, to find out whether predictions depend on them.
    """
    inputs = tensors_of((*args, *kwargs.values()))
    tracked = [t for t in inputs if seen.tracker.find(t) is not None]
    parameters = [seen.tracker.get(t) for t in tracked]
    names = set().union(*(parameter.names for parameter in parameters))
    has_data = any(map(seen.is_data, inputs))
    # An in-place operation may change a derived parameter; then its new values are tracked.
    change = None if has_data else _Change.expected(func, args, kwargs, tracked, parameters)
    result = func(*args, **kwargs)
    if change is not None and change.happened:
        change.follow(seen)
        return result
    if is_in_place(func):  # the result may not be used, so there is nothing to probe
        why = _why_not(seen, func, parameters, has_data)
        seen.unexplained.update((name, why) for name in names)
        return result
    # Otherwise, track the result, or probe it if that is not possible.
    outputs = [t for t in tensors_of([result]) if t.is_floating_point() or t.is_complex()]
    storages = {t.untyped_storage()._cdata for t in tracked}
    if not outputs or all(t.untyped_storage()._cdata in storages for t in outputs):
        return result  # a view of a parameter, or nothing to differentiate
    if seen.tracker.as_other_numbers(tracked):
        operation = getattr(func, "__name__", str(func))
        return _probed(seen, result, names, no_rule(f"{operation} as other numbers (view_as_complex)"))
    followed = _followed(seen, func, args, kwargs, tracked, parameters, has_data, result)
    if followed is None:
        followed = _probed(seen, result, names, _why_not(seen, func, parameters, has_data))
    return followed


def _followed(
    seen: Discovery,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracked: list[Tensor],
    parameters: list[Tracked],
    has_data: bool,
    result: Any,
) -> Any:
    """Return the result, tracked so that its gradients reach all parameters; `None` if that is not possible."""
    different = list({id(t): t for t in tracked}.values())
    arguments = [Argument.of((), t, seen.tracker.get(t), data=False) for t in different]
    follows = isinstance(result, Tensor) and not has_data and all(argument.by_rows for argument in arguments)
    if follows and len(different) == 1 and func not in _FOLLOW:
        return _Following(seen, func, args, kwargs, tracked[0], arguments[0], parameters[0], result).result()
    expanded = [t for t, parameter in zip(tracked, parameters, strict=True) if _may_have_rows(seen, t, parameter)]
    if expanded and (len({parameter.name for parameter in parameters}) > 1 or has_data):
        # With one example, everything may be a row of it; an audit knows what larger batches are like.
        guess = seen.num_data > 1 or not has_data
        with seen.rows.question(func, seen.tracker.get(expanded[0]).name, guess) as has_rows:
            if has_rows:
                return _with_expanded(seen, func, args, kwargs, expanded[0])
    return _Computed(seen, func, args, kwargs, different, arguments, result).result() if follows else None


def _why_not(seen: Discovery, func: Any, parameters: list[Tracked], has_data: bool) -> str:
    """Return the reason why a use is not covered: there is no rule, or the rule does not take such arguments."""
    operation = getattr(func, "__name__", str(func))
    others = " together with another parameter" if len({one.name for one in parameters}) > 1 and not has_data else ""
    before = " before it meets the batch" if any(one.derived is not None for one in parameters) else ""
    if func in seen.trace.rules and not others + before:
        return f"it is used by {operation} with arguments that the rule for it does not take"
    return no_rule(operation + others + before)


def _may_have_rows(seen: Discovery, t: Tensor, parameter: Tracked) -> bool:
    """Whether (a view of) a parameter may have a row for every example, such as expanded learned queries."""
    argument = Argument.of((), t, parameter, data=False)
    computed = parameter.derived is not None and seen.num_data == 1
    return argument.by_rows and (computed or elementwise.is_expanded(seen.num_data, argument))


def _with_expanded(seen: Discovery, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor) -> Any:
    """Run an operation on (a view of) a parameter that was expanded over the batch, treating it as data."""
    parameter = seen.tracker.get(t)
    argument = Argument.of((), t, parameter, data=False)
    call = Call(func, seen.num_data)
    collect = _per_datum_receiver(seen, call, argument, parameter)
    spread = Spread.expanded(argument, tuple(t.shape))
    # A copy has its own storage, so it is not recognized as the parameter again.
    swap = {id(t): tap_spread(seen, t, (call.name, parameter.name), spread, collect).clone()}
    named = {key: _replaced(part, swap) for key, part in kwargs.items()}
    with seen.intercepting():
        result = func(*_replaced(args, swap), **named)
    for one in tensors_of([result]):
        seen.marks.mark(one)  # even if nothing else depends on data
    return result


class _Following:
    """An operation on one parameter and constants, whose gradients are mapped back to the parameter."""

    def __init__(
        self,
        seen: Discovery,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        t: Tensor,
        argument: Argument,
        parameter: Tracked,
        result: Tensor,
    ) -> None:
        self.seen = seen
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.t = t
        self.argument = argument
        self.parameter = parameter
        self.plain = result
        self.call = Call(func, seen.num_data)
        self.what = (self.call.name, parameter.name)
        self.shape = tuple(parameter.tensor.shape)

    def result(self) -> Tensor:
        """Return the result, tracked so that its per-example gradients reach the parameter."""
        num_data = self.seen.num_data
        # Without an audit, guess from a new axis as long as the batch.
        guess = num_data > 1 and self.plain.shape.count(num_data) > self.t.shape.count(num_data)
        with self.seen.rows.question(self.func, self.parameter.name, guess) as has_data:
            return self.seen.marks.mark(self._with_rows_of_data()) if has_data else self._derived()

    def _with_rows_of_data(self) -> Tensor:
        """Tap the result, which has a row for every example, so that gradients are still separate."""
        seen, shape = self.seen, tuple(self.plain.shape)
        if self.func in _ELEMENTWISE:
            spread = Spread.expanded(self.argument, shape)
            z = tap_spread(seen, self.t.expand(shape), self.what, spread, self._receiver())
            return self._again(z)
        if self.func in _MOVES or self.func in _CASTS:
            spread = Spread(shape, self._entries_of_result(), self.shape)
            return tap_spread(seen, self.plain, self.what, spread, self._receiver())
        receive, pull_back = self._back()

        def start(row_map: RowMap) -> Receiver:
            data = on_device(row_map.index(self.plain.numel()), self.plain.device).reshape(shape)
            mine = [data == n for n in range(seen.num_data)]
            return lambda g: receive(torch.stack([pull_back(g.squeeze(-1) * of_datum)[0] for of_datum in mine], 1))

        opened = seen.rows.receiver(RowQuery(self.what, shape, meeting=True), start)
        return seen.tap(self.plain, lambda g: opened(g.unsqueeze(-1)))

    def _derived(self) -> Tensor:
        """Track the result; per-example gradients are pulled back through the operation after the backward pass."""

        def add_use() -> Receiver:
            receive, pull_back = self._back()
            return lambda g: receive(pull_back(g)[0])

        token = (self.func, self.parameter.token, self.argument.offset, self.argument.shape, self.argument.stride)
        name, also = self.parameter.name, self.parameter.also
        return add_derived(self.seen, self.plain, name, token, self.call.name, add_use, also)

    def _receiver(self) -> Receiver:
        """Return the gradient callback for `[columns, N, *shape of the parameter]`."""
        return _per_datum_receiver(self.seen, self.call, self.argument, self.parameter)

    def _back(self) -> tuple[Receiver, Callable[[Tensor], list[Tensor]]]:
        """Return the callback for gradients `[columns, N, *shape]` of the argument, and their computation."""
        return _at_entries(self._receiver(), self.argument), _pull_back(self._again, [self.t], self.plain)

    def _again(self, value: Tensor) -> Tensor:
        """Run the operation with another tensor in place of the parameter."""
        return _run_again(self.func, self.args, self.kwargs, {id(self.t): value})

    def _entries_of_result(self) -> Tensor:
        """Return the parameter entry at each position of the result."""
        if self.t.is_meta:  # there are no values
            return torch.zeros((), dtype=torch.long).expand(self.plain.shape)
        # Compute on the CPU to avoid synchronization, unless index tensors are on another device.
        alone = len(tensors_of((*self.args, *self.kwargs.values()))) == 1
        places = torch.arange(self.t.numel(), device="cpu" if alone else self.t.device).reshape(self.t.shape)
        if self.func not in _CASTS:
            places = self._again(places)
        places = places.cpu()
        index = self.argument.entries(tuple(range(self.t.ndim)))
        return places if index is None else index[places]


class _Change:
    """An operation that changes (a view of) a derived parameter in place, such as `nn.ReLU(inplace=True)`.

    From then on, its memory holds another derived parameter.
    """

    @classmethod
    def expected(
        cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: list[Tensor], parameters: list[Tracked]
    ) -> "_Change | None":
        """Record the state before the operation runs; `None` if it will not change a derived parameter."""
        may_change = is_in_place(func) or kwargs.get("inplace") is True or any(part is True for part in args)
        if not may_change or len(tracked) > 1 or parameters[0].derived is None:
            return None
        return cls(func, args, kwargs, tracked[0], parameters[0])

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor, parameter: Tracked) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.t = t
        self.parameter = parameter
        self.before = parameter.tensor.detach().clone()
        self.version = t._version
        self.view = tuple(t.shape), t.stride(), t.storage_offset() - parameter.tensor.storage_offset()

    @property
    def happened(self) -> bool:
        """Whether the operation has changed the tensor."""
        return self.t._version != self.version

    def follow(self, seen: Discovery) -> None:
        """Track the changed tensor in place of the original one."""
        old = self.parameter

        def add_use() -> Receiver:
            assert old.derived is not None  # noqa: S101 (checked by `expected`)
            collect, pull_back = old.derived.collector(), _pull_back(self._again, [self.before], self.before)
            return lambda g: collect(pull_back(g)[0])

        derived = Derived(add_use)
        seen.derived.append(derived)
        token = ("in place", self.func, old.token, self.view)
        seen.tracker.add(Tracked(old.name, old.tensor, token, derived, old.also))

    def _again(self, value: Tensor) -> Tensor:
        value = value.clone()
        _run_again(self.func, self.args, self.kwargs, {id(self.t): value.as_strided(*self.view)})
        return value


class _Computed:
    """An operation on several parameters and constants, whose gradients are mapped back to all parameters.

    Gradients arrive for every example, as if each had a copy of the result. So if a rule covers the operation,
    parameters have the factors that they would have if inputs were data, equal for all examples. An example is a small
    network of positions that computes an attention bias. If no rule covers it, gradients are mapped to the entries of
    each parameter.
    """

    def __init__(
        self,
        seen: Discovery,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        arguments: list[Argument],
        result: Tensor,
    ) -> None:
        self.seen = seen
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors  # the tracked tensors
        self.arguments = arguments
        self.plain = result
        self.call = Call(func, seen.num_data)
        inputs = tensors_of((*args, *kwargs.values()))
        sources = list(map(seen.tracker.find, inputs))
        self.key = ("computed", seen.key_of(func, args, kwargs, inputs, sources))
        self.names = [name for source in sources if source is not None for name in sorted(source.names)]
        self.constants = [t for t, source in zip(inputs, sources, strict=True) if source is None]
        derived = [t for t, argument in zip(tensors, arguments, strict=True) if argument.derived]
        self.inputs = derived or (self.constants or tensors)[:1]  # the tensors that are treated as data

    def result(self) -> Tensor:
        """Return the result, tracked so that its per-example gradients reach all parameters."""
        if not self.constants or self.func in _FOLLOW:
            return self._followed()
        num_data = self.seen.num_data
        most = max(t.shape.count(num_data) for t in self.tensors)
        guess = num_data > 1 and self.plain.shape.count(num_data) > most
        with self.seen.rows.question(self.func, self.names[0], guess) as has_data:
            if not has_data:
                return self._followed()
            swap = {id(t): self.seen.as_data(t) for t in self.constants}
            with self.seen.intercepting():
                return _run_again(self.func, self.args, self.kwargs, swap)

    def _followed(self) -> Tensor:
        names = self.names
        return add_derived(self.seen, self.plain, names[0], self.key, self.call.name, self._add_use, names)

    def _add_use(self) -> Receiver:
        by_rule, expanded = self._by_rule()
        # By id of a tensor: the tensor to differentiate with respect to, and its gradient callback.
        rest = dict(expanded)
        for t, argument in zip(self.tensors, self.arguments, strict=True):
            if id(t) not in rest and (argument.name not in by_rule or any(t is one for one in self.inputs)):
                receive = _per_datum_receiver(self.seen, self.call, argument, self.seen.tracker.get(t))
                rest[id(t)] = t, _at_entries(receive, argument)

        def run(*values: Tensor) -> Tensor:
            return _run_again(self.func, self.args, self.kwargs, dict(zip(rest, values, strict=True)))

        pull_back = _pull_back(run, [t for t, _ in rest.values()], self.plain)

        def receive_all(g: Tensor) -> None:
            for receive in dict.fromkeys(by_rule.values()):
                receive(g)
            for (_, receive), back in zip(rest.values(), pull_back(g) if rest else (), strict=True):
                receive(back)

        return receive_all

    def _by_rule(self) -> tuple[dict[str, Receiver], dict[int, tuple[Tensor, Receiver]]]:
        """Return the gradient callbacks of parameters that the operation's rule covers, treating inputs as data.

        Returns:
            By name of a parameter, the callback for gradients of the result. By id of a broadcast tensor, the expanded
            tensor and the callback for its gradients.
        """
        seen, num_data, plain = self.seen, self.seen.num_data, self.plain
        rule = seen.trace.rules.get(self.func)
        aligned = self.func is F.embedding or all(t.ndim == plain.ndim for t in self.inputs)
        if rule is None or self.func not in _BY_ROWS or not aligned:
            return {}, {}
        swap = {id(t): t.detach().expand(num_data, *t.shape) for t in self.inputs}
        args = _replaced(self.args, swap)
        kwargs = {name: _replaced(part, swap) for name, part in self.kwargs.items()}
        plans = seen.trace.plans
        if self.key not in plans:
            copies = {id(t) for t in swap.values()}

            def described(place: int | str, part: Any) -> Any:
                is_copy = id(part) in copies
                tracked = seen.tracker.find(part) if isinstance(part, Tensor) and not is_copy else None
                return Argument.of((place,), part, tracked, data=is_copy) if isinstance(part, Tensor) else part

            named = {name: described(name, part) for name, part in kwargs.items()}
            every = [described(*part) for part in enumerate(args)]
            plans[self.key] = rule(self.call, *every, **named) if takes(rule, args, kwargs) else None
        by_rule: dict[str, Receiver] = {}
        expanded: dict[int, tuple[Tensor, Receiver]] = {}
        for step in plans[self.key] or ():
            plan = step.plan if isinstance(step, Broadcast) else step
            assert plan is not None  # noqa: S101 (derived parameters are treated as data)
            for one in seen.trace.settled(plan, [plan], self.call, plain):
                with full_precision(plain.device.type):
                    receive = seen.use(one, prepared(one, args, kwargs), by_construction=True)
                if isinstance(step, Broadcast):
                    t = argument_at(step.argument.place, self.args, self.kwargs)
                    expanded[id(t)] = t.expand(step.shape[1:]), receive
                else:
                    by_rule |= dict.fromkeys(one.layout.params, receive)
        return by_rule, expanded


def _per_datum_receiver(seen: Discovery, call: Call, argument: Argument, parameter: Tracked) -> Receiver:
    """Return the callback for gradients `[columns, N, *shape]` of a parameter, or of a derived one."""
    with full_precision(argument.device.type):
        if parameter.derived is None:
            return _use_per_datum(seen, call, argument, parameter.tensor)
        return parameter.derived.collector()


def _use_per_datum(seen: Discovery, call: Call, argument: Argument, like: Tensor) -> Receiver:
    """Record a use of all entries of a parameter by every example; gradients are `[columns, N, *shape]`."""
    layout = entries_layout(argument)
    device = argument.device

    def by_rows(g: Tensor, _: Any) -> Tensor:
        rows_last: Tensor = g.reshape(*g.shape[:2], -1, layout.row_size)
        return rows_last

    plans, key = seen.trace.plans, ("per example", call.func, layout, call.num_data)
    if key not in plans:
        inputs = Rows(all_rows(layout, device), layout.column_size, (call.num_data,), argument.dtype, device)
        plans[key] = Plan(call.name, layout, inputs, read=by_rows)
    (plan,) = seen.trace.settled(plans[key], [plans[key]], call, like)
    return seen.use(plan, None, by_construction=True)


def _probed(seen: Discovery, result: Any, names: set[str], why: str) -> Any:
    """Return results with probes that report the use as not covered if gradients reach them."""

    def fire(_: Tensor) -> None:
        seen.unexplained.update((name, why) for name in names)

    if isinstance(result, Tensor):
        return seen.tap(result, fire, probed=True)
    fire(tensors_of(result)[0])  # several results are not probed one by one
    return result


def _pull_back(run: Callable[..., Tensor], tensors: list[Tensor], result: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that pulls gradients `[..., *shape of the result]` back to the inputs of an operation."""
    made: list[Any] = []  # created when gradients arrive, because PyTorch refuses to create it inside of a checkpoint
    values, shape = [t.detach() for t in tensors], result.shape

    def pull_back(g: Tensor) -> list[Tensor]:
        if not made:
            made.append(torch.func.vjp(run, *values)[1])
        leading = g.shape[: g.ndim - len(shape)]
        back = torch.func.vmap(made[0])(g.reshape(-1, *shape))
        return [one.reshape(*leading, *one.shape[1:]) for one in back]

    return pull_back


def _at_entries(receive: Receiver, argument: Argument) -> Receiver:
    """Return a callback that scatters gradients `[columns, N, *shape]` of (a view of) a parameter into its entries."""
    assert argument.source is not None  # noqa: S101 (only tracked arguments get here)
    index, shape = argument.entries(tuple(range(argument.ndim))), argument.source[0]
    return lambda g: receive(scattered(g.reshape(*g.shape[: g.ndim - argument.ndim], -1), index, shape))


def _run_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], swap: dict[int, Tensor]) -> Tensor:
    """Run an operation with some tensors replaced."""
    named = {key: _replaced(part, swap) for key, part in kwargs.items()}
    out: Tensor = func(*_replaced(args, swap), **named)
    return out


def _replaced(part: Any, swap: dict[int, Tensor]) -> Any:
    """Return arguments with some tensors replaced."""
    if isinstance(part, Tensor):
        return swap.get(id(part), part)
    return type(part)(_replaced(inner, swap) for inner in part) if type(part) in {tuple, list} else part
