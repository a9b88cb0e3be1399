"""One forward pass of a model in training, and what happens when the gradient of a loss comes back."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kfs.data import mapped, tensors_in
from kfs.errors import DataError, KfsError, LossError
from kfs.kfac.backpropagated_vectors import backpropagated_vectors
from kfs.kfac.blocks import Block
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.uses import Use, Uses
from kfs.kfac.layout import Key, Layout
from kfs.kfac.outputs import Owner, parts_of, prediction_in, with_parts
from kfs.kfac.rules import RULES
from kfs.kfac.rules.fallback import otherwise
from kfs.kfac.scaffold import backward, hidden_uses, not_covered
from kfs.kfac.settings import Settings
from kfs.kfac.structures.decompositions import computable
from kfs.kfac.sums.per_datum import PerDatum, Squares, Statistic
from kfs.losses import Loss
from kfs.losses.counter import Stream

# By block: its layout, and what adds up squares of its gradients, from zero.
Bases = Mapping[Key, tuple[Layout, Squares]]


class Watcher(Protocol):
    """What a pass needs to know of whoever watches."""

    loss: Loss
    settings: Settings
    first_datum: int
    keep_inputs: bool

    def completed(self, one: "Pass") -> None:
        """Keep a pass whose gradient has arrived."""

    def next_datum(self) -> int:
        """Return the number of the next datum, for draws."""

    def trains(self) -> bool:
        """Whether the backward pass that runs leaves gradients at the model's parameters."""


@dataclass
class Record:
    """What one or several passes have given.

    Attributes:
        blocks: Raw sums, not scaled by any reduction factor.
        squares: Raw sums of squared per-datum gradients, in given bases.
        num_data: How many data.
        examples: What an average over examples divides by.
        count: What a mean over targets divides by.
        uncovered: Parameters without usable block, and why.
        finite: Whether all predictions, and gradients of the loss with respect to them, were finite.
        mismatch: How far gradients of the loss were from those of the loss that was announced, relative to them.
        inputs: Arguments, keyword arguments, and targets of all passes, if inputs are kept.
    """

    blocks: dict[Key, Block] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)
    num_data: int = 0
    examples: float = 0.0
    count: float = 0.0
    uncovered: dict[str, str] = field(default_factory=dict)
    finite: bool = True
    mismatch: float = 0.0
    inputs: list[tuple[Any, Any, Tensor]] = field(default_factory=list)

    def plus(self, other: "Record") -> "Record":
        """Return the sum; this object's tensors may be part of it."""
        both = self.uncovered.keys() & other.uncovered.keys()  # what one pass does not use, another may
        broken = {n: why for r in (self, other) for n, why in r.uncovered.items() if n in both or n in _names(r)}
        for key, block in other.blocks.items():
            if key in self.blocks:
                pairs = self.blocks[key].pairs
                merged = {side: pairs[side].merge(pair) for side, pair in block.pairs.items() if side in pairs}
                self.blocks[key].pairs = block.pairs | pairs | merged
            else:
                self.blocks[key] = block
        for key, squares in other.squares.items():
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares
        return Record(
            self.blocks,
            self.squares,
            self.num_data + other.num_data,
            self.examples + other.examples,
            self.count + other.count,
            broken,
            self.finite and other.finite,
            max(self.mismatch, other.mismatch),
            self.inputs + other.inputs,
        )


def _names(record: Record) -> set[str]:
    return {name for block in record.blocks.values() for name in block.layout.params}


class Both(Uses):
    """Adds inputs and gradients to factors, and per-datum gradients to squares, in one pass."""

    def __init__(self, settings: Settings, bases: Bases) -> None:
        """Know the bases of some blocks from before."""
        super().__init__(settings, mixing=True)
        squares: dict[Key, Statistic] = {key: squares for key, (_, squares) in bases.items()}
        self._per_datum = PerDatum(settings, {key: layout for key, (layout, _) in bases.items()}, squares)

    def record(self, use: Use) -> Callable[[Tensor], None]:
        """Take note of a use twice."""
        first, second = super().record(use), self._per_datum.record(use)

        def receive(g: Tensor) -> None:
            first(g)
            second(g)

        return receive

    def finish_backward(self) -> None:
        """Add what was collected."""
        super().finish_backward()
        self._per_datum.finish_backward()

    def finish_batch(self) -> None:
        """Forget the batch."""
        super().finish_batch()
        self._per_datum.finish_batch()


class Pass:
    """One forward pass, and the backward pass that follows it.

    Args:
        watch: Whoever watches.
        params: Parameters to track, by name; nothing if examples are only counted.
        bases: In which bases to sum up squares.
        args: Positional arguments of the model.
        kwargs: Keyword arguments.

    Attributes:
        num_data: How many data it has.
    """

    def __init__(self, watch: Watcher, params: dict[str, Tensor] | None, bases: Bases, args: Any, kwargs: Any) -> None:
        """Find out how many data there are."""
        self._watch, self._params, self._bases = watch, params, bases
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
        self._is_guess, self._is_told = True, False
        self._examples, self._count, self._arrived_before, self._finite = 0.0, 0.0, False, True
        self._mismatch = self._scale = torch.zeros(())
        self._stack = ExitStack()
        self._uses = Both(watch.settings, bases) if bases else Uses(watch.settings, mixing=True)
        self._capture = Capture(params or {}, self.num_data, self._uses, RULES, otherwise, watch.settings.batch_axis)

    def start(self, args: Any, kwargs: Any) -> Any:
        """Enter the capture, and return marked arguments."""
        if self._params is None:
            return None
        mark = self._capture.mark_data
        marked = tuple(mapped(a, mark) for a in args), {key: mapped(value, mark) for key, value in kwargs.items()}
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled model hides its operations
        self._stack.enter_context(self._capture)
        return marked

    def stop(self) -> None:
        """Leave the capture."""
        self._stack.close()
        self._capture.forget_marks()
        self._capture.running = False

    def told(self, y: Tensor) -> None:
        """Take note of targets; of two different ones (mixed labels) none are those of the loss."""
        self._y, self._is_guess = None if self._is_told else y.detach(), False
        self._is_told = True

    def gated(self, output: Any) -> Any:
        """Return the model's output such that this object is told when a gradient arrives at predictions."""
        f: Tensor | None
        try:
            f = prediction_in(output)
        except KfsError as problem:
            f, self._problem = next((t for t in parts_of(output) if t.requires_grad), None), problem
        if f is None or f.grad_fn is None:
            return output
        if f.shape[:1] != (self.num_data,) and self._problem is None:
            self._problem = DataError(
                f"The model was called with {self.num_data} data, but its prediction has shape {list(f.shape)}.",
                "Put the batch axis first in predictions; say where it is in inputs with batch_axis=.",
            )
        if self._params is not None and self._watch.first_datum == 0:
            self._capture.unexplained |= hidden_uses(f, self._params)
        self._edge, self._f, me = get_gradient_edge(f), f.detach(), weakref.ref(self)
        f.register_hook(lambda g: _tell(me, g))

        def owned(t: Tensor) -> Tensor:
            kept = hasattr(t.grad_fn, "_saved_result")
            result: Tensor = Owner.apply(t, self, not kept) if t.grad_fn is not None else t  # type: ignore[no-untyped-call]
            if t is f:
                result._kfs_pass = me  # type: ignore[attr-defined]
            return result

        return with_parts(output, owned)

    def finish(self) -> Record:
        """Return what the pass has given, after its backward pass."""
        record = Record({}, {}, self.num_data, self._examples, self._count, finite=self._finite)
        if self._watch.keep_inputs and self._y is not None and self._examples:
            args, kwargs = self._arguments
            record.inputs = [(args, {key: value for key, value in kwargs.items() if key != "labels"}, self._y)]
        record.mismatch = float(self._mismatch)
        if self._params is None or not self._finite or not self._examples:
            return record
        if not self._capture.finished:  # it was the user's backward pass that has shown gradients
            self._capture.pass_virtual()
            self._uses.finish_backward()
            self._capture.finished = True
        self._uses.finish_batch()
        record.blocks = self._uses.blocks
        empirical = self._watch.settings.fisher == "empirical"
        for block in record.blocks.values():
            for pair in block.pairs.values():
                pair.input.finish()
                pair.gradient.finish()
                if empirical:
                    pair.gradient.total.div_(self._scale.square())
        squares = {key: squares.total for key, (_, squares) in self._bases.items()}
        record.squares = {key: t / self._scale.square() for key, t in squares.items()} if empirical else squares
        record.uncovered = not_covered(
            self._params, record.blocks.values(), self._capture.unexplained, self._uses.conflicts
        )
        return record

    def arrived(self, g: Tensor) -> None:
        """Take the gradient of a loss with respect to predictions: send vectors back, or wait for what comes by."""
        if self._arrived_before or not self._watch.trains():
            return
        if self._problem is not None:
            raise self._problem
        self._arrived_before = True
        watch, fisher = self._watch, self._watch.settings.fisher
        f, g = computable(self._f), g.detach()
        self._finite = bool(g.isfinite().all() & ~(f.isnan() | (f == torch.inf)).any())
        if self._finite:
            self._y, self._scale = self._targets_and_scale(f, g)
            nothing = fisher == "empirical" and not bool(self._scale)
            self._examples = 0.0 if nothing else watch.loss.examples(self._y)
            self._count = 0.0 if nothing else watch.loss.count(self._y)
        if self._params is None or not self._examples or self._y is None:
            self._capture.finished = True
        elif fisher in {"empirical", "forward-only"}:
            self._capture.keep_graph = self._capture.together = False
            self._uses.finish_forward()
        else:
            self._send(f, self._y)
        if not watch.keep_inputs:
            self._arguments = None
        del self._f, self._edge  # the graph is large
        watch.completed(self)

    def _targets_and_scale(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets, or what stands for them, and by which factor the loss is larger than a sum of criteria."""
        loss, fisher, precise, g = self._watch.loss, self._watch.settings.fisher, g.dtype == f.dtype, computable(g)
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

    def _send(self, f: Tensor, y: Tensor) -> None:
        """Send vectors back through the graph, which somebody else will use up."""
        settings, at_once = self._watch.settings, self._watch.settings.columns_at_once or 1
        with self._capture.attentive():
            self._uses.finish_forward()
            first = self._watch.next_datum()
            for columns in backpropagated_vectors(self._watch.loss, f, y, settings, first, at_once, Stream):
                backward(self._edge, self._capture, columns.to(self._f.dtype), keep_graph=True)
                self._uses.finish_backward()


def _tell(one: "weakref.ref[Pass]", g: Tensor) -> None:
    """Tell a pass that still exists about a gradient."""
    alive = one()
    if alive is not None:
        alive.arrived(g)


# Beyond which relative distance gradients are those of another loss; half precision rounds by less.
_DEPARTURE = 0.05


def fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return by which factor a direction comes closest to `g`, and how far away it is then, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)
