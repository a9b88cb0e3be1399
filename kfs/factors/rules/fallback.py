"""The fallback for operations without a rule: track results of parameters and constants, and probe everything else.

A probe is a tap that reports, in the backward pass, whether predictions depend on a use that is not covered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.rows.row_map import Receiver, RowMap, RowQuery
from kfs.factors.rules import elementwise, linear
from kfs.factors.rules.elementwise import all_rows, entries_layout
from kfs.factors.trace.derived import Spread, add_derived, on_device, scattered, tap_spread
from kfs.factors.trace.discovery import Discovery, prepared, takes
from kfs.factors.trace.plan import Argument, Broadcast, Call, Plan, argument_at
from kfs.factors.trace.trace import no_rule
from kfs.factors.trace.tracking import Derived, Tracked, is_in_place, tensors_of
from kfs.runtime.precision import full_precision

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


@dataclass(frozen=True, eq=False)
class _Run:
    """A call of an operation without a plan, in a pass."""

    seen: Discovery
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def call(self) -> Call:
        """The call, as rules see it."""
        return Call(self.func, self.seen.num_data)

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return tensors_of((*self.args, *self.kwargs.values()))

    def argument(self, t: Tensor) -> Argument:
        """Describe a tracked tensor."""
        return Argument.of((), t, self.seen.tracker.get(t), data=False)

    def receiver(self, t: Tensor) -> Receiver:
        """Return the callback for gradients `[columns, N, *shape]` of the parameter that a tensor is (a view of)."""
        seen, call, argument, parameter = self.seen, self.call, self.argument(t), self.seen.tracker.get(t)
        with full_precision(t.device.type):
            if parameter.derived is not None:
                return parameter.derived.collector()
            # Every example uses all entries.
            layout = entries_layout(argument)
            plans, key = seen.trace.plans, ("per example", call.func, layout, call.num_data)
            if key not in plans:
                rows = all_rows(argument, layout, (call.num_data,))
                plans[key] = Plan(
                    call.name, layout, rows, read=lambda g, _: g.reshape(*g.shape[:2], -1, layout.row_size)
                )
            (plan,) = seen.trace.settled(plans[key], [plans[key]], call, parameter.tensor)
            return seen.use(plan, None, by_construction=True)

    def replaced(self, swap: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with other tensors in place of those with some ids."""

        def other(part: Any) -> Any:
            if isinstance(part, Tensor):
                return swap.get(id(part), part)
            return type(part)(map(other, part)) if type(part) in {tuple, list} else part

        return tuple(map(other, self.args)), {key: other(part) for key, part in self.kwargs.items()}

    def again(self, swap: dict[int, Tensor]) -> Any:
        """Run the operation with some tensors replaced."""
        args, kwargs = self.replaced(swap)
        return self.func(*args, **kwargs)


def without_rule(seen: Discovery, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has no rule.

    A result of parameters and constants is tracked as a derived parameter, unless it has a row for every example. All
    other uses are probed, to find out whether predictions depend on them.
    """
    run = _Run(seen, func, args, kwargs)
    tracked = [t for t in run.inputs if seen.tracker.find(t) is not None]
    parameters = [seen.tracker.get(t) for t in tracked]
    names = set().union(*(parameter.names for parameter in parameters))
    has_data = any(map(seen.is_data, run.inputs))
    # An in-place operation may change a derived parameter; then its new values are tracked.
    may_change = is_in_place(func) or kwargs.get("inplace") is True or any(part is True for part in args)
    if may_change and not has_data and len(tracked) == 1 and parameters[0].derived is not None:
        before, version = parameters[0].tensor.detach().clone(), tracked[0]._version
        result = func(*args, **kwargs)
        if tracked[0]._version != version:
            _track_change(run, tracked[0], before)
            return result
    else:
        result = func(*args, **kwargs)
    if is_in_place(func):  # the result may not be used, so there is nothing to probe
        why = _why_not(run, parameters, has_data)
        seen.unexplained.update((name, why) for name in names)
        return result
    # Otherwise, track the result, or probe it if that is not possible.
    outputs = [t for t in tensors_of([result]) if t.is_floating_point() or t.is_complex()]
    storages = {t.untyped_storage()._cdata for t in tracked}
    if not outputs or all(t.untyped_storage()._cdata in storages for t in outputs):
        return result  # a view of a parameter, or nothing to differentiate
    if seen.tracker.as_other_numbers(tracked):
        return _probed(seen, result, names, no_rule(f"{run.call.name} as other numbers (view_as_complex)"))
    followed = _followed(run, tracked, parameters, has_data, result)
    if followed is None:
        followed = _probed(seen, result, names, _why_not(run, parameters, has_data))
    return followed


def _followed(run: _Run, tracked: list[Tensor], parameters: list[Tracked], has_data: bool, result: Any) -> Any:
    """Return the result, tracked so that its gradients reach all parameters; `None` if that is not possible."""
    seen = run.seen
    if any(parameter.rows for parameter in parameters):  # a table of which a parameter has replaced rows
        return None
    different = list({id(t): t for t in tracked}.values())
    arguments = list(map(run.argument, different))
    follows = isinstance(result, Tensor) and not has_data and all(argument.by_rows for argument in arguments)
    if follows and len(different) == 1 and run.func not in _FOLLOW:
        return _Following(run, tracked[0], arguments[0], parameters[0], result).result()
    asked = [t for t, parameter in zip(tracked, parameters, strict=True) if _may_have_rows(run, t, parameter)]
    if asked and (len({parameter.name for parameter in parameters}) > 1 or has_data):
        # With one example, everything may be a row of it. So a question that an audit of several examples has not
        # asked would be answered wrongly: which questions are asked does not depend on the number of examples.
        expanded = [t for t in asked if elementwise.is_expanded(seen.num_data, run.argument(t))]
        guess = bool(expanded) if seen.num_data > 1 else not has_data
        with seen.rows.question(run.func, seen.tracker.get(asked[0]).name, guess) as has_rows:
            if has_rows:
                return _with_expanded(run, (expanded or asked)[0])
    return _Computed(run, different, arguments, result).result() if follows else None


def _why_not(run: _Run, parameters: list[Tracked], has_data: bool) -> str:
    """Return the reason why a use is not covered: there is no rule, or the rule does not take such arguments."""
    others = " together with another parameter" if len({one.name for one in parameters}) > 1 and not has_data else ""
    before = " before it meets the batch" if any(one.derived is not None for one in parameters) else ""
    if run.func in run.seen.trace.rules and not others + before:
        return f"it is used by {run.call.name} with arguments that the rule for it does not take"
    return no_rule(run.call.name + others + before)


def _may_have_rows(run: _Run, t: Tensor, parameter: Tracked) -> bool:
    """Whether (a view of) a parameter may have a row for every example, such as expanded learned queries."""
    argument = run.argument(t)
    may_be_expanded = elementwise.is_expanded(1, argument) or 0 in argument.stride
    return argument.by_rows and (parameter.derived is not None or may_be_expanded)


def _with_expanded(run: _Run, t: Tensor) -> Any:
    """Run an operation on (a view of) a parameter that was expanded over the batch, treating it as data."""
    seen, argument, parameter = run.seen, run.argument(t), run.seen.tracker.get(t)
    spread = Spread.expanded(argument, tuple(t.shape))
    # A copy has its own storage, so it is not recognized as the parameter again.
    swap = {id(t): tap_spread(seen, t, (run.call.name, parameter.name), spread, run.receiver(t)).clone()}
    with seen.intercepting():
        result = run.again(swap)
    for one in tensors_of([result]):
        seen.marks.mark(one)  # even if nothing else depends on data
    return result


@dataclass(eq=False)
class _Following:
    """An operation on one parameter and constants, whose gradients are mapped back to the parameter."""

    run: _Run
    t: Tensor  # the parameter, or a view of it
    argument: Argument
    parameter: Tracked
    plain: Tensor  # the result

    def result(self) -> Tensor:
        """Return the result, tracked so that its per-example gradients reach the parameter."""
        seen, num_data = self.run.seen, self.run.seen.num_data
        # Without an audit, guess from a new axis as long as the batch.
        guess = num_data > 1 and self.plain.shape.count(num_data) > self.t.shape.count(num_data)
        with seen.rows.question(self.run.func, self.parameter.name, guess) as has_data:
            return seen.marks.mark(self._with_rows_of_data()) if has_data else self._derived()

    def _with_rows_of_data(self) -> Any:
        """Tap the result, which has a row for every example, so that gradients are still separate."""
        seen, func, shape = self.run.seen, self.run.func, tuple(self.plain.shape)
        what = (self.run.call.name, self.parameter.name)
        if func in _ELEMENTWISE:
            spread = Spread.expanded(self.argument, shape)
            return self._again(tap_spread(seen, self.t.expand(shape), what, spread, self.run.receiver(self.t)))
        if func in _MOVES or func in _CASTS:
            spread = Spread(shape, self._entries_of_result(), tuple(self.parameter.tensor.shape))
            return tap_spread(seen, self.plain, what, spread, self.run.receiver(self.t))
        receive, pull_back = self._back()

        def start(row_map: RowMap) -> Receiver:
            data = on_device(row_map.index(self.plain.numel()), self.plain.device).reshape(shape)
            mine = [data == n for n in range(seen.num_data)]
            return lambda g: receive(torch.stack([pull_back(g.squeeze(-1) * of_datum)[0] for of_datum in mine], 1))

        opened = seen.rows.receiver(RowQuery(what, shape, meeting=True), start)
        return seen.tap(self.plain, lambda g: opened(g.unsqueeze(-1)))

    def _derived(self) -> Tensor:
        """Track the result; per-example gradients are pulled back through the operation after the backward pass."""

        def add_use() -> Receiver:
            receive, pull_back = self._back()
            return lambda g: receive(pull_back(g)[0])

        run, argument, parameter = self.run, self.argument, self.parameter
        token = (run.func, parameter.token, argument.offset, argument.shape, argument.stride)
        return add_derived(run.seen, self.plain, parameter.name, token, run.call.name, add_use, parameter.also)

    def _back(self) -> tuple[Receiver, Callable[[Tensor], list[Tensor]]]:
        """Return the callback for gradients `[columns, N, *shape]` of the argument, and their computation."""
        return _at_entries(self.run.receiver(self.t), self.argument), _pull_back(self._again, [self.t], self.plain)

    def _again(self, value: Tensor) -> Any:
        """Run the operation with another tensor in place of the parameter."""
        return self.run.again({id(self.t): value})

    def _entries_of_result(self) -> Tensor:
        """Return the parameter entry at each position of the result."""
        if self.t.is_meta:  # there are no values
            return torch.zeros((), dtype=torch.long).expand(self.plain.shape)
        # Compute on the CPU to avoid synchronization, unless index tensors are on another device.
        device = "cpu" if len(self.run.inputs) == 1 else self.t.device
        places = torch.arange(self.t.numel(), device=device).reshape(self.t.shape)
        if self.run.func not in _CASTS:
            places = self._again(places)
        places = places.cpu()
        index = self.argument.entries(tuple(range(self.t.ndim)))
        return places if index is None else index[places]


def _track_change(run: _Run, t: Tensor, before: Tensor) -> None:
    """Track the new values of (a view of) a derived parameter, which an operation has changed in place.

    From then on, the memory of the parameter holds another derived one. The values `before` are differentiated.
    """
    old = run.seen.tracker.get(t)
    view = tuple(t.shape), t.stride(), t.storage_offset() - old.tensor.storage_offset()

    def again(value: Tensor) -> Tensor:
        value = value.clone()
        run.again({id(t): value.as_strided(*view)})
        return value

    def add_use() -> Receiver:
        assert old.derived is not None  # noqa: S101 (the caller has checked it)
        collect, pull_back = old.derived.collector(), _pull_back(again, [before], before)
        return lambda g: collect(pull_back(g)[0])

    derived = Derived(add_use)
    run.seen.derived.append(derived)
    token = ("in place", run.func, old.token, view)
    run.seen.tracker.add(Tracked(old.name, old.tensor, token, derived, old.also))


@dataclass(eq=False)
class _Computed:
    """An operation on several parameters and constants, whose gradients are mapped back to all parameters.

    Gradients arrive for every example, as if each had a copy of the result. So if a rule covers the operation,
    parameters have the factors that they would have if inputs were data, equal for all examples. An example is a small
    network of positions that computes an attention bias. If no rule covers it, gradients are mapped to the entries of
    each parameter.
    """

    run: _Run
    tensors: list[Tensor]  # the tracked tensors
    arguments: list[Argument]
    plain: Tensor  # the result

    def __post_init__(self) -> None:
        """Find out which tensors are treated as data."""
        run, inputs = self.run, self.run.inputs
        sources = list(map(run.seen.tracker.find, inputs))
        self.key = ("computed", run.seen.key_of(run.func, run.args, run.kwargs, inputs, sources))
        self.names = [name for source in sources if source is not None for name in sorted(source.names)]
        self.constants = [t for t, source in zip(inputs, sources, strict=True) if source is None]
        derived = [t for t, argument in zip(self.tensors, self.arguments, strict=True) if argument.derived]
        self.inputs = derived or (self.constants or self.tensors)[:1]  # the tensors that are treated as data

    def result(self) -> Any:
        """Return the result, tracked so that its per-example gradients reach all parameters."""
        seen, func = self.run.seen, self.run.func
        if not self.constants or func in _FOLLOW:
            return self._followed()
        num_data = seen.num_data
        most = max(t.shape.count(num_data) for t in self.tensors)
        guess = num_data > 1 and self.plain.shape.count(num_data) > most
        with seen.rows.question(func, self.names[0], guess) as has_data:
            if not has_data:
                return self._followed()
            swap = {id(t): seen.as_data(t) for t in self.constants}
            with seen.intercepting():
                return self.run.again(swap)

    def _followed(self) -> Tensor:
        names = self.names
        return add_derived(self.run.seen, self.plain, names[0], self.key, self.run.call.name, self._add_use, names)

    def _add_use(self) -> Receiver:
        by_rule, expanded = self._by_rule()
        # By id of a tensor: the tensor to differentiate with respect to, and its gradient callback.
        rest = dict(expanded)
        for t, argument in zip(self.tensors, self.arguments, strict=True):
            if id(t) not in rest and (argument.name not in by_rule or any(t is one for one in self.inputs)):
                rest[id(t)] = t, _at_entries(self.run.receiver(t), argument)

        def again(*values: Tensor) -> Any:
            return self.run.again(dict(zip(rest, values, strict=True)))

        pull_back = _pull_back(again, [t for t, _ in rest.values()], self.plain)

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
        run, seen, plain = self.run, self.run.seen, self.plain
        rule = seen.trace.rules.get(run.func)
        aligned = run.func is F.embedding or all(t.ndim == plain.ndim for t in self.inputs)
        if rule is None or run.func not in _BY_ROWS or not aligned:
            return {}, {}
        swap = {id(t): t.detach().expand(seen.num_data, *t.shape) for t in self.inputs}
        args, kwargs = run.replaced(swap)
        plans = seen.trace.plans
        if self.key not in plans:
            copies = {id(t) for t in swap.values()}

            def described(place: int | str, part: Any) -> Any:
                if not isinstance(part, Tensor):
                    return part
                is_copy = id(part) in copies
                return Argument.of((place,), part, None if is_copy else seen.tracker.find(part), data=is_copy)

            named = {name: described(name, part) for name, part in kwargs.items()}
            every = [described(*part) for part in enumerate(args)]
            plans[self.key] = rule(run.call, *every, **named) if takes(rule, args, kwargs) else None
        by_rule: dict[str, Receiver] = {}
        expanded: dict[int, tuple[Tensor, Receiver]] = {}
        for step in plans[self.key] or ():
            plan = step.plan if isinstance(step, Broadcast) else step
            assert plan is not None  # noqa: S101 (derived parameters are treated as data)
            for one in seen.trace.settled(plan, [plan], run.call, plain):
                with full_precision(plain.device.type):
                    receive = seen.use(one, prepared(one, args, kwargs), by_construction=True)
                if isinstance(step, Broadcast):
                    t = argument_at(step.argument.place, run.args, run.kwargs)
                    expanded[id(t)] = t.expand(step.shape[1:]), receive
                else:
                    by_rule |= dict.fromkeys(one.layout.params, receive)
        return by_rule, expanded


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
