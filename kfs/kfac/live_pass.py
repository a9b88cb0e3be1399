"""One forward pass of a model in training, and what happens when the gradient of a loss comes back."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kfs.data import mapped, tensors_in
from kfs.errors import DataError, LossError, ModelError
from kfs.kfac.backpropagated_vectors import backpropagated_vectors
from kfs.kfac.batch_axis import BatchAxis
from kfs.kfac.blocks import Block, Layout, Side
from kfs.kfac.capture import Capture
from kfs.kfac.inputs import Input
from kfs.kfac.operations import RULES
from kfs.kfac.operations.fallback import otherwise
from kfs.kfac.per_datum import PerDatum, Squares, Statistic
from kfs.kfac.scaffold import backward, hidden_uses, not_covered
from kfs.kfac.settings import Settings
from kfs.kfac.uses import Key, Uses
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
        last: Arguments, keyword arguments, and targets of the last pass; nothing if inputs are not kept.
    """

    blocks: dict[Key, Block] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)
    num_data: int = 0
    examples: float = 0.0
    count: float = 0.0
    uncovered: dict[str, str] = field(default_factory=dict)
    finite: bool = True
    mismatch: float = 0.0
    last: tuple[Any, Any, Tensor] | None = None

    def plus(self, other: "Record") -> "Record":
        """Return the sum; this object's tensors may be part of it."""
        for key, block in other.blocks.items():
            mine = self.blocks.setdefault(key, block)
            if mine is not block:
                for side, pair in block.pairs.items():
                    mine.pairs[side] = mine.pairs[side].merge(pair) if side in mine.pairs else pair
        for key, squares in other.squares.items():
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares
        both = self.uncovered.keys() & other.uncovered.keys()  # what one pass does not use, another may
        broken = {n: why for r in (self, other) for n, why in r.uncovered.items() if n in both or n in _names(r)}
        return Record(
            self.blocks,
            self.squares,
            self.num_data + other.num_data,
            self.examples + other.examples,
            self.count + other.count,
            broken,
            self.finite and other.finite,
            max(self.mismatch, other.mismatch),
            other.last,
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

    def record(
        self,
        batch: BatchAxis,
        operation: str,
        layout: Layout,
        vectors: Input,
        read: Callable[[Tensor], Tensor],
        like: Tensor,
        ones: bool,
        side: Side,
    ) -> Callable[[Tensor], None]:
        """Take note of a use twice."""
        use = (batch, operation, layout, vectors, read, like, ones, side)
        first, second = super().record(*use), self._per_datum.record(*use)

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
        y: Targets, if they are known.
    """

    def __init__(self, watch: Watcher, params: dict[str, Tensor] | None, bases: Bases, args: Any, kwargs: Any) -> None:
        """Find out how many data there are."""
        self._watch, self._params, self._bases = watch, params, bases
        self._arguments: Any = (args, kwargs)
        settings = watch.settings
        axis = settings.batch_axis or 0
        inputs = [t for t in tensors_in([*args, *kwargs.values()]) if t.ndim > axis]
        if not inputs:
            raise DataError(
                "The model was called without any tensor that has a batch axis.",
                "Call it with a batch of inputs: model(x) with x of shape [N, ...].",
            )
        self._num_data = inputs[0].shape[axis]
        self.y: Tensor | None = kwargs.get("labels")
        self._examples, self._count, self._arrived_before, self._finite = 0.0, 0.0, False, True
        self._mismatch = self._scale = torch.zeros(())
        self._stack = ExitStack()
        self._uses = Both(settings, bases) if bases else Uses(settings, mixing=True)
        self._capture = Capture(params or {}, self._num_data, self._uses, RULES, otherwise, settings.batch_axis)

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

    def gated(self, output: Any) -> tuple[Any, Tensor | None]:
        """Return the model's output such that this object is told when a gradient arrives there, and predictions."""
        f = prediction_in(output)
        if not f.requires_grad:
            return output, None
        if f.shape[:1] != (self._num_data,):
            raise DataError(
                f"The model was called with {self._num_data} data, but its prediction has shape {list(f.shape)}.",
                "Put the batch axis first in predictions; say where it is in inputs with batch_axis=.",
            )
        if self._params is not None and self._watch.first_datum == 0:
            self._capture.unexplained |= hidden_uses(f, self._params)
        self._edge, self._f = get_gradient_edge(f), f.detach()
        gated = f.view_as(f)
        gated.register_hook(self._gradient_arrived)
        swap, loss = {id(f): gated}, getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and self.y is not None:  # the model has computed it
            self._value = None if "num_items_in_batch" in self._arguments[1] else loss.detach()
            swap[id(loss)] = loss.view_as(loss)
            swap[id(loss)].register_hook(self._gradient_of_loss_arrived)
        return replaced(output, swap), gated

    def finish(self) -> Record:
        """Return what the pass has given, after its backward pass."""
        record = Record({}, {}, self._num_data, self._examples, self._count, finite=self._finite)
        if self._watch.keep_inputs and self.y is not None:
            args, kwargs = self._arguments
            record.last = (args, {key: value for key, value in kwargs.items() if key != "labels"}, self.y)
        if self._params is None or not self._finite or not self._examples:
            return record
        if not self._capture.finished:  # it was the user's backward pass that has shown gradients
            self._capture.pass_virtual()
            self._uses.finish_backward()
            self._capture.finished = True
        self._uses.finish_batch()
        record.blocks = self._uses.blocks
        for block in record.blocks.values():
            for pair in block.pairs.values():
                pair.input.finish()
                pair.gradient.finish()
                if self._watch.settings.fisher == "empirical":
                    pair.gradient.total.div_(self._scale.square())
        record.squares = {key: squares.total for key, (_, squares) in self._bases.items()}
        if self._watch.settings.fisher == "empirical":
            record.squares = {key: total / self._scale.square() for key, total in record.squares.items()}
        record.uncovered = not_covered(
            self._params, record.blocks.values(), self._capture.unexplained, self._uses.conflicts
        )
        record.mismatch = float(self._mismatch)
        return record

    def _gradient_of_loss_arrived(self, scale: Tensor) -> None:
        """Go on, with the targets that the model was given and the gradient that it must have computed."""
        if self._arrived_before or not self._watch.trains():
            return
        f, y, loss = self._float(self._f), self.y, self._watch.loss
        assert y is not None  # noqa: S101 (there is no hook otherwise)
        loss.check(f, y)
        R = loss.reduction_factor(loss.count(y))
        if self._value is not None:
            value = R * loss.criterion(f, y).sum()
            self._mismatch = (value - self._value).abs() / self._value.abs().clamp(min=1e-30)
        self._proceed(f, y, scale * R)

    def _gradient_arrived(self, g: Tensor) -> None:
        """Find out about targets and scale, and go on."""
        if self._arrived_before or not self._watch.trains():
            return
        f, g, loss = self._float(self._f), self._float(g.detach()), self._watch.loss
        y, scale = self.y, None
        try:
            if y is not None:
                loss.check(f, y)
        except (ValueError, TypeError):  # not the targets of this loss, such as labels that the model was given
            self.y = y = None
        if y is None:
            self._mismatch = loss.departure(f, g)
            y = loss.stand_in(f, g)
        else:
            scale, self._mismatch = _fit(g, loss.gradient(f, y))
        if scale is None and self._watch.settings.fisher == "empirical":
            scale, departure = _fit(g, loss.gradient(f, y))
            if not departure < _DEPARTURE:
                raise LossError(
                    f"The scale of the gradient is not known, since targets of {loss.name} are not.",
                    "Call the optimizer's targets(y) before backward(), or compute the loss by the module of loss=.",
                )
        self._proceed(f, y, g.new_ones(()) if scale is None else scale, g)

    def _proceed(self, f: Tensor, y: Tensor, scale: Tensor, g: Tensor | None = None) -> None:
        """Send vectors back, or wait for gradients to come by."""
        self._arrived_before, self._scale = True, scale
        watch, capture = self._watch, self._capture
        wrong = f.isnan().any() | (f == torch.inf).any() | ~scale.isfinite()
        self._finite = not bool(wrong if g is None else wrong | ~g.isfinite().all())
        self.y = y
        if self._finite:
            self._examples, self._count = watch.loss.examples(y), watch.loss.count(y)
        if self._params is None or not self._examples:
            capture.finished = True
        elif watch.settings.fisher in {"empirical", "forward-only"}:
            capture.keep_graph = capture.together = False
            self._uses.finish_forward()
        else:
            self._send(f, y)
        watch.first_datum += self._num_data if self._params is not None else 0
        if not watch.keep_inputs:
            self._arguments = None
        del self._f, self._edge  # the graph is large
        watch.completed(self)

    def _send(self, f: Tensor, y: Tensor) -> None:
        """Send vectors back through the graph, which somebody else will use up."""
        settings, at_once = self._watch.settings, self._watch.settings.columns_at_once or 1
        with self._capture.attentive():
            self._uses.finish_forward()
            first = self._watch.first_datum
            for columns in backpropagated_vectors(self._watch.loss, f, y, settings, first, at_once, Stream):
                backward(self._edge, self._capture, columns.to(self._f.dtype), keep_graph=True)
                self._uses.finish_backward()

    @staticmethod
    def _float(t: Tensor) -> Tensor:
        """Return a tensor in a precision that losses are computed in."""
        return t.to(torch.promote_types(t.dtype, torch.float32))


# Beyond which relative distance gradients are those of another loss; half precision rounds by less.
_DEPARTURE = 0.05


def _fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return by which factor a direction comes closest to `g`, and how far away it is then, relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)


def prediction_in(output: Any) -> Tensor:
    """Return predictions in what a model returned: itself, its `logits`, or the first tensor of a tuple.

    Raises:
        ModelError: If there is none.
    """
    f = getattr(output, "logits", output)
    if isinstance(f, Mapping):
        f = f.get("logits")
    if isinstance(f, (tuple, list)) and f:
        f = f[0]
    if not isinstance(f, Tensor) or f.ndim == 0:
        raise ModelError(
            f"The model returned a {type(output).__name__}, in which no prediction [N, ...] is found.",
            "Return a tensor, an object or mapping with `logits`, or a tuple that starts with the prediction.",
        )
    return f


def replaced(output: Any, swap: dict[int, Tensor]) -> Any:
    """Return what a model returned with some tensors replaced."""
    if isinstance(output, Tensor):
        return swap.get(id(output), output)
    if isinstance(output, (tuple, list)):
        parts: list[Any] = [swap.get(id(part), part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if isinstance(output, Mapping):  # Hugging Face's outputs set their attributes, too
        for key, value in list(output.items()):
            if id(value) in swap:
                output[key] = swap[id(value)]  # type: ignore[index]
        return output
    for name, value in list(vars(output).items()):
        if id(value) in swap:
            setattr(output, name, swap[id(value)])
    return output
