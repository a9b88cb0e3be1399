"""Factors from passes that somebody else makes: forward through `model(...)`, backward through any loss of it.

Hooks on the model's forward pass switch the capture on and off. A hook on the predictions runs when the gradient of
the loss arrives there: the graph is complete then and not used up yet, so that further vectors can be sent back
through it, and the gradient shows which targets count. With `fisher="empirical"` the backward pass itself is enough.

What passes have given is staged until `Watch.collect` takes it; a forward pass without backward pass gives nothing.
What happens during one pass lives in `passes`.
"""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
from torch.autograd.graph import get_gradient_edge

from kfs.errors import ModelError
from kfs.kfac.capture import Session
from kfs.kfac.rules import new_session
from kfs.kfac.settings import Settings
from kfs.losses import Loss
from kfs.optim.passes import Bases, Pass, StepSums


class Watch:
    """Watches a model while somebody trains it.

    Args:
        model: The model; it is called as usual.
        loss: Describes the loss.
        module: The loss module, if the loss was given as one; where it is called, targets are seen.
        settings: Which curvature matrix, and how.
        wanted: A method, asked before a forward pass: parameters to track, by name; nothing if factors are not needed.
            Whoever has it is not kept alive.
        bases: Asked before a forward pass: in which bases to sum up squares.
        count: Whether to count the examples of passes that are not captured.
        keep_inputs: Whether records have the inputs of all passes.

    Attributes:
        first_datum: How many data have entered averages before; draws depend on it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        module: nn.Module | None,
        settings: Settings,
        wanted: Callable[[], dict[str, Tensor] | None],
        bases: Callable[[], Bases],
        count: bool,
        keep_inputs: bool,
    ) -> None:
        """Put hooks on model and loss."""
        self.loss, self.settings, self.first_datum, self.keep_inputs = loss, settings, 0, keep_inputs
        self._model, self._wanted, self._bases = weakref.ref(model), weakref.WeakMethod(wanted), bases
        self._count = count
        self._session: Session | None = None
        self._running: Pass | None = None
        self._frame: FrameType | None = None
        self._depth = 0
        self._latest: weakref.ref[Pass] | None = None
        self._complete: list[Pass] = []
        self._backward = -1
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "_before"), with_kwargs=True),
            model.register_forward_hook(Hook(self, "_after"), with_kwargs=True, always_call=True),
        ]
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(Hook(self, "_targets"), with_kwargs=True))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove all hooks, and forget everything."""
        self._forget_interrupted()
        _remove(self._handles)
        self._complete.clear()

    def collect(self) -> StepSums | None:
        """Return the sum of what all passes with a backward pass have given since the last call, if there were any."""
        self._forget_interrupted()
        passes, self._complete = self._complete, []
        total: StepSums | None = None
        for one in passes:
            if total is None:
                total = one.collect()
            else:
                total.merge(one.collect())
        return total

    def add_pass(self, one: Pass) -> None:
        """Keep a pass whose gradient has arrived; those of gradients that nobody has any more are forgotten."""
        model, backward = self._model(), torch._C._current_graph_task_id()
        if backward != self._backward and model is not None and all(p.grad is None for p in model.parameters()):
            self._complete.clear()
        self._backward = backward
        self._complete.append(one)

    def next_datum(self) -> int:
        """Return the number of the next datum, for draws: after those that wait to be collected."""
        return self.first_datum + sum(one.num_data for one in self._complete)

    def forget(self) -> None:
        """Forget passes that were not collected."""
        self._complete.clear()

    def trains(self) -> bool:
        """Whether the backward pass that runs leaves gradients at parameters: `backward()`, not `autograd.grad`."""
        model = self._model()
        leaves = (get_gradient_edge(p).node for p in model.parameters() if p.requires_grad) if model else ()
        try:
            return any(map(torch._C._will_engine_execute_node, leaves))
        except RuntimeError:  # PyTorch does not answer for leaves that autograd.grad asks for
            return False

    def targets(self, y: Tensor) -> None:
        """Take note of the targets of the last forward pass."""
        one = None if self._latest is None else self._latest()
        if one is not None:
            one.set_targets(y)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Start to capture, unless the model calls itself."""
        elsewhere = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
        if module is not self._model() or not torch.is_grad_enabled() or elsewhere:
            return None
        self._forget_interrupted()
        self._depth += 1
        if self._depth > 1:
            return None
        self._frame = _call_of_module()
        wanted = self._wanted()
        params = None if wanted is None else wanted()
        if params is None and not self._count:
            return None
        if params is not None:
            _refuse_compiled(self._frame)
        session = None if params is None else self._session_for(params)
        self._running = Pass(self, session, self._bases() if params else {}, args, kwargs)
        return self._running.start(args, kwargs)

    def _session_for(self, params: dict[str, Tensor]) -> Session:
        """Return the session that has plans from earlier passes, or a new one if other parameters are tracked."""
        known = None if self._session is None else self._session.tracker.params
        if known is None or known.keys() != params.keys() or any(known[n] is not p for n, p in params.items()):
            self._session = new_session(params, self.settings.joint_bias, mixing=True)
        assert self._session is not None  # noqa: S101 (it was made above)
        return self._session

    def _after(self, module: nn.Module, _: Any, __: Any, output: Any) -> Any:
        """Stop, and wait for a gradient; `output` is missing if the forward pass has failed."""
        if module is not self._model() or self._depth == 0:
            return None
        self._depth -= 1
        if self._depth:
            return None
        one, self._running, self._frame = self._running, None, None
        if one is None:
            return None
        one.stop()
        self._latest = weakref.ref(one)
        return None if output is None else one.watch_output(output)

    def _targets(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Take note of targets, if the loss is that of predictions."""
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        mine = getattr(given.get("input"), "_kfs_pass", None)
        one = None if mine is None else mine()
        if one is not None and isinstance(given.get("target"), Tensor):
            one.set_targets(given["target"])

    def _forget_interrupted(self) -> None:
        """Leave the capture of a forward pass that was interrupted from the keyboard: no hook is called then."""
        frame = sys._getframe(1)
        while frame is not None and self._frame is not None and frame is not self._frame:
            frame = frame.f_back  # type: ignore[assignment]
        if self._frame is not None and frame is None:
            if self._running is not None:
                self._running.stop()
            self._running, self._frame, self._depth = None, None, 0


class Hook:
    """Calls a method of a `Watch` that still exists. A copy of a hooked module, or a file of it, has no use for it."""

    def __init__(self, watch: Watch | None = None, method: str = "") -> None:
        """Remember the watch without keeping it."""
        self._watch, self._method = None if watch is None else weakref.ref(watch), method

    @_disable_dynamo
    def __call__(self, *args: Any) -> Any:
        """Call the method."""
        watch = None if self._watch is None else self._watch()
        return None if watch is None else getattr(watch, self._method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the watch out."""
        return Hook, ()


def _call_of_module() -> FrameType | None:
    """Return the frame in which a module is being called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        frame = frame.f_back
    return frame


def _remove(handles: list[Any]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
    handles.clear()


def _refuse_compiled(frame: FrameType | None) -> None:
    """Refuse a call from compiled code, which hides the model's operations.

    Raises:
        ModelError: If there is compiled code on the way.
    """
    while frame is not None:
        if frame.f_code.co_name.startswith("torch_dynamo_resume") or frame.f_code.co_name == "compile_wrapper":
            raise ModelError(
                "The model is compiled, but the optimizer has the model that was not.",
                "Compile it first, model = torch.compile(model), and make the optimizer of the result.",
            )
        frame = frame.f_back
