"""Watches a model in training: computes factors from its forward passes and from the backward passes of its loss.

Captured passes live in `kfs.factors.capture`, the replay of recorded passes in `kfs.optim.factor_graphs`.

Hooks on the model's forward pass enter and exit a captured pass. A hook on the predictions is called when the gradient
of the loss arrives there. At this moment, the graph is complete and not yet freed. So further vectors can be sent back
through it, and the gradient shows which targets count. With `fisher="empirical"`, the user's backward pass is enough.

A `Pass` is one forward pass with its backward pass. `Watch` keeps the results of passes until `Watch.collect` takes
them. A forward pass without a backward pass has no result.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from math import isfinite
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from kfs.display.describe import counted
from kfs.errors import DataError, KfsError, KfsWarning, ModelError
from kfs.factors.accumulate import FactorSums, PerDatumSums, Statistic
from kfs.factors.audit import Audit, Audits, Counts, NotRepeatableError, distrust
from kfs.factors.blocks import computable
from kfs.factors.capture import CapturedPass
from kfs.factors.compute import backpropagated_vectors, not_covered
from kfs.factors.rows import AuditResult, BatchMasks
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.factors.trace import Interception, Trace
from kfs.losses import Loss
from kfs.optim.across_ranks import Exchange
from kfs.optim.averages import Bases, StepSums
from kfs.optim.factor_graphs import Data, FactorGraph, FactorGraphs, FactorResult, Hook
from kfs.optim.fsdp import has_gradients, is_fully_sharded, leaves, local_part, whole_in_backward
from kfs.optim.loss_check import LossCheck, Targets, shows_targets
from kfs.optim.report import Costs, callers
from kfs.optim.update_rule import total_size
from kfs.problem.data import MaskSource
from kfs.problem.isolation import evaluating, is_evaluating, restored
from kfs.problem.risk import output_tensors, prediction_in
from kfs.problem.whole_parameters import WholeParameters
from kfs.runtime import sync
from kfs.runtime.cuda_graphs import unchanged_attributes
from kfs.runtime.nested import tensors_in
from kfs.runtime.sync import DeferredChecks, number, numbers

# Graph nodes to visit at most: few operations lie between predictions and loss, and graphs of other models are large.
_MOST_OPERATIONS = 50


class KeepsPass(torch.autograd.Function):
    """The identity. Its node in the autograd graph keeps a pass alive while a gradient can be sent back through it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, one: object, alias: bool, predicted: bool) -> Tensor:  # noqa: D102
        ctx.one = one
        ctx.predicted = predicted
        if t.ndim == 0:
            return t.clone()
        # An alias shares memory but is not a view, so in-place operations may follow. If the previous operation has
        # saved its result, autograd must detect in-place operations, and only a view allows that.
        return t.detach() if alias else t.view_as(t)

    @staticmethod
    def backward(_: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient unchanged."""
        return g, None, None, None


def passes_behind(t: Tensor) -> list[Any]:
    """Return the passes that computed the predictions behind a tensor, within a few operations."""
    found = []
    nodes: list[Any] = [t.grad_fn]
    for node in nodes:
        if hasattr(node, "predicted"):
            found += [node.one] if node.predicted else []
        elif node is not None:
            following = [further for further, _ in node.next_functions if further not in nodes]
            nodes += following[: _MOST_OPERATIONS - len(nodes)]
    return found


def call_with_gradient(notify: Callable[[Tensor | None], None], f: Tensor | None, output: Any) -> None:
    """Call a function in backward passes, with the gradient of predictions, or of any output if there are none.

    Trainers return copies of outputs in another precision or on another device. The gradient of a loss that the model
    has computed before reaches the originals.

    Args:
        notify: The function.
        f: The predictions.
        output: The model's output.
    """
    if f is None:
        for t in output_tensors(output).values():
            if t.grad_fn is not None:
                t.register_hook(notify)
        return
    node, place = f.grad_fn, f.output_nr
    if any(t is not f and t.requires_grad for t in output_tensors(output).values()):
        while node is not None and node.name() == "ToCopyBackward0":
            node, place = node.next_functions[0]
    if node is None or node is f.grad_fn:
        f.register_hook(notify)
    else:
        node.register_prehook(lambda gradients: notify(gradients[place]))


def with_parts(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a model's output with a function applied to its tensors."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, (tuple, list)):
        parts: list[Any] = [function(part) if isinstance(part, Tensor) else part for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    items = output if isinstance(output, Mapping) else vars(output)
    # Setting an item of a Hugging Face mapping also sets the attribute.
    put = output.__setitem__ if isinstance(output, MutableMapping) else partial(setattr, output)
    for key, value in list(items.items()):
        if isinstance(value, Tensor):
            put(key, function(value))
    return output


# These Fisher types need no vectors: the user's backward pass provides the gradients.
_WITHOUT_VECTORS = {"empirical", "forward-only"}
# Arguments with which a model may return its loss without predictions; the second one is TRL's.
_FOR_LOSS = ("labels", "fused_lm_head")
# A model, whether autocast is enabled for it, and in which dtype.
Apart = tuple[nn.Module, bool, torch.dtype]


def without_labels(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the arguments of a model without those that ask for a loss."""
    args, kwargs = arguments
    return args, {key: value for key, value in kwargs.items() if key not in _FOR_LOSS}


class Pass:
    """A forward pass of the model, and the backward pass that follows it.

    Args:
        watch: The `Watch` that creates it, with the loss, settings and options. Only a weak reference to it is stored.
        arguments: Positional and keyword arguments of the model.
        trace: Tracks parameters; `None` to count examples only.
        known: Result of the audit.
        bases: Eigenbases for sums of squared gradients.
        graph: Recording that computes the sums, so that the pass is not captured.
        wants_factors: Whether factors are computed, at least by other processes.
        apart: What computes predictions apart if the user's pass returns only a loss.

    Attributes:
        has_gradient: Whether a gradient of the predictions has arrived.
        problem: An error that is raised when a gradient arrives: passes without one are harmless.
        to_record: Pass to record or rehearse with the same data, if passes like this one repeat.
        data: The data of this pass, if it has arrived, for `to_record`.
    """

    def __init__(
        self,
        watch: "Watch",
        arguments: tuple[Any, Any],
        trace: Trace | None,
        known: AuditResult | None,
        bases: Bases,
        graph: FactorGraph | None,
        wants_factors: bool,
        apart: Apart | None,
    ) -> None:
        self.owner = weakref.ref(watch)
        self.apart = apart
        self.loss = watch.loss
        self.settings = watch.settings
        self.compare = watch.loss_check.steps_left > 0
        self.costs = watch.costs
        self.keep_inputs = watch.keep_inputs
        self.bases = bases
        self.graph = graph
        self.audited = known
        self.wants_factors = wants_factors
        self.has_gradient = False
        self.to_record: FactorGraph | None = None
        self.data: Data | None = None
        num_data = watch.number_of_data(arguments)
        self.num_data = 1 if num_data is None else num_data
        self.all_data = self.num_data  # including examples of other processes
        # Maps the number of examples to the number on lower ranks, and the total number, on which drawn labels depend.
        draws = wants_factors and self.settings.fisher == "mc"
        self.place_of_data = watch.exchange.numbering() if draws else None
        self.problem: Exception | None = None
        if num_data is None:
            self.problem = DataError(
                "The model was called without any tensor that has a batch axis.",
                "Call it with a batch of inputs: model(x) with x of shape [N, ...].",
            )
        self._arguments = arguments if self.apart is None else without_labels(arguments)
        labels = arguments[1].get("labels")
        self.targets = Targets(labels if isinstance(labels, Tensor) else None, compare=self.compare)
        self._result = StepSums(self.num_data, in_model=self.targets.y is not None)
        self._context = ExitStack()
        self._sums = FactorSums(self.settings)
        self._statistics: list[Statistic] = [self._sums]
        if bases:
            layouts = {key: layout for key, (layout, _) in bases.items()}
            squares = {key: squares for key, (_, squares) in bases.items()}
            self._statistics.append(PerDatumSums(self.settings, layouts, squares))
        self._replayed: FactorResult | None = None
        self._captured: CapturedPass | None = None
        self.padding: DeferredChecks | None = None  # records padding that no rule about rows explains
        if trace is not None and graph is None:
            # Which targets are counted is known once the gradient of the loss arrives.
            masks = BatchMasks(
                mask=watch.masks.find(arguments, self.num_data),
                pending=self.loss.class_axis is not None,
                device=trace.device,
            )
            batch_axis = self.settings.batch_axis
            self.padding = None if self.settings.fisher == "forward-only" else DeferredChecks(trace.device)
            trace.restart_blocks()
            self._captured = CapturedPass(
                trace, self._statistics, self.num_data, batch_axis, known, masks=masks, padding=self.padding
            )
            # Without a backward pass, queries would keep the graph that holds them.
            weakref.finalize(self, self._captured.rows.forget).atexit = False

    def start(self) -> Any:
        """Start capturing. Return marked arguments for the model, or `None` to leave them unchanged."""
        if self._captured is None or self.apart is not None:
            return None
        marked = self._captured.mark(self._arguments)
        self._context.enter_context(self._captured)
        return marked

    def stop(self) -> None:
        """Stop capturing."""
        self._context.close()

    @property
    def sends_vectors(self) -> bool:
        """Whether vectors are sent back through the graph before the user's gradient."""
        if self._captured is None or self.settings.fisher not in _WITHOUT_VECTORS:
            return self._captured is not None
        return self._captured.rows.need_probes

    def watch_output(self, output: Any, receive: "weakref.WeakMethod[Any]") -> Any:
        """Return the model's output with hooks that call `receive` with this pass when a gradient arrives."""
        f = None if self.apart is not None else self._note_predictions(output)
        if f is None and not output_tensors(output):
            return output
        if f is not None and f.grad_fn is None:
            return output
        reference = weakref.ref(self)

        def notify(g: Tensor | None) -> None:
            one, method = reference(), receive()
            if g is not None and one is not None and method is not None:
                method(one, g)

        call_with_gradient(notify, f, output)

        def kept(t: Tensor) -> Tensor:
            if t.grad_fn is None:
                return t
            values_are_saved = hasattr(t.grad_fn, "_saved_result")
            result: Tensor = KeepsPass.apply(t, self, not values_are_saved, t is f)  # type: ignore[no-untyped-call]
            if t is f:
                others = getattr(t, "_kfs_passes", ())  # Another optimizer may watch the same model.
                result._kfs_passes = (*others, reference)  # type: ignore[attr-defined]
            return result

        return with_parts(output, kept)

    def _note_predictions(self, output: Any) -> Tensor | None:
        """Return the predictions in the model's output, after noting where their gradient arrives.

        If there are none, or if they are wrong, it is a problem.
        """
        try:
            f = prediction_in(output, self.loss.output)
        except KfsError as problem:
            self.problem = problem
            if self.targets.y is not None:
                fused = "If its loss is fused: it must return predictions when it gets no labels, and needs audit=True."
                self.problem = ModelError(problem.cause, f"{problem.way_out} {fused}")
            return None
        if f.grad_fn is None:
            return f
        if f.shape[:1] != (self.num_data,) and self.problem is None:
            self.problem = DataError(
                f"The model was called with {counted(self.num_data, 'example')}, but its prediction "
                f"has shape {list(f.shape)}.",
                "Put the batch axis first in predictions; pass its position in inputs as batch_axis=.",
            )
        if self._captured is not None:
            self._captured.finish_forward(f)
        self._edge = get_gradient_edge(f)
        self._f = f.detach()
        return f

    def _predict_apart(self, model: nn.Module, enabled: bool, dtype: torch.dtype, g: Tensor) -> Tensor:
        """Compute predictions without labels, and return the gradient of the loss there; NaN if `g` is not finite."""
        y = self.targets.y
        if y is None:
            raise self.loss.unknown_targets()
        args, kwargs = self._arguments if self._captured is None else self._captured.mark(self._arguments)
        with (
            restored(model, g.device, refuse=False),
            torch.enable_grad(),
            torch.autocast(g.device.type, dtype, enabled),
            evaluating(),
            self._captured or nullcontext(),
        ):
            output = model(*args, **kwargs)
        self._note_predictions(output)
        if self.problem is not None:
            raise self.problem
        f = computable(self._f)
        self.loss.check_now(f, y)
        gradient = self.loss.gradient(f, y) * self.loss.reduction_factor(max(number(self.loss.count(y)), 1.0))
        return torch.where(g.isfinite().all(), gradient, torch.nan)

    def receive_gradient(self, g: Tensor, first_datum: int) -> None:
        """Process the gradient of a loss at the predictions, and send vectors back if the curvature needs them."""
        if self.problem is not None:
            raise self.problem
        self.has_gradient = True
        if not self.num_data:  # an empty batch
            return
        if self.apart is not None:
            g = self._predict_apart(*self.apart, g)
        f, g, result = computable(self._f), g.detach(), self._result
        # A prediction of minus infinity is a masked class.
        result.finite = bool(g.isfinite().all() & ~(f.isnan() | (f == torch.inf)).any())
        y = self.targets.match(f, g, self.loss, self.settings.fisher) if result.finite else None
        result.mismatch = float(self.targets.mismatch)
        # The empirical Fisher of a zero gradient has no scale, and is not used.
        if y is not None and (self.settings.fisher != "empirical" or bool(self.targets.scale)):
            result.examples = number(self.loss.examples(y))
            result.count = number(self.loss.count(y))
            if self.keep_inputs and result.examples:
                args, kwargs = self._arguments
                result.inputs = [(args, {key: value for key, value in kwargs.items() if key != "labels"}, y)]
        # Read the loss and the size of the gradient, to notice a run that gets worse.
        if y is not None:
            with sync.allow_sync():
                result.square, result.deviance = numbers([computable(g).square().sum(), self._deviance(f, y)])
        with self.costs.timed("factors"):
            if y is not None and result.examples and self.graph is not None:
                self._replayed = self.graph.replay(self._arguments, y, first_datum)
            if self._captured is not None:
                self._capture_gradients(self._captured, f, g, y, first_datum)
        del self._f, self._edge, self._arguments  # Free them early: the graph and the inputs are large.

    def _deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum of deviances; NaN if targets are unknown."""
        if y is self.targets.y or shows_targets(self.loss):
            return self.loss.deviance(f, y).sum()
        return f.new_full((), torch.nan)

    def _capture_gradients(self, one: CapturedPass, f: Tensor, g: Tensor, y: Tensor | None, first_datum: int) -> None:
        """Send vectors back through the graph, or capture gradients in the user's backward pass."""
        if y is None or not self._result.examples:
            return
        if one.masks.pending:
            one.masks.set_targets(self.loss.counted(y))
        if self.settings.fisher in _WITHOUT_VECTORS and self.apart is not None:
            one.send_back(self._edge, [g.unsqueeze(0).to(self._f.dtype)], like=self._f)
        elif self.settings.fisher in _WITHOUT_VECTORS:
            one.listen(self._edge, self._f)
        else:
            at_once = self.settings.columns_at_once or 1
            # On an accelerator, a tensor lets one kernel draw all labels, as in recorded passes, with the same result.
            on_device = sync.is_asynchronous(f.device)
            first = torch.full((), first_datum, dtype=torch.int64, device=f.device) if on_device else first_datum
            vectors = backpropagated_vectors(self.loss, f, y, self.settings, first, at_once)
            if self.to_record is not None:
                self.data = self._arguments, y, first_datum
            # The user's backward pass needs the graph afterwards.
            one.send_back(self._edge, (columns.to(self._f.dtype) for columns in vectors), True, self._f)

    def collect(self) -> StepSums:
        """Return the sums of the pass, after its backward pass."""
        result, one = self._result, self._captured
        if self.compare and self.num_data:
            result.other = self.targets.other_loss()
            result.smoothing = float(self.targets.smoothing)
            result.scales = [(self.targets.known_scale(), result.count)]
        if self._replayed is not None:
            result.blocks = self._replayed.blocks
            result.uncovered = self._replayed.uncovered
        if one is None or not result.examples:
            return result
        one.stop_listening()  # gradients were captured in the user's backward pass, unless vectors were sent back
        result.blocks = self._sums.blocks
        result.squares = {key: squares.total for key, (_, squares) in self.bases.items()}
        self._sums.complete()
        gradients = [role.gradient.total for block in result.blocks.values() for role in block.roles.values()]
        if self.settings.fisher == "empirical":
            for total in (*gradients, *result.squares.values()):
                total.div_(self.targets.scale**2)
        params = one.tracker.params
        result.uncovered = not_covered(params, result.blocks.values(), one.unexplained, self._sums.conflicts)
        return result


@dataclass
class _Call:
    """The outermost call of the model that is running now."""

    frame: FrameType | None
    thread: threading.Thread = field(default_factory=threading.current_thread)  # the calling thread
    depth: int = 1  # number of nested calls, the outermost one included
    watched: Pass | None = None  # `None` if neither factors nor counts are needed

    @property
    def is_mine(self) -> bool:
        """Whether the current thread has called it."""
        return self.thread is threading.current_thread()


@dataclass(eq=False)
class Watch:
    """Watches the passes of a model in training."""

    model: InitVar[nn.Module]  # the model, which the user calls as usual
    module: InitVar[nn.Module | None]  # the loss module, if the loss was given as one
    # A method that returns the parameters to track in a forward pass, and eigenbases for sums of squared gradients;
    # `None` if factors are not needed. Only a weak reference to it is stored.
    wanted: InitVar[Callable[[], tuple[dict[str, Tensor], Bases] | None]]
    loss: Loss
    settings: Settings
    costs: Costs  # accumulates the time for factors in passes
    replay: InitVar[bool]  # whether passes for factors may be recorded
    exchange: Exchange  # communication with other processes
    loss_check: LossCheck  # says whether passes compare the loss with others, and its scale with the declared one
    masks: MaskSource  # finds a mask in the arguments of the model
    keep_inputs: bool  # whether results include the inputs of all passes
    notes_sizes: bool  # whether `gradients_are_untouched` is called
    first_datum: int = 0  # number of examples in earlier steps; drawn labels depend on it
    audit: Audit | None = None  # report of the last audit
    in_half_precision: bool = False  # whether the last pass was run with autocast
    was_called: bool = False  # whether a training pass has begun since the last call of `collect`
    _sizes: list[float] = field(default_factory=list)  # of gradients, at the end of the last backward pass
    _place: int = 0  # index of the argument tensor with one row per example
    _apart: bool = False  # whether the model returns a loss without predictions if it gets labels
    _trace: Trace | None = None
    _call: _Call | None = None
    _latest: "weakref.ref[Pass] | None" = None
    _complete: list[Pass] = field(default_factory=list)
    _backward: int = -1  # identifies the last backward pass
    _problem: Exception | None = None  # error of a backward pass, which the step raises on all processes

    def __post_init__(
        self, model: nn.Module, module: nn.Module | None, wanted: Callable[[], Any], replay: bool
    ) -> None:
        """Register hooks on the model and the loss."""
        self._sharded = is_fully_sharded(model)
        self._graphs = FactorGraphs(self.settings, replay)
        self._model = weakref.ref(model)
        self._wanted = weakref.WeakMethod(wanted)
        before, after = Hook(self, "_before_forward"), Hook(self, "_after_forward")
        hooks = ExitStack()
        # Run before the hook of `fully_shard`, while all parameters are still sharded.
        first = model.register_forward_pre_hook(before, with_kwargs=True, prepend=self._sharded)
        hooks.callback(first.remove)
        hooks.callback(model.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
        if module is not None:
            hooks.callback(module.register_forward_pre_hook(Hook(self, "_before_loss"), with_kwargs=True).remove)
        self._remove_hooks = weakref.finalize(self, hooks.close)

    def close(self) -> None:
        """Remove all hooks, and discard passes and recordings."""
        self._forget_interrupted()
        self._remove_hooks()
        self.forget()
        self._graphs.forget()

    def collect(self) -> StepSums | None:
        """Return the sum over all passes with a backward pass since the last call; `None` if there were none."""
        self._forget_interrupted()
        self.was_called = False
        if self._problem is not None:
            problem = self._problem
            self.forget()
            raise problem
        passes = self._complete
        self._complete = []
        model = self._model()
        with self.costs.timed("factors"):
            results = [one.collect() for one in passes]
            for one, result in zip(passes, results, strict=True):
                # There was padding that the audited data lacked: measure in every later batch which rows count.
                audited, padding = one.audited, one.padding
                if model is not None and audited is not None and padding and padding.first_failure() is not None:
                    distrust(model, audited)
                if one.to_record is not None and one.data is not None:
                    self._graphs.record(one.to_record, one.data, result.blocks)
            for other in results[1:]:
                results[0].merge(other)
        return results[0] if results else None

    @property
    def has_passes(self) -> bool:
        """Whether there was a backward pass since the last step."""
        return bool(self._complete) or self._problem is not None

    def gradients_are_untouched(self) -> bool:
        """Whether gradients are as they were after the last backward pass that compared the loss.

        Their values are compared: a `GradScaler` divides gradients without a new version of the tensors.
        """
        sizes, self._sizes = self._sizes, []
        pairs = list(zip(sizes, self._sizes_of_gradients(), strict=False)) if sizes else []
        finite = [old == new for old, new in pairs if isfinite(old)]
        return bool(finite) and all(finite)

    def _note_sizes(self) -> None:
        """Note the sizes of all gradients at the end of a backward pass."""
        self._sizes = self._sizes_of_gradients()

    @torch.no_grad()
    def _sizes_of_gradients(self) -> list[float]:
        model = self._model()
        grads = [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]
        return numbers([total_size([local_part(g).to_dense()]) for g in grads])

    def forget(self) -> None:
        """Discard passes that were not collected."""
        self._complete.clear()
        self._problem = None

    def set_targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass."""
        one = None if self._latest is None else self._latest()
        if one is not None:
            one.targets.give(y)

    def number_of_data(self, arguments: Any) -> int | None:
        """Return the number of examples in the arguments of the model; `None` if no tensor has a batch axis."""
        lengths = self._lengths_of(arguments)
        return lengths[self._place] if self._place < len(lengths) else None

    def _lengths_of(self, arguments: Any) -> list[int]:
        """Return the lengths of all tensors in the arguments of the model along the batch axis."""
        axis = self.settings.batch_axis or 0
        return [t.shape[axis] for t in tensors_in(arguments) if t.ndim > axis]

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Start a pass before the outermost forward call of the model."""
        if module is not self._model():
            return None
        self._forget_interrupted()
        call = self._call
        if call is not None and call.is_mine:
            call.depth += 1  # with or without gradients: `_after_forward` counts the end of every nested call
            return None
        if not torch.is_grad_enabled() or _is_elsewhere():
            return None
        if call is not None:
            raise ModelError(
                "The model is called with gradients in two threads at the same time; the optimizer watches one pass "
                "after the other.",
                "Train in one thread. Other threads may call the model within torch.no_grad(), or train a copy of it.",
            )
        self.was_called = True
        self.in_half_precision = torch.is_autocast_enabled("cuda")
        self._call = _Call(next((f for f in callers() if f.f_code.co_filename == nn.modules.module.__file__), None))
        self._call.watched = one = self._new_pass(module, (args, kwargs), self._call.frame)
        return None if one is None else one.start()

    def _new_pass(self, module: nn.Module, arguments: tuple[Any, Any], frame: FrameType | None) -> Pass | None:
        """Return the pass that begins: it computes factors, or counts examples; `None` if it is not needed."""
        method = self._wanted()
        wanted = None if method is None else method()
        if wanted is None and self.loss.reduction != "sum":
            return None  # Without factors, examples are counted only if the loss is a sum over them.
        params, bases = ({}, {}) if wanted is None else wanted
        trace = key = graph = known = problem = None
        has_labels = isinstance(arguments[1].get("labels"), Tensor)
        apart = has_labels and self._apart
        try:
            if wanted is not None:
                _refuse_compiled(frame)
                if self.number_of_data(arguments) != 0:  # An empty batch has no curvature.
                    trace = self._trace_for(params)
            # Use a recorded pass if there is one for these arguments. Sums in eigenbases are not recorded.
            if trace is not None and not bases and not apart:
                key = self._graphs.key(module, trace, arguments)
                graph = None if key is None else self._graphs.find(key)
            # Otherwise, the first pass with such arguments is audited before the user's own call.
            if graph is None:
                with _outside_of_passes():
                    known = self._known(module, trace, without_labels(arguments) if apart else arguments, wanted)
                apart = has_labels and self._apart
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is raised, now or later)
            trace, problem = None, self._raise_or_defer(error)
        bases = {} if trace is None else bases
        kind = "cuda" if trace is None else trace.device_type
        of_model = (module, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) if apart else None
        one = Pass(self, arguments, trace, known, bases, graph, wanted is not None, of_model)
        one.problem = problem or one.problem
        # Record passes like this one if they repeat.
        if trace is not None and graph is None and key is not None and not apart and self._graphs.wants(key):
            declared = self.loss, self.settings
            one.to_record = FactorGraph(key, module, *declared, trace, known, self.masks, one.num_data)
        return one

    def _raise_or_defer(self, error: BaseException) -> Exception:
        """Return an error for the step to raise, or raise it now on all processes.

        With several processes, the forward pass continues unwatched, because the others will wait for gradients of this
        one. With a sharded model, all processes synchronize before the forward pass, and raise there.
        """
        if self.exchange.ranks.are_several and not self._sharded and isinstance(error, Exception):
            return error
        self._call = None  # PyTorch does not call `_after_forward` then
        with self.exchange.ranks.agreed("audits") if isinstance(error, Exception) else nullcontext():
            raise error

    def _known(self, model: nn.Module, trace: Trace | None, arguments: Any, wanted: Any) -> AuditResult | None:
        """Return the result of an audit, or of an earlier one; `None` if the model is not audited.

        If a process needs to audit a sharded model, the parameters are gathered on all processes.
        """
        audits = None
        if trace is not None and self.settings.audit:
            counts = Counts(self.masks, self.loss.class_axis)
            output = self.loss.output
            audits = Audits(model, trace, self.settings.batch_axis, halves=False, counts=counts, output=output)
        if not self._sharded or wanted is None:
            return self._audited(model, audits, arguments)
        ranks = self.exchange.ranks
        num_data = self.number_of_data(arguments)
        is_needed = audits is not None and num_data is not None and not audits.are_done(arguments, num_data)
        if not any(ranks.gather("audits", is_needed)):
            return self._audited(model, audits, arguments)
        with ranks.agreed("an audit"), WholeParameters(model, ranks).in_place(wanted[0]) as params:
            if audits is not None:
                audits.trace = new_trace(params, self.settings.joint_bias, mixing=True)
            return self._audited(model, audits, arguments)

    def _audited(self, model: nn.Module, audits: Audits | None, arguments: Any) -> AuditResult | None:
        """Check, on a few examples, that watching changes nothing and captures all uses of the parameters.

        Returns:
            The result; `None` if no audit is wanted, or if the model returns nothing that can be trained.
        """
        num_data = self.number_of_data(arguments)
        if audits is None or num_data is None:
            return None
        run = partial(_predictions, model, self.loss.output)
        try:
            try:
                known = audits.of(run, arguments, num_data)
            except _OtherNumberError as error:  # as in a batch of graphs, where the nodes come first
                lengths = self._lengths_of(arguments)
                if error.num_data not in lengths:
                    return None
                self._place = lengths.index(error.num_data)
                known = audits.of(run, arguments, error.num_data)
        except _NoPredictionsError:
            return self._audited_apart(model, audits, arguments)
        except NotRepeatableError as error:
            warnings.warn(f"The model cannot be audited. {error}", KfsWarning, stacklevel=2)
            self.settings = replace(self.settings, audit=False)
            return None
        self.audit = audits.report
        return known

    def _audited_apart(self, model: nn.Module, audits: Audits, arguments: Any) -> AuditResult | None:
        """Audit a model that returns no predictions without labels, in case that it has a fused loss."""
        known = None
        if "labels" in arguments[1] and not self._sharded:
            with suppress(AttributeError, TypeError):  # the model needs labels
                known = self._audited(model, audits, without_labels(arguments))
        self._apart = known is not None
        return known

    def _trace_for(self, params: dict[str, Tensor]) -> Trace:
        """Return the trace with the plans of earlier passes, or a new one if other parameters are tracked."""
        trace = self._trace
        known = {} if trace is None else trace.tracker.params
        if trace is None or known.keys() != params.keys() or any(known[n] is not p for n, p in params.items()):
            model = self._model() if self._sharded else None
            trace = self._trace = new_trace(params, self.settings.joint_bias, mixing=True, model=model)
        return trace

    def _after_forward(self, module: nn.Module, _: Any, __: Any, output: Any) -> Any:
        """Finish the pass after the outermost forward call. `output` is `None` if the forward pass has failed."""
        call = self._call
        if module is not self._model() or call is None or not call.is_mine:
            return None
        call.depth -= 1
        if call.depth:
            return None
        self._call = None
        one = call.watched
        if one is None:
            return None
        one.stop()
        self._latest = weakref.ref(one)
        return None if output is None else one.watch_output(output, weakref.WeakMethod(self._receive_gradient))

    def _before_loss(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Set the targets of a pass if the loss module is called with its predictions."""
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        f, y = given.get("input"), given.get("target")
        are_labels = isinstance(f, Tensor) and isinstance(y, Tensor) and not y.is_floating_point()
        passes = [reference() for reference in getattr(f, "_kfs_passes", ())]
        changed = passes_behind(f) if are_labels and not passes else []
        # Other optimizers may watch the same model or loss module. Their own hooks are called as well.
        for one in (*passes, *changed):
            if one is not None and one.owner() is self and isinstance(y, Tensor):
                one.targets.give(y, changed=bool(changed))

    def _receive_gradient(self, one: Pass, g: Tensor) -> None:
        """Give a pass the first gradient of its predictions that comes from a training backward pass."""
        model = self._model()
        if one.has_gradient or model is None or not _trains(model):
            return
        # If gradients have been set to `None` since the last backward pass, earlier passes do not count.
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not has_gradients(model):
            self.forget()
        self._backward = backward
        first_datum = self.first_datum + sum(waiting.all_data for waiting in self._complete)
        ranks = self.exchange.ranks
        if not ranks.are_several:
            one.receive_gradient(g, first_datum)
        else:
            with whole_in_backward(model, ranks, one.sends_vectors) if one.wants_factors else nullcontext():
                before = 0
                if one.place_of_data is not None:
                    before, one.all_data = one.place_of_data(one.num_data)
                try:
                    one.receive_gradient(g, first_datum + before)
                # Otherwise, other processes would wait for gradients forever. The step raises the error.
                except Exception as problem:  # noqa: BLE001 (whatever it is, it is raised later)
                    self._problem = self._problem or problem
        self._complete.append(one)
        if self.loss_check.steps_left and self.notes_sizes:
            torch.autograd.Variable._execution_engine.queue_callback(self._note_sizes)

    def _forget_interrupted(self) -> None:
        """Stop capturing a forward pass that was interrupted from the keyboard: PyTorch calls no hook for it."""
        call = self._call
        if call is None or call.frame is None:
            return
        # A call in another thread is not interrupted as long as that thread is alive.
        if any(frame is call.frame for frame in callers()) if call.is_mine else call.thread.is_alive():
            return
        if call.watched is not None and call.is_mine:  # The passes of a thread end with it.
            call.watched.stop()
        self._call = None


@contextmanager
def _outside_of_passes() -> Iterator[None]:
    """Suspend the captured passes of other optimizers of the same model."""
    with ExitStack() as stack:
        while isinstance(_get_current_function_mode(), Interception):
            stack.enter_context(_pop_mode_temporarily())
        yield


class _NoPredictionsError(Exception):
    """The model returned nothing that can be trained."""


class _OtherNumberError(_NoPredictionsError):
    """The number of predictions differs from the number of examples."""

    def __init__(self, num_data: int) -> None:
        super().__init__()
        self.num_data = num_data


def _predictions(
    model: nn.Module,
    name: str | int | None,
    arguments: Any,
    num_data: int,
    within: AbstractContextManager[Any] | None,
) -> Tensor:
    """Evaluate a model on a few examples without changing it."""
    device = next(model.parameters()).device
    # Random state is restored, so that dropout draws the same numbers every time. Running statistics do not change.
    with restored(model, device, refuse=False), unchanged_attributes(model), within or nullcontext(), evaluating():
        output = model(*arguments[0], **arguments[1])  # no optimizer watches this call
    try:
        f = prediction_in(output, name)
    except ModelError as error:
        raise _NoPredictionsError from error
    if not f.requires_grad or f.ndim == 0:
        raise _NoPredictionsError
    if len(f) != num_data:
        raise _OtherNumberError(len(f))
    return f


def _trains(model: nn.Module) -> bool:
    """Whether the running backward pass accumulates gradients in parameters: `backward()`, not `autograd.grad`."""
    edges = (get_gradient_edge(p).node for p in leaves(model) if p.requires_grad)
    try:
        return any(map(torch._C._will_engine_execute_node, edges))
    except RuntimeError:  # PyTorch raises for leaves that are inputs of autograd.grad.
        return False


def _is_elsewhere() -> bool:
    """Whether a pass is not part of training: in a functorch transform, a trace, an evaluation or a backward pass."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return True
    # Computations for a risk are not training. In a backward pass, activation checkpointing runs the model again: its
    # first run was already watched if necessary.
    return is_evaluating() or torch._C._current_graph_task_id() != -1


def _refuse_compiled(frame: FrameType | None) -> None:
    """Raise if the model is called from compiled code, which hides its operations.

    Raises:
        ModelError: If a caller is compiled code.
    """
    names = [caller.f_code.co_name for caller in callers(frame)]
    if any(name.startswith("torch_dynamo_resume") or name == "compile_wrapper" for name in names):
        raise ModelError(
            "The model is compiled, but the optimizer was made for the model before that.",
            "Compile it first, model = torch.compile(model), and make the optimizer for the result.",
        )
