"""Watching a model in training: factors from forward passes `model(...)` and backward passes of any loss of them.

Hooks on the model's forward pass switch the capture on and off. A hook on the predictions is called when the gradient
of the loss arrives there. At this moment the graph is complete and not yet freed, so further vectors can be sent back
through it, and the gradient shows which targets count. With `fisher="empirical"`, the user's backward pass is enough.

The results of passes wait until `Watch.collect` takes them. A forward pass without backward pass has no result.
What happens during one pass is in `passes`.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from kfs.data import MaskSource
from kfs.distributed import Ranks
from kfs.errors import KfsWarning, ModelError
from kfs.kfac.capture import Audit, Audits, Capture, Counts, Known, NotRepeatableError, Session, distrust
from kfs.kfac.rules import new_session
from kfs.kfac.settings import Settings
from kfs.losses import Loss
from kfs.nested import tensors_in
from kfs.optim.costs import Costs
from kfs.optim.exchange import Exchange
from kfs.optim.factor_graphs import Autocast, FactorGraphs, FactorPass
from kfs.optim.fully_sharded import has_gradients, is_fully_sharded, leaves, whole_in_backward
from kfs.optim.hooks import Hook
from kfs.optim.outputs import passes_behind
from kfs.optim.passes import Pass, number_of_data
from kfs.optim.step_sums import Bases, StepSums
from kfs.outputs import prediction_in
from kfs.recording.model_state import unchanged_attributes
from kfs.sharded import WholeParameters
from kfs.state import evaluating, is_evaluating, restored


@dataclass
class _Call:
    """The outermost call of the model that is running."""

    frame: FrameType | None
    thread: threading.Thread = field(default_factory=threading.current_thread)  # that has called it
    depth: int = 1  # number of nested calls, the outermost one included
    watched: Pass | None = None  # `None` if neither factors nor counts are needed

    @property
    def is_mine(self) -> bool:
        """Whether it was called in the thread that asks."""
        return self.thread is threading.current_thread()


@dataclass(eq=False)
class Watch:
    """Watches a model while somebody trains it."""

    model: InitVar[nn.Module]  # It is called as usual.
    module: InitVar[nn.Module | None]  # the loss module, if the loss was given as one
    # A method that returns the parameters to track in a forward pass, and the bases in which to sum squared gradients;
    # `None` if factors are not needed. Its object is not kept alive.
    wanted: InitVar[Callable[[], tuple[dict[str, Tensor], Bases] | None]]
    loss: Loss
    settings: Settings
    keep_inputs: bool  # whether the result has the inputs of all passes
    costs: Costs  # counts the time that factors take in passes
    replay: InitVar[bool] = False  # whether passes for factors may be recorded
    exchange: Exchange = field(default_factory=lambda: Exchange(Ranks(None)))  # with other processes
    masks: MaskSource = field(default_factory=MaskSource)  # where arguments of the model have a mask
    compare: bool = True  # whether passes compare the loss with others, and its scale with the announced one
    first_datum: int = 0  # number of data in earlier steps, on which the labels that are drawn depend
    audit: Audit | None = None  # what was checked for the last pass
    in_half_precision: bool = False  # whether the last pass was run with autocast
    _place: int = 0  # which tensor among the model's arguments has as many rows as there are data
    _session: Session | None = None
    _call: _Call | None = None
    _latest: "weakref.ref[Pass] | None" = None
    _complete: list[Pass] = field(default_factory=list)
    _backward: int = -1  # identifies the last backward pass
    _problem: Exception | None = None  # what went wrong in a backward pass, if other processes have to hear of it

    def __post_init__(
        self, model: nn.Module, module: nn.Module | None, wanted: Callable[[], Any], replay: bool
    ) -> None:
        """Put hooks on model and loss."""
        self._sharded = is_fully_sharded(model)
        self._graphs = FactorGraphs(self.loss, self.settings, replay)
        self._model = weakref.ref(model)
        self._wanted = weakref.WeakMethod(wanted)
        before, after = Hook(self, "_before_forward"), Hook(self, "_after_forward")
        hooks = ExitStack()
        # Before the hook of `fully_shard`: then, all parameters are sharded.
        first = model.register_forward_pre_hook(before, with_kwargs=True, prepend=self._sharded)
        hooks.callback(first.remove)
        hooks.callback(model.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
        if module is not None:
            hooks.callback(module.register_forward_pre_hook(Hook(self, "_before_loss"), with_kwargs=True).remove)
        self._remove_hooks = weakref.finalize(self, hooks.close)

    def close(self) -> None:
        """Remove all hooks, and forget everything."""
        self._forget_interrupted()
        self._remove_hooks()
        self.forget()
        self._graphs.forget()

    def collect(self) -> StepSums | None:
        """Return the sum over all passes with a backward pass since the last call, or `None` if there were none."""
        self._forget_interrupted()
        if self._problem is not None:
            problem = self._problem
            self.forget()
            raise problem
        passes = self._complete
        self._complete = []
        with self.costs.timed("factors"):
            results = [one.collect() for one in passes]
            for one, result in zip(passes, results, strict=True):
                self._distrust_audit_of(one)
                if one.to_record is not None and one.to_record[2] is not None:
                    self._graphs.record(*one.to_record[:2], one.to_record[2], result.blocks)
            for other in results[1:]:
                results[0].merge(other)
        return results[0] if results else None

    @property
    def has_passes(self) -> bool:
        """Whether there was a backward pass since the last step."""
        return bool(self._complete) or self._problem is not None

    def _distrust_audit_of(self, one: Pass) -> None:
        """Measure in every batch which rows count, if a pass has shown padding that the audited data did not have."""
        model = self._model()
        if model is not None and one.audited is not None and one.shows_padding:
            distrust(model, one.audited)

    def forget(self) -> None:
        """Forget passes that were not collected."""
        self._complete.clear()
        self._problem = None

    def set_targets(self, y: Tensor) -> None:
        """Set the targets of the last forward pass."""
        one = None if self._latest is None else self._latest()
        if one is not None:
            one.targets.give(y)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Start to capture, unless the model calls itself."""
        if module is not self._model():
            return None
        self._forget_interrupted()
        call = self._call
        if call is not None and call.is_mine:
            call.depth += 1  # with or without gradients: the end of every inner call is counted
            return None
        if not torch.is_grad_enabled() or _is_elsewhere():
            return None
        _refuse_other_thread(call)
        self.in_half_precision = torch.is_autocast_enabled("cuda")
        self._call = _Call(next((f for f in _callers() if f.f_code.co_filename == nn.modules.module.__file__), None))
        method = self._wanted()
        wanted = None if method is None else method()
        session = None
        bases: Bases = {}
        problem = None
        if wanted is not None:
            params, bases = wanted
            session, problem = self._session_for(params, self._call.frame)
        elif self.loss.reduction != "sum":
            # Examples have to be counted in every step if the loss is a sum over them, and only then.
            return None
        arguments = (args, kwargs)
        if number_of_data(arguments, self.settings.batch_axis or 0, self._place) == 0:
            session = None  # An empty batch has no curvature, and is no step of other optimizers either.
            bases = {}
        autocast = _autocast("cuda" if session is None else session.device_type)
        key = None if session is None or bases else self._graphs.key(module, session, arguments, autocast)
        graph = None if key is None else self._graphs.find(key, module)
        known = None
        if graph is None and problem is None:
            try:
                with _outside_of_captures():
                    known = self._known(module, session, arguments, wanted)
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is raised, now or later)
                session, problem = None, self._told(error)
                bases = {}
        one = Pass(
            weakref.ref(self),
            self.loss,
            self.settings,
            session if graph is None else None,
            known,
            bases,
            arguments,
            self.keep_inputs,
            self._place,
            self.compare,
            graph,
            self.costs,
            wants_factors=wanted is not None,
            masks=self.masks,
            place_of_data=self.exchange.numbering() if wanted is not None and self.settings.fisher == "mc" else None,
        )
        one.problem = problem or one.problem
        if session is not None and graph is None and key is not None and self._graphs.wants(key):
            factors = FactorPass(module, self.loss, self.settings, session, known, autocast, self.masks)
            one.to_record = key, factors, None
        self._call.watched = one
        return one.start()

    def _told(self, error: BaseException) -> Exception:
        """Return an error such that the step raises it, or raise it, after other processes have heard of it.

        Beside other processes, the forward pass goes on without being watched: these are about to wait for gradients of
        this one. Those of a sharded model meet before the forward pass.
        """
        if self.exchange.ranks.are_several and not self._sharded and isinstance(error, Exception):
            return error
        self._call = None  # PyTorch calls no other hook then
        with self.exchange.ranks.agreed("audits") if isinstance(error, Exception) else nullcontext():
            raise error

    def _known(self, model: nn.Module, session: Session | None, arguments: Any, wanted: Any) -> Known | None:
        """Return what an audit finds out, or an earlier one has found out; `None` without audit.

        The parameters of a sharded model are gathered for an audit, if one process needs it.
        """
        audits = None
        if session is not None and self.settings.audit:
            counts = Counts(self.masks, self.loss.class_axis)
            audits = Audits(model, session, self.settings.batch_axis, halves=False, counts=counts)
        if not self._sharded or wanted is None:
            return self._audited(model, audits, arguments)
        ranks = self.exchange.ranks
        num_data = number_of_data(arguments, self.settings.batch_axis or 0, self._place)
        is_needed = audits is not None and num_data is not None and not audits.are_done(arguments, num_data)
        if not any(ranks.gather("audits", is_needed)):
            return self._audited(model, audits, arguments)
        with ranks.agreed("an audit"), WholeParameters(model, ranks).in_place(wanted[0]) as params:
            if audits is not None:
                audits.session = new_session(params, self.settings.joint_bias, mixing=True)
            return self._audited(model, audits, arguments)

    def _audited(self, model: nn.Module, audits: Audits | None, arguments: Any) -> Known | None:
        """Check, on a few data, that watching changes nothing and sees everything.

        Returns:
            What was found; `None` if nobody wants to know, or if the model returns nothing that can be trained.
        """
        axis = self.settings.batch_axis or 0
        num_data = number_of_data(arguments, axis, self._place)
        if audits is None or num_data is None:
            return None
        try:
            try:
                known = audits.of(partial(_predictions, model), arguments, num_data)
            except _OtherNumberError as error:  # as in a batch of graphs, whose nodes come first
                lengths = [t.shape[axis] for t in tensors_in(arguments) if t.ndim > axis]
                if error.num_data not in lengths:
                    return None
                self._place = lengths.index(error.num_data)
                known = audits.of(partial(_predictions, model), arguments, error.num_data)
        except _NoPredictionsError:
            return None
        except NotRepeatableError as error:
            warnings.warn(f"The model cannot be audited. {error}", KfsWarning, stacklevel=2)
            self.settings = replace(self.settings, audit=False)
            return None
        self.audit = audits.report
        return known

    def _session_for(
        self, params: dict[str, Tensor], frame: FrameType | None
    ) -> tuple[Session | None, Exception | None]:
        """Return the session that has plans from earlier passes, or a new one if other parameters are tracked.

        Or an error, if the model was called from compiled code, and other processes have to hear of it.
        """
        try:
            _refuse_compiled(frame)
        except ModelError as error:
            return None, self._told(error)
        session = self._session
        known = {} if session is None else session.tracker.params
        if session is None or known.keys() != params.keys() or any(known[n] is not p for n, p in params.items()):
            model = self._model() if self._sharded else None
            session = self._session = new_session(params, self.settings.joint_bias, mixing=True, model=model)
        return session, None

    def _after_forward(self, module: nn.Module, _: Any, __: Any, output: Any) -> Any:
        """Stop to capture, and wait for a gradient. The output is `None` if the forward pass has failed."""
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
        # Other optimizers may watch the same model or have the same loss module. Their hooks are called, too.
        for one in (*passes, *changed):
            if one is not None and one.owner() is self and isinstance(y, Tensor):
                one.targets.give(y, changed=bool(changed))

    def _receive_gradient(self, one: Pass, g: Tensor) -> None:
        """Show a pass the first gradient with respect to its predictions that trains the model."""
        model = self._model()
        if one.has_gradient or model is None or not _trains(model):
            return
        first_datum = self.first_datum + sum(waiting.all_data for waiting in self._complete)
        problem = None
        if not self.exchange.ranks.are_several:
            one.receive_gradient(g, first_datum)
        else:
            ranks = self.exchange.ranks
            with whole_in_backward(model, ranks, one.sends_vectors) if one.wants_factors else nullcontext():
                problem = self._receive_beside_others(one, g, first_datum)
        # If the user has set gradients to None since, the passes that they came from do not count.
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not has_gradients(model):
            self.forget()
        self._backward = backward
        self._complete.append(one)
        self._problem = self._problem or problem

    def _receive_beside_others(self, one: Pass, g: Tensor, first_datum: int) -> Exception | None:
        """Show a pass its gradient, if other processes do the same with other data.

        They would wait for gradients forever if an error ended this backward pass.

        Returns:
            The error, to be raised in the step; `None` if all is well.
        """
        before = 0
        if one.place_of_data is not None:
            before, one.all_data = one.place_of_data(one.num_data)
        try:
            one.receive_gradient(g, first_datum + before)
        except Exception as problem:  # noqa: BLE001 (whatever it is, it is raised later)
            return problem
        return None

    def _forget_interrupted(self) -> None:
        """Leave the capture of a forward pass that was interrupted from the keyboard: no hook is called then."""
        call = self._call
        if call is None or call.frame is None:
            return
        # A call in another thread goes on there, whoever calls here.
        if any(frame is call.frame for frame in _callers()) if call.is_mine else call.thread.is_alive():
            return
        if call.watched is not None and call.is_mine:  # A thread that has ended has taken its captures along.
            call.watched.stop()
        self._call = None


@contextmanager
def _outside_of_captures() -> Iterator[None]:
    """Suspend the capture of another optimizer of the same model, which has been started for the same pass."""
    with ExitStack() as stack:
        while isinstance(_get_current_function_mode(), Capture):
            stack.enter_context(_pop_mode_temporarily())
        yield


class _NoPredictionsError(Exception):
    """The model returned something that nobody trains."""


class _OtherNumberError(_NoPredictionsError):
    """The model returned another number of predictions than there are data."""

    def __init__(self, num_data: int) -> None:
        super().__init__()
        self.num_data = num_data


def _predictions(model: nn.Module, arguments: Any, num_data: int, within: AbstractContextManager[Any] | None) -> Tensor:
    """Evaluate a model on a few data, and leave it as it is."""
    device = next(model.parameters()).device
    # Layers that drop out draw the same numbers every time, and running statistics stay as they are.
    with restored(model, device, refuse=False), unchanged_attributes(model), within or nullcontext(), evaluating():
        output = model(*arguments[0], **arguments[1])  # Another optimizer of the same model does not watch this.
    try:
        f = prediction_in(output)
    except ModelError as error:
        raise _NoPredictionsError from error
    if not f.requires_grad or f.ndim == 0:
        raise _NoPredictionsError
    if len(f) != num_data:
        raise _OtherNumberError(len(f))
    return f


def _trains(model: nn.Module) -> bool:
    """Whether the running backward pass leaves gradients at parameters: `backward()`, not `autograd.grad`."""
    edges = (get_gradient_edge(p).node for p in leaves(model) if p.requires_grad)
    try:
        return any(map(torch._C._will_engine_execute_node, edges))
    except RuntimeError:  # PyTorch does not answer for leaves that autograd.grad asks for.
        return False


def _refuse_other_thread(call: _Call | None) -> None:
    """Refuse a pass while one of another thread is running."""
    if call is not None:
        raise ModelError(
            "The model is called with gradients in two threads at the same time; the optimizer watches one pass "
            "after the other.",
            "Train in one thread. Others may call the model within torch.no_grad(), or train a copy of it.",
        )


def _autocast(kind: str) -> Autocast:
    """Return whether autocast is on for a kind of device, and in which precision it multiplies."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _is_elsewhere() -> bool:
    """Whether a pass is none of those that a model is trained with."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return True
    # Nobody trains with what is computed for a risk. Within a backward pass, a checkpoint runs the model again: its
    # first run was watched, or was not to be.
    return is_evaluating() or torch._C._current_graph_task_id() != -1


def _callers(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield a frame, by default the current one, and the frames that it was called from."""
    frame = frame or sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _refuse_compiled(frame: FrameType | None) -> None:
    """Refuse a call from compiled code, which hides the model's operations.

    Raises:
        ModelError: If there is compiled code among the callers.
    """
    names = [caller.f_code.co_name for caller in _callers(frame)]
    if any(name.startswith("torch_dynamo_resume") or name == "compile_wrapper" for name in names):
        raise ModelError(
            "The model is compiled, but the optimizer was made for the model before that.",
            "Compile it first, model = torch.compile(model), and make the optimizer for the result.",
        )
