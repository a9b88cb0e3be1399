"""Taps: identities in the computation graph whose backward pass shows gradients.

A tap has a zero-size second input. Differentiating the predictions with respect to this input sends vectors back to all
taps: no weight gradient is computed, and a gradient is used where it arises and never stored.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.sums.interface import Receiver, full_precision


class Pass(Protocol):
    """What a tap needs to know of the pass that it belongs to; see `Capture`."""

    running: bool
    finished: bool
    keep_graph: bool
    together: bool


class Tap(torch.autograd.Function):
    """The identity, with a backward pass that shows gradients to a receiver."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, handle: Tensor, one: Pass, receive: Receiver) -> Tensor:  # noqa: ARG004, D102
        ctx.one = one
        ctx.receive = receive
        # The same memory, but for autograd it is no view: operations in place may follow, and cost nothing extra in
        # the backward pass. Nobody else uses z any more, and no operation that has a rule keeps its output.
        return z.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        """Show the gradients; nothing needs to be computed for the second input."""
        one, receive = ctx.one, ctx.receive
        if one.finished or receive is None:  # somebody differentiates what the model has kept, or again
            return g, None, None, None
        if one.running:
            raise ModelError(
                "The model differentiates its own predictions (torch.autograd.grad in its forward pass).",
                "Leave the parameters behind that derivative out with params=; KFAC is not defined for them here.",
            )
        if g.is_cuda:  # pragma: no cover (the thread's first operation may be a product: cuBLAS wants a context)
            torch.cuda.set_device(g.device)
        if one.together:
            Show.apply(g, receive)  # type: ignore[no-untyped-call]
        else:
            with full_precision(g.device.type):
                receive(g.unsqueeze(0))
        if not one.keep_graph:
            ctx.receive = None  # it may hold activations
        return g, None, None, None


class Show(torch.autograd.Function):
    """Passes gradients of columns that are sent back together, by `vmap`, to a receiver: `[columns, ...]`."""

    @staticmethod
    def forward(g: Tensor, receive: Receiver) -> Tensor:  # noqa: ARG004 (columns do not differ here, so that g is zero)
        """Show nothing."""
        return g.new_empty(0)  # pragma: no cover (whether this happens depends on PyTorch's backward formulas)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(_: Any, in_dims: Any, g: Tensor, receive: Receiver) -> tuple[Tensor, None]:
        """Show all columns."""
        with full_precision(g.device.type):
            receive(g.movedim(in_dims[0], 0).detach())
        return g.new_empty(0), None
