"""Taps: identities in the computation graph whose backward pass shows gradients to a callback.

A tap has a zero-size second input, the handle. Differentiating predictions with respect to the handle sends vectors
back to all taps: no weight gradient is computed, and each gradient is used where it arises and never stored.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors.accumulate.outer_products import full_precision
from kfs.factors.rows.source import Receiver


class Phase(Enum):
    """What happens in a pass; it determines what its taps do with gradients."""

    FORWARD = auto()  # the model runs, and must not differentiate its predictions
    IDLE = auto()  # gradients belong to others
    PROBING = auto()  # vectors that measure row maps are sent back; only pending queries take them
    SENDING = auto()  # vectors of the curvature are sent back
    LISTENING = auto()  # the caller's backward pass has the gradients that are needed


class Phased(Protocol):
    """The state of a pass that its taps read."""

    phase: Phase
    columns: int
    keeps_graph: bool
    noise: torch.Generator | None


class Tap(torch.autograd.Function):
    """The identity, with a backward pass that shows gradients to a receiver."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        z: Tensor,
        handle: Tensor,  # noqa: ARG004
        state: Phased,
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
                "Let the model send derivatives forward beside values, as in docs/howto_pinn.md; or leave the "
                "parameters behind that derivative out with params=. kfs.GGN(risk) takes the model as it is.",
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
