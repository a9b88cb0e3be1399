"""Capture: a mode that intercepts every operation that uses a tracked parameter in a forward pass.

Plans for these uses are in `kfs.factors.trace`, taps in `kfs.factors.capture.tap`.

`Capture` is a `TorchFunctionMode`. It recognizes parameters, and views of them, among the arguments of an operation,
whichever code calls the operation. A rule for the operation (see `kfs.factors.rules`) returns a plan: which vectors
multiply the parameter, and how gradients are read. The session caches the plan. For a use with a known plan, the
capture adds the inputs to their sums, and puts a tap on the operation's output.

A parameter may enter an operation without data, such as an embedding of the positions `0, ..., T - 1` without batch
axis. Then the result is a *derived parameter*. It is tracked like a parameter until it is broadcast over the batch,
where gradients are still per example.

PyTorch does not show modes which parameters enter a custom `autograd.Function`. `hidden_uses` finds these parameters in
the graph of the predictions. It also returns all parameters that predictions depend on; other parameters are not used.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from kfs.factors.accumulate.interface import Adder, Receiver, Sums
from kfs.factors.accumulate.outer_products import full_precision
from kfs.factors.capture.derived import tap_broadcast, track_copy
from kfs.factors.capture.row_queries import EVERYTHING, AuditResult, Counting, RowQueries, What
from kfs.factors.capture.tap import Tap, apply_tap
from kfs.factors.rows.counted import ALL, MEASURED, BatchMasks, RowRule
from kfs.factors.rows.row_map import RowMap, StridedRows
from kfs.factors.trace.plan import (
    Broadcast,
    Call,
    Copy,
    Plan,
    Read,
    Rewrite,
    argument_at,
    describe,
    with_argument,
)
from kfs.factors.trace.session import Session, no_rule
from kfs.factors.trace.tracking import FIRST_ONLY, SHAPES_ONLY, Derived, Marks, Tracked, tensors_of
from kfs.problem.data import Batch
from kfs.problem.isolation import uncompiled
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import refuse_reentrant_checkpoint
from kfs.runtime.nested import mapped, without_tensors
from kfs.runtime.sync import DeferredChecks


def hidden_uses(f: Tensor, params: Mapping[str, Tensor]) -> tuple[set[tuple[str, str]], set[str]]:
    """Find parameters that enter a custom `autograd.Function` directly, or as a view or copy.

    Args:
        f: Predictions.
        params: Tracked parameters, by name.

    Returns:
        `(parameter, function)` of all such uses, and the set of all parameters that predictions depend on.
    """
    names = {id(p): name for name, p in params.items()}
    found: set[tuple[str, str]] = set()
    reached: set[str] = set()
    # Nodes to visit, with the custom function that they were reached from, if there is no tap in between.
    waiting: list[tuple[Any, str | None]] = [(f.grad_fn, None)]
    seen = set()
    while waiting:
        node, function = waiting.pop()
        if node is None or (node, function) in seen:
            continue
        seen.add((node, function))
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            reached.add(name)
            if function is not None:
                found.add((name, function))
        if isinstance(node, Tap._backward_cls):
            function = None
        elif isinstance(node, BackwardCFunction) and not _waits_for_gradients(node):
            function = type(node).__name__.removesuffix("Backward")
        waiting += [(following, function) for following, _ in node.next_functions]
    return found, reached


def _waits_for_gradients(node: Any) -> bool:
    """Whether a function is the identity that `fully_shard` puts around modules."""
    return str(type(node)._forward_cls.__module__).startswith("torch.distributed.fsdp.")


# Queries of tensor metadata. They are so frequent that skipping the inspection of their arguments pays.
_PROPERTIES = ("dtype", "shape", "device", "ndim", "is_nested", "is_cuda", "is_sparse", "layout")
_METHODS = ("dim", "size", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__")
_QUESTIONS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}

# Operations that select, scatter or repeat rows by indices.
_MOVE_NAMES = (
    *("gather", "index_select", "masked_select", "take", "take_along_dim", "repeat_interleave", "segment_reduce"),
    *("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"),
)
_MOVES = {
    getattr(owner, name + ending)
    for name in _MOVE_NAMES
    for ending in ("", "_")
    for owner in (torch, Tensor)
    if hasattr(owner, name + ending)
} | {Tensor.__getitem__, Tensor.__setitem__, torch.nn.functional.one_hot}
# Operations that read values on the host, such as lengths.
_READS = {Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__index__}


@dataclass(frozen=True)
class Used:
    """One use of a parameter in a pass."""

    number: int  # index among all uses of the pass
    what: What
    rows: int
    positions: int  # of each row
    by_construction: bool  # whether rows are in the order of examples by construction
    query: int  # index among the uses that the audit recorded
    not_padding: Tensor | None = field(default=None, compare=False)  # positions that inputs do not mark as padding


Observer = Callable[[Used, RowMap, Receiver], Receiver]
_MOST_PLANS = 10_000  # a model whose shapes never repeat adds plans in every batch


class Capture(TorchFunctionMode):
    """A mode that intercepts the forward pass of one batch.

    Args:
        session: Has tracked parameters, rules and plans.
        sums: The sums in which inputs and gradients are accumulated.
        num_data: Number of examples in the batch.
        batch_axis: Position of the batch axis in activations, if not the first.
        known: Results of an audit. `None` to guess row maps from lengths.
        measuring: Whether to measure all row maps, for an audit.
        masks: The masks that determine which rows count. By default, all do.
        padding: Records padding that no row rule explains. If not given, it is not looked for.
    """

    def __init__(
        self,
        session: Session,
        sums: Sums,
        num_data: int,
        batch_axis: int | None = None,
        known: AuditResult | None = None,
        measuring: bool = False,
        masks: BatchMasks | None = None,
        padding: DeferredChecks | None = None,
    ) -> None:
        super().__init__()
        # Plans are dropped if parameters have moved to other storages, or if varying shapes have made too many of them.
        if session.tracker.has_moved() or len(session.plans) > _MOST_PLANS:
            session.forget_plans()
            sums.adders.clear()
        if known is not None and not session.both_ways >= known.both_ways:
            session.learn(known.both_ways)
        self.session = session
        self.tracker = session.tracker
        self.sums = sums
        self.num_data = num_data
        self.batch_axis = batch_axis
        self.measuring = measuring
        self.masks = masks or BatchMasks()
        if known is not None and not known.has_mask:
            self.masks.mask = None
        # Whether some rows do not count, as far as the host knows.
        self._counts_rows = sums.counts_rows and known is not None and self.masks.leave_out(known.row_rules)
        self._distrusts = sums.counts_rows and known is not None and known.distrusted
        self._checked = known.checked if sums.counts_rows and known is not None and padding is not None else None
        self._padding = padding
        self._with_gradient: Tensor | None = None  # which rows of the checked use have a gradient so far
        self._should_count: list[Tensor] = []  # which rows of the checked use should have one
        self.uses = 0  # number of uses so far
        self.whats: list[What] = []  # all uses, if rows are measured
        self.most_positions = 0  # largest number of positions of a use, over all examples
        self.noise: torch.Generator | None = None  # adds noise to all outputs, for experiments
        # Called for every use with its row map and gradient callback; returns the callback to use.
        self.observer: Observer | None = None
        self.queries: RowQueries | None = None  # the row queries of this pass, if any
        inputs = ((), ()) if known is None else (known.constants, known.inputs)
        self.marks = Marks(self.tracker, num_data, batch_axis, *inputs)
        self.is_data = self.marks.is_data
        self.as_data = self.marks.as_data
        self.mark_data = self.marks.mark_data
        self.precisions: dict[str, torch.dtype] = {}  # lowest precision that a parameter was cast to
        self.routes = False  # whether the data determine which rows are selected
        self.handle: Tensor | None = None  # the zero-size second input of all taps
        self.keep_graph = True  # whether further backward passes will follow
        self.together = False  # whether the backward pass is for several columns, batched by `vmap`
        self.running = True  # whether the forward pass is still running
        self.sending = False  # whether `backward` runs, in full precision
        self.probing = False  # whether its vectors are probes that measure row maps
        self.listening = False  # whether to show gradients of the caller's backward pass
        self.operations = 0  # hash of the sequence of operations
        self.derived: list[Derived] = []  # in order of creation
        # `(parameter, why)` of uses that no rule covers; complete after a backward pass.
        self.unexplained: set[tuple[str, str]] = set() if known is None else set(known.unexplained)
        self.reached: set[str] = set()  # parameters that predictions depend on
        self._known = known
        self._waits = False  # whether the next tap belongs to a pending row query

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; if it uses a tracked parameter, according to its plan."""
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        # The sequence of operations identifies the execution path. Rows selected by data may be in any order.
        self.operations = hash((self.operations, func))
        inputs = tensors_of((*args, *kwargs.values()) if kwargs else args)
        if func in _MOVES or func in _READS:
            self.routes = self.routes or self._moves_by_data(func, args, inputs)
        # Does the operation use a tracked parameter?
        if not torch.is_grad_enabled():  # operations without gradient are not uses
            refuse_reentrant_checkpoint()
        elif _are_functorch_transforms_active():  # taps do not work under torch.func
            plain = [t for t in inputs if not is_functorch_wrapped_tensor(t)]
            found = [tracked for t in plain if (tracked := self.tracker.find(t)) is not None]
            why = no_rule(f"{func.__name__} inside of torch.func")
            self.unexplained.update((name, why) for tracked in found for name in tracked.names)
        else:
            if func in FIRST_ONLY:  # other arguments only give type or shape
                inputs = inputs[:1]
            # A mask made by torch.ones_like(weight) depends on the parameter's shape, but not on its values.
            sources = [] if func in SHAPES_ONLY else list(map(self.tracker.find, inputs))
            if any(sources):
                return self._run(func, args, kwargs, inputs, sources)
        result = func(*args, **kwargs)
        self.marks.note(func, inputs, args, result)
        return result

    def _moves_by_data(self, func: Any, args: Any, inputs: list[Tensor]) -> bool:
        """Whether the data determine where rows go, or how many each example has."""
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            indices = tensors_of(args[1:2])
        else:
            indices = inputs if len(inputs) == 1 else inputs[1:]
        return any(self.is_data(t) for t in indices if not t.is_floating_point())

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], sources: list[Tracked | None]) -> Any:
        """Run an operation that uses a tracked parameter, with its cached plan if there is one."""
        key = self.key_of(func, args, kwargs, inputs, sources)
        settled = self.session.plans.get(key)
        if type(settled) is not list or not self.fit(settled):
            result = self._run_unsettled(key, func, args, kwargs)
            self.marks.note(func, inputs, args, result)
            return result
        out = func(*args, **kwargs)
        for plan in settled:
            out = self._tap_output(plan, args, kwargs, out)
        return out

    def _run_unsettled(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that uses a tracked parameter and has no settled plan; settle it if the output is tapped."""
        kind = self.session.device_type
        call = Call(func, self.num_data, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        planned = self._plan(key, call, args, kwargs)
        if planned is None:
            return self.session.fallback(self, func, args, kwargs)
        if isinstance(planned, Rewrite):
            return planned.body(self, *args, **kwargs)
        if isinstance(planned, Copy):
            return track_copy(self, planned, func(*args, **kwargs), key)
        if isinstance(planned[0], Broadcast):
            for step in planned:
                tapped = tap_broadcast(self, step, argument_at(step.argument.place, args, kwargs), call)
                args, kwargs = with_argument(step.argument.place, tapped, args, kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if planned[0].follows:
            return self._follow(planned, call, key, args, kwargs, out)
        return self._settle_and_tap(planned, call, key, args, kwargs, out)

    def _follow(
        self,
        planned: tuple[Plan, ...],
        call: Call,
        key: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
    ) -> Any:
        """Track the output of an operation on constants as a derived parameter, unless it has a row per example."""
        func = call.func
        with full_precision(self.session.device_type):
            x = prepared(planned[0], args, kwargs)
        leading, axis = planned[0].inputs.leading(x), self.batch_axis or 0
        guess = self.num_data > 1 and leading[axis : axis + 1] == (self.num_data,)
        with self.row_queries().question(func, planned[0].layout.weight, guess) as has_data:
            if has_data:  # the input does not depend on data, but it has a row for every example
                tapped = self._settle_and_tap(planned, call, (key, "rows of data"), args, kwargs, out)
                return self.marks.mark(tapped)
            return self.session.fallback(self, func, args, kwargs)

    def _settle_and_tap(
        self,
        planned: tuple[Plan, ...],
        call: Call,
        key: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
    ) -> Tensor:
        """Settle plans, and return the operation's output with a tap for each."""
        placement = self.sums.placement
        settled = self.session.plans.get(key)
        if type(settled) is not list or not self.fit(settled):
            settled = [one for plan in planned for one in self.session.settle(plan, call, out, placement)]
            self.session.plans[key] = settled
        for plan in settled:
            out = self._tap_output(plan, args, kwargs, out)
        return out

    def open(
        self,
        what: What,
        leading: tuple[int, ...],
        start: Callable[[RowMap], Receiver],
        meeting: bool = False,
        counting: Counting = EVERYTHING,
    ) -> Receiver:
        """Register a row query for the next tap. Arguments are those of `RowQueries.open`."""
        queries = self.row_queries()
        before = len(queries.opened)
        receive = queries.open(what, leading, start, meeting, counting)
        self._waits = len(queries.opened) > before
        return receive

    def observed(self, t: Tensor, what: What) -> Tensor:
        """Return a tensor with a tap that measures its row map number by number, for an audit."""
        receive = self.row_queries().observe(what, tuple(t.shape))
        self._waits = True
        return self.tap(t, receive)

    def row_queries(self) -> RowQueries:
        """Return the row queries of this pass."""
        if self.queries is None:
            mixing = self.session.mixing
            self.queries = RowQueries(self.num_data, self.batch_axis, self._known, self.measuring, mixing, self.masks)
        return self.queries

    def _plan(self, key: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operation's rule, which is cached."""
        rule = self.session.rules.get(call.func)
        if rule is None:
            return None
        plans = self.session.plans
        if key not in plans or type(plans[key]) is list:  # settled plans that do not fit the blocks of this pass
            described = [describe(part, (place,), self.tracker, self.is_data) for place, part in enumerate(args)]
            named = {name: describe(part, (name,), self.tracker, self.is_data) for name, part in kwargs.items()}
            # Rules assume that a view of a parameter has entries of it, which fails for views in another dtype.
            as_entries = not self.tracker.as_other_numbers(tensors_of((*args, *kwargs.values())))
            plans[key] = rule(call, *described, **named) if as_entries else None
        return plans[key]

    def key_of(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], sources: list[Tracked | None]) -> Any:
        """Return the cache key of a plan: operation, arguments, number of examples and `autocast`."""
        kind = self.session.device_type
        key = [func, self.num_data]
        if torch.is_autocast_enabled(kind):
            key.append(torch.get_autocast_dtype(kind))
        for t, source in zip(inputs, sources, strict=True):
            if source is None:
                key += (t.shape, t.dtype, self.is_data(t))
            elif t is source.tensor:  # the whole parameter
                key.append(source.token)
            else:
                key += (source.token, t.storage_offset(), t.shape, t.stride(), t.dtype)
        if kwargs or not all([isinstance(part, Tensor) for part in args]):  # noqa: C419 (a generator takes longer)
            key.append(without_tensors((args, tuple(kwargs.items()))))
        return tuple(key)

    def fit(self, plans: Iterable[Plan]) -> bool:
        """Whether settled plans fit the existing blocks; in training, every pass starts without blocks."""
        adders, placement = self.sums.adders, self.sums.placement
        return all([plan in adders or not plan.fits or placement.admit(plan.layout) for plan in plans])  # noqa: C419

    def use(self, plan: Plan, x: Any, by_construction: bool = False) -> Receiver:
        """Accumulate the inputs of a use, and return its gradient callback for `[columns, *shape of the output]`.

        Args:
            plan: A plan that the session has settled.
            x: The prepared input.
            by_construction: Whether rows are in the order of examples by construction.
        """
        number = self.uses
        self.uses += 1
        if self.measuring:
            self.whats.append((plan.operation, plan.layout.weight))
        if not plan.fits:
            self._waits = True  # so that probes also reach it
            return lambda _: self.sums.note_conflict(plan)
        adder = self.sums.adders.get(plan)
        if adder is None:
            adder = self.sums.adders[plan] = self.sums.adder_of(plan)
        if self.sums.by_datum or self._counts_rows or self._distrusts or number == self._checked:
            receive = self._add_rows(number, adder, plan, x, by_construction)
        else:
            receive = adder.add(x)
        return receive if plan.read is None else _reading(plan.read, x, receive)

    def _add_rows(self, number: int, adder: Adder, plan: Plan, x: Any, by_construction: bool) -> Receiver:
        """Accumulate the inputs of a use as soon as its row map and the rows that count are known."""
        leading = plan.inputs.leading(x)
        rows = prod(leading)
        what = (plan.operation, plan.layout.weight)
        positions = plan.inputs.per_row
        row_map = StridedRows.batch_first(self.num_data, rows) if by_construction else None
        used = Used(
            number, what, rows, positions, by_construction, self.row_queries().next_use, plan.inputs.not_padding(x)
        )
        self.most_positions = max(self.most_positions, rows * positions)

        def start(row_map: RowMap) -> Receiver:
            with full_precision(plan.device.type):
                receive = adder.add(x, row_map)
            if number == self._checked:
                receive = self._looking_for_padding(row_map.counted, used, receive)
            return receive if self.observer is None else self.observer(used, row_map, receive)

        rule = self._rule(number, what)
        # Derived and broadcast parameters are not measured, and fixed positions need not be.
        if self._distrusts and not by_construction and rule.kind != "positions":
            rule = MEASURED
        counting = Counting(rule, positions, row_map, self.sums.by_datum)
        return self.open(what, leading, start, counting=counting)

    def _looking_for_padding(self, counted: Tensor | None, used: Used, receive: Receiver) -> Receiver:
        """Return a receiver that also records which rows have a gradient in any column."""
        self._should_count = [t.flatten() for t in (counted, used.not_padding) if t is not None]

        def look(g: Tensor) -> None:
            found = (g != 0).any(-1).flatten(1).any(0)
            self._with_gradient = found if self._with_gradient is None else self._with_gradient | found
            receive(g)

        return look

    def note_padding(self) -> None:
        """Record rows that should count but have no gradient, after all vectors were sent back."""
        if self._padding is None or self._with_gradient is None:
            return
        surprising = ~self._with_gradient
        for rows in self._should_count:
            surprising = surprising & rows
        self._padding.note(surprising, 0)
        self._with_gradient = None

    def _rule(self, number: int, what: What) -> RowRule:
        """Return the row rule of a use."""
        known = self._known
        if known is None or not self._counts_rows:
            return ALL
        fits = number < len(known.rows) and known.rows[number][0] == what
        rule = known.rows[number][1] if fits else known.otherwise
        return ALL if rule.whole and self.masks.are_complete else rule

    def tap(self, z: Tensor, receive: Receiver, probed: bool = False) -> Tensor:
        """Return `z` with a tap that shows its gradients to a receiver, including those of probes if `probed`."""
        if self.handle is None:
            self.handle = torch.empty(0, requires_grad=True)
        waits = self._waits or probed
        if waits:
            self._waits = False
        return apply_tap(z, self.handle, self, receive, waits)

    def find_hidden_uses(self, f: Tensor) -> None:
        """Look for uses that were not intercepted, unless an earlier pass had the same operations."""
        known = self.session.hidden_uses
        if self.operations not in known:
            hidden, reached = hidden_uses(f, self.tracker.leaves())
            known[self.operations] = {(name, no_rule(function)) for name, function in hidden}, reached
        hidden, self.reached = known[self.operations]
        self.unexplained |= hidden

    def clear_marks(self) -> None:
        """Remove the marks of this pass and drop its tensors, after the forward pass."""
        self.tracker.forget_batch()
        self.marks.forget()

    def _tap_output(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """Accumulate the inputs of a use, and return the operation's output with a tap."""
        if plan.narrow is not None:
            with full_precision(plan.device.type):
                receive = self.use(plan, prepared(plan, args, kwargs))
        else:  # without autocast, only the graph has to be switched off, which is faster in this way
            torch._C._set_grad_enabled(False)
            try:
                receive = self.use(plan, prepared(plan, args, kwargs))
            finally:
                torch._C._set_grad_enabled(True)
        return self.tap(out, receive)


def forward(
    risk: EmpiricalRisk,
    batch: Batch,
    session: Session,
    sums: Sums,
    batch_axis: int | None = None,
    known: AuditResult | None = None,
    ignored: DeferredChecks | None = None,
    padding: DeferredChecks | None = None,
) -> tuple[Tensor, Capture]:
    """Evaluate the model with taps at the outputs of all parametric operations.

    Args:
        risk: Model and parameters.
        batch: A batch of data.
        session: Has tracked parameters, rules and plans.
        sums: The sums in which inputs, and later gradients, are accumulated.
        batch_axis: Position of the batch axis in activations, if not the first.
        known: Results of an audit. `None` to guess row maps from lengths.
        ignored: If given, all targets are assumed to count, and examples with ignored targets are recorded there.
        padding: If given, records padding that no row rule explains.

    Returns:
        Predictions, and the capture, which is needed to send vectors back.
    """
    targets = risk.loss.counted(batch.y)
    masks = BatchMasks(targets, risk.mask_source.find(batch.x, len(batch.y)), device=batch.y.device)
    if ignored is not None and targets is not None:
        ignored.note(~targets.flatten(1).all(1), batch.start)
        masks.assume_all_count()
    capture = Capture(session, sums, len(batch.y), batch_axis, known, masks=masks, padding=padding)
    # Run the model under capture. The user's code may keep tensors, so marks are removed even if it raises.
    marked = batch._replace(x=mapped(batch.x, capture.mark_data))
    try:
        with uncompiled():
            f = risk.predict(risk.params, marked, within=capture)
    finally:
        capture.clear_marks()
        capture.running = False
    capture.find_hidden_uses(f)
    return f, capture


def prepared(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of a plan's operation as `prepare` computes it; `None` if the plan has no arguments."""
    tensors = [
        args[argument.place[0]] if argument.is_positional else argument_at(argument.place, args, kwargs)  # type: ignore[index]
        for argument in plan.arguments
    ]
    if plan.prepare is not None:
        return plan.prepare(*tensors)
    return tensors[0] if tensors else None


def _reading(read: Read, x: Any, receive: Receiver) -> Receiver:
    """Return a receiver that converts gradients before it passes them on."""
    return lambda g: receive(read(g, x))
