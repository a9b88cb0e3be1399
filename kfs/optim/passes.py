"""One forward pass of a model in training, and what happens when the gradient of a loss comes back."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kfs import waiting
from kfs.data import MaskSource
from kfs.errors import DataError, KfsError
from kfs.flags import Flags
from kfs.kfac.capture import BatchMasks, Capture, Known, Session, measure_rows, pass_derived, send_back
from kfs.kfac.coverage import not_covered
from kfs.kfac.settings import Settings
from kfs.kfac.structures import computable
from kfs.kfac.sums import FactorSums
from kfs.kfac.vectors import backpropagated_vectors
from kfs.losses import Loss
from kfs.nested import mapped, tensors_in
from kfs.optim.costs import Costs
from kfs.optim.factor_graphs import Data, FactorGraph, FactorPass, FactorResult, PassKey
from kfs.optim.other_losses import shows_targets
from kfs.optim.outputs import KeepsPass, with_parts
from kfs.optim.step_sums import Bases, FactorAndSquareSums, StepSums
from kfs.optim.targets import Targets
from kfs.outputs import parts_of, prediction_in
from kfs.state import uncompiled
from kfs.waiting import number, numbers

# With these, the user's backward pass is enough.
_WITHOUT_VECTORS = {"empirical", "forward-only"}


def number_of_data(arguments: Any, axis: int = 0, place: int = 0) -> int | None:
    """Return how many data a model is called with, by a tensor that has a batch axis; `None` without one.

    Args:
        arguments: Arguments of the model.
        axis: The batch axis.
        place: Which of these tensors has as many rows as there are data; by default the first one.
    """
    lengths = [t.shape[axis] for t in tensors_in(arguments) if t.ndim > axis]
    return lengths[place] if place < len(lengths) else None


@dataclass(eq=False)
class Pass:
    """One forward pass, and the backward pass that follows it."""

    owner: "weakref.ref[Any]"  # what watches it
    loss: Loss  # the announced one
    settings: Settings
    session: InitVar[Session | None]  # tracks parameters; `None` to count examples only
    known: InitVar[Known | None]  # what an audit found out
    bases: Bases  # in which to sum squared gradients
    arguments: InitVar[tuple[Any, Any]]  # of the model: positional and keyword arguments
    keep_inputs: bool  # whether the result has the arguments
    place: int = 0  # which tensor among the arguments has as many rows as there are data
    compare: bool = False  # whether to compare the loss with others, and its scale with the announced one
    graph: FactorGraph | None = None  # computes the sums, if the pass is not watched
    costs: Costs = field(default_factory=Costs)  # counts the time that factors take in the user's backward pass
    masks: MaskSource = field(default_factory=MaskSource)  # where the arguments have a mask
    # Given a number of data: how many data of other processes come before them, and how many there are of all.
    place_of_data: Callable[[int], tuple[int, int]] | None = None
    wants_factors: bool = False  # whether factors are due; of other processes, too, if this one has no data
    has_gradient: bool = False  # whether the gradient of a loss has arrived
    # If passes like this one are to be recorded: what they have in common, how they run, and the data of this one.
    to_record: tuple[PassKey, FactorPass, Data | None] | None = None

    def __post_init__(self, session: Session | None, known: Known | None, arguments: tuple[Any, Any]) -> None:
        self.audited = known
        axis = self.settings.batch_axis or 0
        num_data = number_of_data(arguments, axis, self.place)
        self.num_data = 1 if num_data is None else num_data
        self.all_data = self.num_data  # also those of other processes
        self.problem: Exception | None = None  # It is raised if somebody trains with this pass, and only then.
        if num_data is None:
            self.problem = DataError(
                "The model was called without any tensor that has a batch axis.",
                "Call it with a batch of inputs: model(x) with x of shape [N, ...].",
            )
        self._arguments = arguments
        labels = arguments[1].get("labels")
        self.targets = Targets(labels if isinstance(labels, Tensor) else None, compare=self.compare)
        self._result = StepSums(self.num_data, in_model=self.targets.y is not None)
        self._stack = ExitStack()
        self._sums = FactorAndSquareSums(self.settings, self.bases) if self.bases else FactorSums(self.settings)
        self._replayed: FactorResult | None = None
        self._capture: Capture | None = None
        self._padding: Flags | None = None  # takes note of padding that no rule about rows explains
        if session is not None:
            # Which targets count is known when the gradient of the loss is.
            masks = BatchMasks(
                mask=self.masks.find(arguments, self.num_data),
                pending=self.loss.class_axis is not None,
                device=session.device,
            )
            batch_axis = self.settings.batch_axis
            self._padding = None if self.settings.fisher == "forward-only" else Flags(session.device)
            self._capture = Capture(
                session, self._sums, self.num_data, batch_axis, known, masks=masks, padding=self._padding
            )

    def start(self) -> Any:
        """Enter the capture, and return marked arguments for the model, or `None` to leave them as they are."""
        if self._capture is None:
            return None
        marked = mapped(self._arguments, self._capture.mark_data)
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(self._capture)
        return marked

    def stop(self) -> None:
        """Leave the capture."""
        self._stack.close()
        if self._capture is not None:
            self._capture.leave_nothing_behind()
            self._capture.running = False

    @property
    def sends_vectors(self) -> bool:
        """Whether vectors go back through the graph before the user's gradient does."""
        if self._capture is None or self.settings.fisher not in _WITHOUT_VECTORS:
            return self._capture is not None
        return self._capture.sites is not None and self._capture.sites.need_probes

    def watch_output(self, output: Any, receive: "weakref.WeakMethod[Any]") -> Any:
        """Return the model's output such that `receive` is called, with this pass, when a gradient arrives there."""
        f: Tensor | None
        try:
            f = prediction_in(output)
        except KfsError as problem:
            f = next((t for t in parts_of(output) if t.requires_grad), None)
            self.problem = problem
        if f is None or f.grad_fn is None:
            return output
        if f.shape[:1] != (self.num_data,) and self.problem is None:
            self.problem = DataError(
                f"The model was called with {self.num_data} data, but its prediction has shape {list(f.shape)}.",
                "Put the batch axis first in predictions; say where it is in inputs with batch_axis=.",
            )
        if self._capture is not None:
            self._capture.find_hidden_uses(f)
        self._edge = get_gradient_edge(f)
        self._f = f.detach()
        reference = weakref.ref(self)

        def notify(g: Tensor) -> None:
            one, method = reference(), receive()
            if one is not None and method is not None:
                method(one, g)

        f.register_hook(notify)

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

    def receive_gradient(self, g: Tensor, first_datum: int) -> None:
        """Take the gradient of a loss with respect to predictions, and send vectors back if curvature needs them."""
        if self.problem is not None:
            raise self.problem
        self.has_gradient = True
        if not self.num_data:  # There is nothing to look at, and no target that counts.
            del self._f, self._edge, self._arguments
            return
        f, g, result = computable(self._f), g.detach(), self._result
        # A prediction of minus infinity is a class that was masked.
        result.finite = bool(g.isfinite().all() & ~(f.isnan() | (f == torch.inf)).any())
        y = self.targets.match(f, g, self.loss, self.settings.fisher) if result.finite else None
        result.mismatch = float(self.targets.mismatch)
        # The empirical Fisher of a vanishing gradient has no scale, and is not used.
        if y is not None and (self.settings.fisher != "empirical" or bool(self.targets.scale)):
            result.examples = number(self.loss.examples(y))
            result.count = number(self.loss.count(y))
            if self.keep_inputs and result.examples:
                args, kwargs = self._arguments
                result.inputs = [(args, {key: value for key, value in kwargs.items() if key != "labels"}, y)]
        if y is not None:
            with waiting.waiting_allowed():
                result.square, result.deviance = numbers([computable(g).square().sum(), self._deviance(f, y)])
        with self.costs.timed("factors"):
            if y is not None and result.examples and self.graph is not None:
                self._replayed = self.graph.replay(self._arguments, y, first_datum)
            if self._capture is not None:
                self._capture_gradients(self._capture, f, y, first_datum)
        del self._f, self._edge, self._arguments  # The graph and the inputs are large.

    def _deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum of deviances; NaN if targets are not known."""
        if y is self.targets.y or shows_targets(self.loss):
            return self.loss.deviance(f, y).sum()
        return f.new_full((), torch.nan)

    def _capture_gradients(self, capture: Capture, f: Tensor, y: Tensor | None, first_datum: int) -> None:
        """Send vectors back through the graph, or let the user's backward pass show gradients."""
        if y is None or not self._result.examples:
            return
        if capture.masks.pending:
            capture.masks.set_targets(self.loss.counted(y))
        if self.settings.fisher in _WITHOUT_VECTORS:
            capture.keep_graph = False
            measure_rows(self._edge, capture, self._f)
            capture.listening = True
            self._sums.finish_forward()
        else:
            at_once = self.settings.columns_at_once or 1
            # On an accelerator, one kernel draws, as in passes that are recorded. The numbers are the same.
            behind = waiting.runs_behind(f.device)
            first = torch.full((), first_datum, dtype=torch.int64, device=f.device) if behind else first_datum
            vectors = backpropagated_vectors(self.loss, f, y, self.settings, first, at_once)
            if self.to_record is not None:
                self.to_record = *self.to_record[:2], (self._arguments, self.num_data, y, first_datum)
            # The user's backward pass needs the graph afterwards.
            send_back(self._edge, capture, (columns.to(self._f.dtype) for columns in vectors), True, self._f)

    @property
    def shows_padding(self) -> bool:
        """Whether there was padding, after `collect`, that the audited data did not have."""
        return self._padding is not None and self._padding.first_bad() is not None

    def collect(self) -> StepSums:
        """Return what the pass has given, after its backward pass."""
        result, capture = self._result, self._capture
        if self.compare and self.num_data:
            result.other = self.targets.other_loss()
            result.scales = [(self.targets.known_scale(), result.count)]
        if self._replayed is not None:
            result.blocks = self._replayed.blocks
            result.uncovered = self._replayed.uncovered
        if capture is None or not result.examples:
            return result
        if capture.listening:  # The user's backward pass has shown gradients.
            with torch.no_grad():
                pass_derived(capture)
            self._sums.finish_backward()
            self._sums.finish_batch()
            capture.listening = False
            capture.note_padding()
            if capture.sites is not None:
                capture.sites.forget()
        result.blocks = self._sums.blocks
        result.squares = {key: squares.total for key, (_, squares) in self.bases.items()}
        self._sums.complete()
        gradients = [role.gradient.total for block in result.blocks.values() for role in block.roles.values()]
        if self.settings.fisher == "empirical":
            for total in (*gradients, *result.squares.values()):
                total.div_(self.targets.scale**2)
        params = capture.tracker.params
        result.uncovered = not_covered(params, result.blocks.values(), capture.unexplained, self._sums.conflicts)
        return result
