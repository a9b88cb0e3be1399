"""One forward pass of a model in training, and what happens when the gradient of a loss comes back."""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kfs.data import mapped, tensors_in
from kfs.errors import DataError, KfsError, LossError
from kfs.kfac.backpropagated_vectors import backpropagated_vectors
from kfs.kfac.capture import Capture, Session, pass_derived, send_back
from kfs.kfac.coverage import not_covered
from kfs.kfac.layout import Key, Layout
from kfs.kfac.settings import Settings
from kfs.kfac.structures import computable
from kfs.kfac.sums import Adder, BlockSums, FactorSums, PerDatumSums, Planned, Receiver, Squares
from kfs.losses import Loss
from kfs.losses.counter import Stream
from kfs.optim.outputs import KeepsPass, parts_of, prediction_in, with_parts

# By block: its layout, and what adds up squares of its gradients, from zero.
Bases = Mapping[Key, tuple[Layout, Squares]]
# Beyond this relative distance, gradients are those of another loss; half precision rounds by less.
_DEPARTURE = 0.05


class Watcher(Protocol):
    """What a pass needs to know of whoever watches."""

    loss: Loss
    settings: Settings
    first_datum: int
    keep_inputs: bool

    def add_pass(self, one: "Pass") -> None:
        """Keep a pass whose gradient has arrived."""

    def next_datum(self) -> int:
        """Return the index of the next datum, for draws."""

    def trains(self) -> bool:
        """Whether the backward pass that runs leaves gradients at the model's parameters."""


@dataclass
class StepSums:
    """What the passes of one step have given.

    Attributes:
        blocks: Sums of outer products, by block, not scaled by any reduction factor.
        squares: Sums of squared per-datum gradients, in given bases.
        num_data: Number of data.
        examples: What an average over examples divides by.
        count: What a mean over targets divides by.
        uncovered: Parameters without usable block, and why.
        finite: Whether all predictions, and gradients of the loss with respect to them, were finite.
        mismatch: How far gradients of the loss were from those of the loss that was announced, relative to them.
        inputs: Arguments, keyword arguments, and targets of all passes, if inputs are kept.
    """

    blocks: dict[Key, BlockSums] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)
    num_data: int = 0
    examples: float = 0.0
    count: float = 0.0
    uncovered: dict[str, str] = field(default_factory=dict)
    finite: bool = True
    mismatch: float = 0.0
    inputs: list[tuple[Any, Any, Tensor]] = field(default_factory=list)

    def merge(self, other: "StepSums") -> None:
        """Add what another pass has given."""
        # What one pass does not use, another may. A block that lacks something in one pass is of no use.
        both = self.uncovered.keys() & other.uncovered.keys()
        reasons = [(one, name, why) for one in (self, other) for name, why in one.uncovered.items()]
        self.uncovered = {name: why for one, name, why in reasons if name in both or name in one.covered}
        for key, block in other.blocks.items():
            if key in self.blocks:
                self.blocks[key].merge(block)
            else:
                self.blocks[key] = block
        for key, squares in other.squares.items():
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares
        self.num_data += other.num_data
        self.examples += other.examples
        self.count += other.count
        self.finite = self.finite and other.finite
        self.mismatch = max(self.mismatch, other.mismatch)
        self.inputs += other.inputs

    @property
    def covered(self) -> set[str]:
        """The parameters that have blocks."""
        return {name for block in self.blocks.values() for name in block.layout.params}


class FactorAndSquareSums(FactorSums):
    """Adds inputs and gradients to factors, and per-datum gradients to squares, in one pass."""

    def __init__(self, settings: Settings, bases: Bases) -> None:
        """Know the bases of some blocks from before."""
        super().__init__(settings)
        layouts = {key: layout for key, (layout, _) in bases.items()}
        squares = {key: squares for key, (_, squares) in bases.items()}
        self._squares = PerDatumSums(settings, layouts, squares)

    def adder_of(self, plan: Planned) -> Adder:
        """Return what adds a use twice."""
        return _Twice(super().adder_of(plan), self._squares.adder_of(plan))

    def finish_backward(self) -> None:
        """Add what was collected."""
        super().finish_backward()
        self._squares.finish_backward()

    def finish_batch(self) -> None:
        """Forget the batch."""
        super().finish_batch()
        self._squares.finish_batch()


class _Twice(Adder):
    """Adds a use to two sums."""

    def __init__(self, first: Adder, second: Adder) -> None:
        self.first = first
        self.second = second

    def add(self, x: Tensor | None) -> Receiver:
        first, second = self.first.add(x), self.second.add(x)

        def receive(g: Tensor) -> None:
            first(g)
            second(g)

        return receive


class Pass:
    """One forward pass, and the backward pass that follows it.

    Args:
        watch: Whoever watches.
        session: Tracks parameters; `None` if examples are only counted.
        bases: In which bases to sum up squares.
        args: Positional arguments of the model.
        kwargs: Keyword arguments.

    Attributes:
        num_data: Number of data.
    """

    def __init__(self, watch: Watcher, session: Session | None, bases: Bases, args: Any, kwargs: Any) -> None:
        """Find out how many data there are."""
        self._watch = watch
        self._session = session
        self._bases = bases
        self._arguments: Any = (args, kwargs)
        self._problem: KfsError | None = None  # one that matters only if somebody trains with this pass
        axis = watch.settings.batch_axis or 0
        inputs = [t for t in tensors_in([*args, *kwargs.values()]) if t.ndim > axis]
        if not inputs:
            self._problem = DataError(
                "The model was called without any tensor that has a batch axis.",
                "Call it with a batch of inputs: model(x) with x of shape [N, ...].",
            )
        self.num_data = inputs[0].shape[axis] if inputs else 1
        labels = kwargs.get("labels")
        self._y: Tensor | None = labels if isinstance(labels, Tensor) else None
        self._is_guess = True
        self._is_told = False
        self._examples = 0.0
        self._count = 0.0
        self._arrived_before = False
        self._finite = True
        self._mismatch = self._scale = torch.zeros(())
        self._stack = ExitStack()
        self._sums = FactorAndSquareSums(watch.settings, bases) if bases else FactorSums(watch.settings)
        self._capture = None
        if session is not None:
            self._capture = Capture(session, self._sums, self.num_data, watch.settings.batch_axis)

    def start(self, args: Any, kwargs: Any) -> Any:
        """Enter the capture, and return marked arguments."""
        if self._capture is None:
            return None
        mark = self._capture.mark_data
        marked = tuple(mapped(a, mark) for a in args), {key: mapped(value, mark) for key, value in kwargs.items()}
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled model hides its operations
        self._stack.enter_context(self._capture)
        return marked

    def stop(self) -> None:
        """Leave the capture."""
        self._stack.close()
        if self._capture is not None:
            self._capture.forget_marks()
            self._capture.running = False

    def set_targets(self, y: Tensor) -> None:
        """Take note of targets; of two different ones (mixed labels) none are those of the loss."""
        self._y = None if self._is_told else y.detach()
        self._is_guess = False
        self._is_told = True

    def watch_output(self, output: Any) -> Any:
        """Return the model's output such that this object is told when a gradient arrives at predictions."""
        f: Tensor | None
        try:
            f = prediction_in(output)
        except KfsError as problem:
            f = next((t for t in parts_of(output) if t.requires_grad), None)
            self._problem = problem
        if f is None or f.grad_fn is None:
            return output
        if f.shape[:1] != (self.num_data,) and self._problem is None:
            self._problem = DataError(
                f"The model was called with {self.num_data} data, but its prediction has shape {list(f.shape)}.",
                "Put the batch axis first in predictions; say where it is in inputs with batch_axis=.",
            )
        if self._capture is not None:
            self._capture.find_hidden_uses(f)
        self._edge = get_gradient_edge(f)
        self._f = f.detach()
        me = weakref.ref(self)
        f.register_hook(lambda g: _tell(me, g))

        def kept(t: Tensor) -> Tensor:
            values_are_kept = hasattr(t.grad_fn, "_saved_result")
            result: Tensor = t
            if t.grad_fn is not None:
                result = KeepsPass.apply(t, self, not values_are_kept)  # type: ignore[no-untyped-call]
            if t is f:
                result._kfs_pass = me  # type: ignore[attr-defined]
            return result

        return with_parts(output, kept)

    def collect(self) -> StepSums:
        """Return what the pass has given, after its backward pass."""
        result = StepSums({}, {}, self.num_data, self._examples, self._count, finite=self._finite)
        if self._watch.keep_inputs and self._y is not None and self._examples:
            args, kwargs = self._arguments
            result.inputs = [(args, {key: value for key, value in kwargs.items() if key != "labels"}, self._y)]
        result.mismatch = float(self._mismatch)
        if self._capture is None or not self._finite or not self._examples:
            return result
        if not self._capture.finished:  # it was the user's backward pass that has shown gradients
            with torch.no_grad():
                pass_derived(self._capture)
            self._sums.finish_backward()
            self._sums.finish_batch()
            self._capture.finished = True
        empirical = self._watch.settings.fisher == "empirical"
        for block in self._sums.blocks.values():
            block.complete()
            for role in block.roles.values():
                if empirical:
                    role.gradient.total.div_(self._scale.square())
        result.blocks = self._sums.blocks
        for key, (_, squares) in self._bases.items():
            result.squares[key] = squares.total / self._scale.square() if empirical else squares.total
        params = self._capture.tracker.params
        result.uncovered = not_covered(params, result.blocks.values(), self._capture.unexplained, self._sums.conflicts)
        return result

    def receive_gradient(self, g: Tensor) -> None:
        """Take the gradient of a loss with respect to predictions: send vectors back, or wait for what comes by."""
        if self._arrived_before or not self._watch.trains():
            return
        if self._problem is not None:
            raise self._problem
        self._arrived_before = True
        watch, fisher, capture = self._watch, self._watch.settings.fisher, self._capture
        f, g = computable(self._f), g.detach()
        self._finite = bool(g.isfinite().all() & ~(f.isnan() | (f == torch.inf)).any())
        if self._finite:
            self._y, self._scale = self._targets_and_scale(f, g)
            no_signal = fisher == "empirical" and not bool(self._scale)
            self._examples = 0.0 if no_signal else watch.loss.examples(self._y)
            self._count = 0.0 if no_signal else watch.loss.count(self._y)
        if capture is not None:
            if not self._examples or self._y is None:
                capture.finished = True
            elif fisher in {"empirical", "forward-only"}:
                capture.keep_graph = capture.together = False
                self._sums.finish_forward()
            else:
                self._send(f, self._y, capture)
        if not watch.keep_inputs:
            self._arguments = None
        del self._f, self._edge  # the graph is large
        watch.add_pass(self)

    def _targets_and_scale(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets, or what stands for them, and by which factor the loss is larger than a sum of criteria."""
        loss, fisher = self._watch.loss, self._watch.settings.fisher
        precise, g = g.dtype == f.dtype, computable(g)
        if self._y is not None:
            try:
                loss.check(f, self._y)
                scale, self._mismatch = fit(g, loss.gradient(f, self._y))
                if not self._is_guess or self._mismatch < _DEPARTURE:
                    return self._y, scale
            except (ValueError, TypeError):
                if not self._is_guess:
                    raise
        # Half precision has lost the small entries that would show whether sums are zero.
        self._mismatch = loss.departure(f, g) if precise else g.new_zeros(())
        try:
            y = loss.stand_in(f, g)
            scale, departure = fit(g, loss.gradient(f, y)) if fisher == "empirical" else (g.new_ones(()),) * 2
        except LossError:
            if fisher not in {"empirical", "forward-only"}:
                raise
            y, scale, departure = f, g.new_ones(()), g.new_ones(())
        if fisher == "empirical" and not departure < _DEPARTURE:
            raise LossError(
                f"The scale of the gradient is not known, since targets of {loss.name} are not.",
                "Call the optimizer's targets(y) before backward(), or compute the loss by the module of loss=.",
            )
        return y, scale

    def _send(self, f: Tensor, y: Tensor, capture: Capture) -> None:
        """Send vectors back through the graph, which somebody else will use up."""
        settings, at_once = self._watch.settings, self._watch.settings.columns_at_once or 1
        first = self._watch.next_datum()
        vectors = backpropagated_vectors(self._watch.loss, f, y, settings, first, at_once, Stream)
        send_back(self._edge, capture, (columns.to(self._f.dtype) for columns in vectors), keep_graph=True)


def _tell(one: "weakref.ref[Pass]", g: Tensor) -> None:
    """Tell a pass that still exists about a gradient."""
    alive = one()
    if alive is not None:
        alive.receive_gradient(g)


def fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return by which factor a direction comes closest to `g`, and how far away it is then, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)
