"""Partial derivatives of recurrent steps for all times at once, and the loop that sends gradients back through them.

Symbols and axes are those of `recurrence`. A step is one of PyTorch's: of an RNN, a GRU or an LSTM.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfs.kfac.sums.outer_products import full_precision
from kfs.precision import at_least_float32

# Gradients at all p, at all q, at all projected states, at the first state, and at the first state of cells. Those that
# an operation does not have are empty.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Steps:
    """What the steps of a recurrence take, for all times, in float32 or better."""

    p: Tensor  # what inputs contribute, [time, batch, gates, features]
    q: Tensor  # what states contribute, likewise
    before: Tensor  # states before each time, [time, batch, features]
    cell: Tensor | None  # the first state of the cells of an LSTM, [batch, features]


class Slopes(ABC):
    """Partial derivatives of a recurrent step, for all times: what gradients are multiplied with.

    Args:
        tensors: These derivatives, `[time, batch, ...]`, in float32 or better.
        states: What the steps return, `[time, batch, features]`; what an LSTM returns before it is projected.
        last_cell: The last state of the cells of an LSTM, `[batch, features]`.
    """

    gates: ClassVar[int]  # how many p and q there are for each feature of a state

    def __init__(self, tensors: tuple[Tensor, ...], states: Tensor, last_cell: Tensor | None = None) -> None:
        self.tensors = tensors
        self.states = states
        self.last_cell = last_cell

    @classmethod
    @abstractmethod
    def of(cls, steps: Steps) -> "Slopes":
        """Compute them."""

    @staticmethod
    @abstractmethod
    def send_back(tensors: tuple[Tensor, ...], g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Send gradients back through all times.

        Args:
            tensors: Those of an instance.
            g: Gradients at states from outside, `[time, columns, batch, features]`.
            g_cell: Gradients at the last state of cells, `[columns, batch, features]`. Empty if there are none.
            W: The recurrent weight.
            W_r: The weight that projects states.
        """


def slopes_of(kind: type[Slopes], p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None = None) -> Slopes:
    """Return all states and partial derivatives of a step, in float32 or better.

    Args:
        kind: Kind of the step.
        p: What inputs contribute, `[time, batch, gates * features]`.
        q: What states contribute, likewise.
        before: States before each time.
        cell: The first state of the cells of an LSTM.
    """
    dtype = at_least_float32(before.dtype)
    with full_precision(before.device.type):
        p, q = (t.to(dtype).unflatten(-1, (kind.gates, -1)) for t in (p, q))
        return kind.of(Steps(p, q, before.to(dtype), cell))


class OneGate(Slopes):
    """`h = tanh(p + q)`, or `relu`."""

    gates = 1

    @staticmethod
    def send_back(
        tensors: tuple[Tensor, ...],
        g: Tensor,
        g_cell: Tensor,  # noqa: ARG004 (there are no cells)
        W: Tensor,
        W_r: Tensor | None,  # noqa: ARG004 (nor projections)
    ) -> Gradients:
        """Take one product and one multiplication per time."""
        (slopes,) = tensors
        at_q = g.new_empty(g.shape)
        total = g.new_empty(g.shape[1:])
        total_rows = total.flatten(0, 1)
        following: Tensor | None = None
        for outside, slope, result, rows in _back_in_time(_rows(g), slopes, at_q, _rows(at_q)):
            if following is None:
                total_rows.copy_(outside)
            else:
                torch.addmm(outside, following, W, out=total_rows)
            torch.mul(total, slope, out=result)
            following = rows
        none = g.new_empty(0)
        return at_q, at_q, none, at_q[0] @ W, none


class Tanh(OneGate):
    """`h = tanh(p + q)`."""

    @classmethod
    def of(cls, steps: Steps) -> "Tanh":
        """Compute `1 - h^2`."""
        h = (steps.p + steps.q).squeeze(2).tanh_()
        return cls((1 - h.square(),), h)


class ReLU(OneGate):
    """`h = relu(p + q)`."""

    @classmethod
    def of(cls, steps: Steps) -> "ReLU":
        """Look which states are positive."""
        h = (steps.p + steps.q).squeeze(2).relu_()
        return cls(((h > 0).to(h.dtype),), h)


class GRU(Slopes):
    """`h' = (1 - z) n + z h`, for `r, z = sigmoid(p + q)` and `n = tanh(p + r q)` with their parts of `p` and `q`."""

    gates = 3

    @classmethod
    def of(cls, steps: Steps) -> "GRU":
        """Compute slopes of `h'` with respect to the gates of `q`, the last gate of `p`, and `h`."""
        p, q = steps.p, steps.q
        sigmoids = (p[:, :, :2] + q[:, :, :2]).sigmoid_()
        r, z = sigmoids.unbind(2)
        q_n = q[:, :, 2]
        n = torch.addcmul(p[:, :, 2], r, q_n).tanh_()
        bends = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1)  # the slope of a sigmoid s is s - s^2
        at_n = (1 - z).mul_(1 - n.square())
        at_q = torch.empty_like(q)
        torch.mul(at_n * q_n, bends[:, :, 0], out=at_q[:, :, 0])
        torch.mul(steps.before - n, bends[:, :, 1], out=at_q[:, :, 1])
        torch.mul(at_n, r, out=at_q[:, :, 2])
        return cls((at_q, at_n, z), torch.lerp(n, steps.before, z))

    @staticmethod
    def send_back(
        tensors: tuple[Tensor, ...],
        g: Tensor,
        g_cell: Tensor,  # noqa: ARG004 (there are no cells)
        W: Tensor,
        W_r: Tensor | None,  # noqa: ARG004 (nor projections)
    ) -> Gradients:
        """Take one product and two multiplications per time."""
        slopes, at_n, z = tensors
        by_gate = g.new_empty(*g.shape[:3], *slopes.shape[2:])
        at_q = by_gate.flatten(-2)
        totals = g.new_empty(g.shape)
        following: tuple[Tensor, Tensor, Tensor] | None = None  # what the next state has: see the end of the loop
        times = _back_in_time(
            *(_rows(g), slopes, z, by_gate, _rows(at_q)),
            *(totals, totals.unsqueeze(-2), _rows(totals)),
        )
        for outside, slope, keep, result, rows, total, total_by_gate, total_rows in times:
            if following is None:
                total_rows.copy_(outside)
            else:
                torch.addmm(outside, following[0], W, out=total_rows)
                total.addcmul_(following[1], following[2])
            torch.mul(total_by_gate, slope, out=result)
            following = (rows, total, keep)
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
    def of(cls, steps: Steps) -> "LSTM":
        """Compute slopes of `c'` with respect to `c`, `i`, `f`, `g`, and of `h'` with respect to `o` and `c'`.

        States of cells are computed time by time, by one operation each.
        """
        assert steps.cell is not None  # noqa: S101 (an LSTM has one)
        gates = steps.p + steps.q
        sigmoids = gates.sigmoid()
        i, f, _, o = sigmoids.unbind(2)
        g = gates[:, :, 2].tanh()
        new = i * g
        times, batch, _, size = gates.shape
        cells = gates.new_empty(times + 1, batch, size)
        cells[0] = steps.cell
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
        h = o * tanh
        return cls((slopes, torch.addcmul(o, h, tanh, value=-1)), h, rows[-1])

    @staticmethod
    def send_back(tensors: tuple[Tensor, ...], g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Take one product and three multiplications per time, and one more product if states are projected."""
        slopes, at_cell = tensors
        results = g.new_empty(*g.shape[:3], *slopes.shape[2:])  # at the cell before, and at the four gates
        at_q = results[..., 1:, :].flatten(-2)  # a view: four of five parts that stand side by side
        at_state = g.new_empty(g.shape)
        at_new_cell = g.new_empty(results.shape[1], *at_cell.shape[1:])
        by_gate = at_new_cell.unsqueeze(-2)
        unprojected = torch.empty_like(at_new_cell)
        unprojected_rows = unprojected.flatten(0, 1)
        carried = g_cell if g_cell.numel() else torch.zeros_like(at_new_cell)
        following: Tensor | None = None
        times = _back_in_time(
            *(_rows(g), slopes[:, :, :4], slopes[:, :, 4], at_cell),
            *(results[..., :4, :], results[..., 4, :], results[..., 0, :], _rows(at_q)),
            *(at_state, _rows(at_state)),
        )
        # Slices are taken before the loop: on a GPU, it is the number of operations in it that counts.
        for outside, of_cell, of_o, slope, at_parts, at_o, at_old_cell, rows, here, here_rows in times:
            if following is None:
                here_rows.copy_(outside)
            else:
                torch.addmm(outside, following, W, out=here_rows)
            if W_r is not None:
                torch.mm(here_rows, W_r, out=unprojected_rows)
            at_h = here if W_r is None else unprojected
            torch.addcmul(carried, at_h, slope, out=at_new_cell)
            torch.mul(by_gate, of_cell, out=at_parts)
            torch.mul(at_h, of_o, out=at_o)
            following, carried = rows, at_old_cell
        return at_q, at_q, g.new_empty(0) if W_r is None else at_state, at_q[0] @ W, results[0, ..., 0, :]


def _back_in_time(*sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through sequences from the last time to the first one."""
    return zip(*(reversed(t.unbind(0)) for t in sequences), strict=True)


def _rows(t: Tensor) -> Tensor:
    """Return `[time, columns, batch, features]` as matrices `[time, columns * batch, features]`."""
    return t.flatten(1, 2)
