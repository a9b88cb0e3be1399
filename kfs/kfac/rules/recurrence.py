r"""Gradients through a recurrence whose states are known: one loop back in time, and everything else at once.

A layer of a recurrent network in one direction computes, for times $t = 1, \ldots, T$,

$$p_t = W_{ih} x_t + b_{ih}, \quad q_t = W_{hh} h_{t-1} + b_{hh}, \quad h_t = \mathrm{step}(p_t, q_t, h_{t-1}).$$

PyTorch's own operation returns all $h_t$. Given those, all $q_t$ are *one* linear map of $h_0, \ldots, h_{T-1}$, and
all partial derivatives of the step are computed at once: `slopes`. What is left is the chain rule. The gradient at
$h_{t-1}$ consists of what comes from outside, and of what comes from $h_t$, mostly $W_{hh}^\top$ times the gradient at
$q_t$. `Recurrence` runs this loop, and returns total gradients at all $p_t$ and $q_t$: those that autograd gives for a
loop over times that is written out.

Sequences are `[time, batch, features]` here, in the order in which the layer goes through them. Gradients may have an
axis for columns before that of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.rules.slopes import Gradients, Slopes
from kfs.kfac.sums.outer_products import full_precision


class Recurrence(torch.autograd.Function):
    """All states of a recurrence, as a function of what inputs and states contribute, and of first states.

    Their values are known: one step from what came before each time. The backward pass sends gradients through the
    recurrence, as if states had been computed one by one.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        p: Tensor,  # noqa: ARG004 (gradients come back to these)
        q: Tensor,  # noqa: ARG004
        projected: Tensor | None,
        h: Tensor,  # noqa: ARG004
        cell: Tensor | None,
        slopes: Slopes,
        dtype: torch.dtype,
        W: Tensor,
        W_r: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.kind = type(slopes)
        ctx.has = (projected is not None, cell is not None)
        ctx.save_for_backward(W, W_r, *slopes.tensors)
        ctx.set_materialize_grads(False)
        states = (slopes.states.to(dtype) if projected is None else projected).detach()
        return (states,) if slopes.last_cell is None else (states, slopes.last_cell.to(dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_cell: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Send gradients back through all times."""
        W, W_r, *slopes = ctx.saved_tensors
        like = slopes[-1]
        if g is None:
            width = like.shape[2] if W_r is None else W_r.shape[0]
            g = like.new_zeros(*like.shape[:2], width)
        if g_cell is None:
            g_cell = like.new_empty(0)
        # Slopes were computed without graph. If somebody wants to differentiate again, that must not go unnoticed.
        again = torch.empty(0, requires_grad=torch.is_grad_enabled())
        found: Gradients = SendBack.apply(g, g_cell, again, ctx.kind, W, W_r, *slopes)  # type: ignore[no-untyped-call]
        at_p, at_q, at_projected, at_h, at_cell = found
        has_projected, has_cell = ctx.has
        first = (at_p, at_q, at_projected if has_projected else None, at_h, at_cell if has_cell else None)
        return *first, None, None, None, None


class SendBack(torch.autograd.Function):
    """Gradients through a recurrence, for one column or, by `vmap`, for several ones together."""

    @staticmethod
    def forward(g: Tensor, g_cell: Tensor, again: Tensor, kind: type[Slopes], *saved: Any) -> Gradients:  # noqa: ARG004
        """Send one column back."""
        g_cell = g_cell.unsqueeze(0) if g_cell.numel() else g_cell
        found = _send_back(g.unsqueeze(1), g_cell, kind, saved)
        return _on_each(found, lambda t, axis: t.squeeze(axis))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        """Refuse: slopes, which have no graph, would be taken for constants."""
        raise ModelError(
            "The gradient of a recurrent network is differentiated again, in a pass that KFAC watches.",
            "Compute what needs it (a penalty on gradients, a Hessian) in a pass that KFAC does not watch, or write "
            "the network as a loop over cells, such as torch.nn.LSTMCell.",
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        g: Tensor,
        g_cell: Tensor,
        again: Tensor,  # noqa: ARG004
        kind: type[Slopes],
        *saved: Any,
    ) -> tuple[Gradients, tuple[int | None, ...]]:
        """Send all columns back."""
        columns = info.batch_size
        g = g.unsqueeze(1).expand(-1, columns, -1, -1) if in_dims[0] is None else g.movedim(in_dims[0], 1)
        if in_dims[1] is not None:
            g_cell = g_cell.movedim(in_dims[1], 0)
        elif g_cell.numel():
            g_cell = g_cell.expand(columns, *g_cell.shape)
        found = _on_each(_send_back(g, g_cell, kind, saved), lambda t, axis: t.movedim(axis, 0))
        # What is empty has no columns.
        axes = tuple(0 if t.ndim > 1 else None for t in found)
        return found, axes


def _send_back(g: Tensor, g_cell: Tensor, kind: type[Slopes], saved: tuple[Any, ...]) -> Gradients:
    """Send gradients `[time, columns, batch, features]` back, in the precision of slopes."""
    W, W_r, *slopes = saved
    dtype = slopes[0].dtype
    with full_precision(g.device.type):
        W_r = None if W_r is None else W_r.to(dtype)
        return kind.send_back(tuple(slopes), g.to(dtype), g_cell.to(dtype), W.to(dtype), W_r)


def _on_each(found: Gradients, change: Callable[[Tensor, int], Tensor]) -> Gradients:
    """Change each of these gradients, given where its axis for columns is; not those that are empty."""
    axes = (1, 1, 1, 0, 0)
    at_p, at_q, *others = [change(t, axis) if t.ndim > 1 else t for t, axis in zip(found, axes, strict=True)]
    return at_p, at_q, others[0], others[1], others[2]
