"""Discovery: finds every operation that uses a tracked parameter in a forward pass, and its plan.

What a pass does with a use is in `kfs.factors.capture`. Here it is enough to know that a pass accumulates the inputs of
a plan (`use`) and puts a tap on the output of an operation (`tap`).

A `TorchFunctionMode` shows all operations, whichever code calls them. `Discovery` recognizes parameters, and views of
them, among the arguments. A rule for the operation (see `kfs.factors.rules`) returns a plan: which vectors multiply the
parameter, and how gradients are read. The trace keeps it.

A parameter may enter an operation without data, such as an embedding of the positions `0, ..., T - 1` without batch
axis. Then the result is a *derived parameter*. It is tracked like a parameter until it is broadcast over the batch,
where gradients are still per example.
"""

from abc import ABC, abstractmethod
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from kfs.factors.rows.row_map import AuditResult, Receiver, RowSource
from kfs.factors.trace.derived import saved_as_before, tap_broadcast
from kfs.factors.trace.plan import Broadcast, Call, Copy, Plan, Rewrite, argument_at, describe, with_argument
from kfs.factors.trace.trace import Rule, Trace, no_rule
from kfs.factors.trace.tracking import FIRST_ONLY, SHAPES_ONLY, Derived, Marks, Tracked, tensors_of
from kfs.problem.torch_fixes import refuse_reentrant_checkpoint
from kfs.runtime.nested import mapped, without_tensors
from kfs.runtime.precision import full_precision

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


class Discovery(ABC):
    """Finds the uses of tracked parameters in one forward pass.

    Args:
        trace: Has tracked parameters, rules and plans.
        num_data: Number of examples in the batch.
        batch_axis: Position of the batch axis in inputs, if not the first.
        known: Result of an audit, if there was one.

    Attributes:
        unexplained: `(parameter, why)` of uses that no rule covers; complete after a backward pass.
        reached: Parameters that predictions depend on.
        precisions: By parameter, the lowest precision that it was cast to.
        routes: Whether the data determine which rows are selected.
        operations: Hash of the sequence of operations, which identifies the execution path.
        derived: Derived parameters, in order of creation.
    """

    def __init__(
        self,
        trace: Trace,
        num_data: int,
        batch_axis: int | None = None,
        known: AuditResult | None = None,
    ) -> None:
        self.trace = trace
        self.tracker = trace.tracker
        self.num_data = num_data
        self.batch_axis = batch_axis
        self.marks = Marks(self.tracker, num_data, batch_axis, known)
        self.is_data = self.marks.is_data
        self.as_data = self.marks.as_data
        self.unexplained: set[tuple[str, str]] = set()
        self.reached: set[str] = set()
        self.precisions: dict[str, torch.dtype] = {}
        self.routes = False
        self.operations = 0
        self.derived: list[Derived] = []

    @property
    @abstractmethod
    def rows(self) -> RowSource:
        """The row source of the pass. It also answers which results on constants have a row for every example."""

    @abstractmethod
    def use(self, plan: Plan, x: Any, by_construction: bool = False) -> Receiver:
        """Accumulate the inputs of a use, and return its gradient callback for `[columns, *shape of the output]`.

        Args:
            plan: A plan that the trace has settled.
            x: The prepared input.
            by_construction: Whether rows are in the order of examples by construction.
        """

    @abstractmethod
    def tap(self, z: Tensor, receive: Receiver, probed: bool = False) -> Tensor:
        """Return `z` with a tap that shows its gradients to a receiver, including those of probes if `probed`."""

    def intercepting(self) -> "Interception":
        """Return the mode in which operations reach this pass; rules enter it again around parts of an operation."""
        return Interception(self)

    def mark(self, inputs: Any) -> Any:
        """Return (nested) inputs of the model with their tensors marked by whether they are data."""
        return mapped(inputs, self.marks.mark_data)

    def moves_by_data(self, func: Any, args: Any, inputs: list[Tensor]) -> bool:
        """Whether the data determine where rows go, or how many each example has."""
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            indices = tensors_of(args[1:2])
        else:
            indices = inputs if len(inputs) == 1 else inputs[1:]
        return any(self.is_data(t) for t in indices if not t.is_floating_point())

    def run_unsettled(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that uses a tracked parameter and has no settled plan; settle it if the output is tapped."""
        kind = self.trace.device_type
        call = Call(func, self.num_data, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        # Ask the rule for the operation, unless it was asked before.
        rule, plans = self.trace.rules.get(func), self.trace.plans
        if rule is not None and (key not in plans or type(plans[key]) is list):  # a list does not fit the blocks here
            described = [describe(part, (place,), self.tracker, self.is_data) for place, part in enumerate(args)]
            named = {name: describe(part, (name,), self.tracker, self.is_data) for name, part in kwargs.items()}
            # Rules assume that a view of a parameter has entries of it, which fails for views in another dtype.
            as_entries = not self.tracker.as_other_numbers(tensors_of((*args, *kwargs.values())))
            plans[key] = rule(call, *described, **named) if as_entries and takes(rule, args, kwargs) else None
        planned = None if rule is None else plans[key]
        if planned is None:
            return self.trace.fallback(self, func, args, kwargs)
        if isinstance(planned, Rewrite):
            return planned.body(self, *args, **kwargs)
        if isinstance(planned, Copy):
            return self._track_copy(planned, func(*args, **kwargs), key)
        if isinstance(planned[0], Broadcast):
            pairs = []
            for step in planned:
                t = argument_at(step.argument.place, args, kwargs)
                pairs.append((tap_broadcast(self, step, t, call), t))
                args, kwargs = with_argument(step.argument.place, pairs[-1][0], args, kwargs)
            with saved_as_before(pairs):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if planned[0].follows:
            return self._follow(planned, call, key, args, kwargs, out)
        return self.tapped(self.trace.settled(key, planned, call, out), args, kwargs, out)

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
        with full_precision(self.trace.device_type):
            leading = planned[0].inputs.leading(prepared(planned[0], args, kwargs))
        axis = self.batch_axis or 0
        guess = self.num_data > 1 and leading[axis : axis + 1] == (self.num_data,)
        with self.rows.question(call.func, planned[0].layout.weight, guess) as has_data:
            if not has_data:
                return self.trace.fallback(self, call.func, args, kwargs)
            settled = self.trace.settled((key, "rows of data"), planned, call, out)
            return self.marks.mark(self.tapped(settled, args, kwargs, out))

    def key_of(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], sources: list[Tracked | None]) -> Any:
        """Return the cache key of a plan: operation, arguments, number of examples and `autocast`."""
        kind = self.trace.device_type
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

    def tapped(self, plans: list[Plan], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """Accumulate the inputs of uses, and return the operation's output with a tap for each."""
        for plan in plans:
            if plan.narrow is not None:
                with full_precision(plan.device.type):
                    receive = self.use(plan, prepared(plan, args, kwargs))
            else:  # without autocast, only the graph has to be switched off, which is faster in this way
                torch._C._set_grad_enabled(False)
                try:
                    place = plan.plain_input
                    receive = self.use(plan, prepared(plan, args, kwargs) if place is None else args[place])
                finally:
                    torch._C._set_grad_enabled(True)
            out = self.tap(out, receive)
        return out

    def _track_copy(self, copy: Copy, result: Any, key: Any) -> Any:
        """Track a copy of a whole parameter as the parameter; views are tracked already."""
        if isinstance(result, Tensor) and self.tracker.find(result) is None:
            known = self.precisions.get(copy.name, result.dtype)
            self.precisions[copy.name] = max(known, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            self.tracker.add(Tracked(copy.name, result, ("copy", key, result.dtype)))
        return result


class Interception(TorchFunctionMode):
    """The mode that sees every operation of a forward pass.

    Args:
        seen: The pass.
    """

    def __init__(self, seen: Discovery) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; if it uses a tracked parameter, according to its plan."""
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        seen = self._seen
        seen.operations = hash((seen.operations, func))
        inputs = tensors_of((*args, *kwargs.values()) if kwargs else args)
        if func in _MOVES or func in _READS:  # selected rows may be in any order
            seen.routes = seen.routes or seen.moves_by_data(func, args, inputs)
        # Does the operation use a tracked parameter?
        if not torch.is_grad_enabled():  # operations without gradient are not uses
            refuse_reentrant_checkpoint()
        elif _are_functorch_transforms_active():  # taps do not work under torch.func
            plain = [t for t in inputs if not is_functorch_wrapped_tensor(t)]
            found = [tracked for t in plain if (tracked := seen.tracker.find(t)) is not None]
            why = no_rule(f"{func.__name__} inside of torch.func")
            seen.unexplained.update((name, why) for tracked in found for name in tracked.names)
        else:
            if func in FIRST_ONLY:  # other arguments only give type or shape
                inputs = inputs[:1]
            # A mask made by torch.ones_like(weight) depends on the parameter's shape, but not on its values.
            sources = [] if func in SHAPES_ONLY else list(map(seen.tracker.find, inputs))
            if any(sources):
                key = seen.key_of(func, args, kwargs, inputs, sources)
                plans = seen.trace.ready.get(key) or seen.trace.plans_of(key)
                if plans is not None:
                    return seen.tapped(plans, args, kwargs, func(*args, **kwargs))
                result = seen.run_unsettled(key, func, args, kwargs)
                seen.marks.note(func, inputs, args, result)
                return result
        result = func(*args, **kwargs)
        seen.marks.note(func, inputs, args, result)
        return result


_signature = cache(signature)


def takes(rule: Rule, args: Any, kwargs: Any) -> bool:
    """Whether a rule has these arguments of its operation: its signature has those that it supports."""
    try:
        _signature(rule).bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def prepared(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of a plan's operation as `prepare` computes it; `None` if the plan has no arguments."""
    tensors = [argument_at(argument.place, args, kwargs) for argument in plan.arguments]
    if plan.prepare is not None:
        return plan.prepare(*tensors)
    return tensors[0] if tensors else None
