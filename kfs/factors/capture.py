"""A captured pass: one forward pass in which uses of parameters are seen, and the vectors sent back through its graph.

It is the only implementation of a pass. Its clients are `kfs.factors.compute`, audits, `kfs.inspect`, and the
optimizer, which watches passes of the user and records its own.

    with CapturedPass(trace, statistics, num_data) as one:  # inputs are accumulated in this context
        f = model(*one.mark(arguments))
    one.finish_forward(f)
    one.send_back(f, vectors)  # gradients are accumulated

`kfs.factors.trace.discovery` finds which operations use parameters; a pass inherits from it. A row source determines
which example a row belongs to (see `kfs.factors.rows.row_map`).

The output of every use has a *tap*: an identity in the computation graph whose backward pass shows gradients to a
callback. A tap has a zero-size second input, the handle. Differentiating predictions with respect to the handle sends
vectors back to all taps: no weight gradient is computed, and each gradient is used where it arises and never stored.

PyTorch does not show modes which parameters enter a custom `autograd.Function`. `hidden_uses` finds these parameters in
the graph of the predictions. It also returns all parameters that predictions depend on; other parameters are not used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from kfs.errors import ModelError
from kfs.factors.accumulate.statistic import Adder, Statistic, all_of
from kfs.factors.rows.counted import ALL, MEASURED, BatchMasks
from kfs.factors.rows.row_map import AuditResult, Receiver, RowMap, RowQuery, RowSource, StridedRows
from kfs.factors.trace.discovery import Discovery, Interception
from kfs.factors.trace.plan import Plan
from kfs.factors.trace.trace import MOST_PLANS, Trace, no_rule
from kfs.problem.data import Batch
from kfs.problem.isolation import uncompiled
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.precision import full_precision
from kfs.runtime.sync import DeferredChecks


class Phase(Enum):
    """Phase of a pass, which determines how its taps handle gradients."""

    FORWARD = auto()  # the model runs, and must not differentiate its predictions
    IDLE = auto()  # gradients belong to others
    PROBING = auto()  # vectors that measure row maps are sent back; only pending queries take them
    SENDING = auto()  # vectors of the curvature are sent back
    LISTENING = auto()  # the caller's backward pass has the gradients that are needed


class Tap(torch.autograd.Function):
    """The identity, with a backward pass that shows gradients to a receiver."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        z: Tensor,
        handle: Tensor,  # noqa: ARG004
        state: "CapturedPass",
        receive: Receiver,
        probed: bool,
    ) -> Tensor:
        ctx.state = state
        ctx.receive = receive
        ctx.probed = probed
        # The result shares memory but is not a view for autograd: in-place operations may follow, and add nothing to
        # the backward pass. This is safe: z is not used elsewhere, and no operation that has a rule saves its output.
        return z.detach() if state.noise is None else _noisy(z, state.noise)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Show the gradients to the receiver. The handle needs no gradient."""
        state, receive = ctx.state, ctx.receive
        phase = state.phase
        if phase is Phase.FORWARD:
            raise ModelError(
                "The model differentiates its own predictions (torch.autograd.grad in its forward pass).",
                "Send derivatives forward beside values by kfs.pinn.taylor(net, x), as in docs/howto_pinn.md; or leave "
                "the parameters behind that derivative out with params=. kfs.GGN(risk) takes the model as it is.",
            )
        if receive is None or phase is Phase.IDLE or (phase is Phase.PROBING and not ctx.probed):
            return g, None, None, None, None
        if g.is_cuda:  # pragma: no cover (the thread's first operation may be a product: cuBLAS wants a context)
            torch.cuda.set_device(g.device)
        if phase is Phase.LISTENING:
            with full_precision(g.device.type):
                receive(g.unsqueeze(0))
        elif state.columns > 1:
            Show.apply(g, receive)  # type: ignore[no-untyped-call]
        else:
            receive(g.unsqueeze(0))
        if not state.keeps_graph:
            ctx.receive = None  # it may hold activations
        return g, None, None, None, None


def _noisy(z: Tensor, generator: torch.Generator) -> Tensor:
    """Return an activation plus noise of the same root mean square."""
    if not z.is_floating_point() or not z.numel():
        return z.detach()
    size = z.norm() / z.numel() ** 0.5
    noise = torch.randn(z.shape, generator=generator, dtype=torch.float32).to(z)
    return z + torch.where(size > 0, size, 1.0) * noise


# `Tap.apply` without its check for torch.func transformations, which takes a third of its time.
apply_tap: Callable[..., Tensor] = super(torch.autograd.Function, Tap).apply


class Show(torch.autograd.Function):
    """Passes the gradients of several columns, which are batched by `vmap`, to a receiver as `[columns, ...]`."""

    @staticmethod
    def forward(g: Tensor, receive: Receiver) -> Tensor:  # noqa: ARG004 (g is not batched, so it is zero)
        """Return an empty tensor; an unbatched gradient is not shown."""
        return g.new_empty(0)  # pragma: no cover (whether this happens depends on PyTorch's backward formulas)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(_: Any, in_dims: Any, g: Tensor, receive: Receiver) -> tuple[Tensor, None]:
        """Show all columns to the receiver."""
        receive(g.movedim(in_dims[0], 0))
        return g.new_empty(0), None


# Called for every use with its query, row map and gradient callback; returns the callback to use.
Observer = Callable[[RowQuery, RowMap, Receiver], Receiver]


class CapturedPass(Discovery):
    """One forward pass, and backward passes through its graph.

    Args:
        trace: Has tracked parameters, rules and plans.
        statistics: Accumulate inputs and gradients. If there are none, the pass finds row maps only.
        num_data: Number of examples in the batch.
        batch_axis: Position of the batch axis in activations, if not the first.
        known: Result of an audit. `None` to guess row maps from lengths.
        auditing: Whether the pass is an audit; see `RowSource`.
        masks: The masks that determine which rows count. By default, all do.
        padding: Records padding that no row rule explains. If not given, it is not looked for.
        observer: Called for every use, if given. A pass with an observer does not look for padding.
        noise: Adds noise to the outputs of all uses, if given.

    Attributes:
        phase: What is happening now; taps depend on it.
        columns: How many columns are sent back together.
        keeps_graph: Whether further backward passes follow.
        handle: The zero-size second input of all taps.
    """

    def __init__(
        self,
        trace: Trace,
        statistics: Sequence[Statistic],
        num_data: int,
        batch_axis: int | None = None,
        known: AuditResult | None = None,
        auditing: bool = False,
        masks: BatchMasks | None = None,
        padding: DeferredChecks | None = None,
        observer: Observer | None = None,
        noise: torch.Generator | None = None,
    ) -> None:
        # Plans are dropped if parameters have moved to other storages, or if varying shapes have made too many of them.
        if trace.tracker.has_moved() or len(trace.plans) > MOST_PLANS:
            trace.forget_plans()
            for statistic in statistics:
                statistic.adders.clear()
        if known is not None and not trace.both_ways >= known.both_ways:
            trace.learn(known.both_ways)
        self.masks = masks or BatchMasks()
        if known is not None and not known.has_mask:
            self.masks.mask = None
        super().__init__(trace, num_data, batch_axis, known)
        self._auditing = auditing
        self._rows: RowSource | None = None
        self.statistics = statistics
        # The adder of each plan. That of a single statistic is kept across batches.
        self._adders: dict[Plan, Adder] = statistics[0].adders if len(statistics) == 1 else {}
        self._needs_rows = not statistics or any([one.needs_rows for one in statistics])  # noqa: C419
        self.phase = Phase.IDLE
        self.columns = 1
        self.keeps_graph = True
        self.handle: Tensor | None = None
        self.noise = noise
        self._known = known
        if known is not None:
            self.unexplained |= known.unexplained
        # If a statistic must exclude rows that do not count: does any rule leave rows out, as far as the host knows?
        counting = known if any([one.counts_rows for one in statistics]) else None  # noqa: C419
        self._counts_rows = counting is not None and self.masks.leave_out(counting.row_rules)
        self._distrusts = counting is not None and counting.distrusted
        self._observer = observer
        self._padding: PaddingCheck | None = None
        if counting is not None and counting.checked is not None and padding is not None:
            self._padding = PaddingCheck(counting.checked, padding)
            self._observer = self._padding.observe
        self._uses = 0  # number of uses so far
        self._context = ExitStack()

    def __enter__(self) -> "CapturedPass":
        """Start the forward pass."""
        if self.phase is Phase.FORWARD:
            raise ModelError("The pass runs already.", "Within it, enter intercepting(), as rules do.")
        self.phase = Phase.FORWARD
        self._context.enter_context(uncompiled())
        self._context.enter_context(Interception(self))
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """End the forward pass. Marks are removed, because the model may keep tensors."""
        self._context.close()
        self.tracker.forget_batch()
        self.marks.forget()
        self.phase = Phase.IDLE
        if error is not None:
            self.forget()

    @property
    def rows(self) -> RowSource:
        """The row source. It is made when it is needed: most passes need none."""
        if self._rows is None:
            self._rows = RowSource(
                self.num_data, self.batch_axis, self.masks, self._known, self.trace.mixing, self._auditing
            )
        return self._rows

    def use(self, plan: Plan, x: Any, by_construction: bool = False) -> Receiver:
        """Accumulate the inputs of a use, and return its gradient callback for `[columns, *shape of the output]`."""
        number = self._uses
        self._uses += 1
        if not plan.fits:
            self.rows.takes_probes = True  # audits send nothing else back
            return partial(self._note_conflict, plan)
        adder = self._adders.get(plan)
        if adder is None:
            for statistic in self.statistics:
                if plan not in statistic.adders:
                    statistic.adders[plan] = statistic.adder_of(plan)
            every = [statistic.adders[plan] for statistic in self.statistics]
            adder = self._adders[plan] = every[0] if len(every) == 1 else all_of(every)
        checked = self._padding is not None and number == self._padding.place
        if self._needs_rows or self._counts_rows or self._distrusts or checked:
            receive = self._add_rows(number, adder, plan, x, by_construction)
        else:
            receive = adder(x, None)
        read = plan.read
        return receive if read is None else lambda g: receive(read(g, x))

    def _note_conflict(self, plan: Plan, _: Tensor) -> None:
        """Record a use that contradicts other uses of its parameter."""
        for statistic in self.statistics:
            statistic.note_conflict(plan)

    def _add_rows(self, number: int, adder: Adder, plan: Plan, x: Any, by_construction: bool) -> Receiver:
        """Accumulate the inputs of a use as soon as its row map and the rows that count are known."""
        leading = plan.inputs.leading(x)
        what = (plan.operation, plan.layout.weight)
        row_map = StridedRows.batch_first(self.num_data, prod(leading)) if by_construction else None
        rule = self._known.rule_of(number, what) if self._known is not None and self._counts_rows else ALL
        rule = ALL if rule.whole and self.masks.are_complete else rule
        # Derived and broadcast parameters are not measured, and fixed positions need not be.
        if self._distrusts and not by_construction and rule.kind != "positions":
            rule = MEASURED
        waits = rule.kind == "measured" or (rule.kind != "all" and self.masks.pending)
        query = RowQuery(what, leading, False, rule, plan.inputs.per_row, row_map, self._needs_rows, waits, number)
        observe = self._observer
        if observe is not None:
            query.not_padding = plan.inputs.not_padding(x)

        def start(row_map: RowMap) -> Receiver:
            with full_precision(plan.device.type):
                receive = adder(x, row_map)
            return receive if observe is None else observe(query, row_map, receive)

        return self.rows.receiver(query, start)

    def tap(self, z: Tensor, receive: Receiver, probed: bool = False) -> Tensor:
        """Return `z` with a tap that shows its gradients to a receiver, including those of probes if `probed`."""
        if self.handle is None:
            self.handle = torch.empty(0, requires_grad=True)
        if self._rows is not None:
            probed = probed or self._rows.takes_probes
            self._rows.takes_probes = False
        return apply_tap(z, self.handle, self, receive, probed)

    def finish_forward(self, f: Tensor) -> None:
        """Look for uses that were not intercepted, unless an earlier pass had the same operations."""
        known = self.trace.hidden_uses
        if self.operations not in known:
            hidden, reached = hidden_uses(f, self.tracker.leaves())
            known[self.operations] = {(name, no_rule(function)) for name, function in hidden}, reached
        hidden, self.reached = known[self.operations]
        self.unexplained |= hidden

    def measure_rows(
        self, f: Tensor | GradientEdge, like: Tensor | None = None, also: Sequence[Tensor] = ()
    ) -> Sequence[Tensor | None]:
        """Measure the row maps that are not known yet. Arguments are those of `send_back` and `backward`.

        In an audit, the statistics accumulate the gradients of the first probe.

        Returns:
            Gradients of the first probe with respect to the tensors in `also`.
        """
        if self._rows is None or not (self._rows.opened or self._rows.observed):
            return [None] * len(also)
        predictions = f if isinstance(f, Tensor) else like
        assert predictions is not None  # noqa: S101 (callers without predictions pass `like`)
        found: list[Sequence[Tensor | None]] = []
        with full_precision(predictions.device.type):
            for v in self._rows.measure(predictions):
                found.append(self.backward(f, v.unsqueeze(0), True, () if found else also, Phase.PROBING))
            if self.derived:
                self.pass_derived()
        return found[0] if found else [None] * len(also)

    def send_back(
        self,
        f: Tensor | GradientEdge,
        vectors: Iterable[Tensor],
        keep_graph: bool = False,
        like: Tensor | None = None,
    ) -> None:
        """Send vectors back to all taps, chunk by chunk, and accumulate the gradients in the statistics.

        Args:
            f: Predictions.
            vectors: Chunks of columns, `[columns, *f.shape]`.
            keep_graph: Whether to retain the graph.
            like: The predictions, if `f` is a `GradientEdge`.
        """
        try:
            self.measure_rows(f, like)
            for statistic in self.statistics:
                statistic.finish_forward()
            chunks = iter(vectors)
            columns = next(chunks, None)
            while columns is not None:
                following = next(chunks, None)
                self.backward(f, columns, keep_graph or following is not None)
                for statistic in self.statistics:
                    statistic.finish_backward()
                columns = following
        except BaseException:
            self.forget()
            raise
        self._finish_batch()

    def listen(self, f: GradientEdge, like: Tensor) -> None:
        """Accumulate the gradients of the caller's own backward pass, until `stop_listening`."""
        self.keeps_graph = False
        self.measure_rows(f, like)
        self.phase = Phase.LISTENING
        for statistic in self.statistics:
            statistic.finish_forward()

    def stop_listening(self) -> None:
        """Complete the sums after the caller's backward pass; do nothing if there was none."""
        if self.phase is not Phase.LISTENING:
            return
        with torch.no_grad():
            self.pass_derived()
        for statistic in self.statistics:
            statistic.finish_backward()
        self.phase = Phase.IDLE
        self._finish_batch()

    def pass_derived(self) -> None:
        """Pass on the gradients of derived parameters after a backward pass, in reverse order of creation."""
        for derived in reversed(self.derived):
            derived.pass_on()

    def backward(
        self,
        f: Tensor | GradientEdge,
        vectors: Tensor,
        keep_graph: bool = False,
        also: Sequence[Tensor] = (),
        phase: Phase = Phase.SENDING,
    ) -> Sequence[Tensor | None]:
        """Send vectors `[columns, *f.shape]` back to all taps, which pass the gradients to their receivers.

        Returns:
            Gradients with respect to the tensors in `also`, for a single column.
        """
        handle = self.handle
        if isinstance(f, Tensor) and not f.requires_grad:  # no parameter was used
            return [None] * len(also)
        if handle is None:  # no use was seen, but predictions may still depend on `also`
            return torch.autograd.grad(f, also, vectors[0], retain_graph=keep_graph, allow_unused=True) if also else ()
        self.keeps_graph = keep_graph
        self.columns = len(vectors)
        found: Sequence[Tensor | None] = ()
        with full_precision(vectors.device.type):
            self.phase = phase
            try:
                if self.columns > 1:
                    send = partial(torch.autograd.grad, f, handle, retain_graph=keep_graph, materialize_grads=True)
                    vmap(send)(vectors)
                else:
                    every = (handle, *also)
                    found = torch.autograd.grad(f, every, vectors[0], retain_graph=keep_graph, allow_unused=True)[1:]
                if self.derived:
                    self.pass_derived()
            finally:
                self.phase = Phase.IDLE
        return found

    def _finish_batch(self) -> None:
        """Discard the state of this batch, after the last backward pass."""
        for statistic in self.statistics:
            statistic.finish_batch()
        if self._padding is not None:
            self._padding.finish()
        self.derived.clear()  # as in `forget`
        if self._rows is not None:
            self._rows.forget()

    def forget(self) -> None:
        """Drop references from which the graph of the predictions leads back: they would keep its memory forever."""
        self.derived.clear()
        if self._rows is not None:
            self._rows.forget()


def forward(
    risk: EmpiricalRisk,
    batch: Batch,
    trace: Trace,
    statistics: Sequence[Statistic],
    batch_axis: int | None = None,
    known: AuditResult | None = None,
    ignored: DeferredChecks | None = None,
    padding: DeferredChecks | None = None,
) -> tuple[Tensor, CapturedPass]:
    """Evaluate the model of a risk with taps at the outputs of all parametric operations.

    Args:
        risk: Model and parameters.
        batch: A batch of data.
        trace: Has tracked parameters, rules and plans.
        statistics: Accumulate inputs, and later gradients.
        batch_axis: Position of the batch axis in activations, if not the first.
        known: Result of an audit. `None` to guess row maps from lengths.
        ignored: If given, all targets are assumed to count, and examples with ignored targets are recorded there.
        padding: If given, records padding that no row rule explains.

    Returns:
        Predictions, and the pass, which is needed to send vectors back.
    """
    targets = risk.loss.counted(batch.y)
    masks = BatchMasks(targets, risk.mask_source.find(batch.x, len(batch.y)), device=batch.y.device)
    if ignored is not None and targets is not None:
        ignored.note(~targets.flatten(1).all(1), batch.start)
        masks.assume_all_count()
    one = CapturedPass(trace, statistics, len(batch.y), batch_axis, known, masks=masks, padding=padding)
    f = risk.predict(risk.params, batch._replace(x=one.mark(batch.x)), within=one)
    one.finish_forward(f)
    return f, one


class PaddingCheck:
    """Records padding that no row rule explains: rows of one use that should count, but have no gradient.

    Args:
        place: Index of the use.
        found: Where to record it.
    """

    def __init__(self, place: int, found: DeferredChecks) -> None:
        self.place = place
        self._found = found
        self._with_gradient: Tensor | None = None  # which rows have a gradient so far
        self._should_count: list[Tensor] = []  # which rows should have one

    def observe(self, query: RowQuery, row_map: RowMap, receive: Receiver) -> Receiver:
        """Return a callback that also records which rows of the use have a gradient in any column."""
        if query.number != self.place:
            return receive
        self._should_count = [t.flatten() for t in (row_map.counted, query.not_padding) if t is not None]

        def look(g: Tensor) -> None:
            found = (g != 0).any(-1).flatten(1).any(0)
            self._with_gradient = found if self._with_gradient is None else self._with_gradient | found
            receive(g)

        return look

    def finish(self) -> None:
        """Record rows that should count but have no gradient, after all vectors were sent back."""
        if self._with_gradient is None:
            return
        surprising = ~self._with_gradient
        for rows in self._should_count:
            surprising = surprising & rows
        self._found.note(surprising, 0)
        self._with_gradient = None


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
        elif isinstance(node, BackwardCFunction):
            kind: Any = type(node)
            # `fully_shard` puts an identity around modules, which waits for gradients.
            if not kind._forward_cls.__module__.startswith("torch.distributed.fsdp."):
                function = kind.__name__.removesuffix("Backward")
        waiting += [(following, function) for following, _ in node.next_functions]
    return found, reached
