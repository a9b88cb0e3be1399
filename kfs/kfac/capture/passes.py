"""A forward pass that is captured, and backward passes that send vectors back to its taps."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from kfs.data import Batch, mapped
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.session import Session
from kfs.kfac.capture.tap import Tap
from kfs.kfac.sums.interface import Sums
from kfs.risk import EmpiricalRisk


def forward(
    risk: EmpiricalRisk, batch: Batch, session: Session, sums: Sums, batch_axis: int | None = None
) -> tuple[Tensor, Capture]:
    """Evaluate the model with taps at the outputs of all parametric operations.

    Args:
        risk: Model and parameters.
        batch: Some data.
        session: Has plans.
        sums: What inputs are added to, and gradients will be.
        batch_axis: Where the batch axis is in activations, if not first.

    Returns:
        Predictions, and what is needed to send vectors back.
    """
    capture = Capture(session, sums, len(batch.y), batch_axis)
    marked = Batch(mapped(batch.x, capture.mark_data), batch.y, batch.first)
    try:
        with torch.compiler.set_stance("force_eager"), capture:  # a compiled model hides its operations
            f = risk.predict(risk.params, marked)
    except BaseException:
        capture.finished = True
        raise
    finally:
        capture.forget_marks()
    capture.running = False
    capture.unexplained |= hidden_uses(f, capture)
    return f, capture


def send_back(
    f: Tensor | GradientEdge,
    capture: Capture,
    vectors: Iterable[Tensor],
    keep_graph: bool = False,
) -> None:
    """Send vectors back to all taps, chunk by chunk, and add what arrives to the sums.

    Args:
        f: Predictions.
        capture: The forward pass that they come from.
        vectors: Chunks of some columns, `[columns, *f.shape]`.
        keep_graph: Whether somebody needs the graph afterwards.
    """
    with capture.attentive():
        capture.sums.finish_forward()
        for columns, last in _and_whether_last(iter(vectors)):
            backward(f, capture, columns, keep_graph or not last)
            capture.sums.finish_backward()
    capture.sums.finish_batch()


def backward(f: Tensor | GradientEdge, capture: Capture, vectors: Tensor, keep_graph: bool = False) -> None:
    """Send vectors `[columns, *f.shape]` back to all taps, which take note of what arrives."""
    handle = capture.handle
    if handle is None or (isinstance(f, Tensor) and not f.requires_grad):  # no parameter was used
        return
    capture.keep_graph = keep_graph
    capture.together = len(vectors) > 1

    def send(v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f, handle, v, retain_graph=keep_graph, materialize_grads=True)

    vmap(send)(vectors) if capture.together else send(vectors[0])
    capture.pass_derived()


def hidden_uses(f: Tensor, capture: Capture) -> set[tuple[str, str]]:
    """Find parameters that enter a custom `autograd.Function`, which PyTorch does not show to modes.

    A pass that consists of as many operations and taps as one before is taken for the same, and not looked at again.
    """
    looked_at, signature = capture.session.looked_at, (f.shape, capture.operations, capture.taps)
    if signature in looked_at:
        return looked_at[signature]
    names = {id(p): name for name, p in capture.tracker.params.items()}
    found: set[tuple[str, str]] = set()
    seen, waiting = set(), [f.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        custom = isinstance(node, BackwardCFunction) and not isinstance(node, Tap._backward_cls)
        for following, _ in node.next_functions:
            if custom:
                name = names.get(id(getattr(following, "variable", None)))
                if name is not None:
                    found.add((name, type(node).__name__.removesuffix("Backward")))
            waiting.append(following)
    looked_at[signature] = found
    return found


def _and_whether_last(vectors: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Say of every chunk of vectors whether it is the last one."""
    chunk = next(vectors, None)
    while chunk is not None:
        following = next(vectors, None)
        yield chunk, following is None
        chunk = following
