"""Taps: identities in the computation graph whose backward pass shows gradients to a callback.

A tap has a zero-size second input, the handle. Differentiating predictions with respect to the handle sends vectors
back to all taps: no weight gradient is computed, and each gradient is used where it arises and never stored.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from kfs.errors import ModelError
from kfs.factors.accumulate.outer_products import full_precision
from kfs.factors.accumulate.statistic import Receiver, Statistic
from kfs.factors.capture.row_queries import RowQueries
from kfs.factors.rows.counted import BatchMasks
from kfs.factors.rows.measure import MULTIPLE, probes
from kfs.factors.trace.tracking import Derived


class CapturedPass(Protocol):
    """The part of `Capture` that taps use."""

    handle: Tensor | None
    statistics: Sequence[Statistic]
    num_data: int
    running: bool
    sending: bool
    listening: bool
    probing: bool
    keep_graph: bool
    together: bool
    derived: list[Derived]
    queries: RowQueries | None
    masks: BatchMasks
    noise: torch.Generator | None

    def note_padding(self) -> None:
        """Record rows that should count but have no gradient."""


class Tap(torch.autograd.Function):
    """The identity, with a backward pass that shows gradients to a receiver."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        z: Tensor,
        handle: Tensor,  # noqa: ARG004
        capture: CapturedPass,
        receive: Receiver,
        waits: bool,
    ) -> Tensor:
        ctx.capture = capture
        ctx.receive = receive
        ctx.waits = waits
        # The result shares memory but is not a view for autograd: in-place operations may follow, and add nothing to
        # the backward pass. This is safe: z is not used elsewhere, and no operation that has a rule saves its output.
        return z.detach() if capture.noise is None else _noisy(z, capture.noise)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Show the gradients to the receiver. The handle needs no gradient."""
        capture, receive = ctx.capture, ctx.receive
        if capture.running:
            raise ModelError(
                "The model differentiates its own predictions (torch.autograd.grad in its forward pass).",
                "Let the model send derivatives forward beside values, as in docs/howto_pinn.md; or leave the "
                "parameters behind that derivative out with params=. kfs.GGN(risk) takes the model as it is.",
            )
        sending, listening = capture.sending, capture.listening
        if receive is None or not (sending or listening):  # a backward pass that is not of interest
            return g, None, None, None, None
        if capture.probing and not ctx.waits:
            return g, None, None, None, None
        if g.is_cuda:  # pragma: no cover (the thread's first operation may be a product: cuBLAS wants a context)
            torch.cuda.set_device(g.device)
        if sending and capture.together:
            Show.apply(g, receive)  # type: ignore[no-untyped-call]
        elif sending:
            receive(g.unsqueeze(0))
        else:
            with full_precision(g.device.type):
                receive(g.unsqueeze(0))
        if not capture.keep_graph:
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


def send_back(
    f: Tensor | GradientEdge,
    capture: CapturedPass,
    vectors: Iterable[Tensor],
    keep_graph: bool = False,
    like: Tensor | None = None,
) -> None:
    """Send vectors back to all taps, chunk by chunk, and accumulate the gradients in the statistics.

    Args:
        f: Predictions.
        capture: The forward pass that computed the predictions.
        vectors: Chunks of columns, `[columns, *f.shape]`.
        keep_graph: Whether to retain the graph.
        like: The predictions, if `f` is a `GradientEdge`.
    """
    measure_rows(f, capture, like)
    for statistic in capture.statistics:
        statistic.finish_forward()
    for columns, last in _and_whether_last(iter(vectors)):
        backward(f, capture, columns, keep_graph or not last)
        for statistic in capture.statistics:
            statistic.finish_backward()
    for statistic in capture.statistics:
        statistic.finish_batch()
    capture.note_padding()
    if capture.queries is not None:
        capture.queries.forget()


def measure_rows(
    f: Tensor | GradientEdge, capture: CapturedPass, like: Tensor | None = None, also: Sequence[Tensor] = ()
) -> Sequence[Tensor | None]:
    """Measure the row maps that are not known yet. Arguments are those of `send_back` and `backward`.

    Returns:
        Gradients of the first probe with respect to the tensors in `also`.
    """
    queries = capture.queries
    if queries is None or not (queries.opened or queries.observed):
        return [None] * len(also)
    predictions = f if isinstance(f, Tensor) else like
    assert predictions is not None  # noqa: S101 (callers without predictions pass `like`)
    found: Sequence[Tensor | None] = ()
    if not queries.need_probes:  # only targets were missing
        queries.answer_all()
        return [None] * len(also)
    capture.probing = True
    try:
        queries.counting_rows = queries.count_rows
        # Which rows have a gradient? Send back a vector and a multiple of it.
        if queries.counting_rows:
            v = capture.masks.of_predictions(next(probes(predictions, capture.num_data)))
            for multiple in (v, MULTIPLE * v):
                backward(f, capture, multiple.unsqueeze(0), keep_graph=True)
        queries.counting_rows = False
        # Which example does each row belong to? Send back vectors that are scaled differently for each example.
        for place, v in enumerate(probes(predictions, capture.num_data) if queries.need_row_maps else ()):
            gradients = backward(f, capture, v.unsqueeze(0), keep_graph=True, also=() if place else also)
            found = found or gradients
    finally:
        capture.probing = False
    queries.answer_all()
    return found


def backward(
    f: Tensor | GradientEdge,
    capture: CapturedPass,
    vectors: Tensor,
    keep_graph: bool = False,
    also: Sequence[Tensor] = (),
) -> Sequence[Tensor | None]:
    """Send vectors `[columns, *f.shape]` back to all taps, which pass the gradients to their receivers.

    Returns:
        Gradients with respect to the tensors in `also`, for a single column.
    """
    handle = capture.handle
    if isinstance(f, Tensor) and not f.requires_grad:  # no parameter was used
        return [None] * len(also)
    if handle is None:  # no use was seen, but predictions may still depend on `also`
        return torch.autograd.grad(f, also, vectors[0], retain_graph=keep_graph, allow_unused=True) if also else ()
    capture.keep_graph = keep_graph
    capture.together = len(vectors) > 1

    def send(v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f, handle, v, retain_graph=keep_graph, materialize_grads=True)

    found: Sequence[Tensor | None] = ()
    with full_precision(vectors.device.type):
        capture.sending = True
        try:
            if also:
                found = torch.autograd.grad(f, (handle, *also), vectors[0], retain_graph=keep_graph, allow_unused=True)[
                    1:
                ]
            elif capture.together:
                vmap(send)(vectors)
            else:
                send(vectors[0])
            pass_derived(capture)
        finally:
            capture.sending = False
    return found


def pass_derived(capture: CapturedPass) -> None:
    """Pass on the gradients of derived parameters after a backward pass, in reverse order of creation."""
    for derived in reversed(capture.derived):
        derived.pass_on()


def _and_whether_last(vectors: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Generate each chunk of vectors, and whether it is the last one."""
    chunk = next(vectors, None)
    while chunk is not None:
        following = next(vectors, None)
        yield chunk, following is None
        chunk = following
