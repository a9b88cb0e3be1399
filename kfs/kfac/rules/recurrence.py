"""Gradients through a recurrence whose states are known: one loop back in time, and everything else at once.

A layer of a recurrent network in one direction computes, for times $t = 1, \\ldots, T$,

$$p_t = W_{ih} x_t + b_{ih}, \\quad q_t = W_{hh} h_{t-1} + b_{hh}, \\quad h_t = \\mathrm{step}(p_t, q_t, h_{t-1}).$$

PyTorch's own operation returns all $h_t$. Given those, all $q_t$ are *one* linear map of $h_0, \\ldots, h_{T-1}$, and all
partial derivatives of `step` are computed at once: `Slopes`. What is left is the chain rule. The gradient at $h_{t-1}$
consists of what comes from outside, and of what comes from $h_t$, mostly $W_{hh}^\\top$ times the gradient at $q_t$.
`Recurrence` runs this loop, and returns total gradients at all $p_t$ and $q_t$: those that autograd gives for a loop
over times that is written out.

Sequences are `[time, batch, features]` here, in the order in which the layer goes through them. Gradients may have an
axis for columns before that of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.sums.outer_products import full_precision

# Gradients at all p, at all q, at all projected states, at the first state, and at the first state of cells. Those that
# an operation does not have are empty.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Slopes(ABC):
    """Partial derivatives of a recurrent step, for all times: what gradients are multiplied with.

    Args:
        tensors: These derivatives, `[time, batch, ...]`, in float32 or better.
        unprojected: States of an LSTM before they are projected, `[time, batch, features]`.
    """

    gates: ClassVar[int]  # how many p and q there are for each feature of a state

    def __init__(self, tensors: tuple[Tensor, ...], unprojected: Tensor | None = None) -> None:
        """Remember them."""
        self.tensors = tensors
        self.unprojected = unprojected

    @classmethod
    @abstractmethod
    def of(cls, p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None) -> "Slopes":
        """Compute them.

        Args:
            p: What inputs contribute, `[time, batch, gates, features]`.
            q: What states contribute, likewise.
            before: States before each time.
            after: States after each time.
            cell: The first state of the cells of an LSTM.
        """

    @abstractmethod
    def send_back(self, g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Send gradients back through all times.

        Args:
            g: Gradients at states from outside, `[time, columns, batch, features]`.
            g_cell: Gradients at the last state of cells, `[columns, batch, features]`. Empty if there are none.
            W: The recurrent weight.
            W_r: The weight that projects states.
        """


def slopes_of(
    kind: type[Slopes], p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None = None
) -> Slopes:
    """Return all partial derivatives of a step, in float32 or better; arguments are those of `Slopes.of`, but flat.

    Contributions `p` and `q` are `[time, batch, gates * features]`.
    """
    dtype = torch.promote_types(after.dtype, torch.float32)
    with full_precision(after.device.type):
        p, q = (t.to(dtype).unflatten(-1, (kind.gates, -1)) for t in (p, q))
        return kind.of(p, q, before.to(dtype), after.to(dtype), cell)


class OneGate(Slopes):
    """`h = tanh(p + q)`, or `relu`."""

    gates = 1

    def send_back(self, g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Take one product and one multiplication per time."""
        (slopes,) = self.tensors
        at_q = g.new_empty(g.shape)
        total = g.new_empty(g.shape[1:])
        following: Tensor | None = None
        for outside, slope, result in _back_in_time(g, slopes, at_q):
            here = outside if following is None else _add_product(outside, following, W, total)
            following = torch.mul(here, slope, out=result)
        none = g.new_empty(0)
        return at_q, at_q, none, at_q[0] @ W, none


class Tanh(OneGate):
    """`h = tanh(p + q)`."""

    @classmethod
    def of(cls, p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None) -> "Tanh":
        """Compute `1 - h^2`."""
        return cls((1 - after.square(),))


class ReLU(OneGate):
    """`h = relu(p + q)`."""

    @classmethod
    def of(cls, p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None) -> "ReLU":
        """Look which states are positive."""
        return cls(((after > 0).to(after.dtype),))


class GRU(Slopes):
    """`h' = (1 - z) n + z h`, for `r, z = sigmoid(p + q)` and `n = tanh(p + r q)` with their parts of `p` and `q`."""

    gates = 3

    @classmethod
    def of(cls, p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None) -> "GRU":
        """Compute slopes of `h'` with respect to the gates of `q`, the last gate of `p`, and `h`."""
        sigmoids = (p[:, :, :2] + q[:, :, :2]).sigmoid_()
        r, z = sigmoids.unbind(2)
        q_n = q[:, :, 2]
        n = torch.addcmul(p[:, :, 2], r, q_n).tanh_()
        bends = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1)  # the slope of a sigmoid s is s - s^2
        at_n = (1 - z).mul_(1 - n.square())
        at_q = torch.empty_like(q)
        torch.mul(at_n * q_n, bends[:, :, 0], out=at_q[:, :, 0])
        torch.mul(before - n, bends[:, :, 1], out=at_q[:, :, 1])
        torch.mul(at_n, r, out=at_q[:, :, 2])
        return cls((at_q, at_n, z))

    def send_back(self, g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Take one product and two multiplications per time."""
        slopes, at_n, z = self.tensors
        by_gate = g.new_empty(*g.shape[:3], *slopes.shape[2:])
        at_q = by_gate.flatten(-2)
        totals = g.new_empty(g.shape)
        following: Tensor | None = None
        carried: tuple[Tensor, Tensor] | None = None  # the gradient at the next state, and how much of it comes back
        for outside, slope, keep, result, flat, total in _back_in_time(g, slopes, z, by_gate, at_q, totals):
            if following is None or carried is None:
                total.copy_(outside)
            else:
                _add_product(outside, following, W, total).addcmul_(*carried)
            torch.mul(total.unsqueeze(-2), slope, out=result)
            following, carried = flat, (total, keep)
        first = torch.addcmul(at_q[0] @ W, totals[0], z[0])
        # The candidate n sees q multiplied by r, and p as it is.
        at_p = torch.cat([at_q[..., : 2 * z.shape[2]], totals.mul_(at_n.unsqueeze(1))], -1)
        none = g.new_empty(0)
        return at_p, at_q, none, first, none


class LSTM(Slopes):
    """`c' = f c + i g` and `h' = o tanh(c')`, for `i, f, o = sigmoid(p + q)` and `g = tanh(p + q)`.

    If there is a projection, `h'` is multiplied with its weight.
    """

    gates = 4

    @classmethod
    def of(cls, p: Tensor, q: Tensor, before: Tensor, after: Tensor, cell: Tensor | None) -> "LSTM":
        """Compute slopes of `c'` with respect to `c`, `i`, `f`, `g`, and of `h'` with respect to `o` and `c'`.

        States of cells are computed time by time, by one operation each.
        """
        assert cell is not None  # noqa: S101 (an LSTM has one)
        gates = p + q
        sigmoids = gates.sigmoid()
        i, f, _, o = sigmoids.unbind(2)
        g = gates[:, :, 2].tanh()
        new = i * g
        times, batch, _, size = gates.shape
        cells = gates.new_empty(times + 1, batch, size)
        cells[0] = cell
        rows = cells.unbind(0)
        for keep, add, old, result in zip(f.unbind(0), new.unbind(0), rows[:-1], rows[1:], strict=True):
            torch.addcmul(add, keep, old, out=result)
        tanh = cells[1:].tanh()
        bends = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1, out=gates)  # as for the GRU
        slopes = gates.new_empty(times, batch, 5, size)
        slopes[:, :, 0] = f
        torch.mul(bends[:, :, 0], g, out=slopes[:, :, 1])
        torch.mul(bends[:, :, 1], cells[:-1], out=slopes[:, :, 2])
        torch.addcmul(i, new, g, value=-1, out=slopes[:, :, 3])
        torch.mul(bends[:, :, 3], tanh, out=slopes[:, :, 4])
        unprojected = o * tanh
        return cls((slopes, torch.addcmul(o, unprojected, tanh, value=-1)), unprojected)

    def send_back(self, g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Take one product and three multiplications per time, and one more product if states are projected."""
        slopes, at_cell = self.tensors
        results = g.new_empty(*g.shape[:3], *slopes.shape[2:])  # at the cell before, and at the four gates
        at_q = results[..., 1:, :].flatten(-2)  # a view: four of five parts that stand side by side
        totals = g.new_empty(g.shape)
        total_cell, unprojected = g.new_empty(2, *results.shape[1:3], slopes.shape[3])
        carried = g_cell if g_cell.numel() else torch.zeros_like(total_cell)
        following: Tensor | None = None
        for outside, slope, slope_cell, result, flat, total in _back_in_time(g, slopes, at_cell, results, at_q, totals):
            here = total.copy_(outside) if following is None else _add_product(outside, following, W, total)
            here = here if W_r is None else torch.matmul(here, W_r, out=unprojected)
            torch.addcmul(carried, here, slope_cell, out=total_cell)
            torch.mul(total_cell.unsqueeze(-2), slope[:, :4], out=result[..., :4, :])
            torch.mul(here, slope[:, 4], out=result[..., 4, :])
            following, carried = flat, result[..., 0, :]
        return at_q, at_q, g.new_empty(0) if W_r is None else totals, at_q[0] @ W, results[0, ..., 0, :]


class Recurrence(torch.autograd.Function):
    """All states of a recurrence, as a function of what inputs and states contribute, and of first states.

    Their values are known. The backward pass sends gradients through the recurrence, as if states had been computed one
    by one.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        p: Tensor,  # noqa: ARG004 (gradients come back to these)
        q: Tensor,  # noqa: ARG004
        projected: Tensor | None,
        h: Tensor,  # noqa: ARG004
        cell: Tensor | None,
        states: Tensor,
        last_cell: Tensor | None,
        slopes: Slopes,
        W: Tensor,
        W_r: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.kind = type(slopes)
        ctx.has = (projected is not None, cell is not None)
        ctx.save_for_backward(W, W_r, *slopes.tensors)
        ctx.set_materialize_grads(False)
        return (states.detach(),) if last_cell is None else (states.detach(), last_cell.detach())

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
        at_p, at_q, at_projected, at_h, at_cell = SendBack.apply(g, g_cell, again, ctx.kind, W, W_r, *slopes)  # type: ignore[no-untyped-call]
        has_projected, has_cell = ctx.has
        first = (at_p, at_q, at_projected if has_projected else None, at_h, at_cell if has_cell else None)
        return *first, None, None, None, None, None


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
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse: values that the model computes without graph would be taken for constants."""
        raise ModelError(
            "The gradient of a recurrent network is differentiated again, in a pass that KFAC watches.",
            "Compute what needs it (a penalty on gradients, a Hessian) with a model that KFAC does not watch, or write the "
            "network as a loop over cells, such as torch.nn.LSTMCell.",
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
    ) -> tuple[Gradients, tuple[int, ...]]:
        """Send all columns back."""
        columns = info.batch_size
        g = g.unsqueeze(1).expand(-1, columns, -1, -1) if in_dims[0] is None else g.movedim(in_dims[0], 1)
        if in_dims[1] is not None:
            g_cell = g_cell.movedim(in_dims[1], 0)
        elif g_cell.numel():
            g_cell = g_cell.expand(columns, *g_cell.shape)
        found = _on_each(_send_back(g, g_cell, kind, saved), lambda t, axis: t.movedim(axis, 0))
        # An empty tensor has no columns, and they have to be somewhere.
        found = tuple(t if t.ndim > 1 else t.expand(columns, 0) for t in found)
        return found, (0, 0, 0, 0, 0)


def _send_back(g: Tensor, g_cell: Tensor, kind: type[Slopes], saved: tuple[Any, ...]) -> Gradients:
    """Send gradients `[time, columns, batch, features]` back, in the precision of slopes."""
    W, W_r, *slopes = saved
    dtype = slopes[0].dtype
    with full_precision(g.device.type):
        W_r = None if W_r is None else W_r.to(dtype)
        return kind(tuple(slopes)).send_back(g.to(dtype), g_cell.to(dtype), W.to(dtype), W_r)


def _on_each(found: Gradients, change: Any) -> Gradients:
    """Change each of these gradients, given where its axis for columns is; not those that are empty."""
    axes = (1, 1, 1, 0, 0)
    at_p, at_q, *others = [change(t, axis) if t.ndim > 1 else t for t, axis in zip(found, axes, strict=True)]
    return at_p, at_q, others[0], others[1], others[2]


def _back_in_time(*sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through sequences from the last time to the first one."""
    return zip(*(reversed(t.unbind(0)) for t in sequences), strict=True)


def _add_product(start: Tensor, x: Tensor, W: Tensor, out: Tensor) -> Tensor:
    """Compute `start + x @ W` for `[columns, batch, features]`, into a given tensor, and return it."""
    torch.addmm(start.flatten(0, 1), x.flatten(0, 1), W, out=out.view(-1, W.shape[1]))
    return out
