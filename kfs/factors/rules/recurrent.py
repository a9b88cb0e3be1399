r"""Recurrent networks, rewritten as linear operations, with one loop backwards in time for their gradients.

Rules of linear operations live in `kfs.factors.rules.linear`.

PyTorch runs `nn.RNN`, `nn.LSTM` and `nn.GRU` as one operation. For times $t = 1, \ldots, T$, one layer in one direction
computes

$$p_t = W_{ih} x_t + b_{ih}, \quad q_t = W_{hh} h_{t-1} + b_{hh}, \quad h_t = \mathrm{step}(p_t, q_t, h_{t-1}).$$

The rule runs PyTorch's operation for each layer and direction, without a graph, and so gets all states $h_t$. Given
$h_0, \ldots, h_{T-1}$, the layer consists of linear maps for all times at once: of inputs, of these states, and of
projected states. So every weight is used once, at as many shared positions as there are times. The states that a layer
returns are computed from these products. If one of them were misread, predictions would differ, and the audit would
notice.

The partial derivatives of all steps are computed at once, too (`Slopes`). Then only the chain rule remains. The
gradient at $h_{t-1}$ consists of the gradient from outside of the recurrence and the gradient from $h_t$, which is
mostly $W_{hh}^\top$ times the gradient at $q_t$. `Recurrence` runs this loop back in time. It returns the total
gradients at all $p_t$ and $q_t$, which autograd would give for an explicit loop over times.

Sequences are `[time, batch, features]` here, in the order in which the layer processes them. Gradients may have an axis
for columns before that of the batch.

Cells (`nn.LSTMCell` and others) run for one time, and are linear maps of input and state.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.errors import ModelError
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Planned, Rewrite
from kfs.problem.torch_fixes import refuse_checkpoint
from kfs.runtime.precision import at_least_float32, full_precision

# Gradients with respect to all p, all q, all projected states, the first state, and the first cell state. Gradients
# that a network does not have are empty.
Gradients = tuple[Tensor, ...]
_COLUMNS = (1, 1, 1, 0, 0)  # their axes for columns


class Slopes(ABC):
    """The states of a recurrent network at all times, and the partial derivatives of its steps, in float32 or better.

    Args:
        p: Contribution of inputs, `[time, batch, gates * features]`.
        q: Contribution of states, likewise.
        before: States before each time, `[time, batch, features]`.
        cell: The first cell state of an LSTM, `[batch, features]`.

    Attributes:
        states: The results of the steps, `[time, batch, features]`; of an LSTM, before projection.
        tensors: The derivatives, `[time, batch, ...]`. Gradients are multiplied with them.
        last_cell: The last cell state of an LSTM, `[batch, features]`.
    """

    gates: ClassVar[int]  # number of p and q for each feature of a state
    states: Tensor
    tensors: tuple[Tensor, ...]
    last_cell: Tensor | None = None

    def __init__(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None = None) -> None:
        dtype = at_least_float32(before.dtype)
        with full_precision(before.device.type):
            p, q = (t.to(dtype).unflatten(-1, (self.gates, -1)) for t in (p, q))
            self._compute(p, q, before.to(dtype), cell)

    @abstractmethod
    def _compute(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None) -> None:
        """Compute all attributes from contributions by gate, `[time, batch, gates, features]`."""

    @staticmethod
    @abstractmethod
    def send_back(tensors: tuple[Tensor, ...], g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Send gradients back through all times.

        Args:
            tensors: The derivatives of an instance.
            g: Gradients with respect to states, from outside of the recurrence, `[time, columns, batch, features]`.
            g_cell: Gradients with respect to the last cell state, `[columns, batch, features]`. Empty if there is none.
            W: The recurrent weight.
            W_r: The weight that projects states.
        """


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
        """Send gradients back through all times, with one product and one multiplication per time."""
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

    def _compute(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None) -> None:
        self.states = (p + q).squeeze(2).tanh_()
        self.tensors = (1 - self.states.square(),)


class ReLU(OneGate):
    """`h = relu(p + q)`."""

    def _compute(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None) -> None:
        self.states = (p + q).squeeze(2).relu_()
        self.tensors = ((self.states > 0).to(p.dtype),)


class GRU(Slopes):
    """`h' = (1 - z) n + z h`, for `r, z = sigmoid(p + q)` and `n = tanh(p + r q)` with their parts of `p` and `q`."""

    gates = 3

    def _compute(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None) -> None:
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
        self.states, self.tensors = torch.lerp(n, before, z), (at_q, at_n, z)

    @staticmethod
    def send_back(
        tensors: tuple[Tensor, ...],
        g: Tensor,
        g_cell: Tensor,  # noqa: ARG004 (there are no cells)
        W: Tensor,
        W_r: Tensor | None,  # noqa: ARG004 (nor projections)
    ) -> Gradients:
        """Send gradients back through all times, with one product and two multiplications per time."""
        slopes, at_n, z = tensors
        by_gate = g.new_empty(*g.shape[:3], *slopes.shape[2:])
        at_q = by_gate.flatten(-2)
        totals = g.new_empty(g.shape)
        following: tuple[Tensor, Tensor, Tensor] | None = None  # values of the following time: see the end of the loop
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

    With a projection, `h'` is multiplied with its weight.
    """

    gates = 4

    def _compute(self, p: Tensor, q: Tensor, before: Tensor, cell: Tensor | None) -> None:
        """Compute slopes of `c'` with respect to `c`, `i`, `f`, `g`, and of `h'` with respect to `o` and `c'`.

        Cell states are computed one time after the other, with one operation each.
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
        self.states = o * tanh
        self.tensors = slopes, torch.addcmul(o, self.states, tanh, value=-1)
        self.last_cell = rows[-1]

    @staticmethod
    def send_back(tensors: tuple[Tensor, ...], g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Gradients:
        """Send gradients back, with one product (two with projection) and three multiplications per time."""
        slopes, at_cell = tensors
        results = g.new_empty(*g.shape[:3], *slopes.shape[2:])  # for the cell state before, and the four gates
        at_q = results[..., 1:, :].flatten(-2)  # a view of the last four of five parts
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
        # Slices are taken before the loop: on a GPU, the number of operations in the loop dominates.
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
    """Iterate over sequences from the last time to the first one."""
    return zip(*(reversed(t.unbind(0)) for t in sequences), strict=True)


def _rows(t: Tensor) -> Tensor:
    """Return `[time, columns, batch, features]` as matrices `[time, columns * batch, features]`."""
    return t.flatten(1, 2)


class Recurrence(torch.autograd.Function):
    """All states of a recurrence, as a function of the contributions of inputs and states, and of first states.

    Their values are computed before, by one step from the state before each time. The backward pass sends gradients
    through the recurrence, as if states had been computed one by one.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        p: Tensor,  # noqa: ARG004 (only needed for their gradients)
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
        # Slopes were computed without a graph, so a second differentiation must raise: see `SendBack.backward`.
        again = torch.empty(0, requires_grad=torch.is_grad_enabled())
        found: Gradients = SendBack.apply(g, g_cell, again, ctx.kind, W, W_r, *slopes)  # type: ignore[no-untyped-call]
        at_p, at_q, at_projected, at_h, at_cell = found
        has_projected, has_cell = ctx.has
        first = (at_p, at_q, at_projected if has_projected else None, at_h, at_cell if has_cell else None)
        return *first, None, None, None, None


class SendBack(torch.autograd.Function):
    """Gradients through a recurrence, for one column or, with `vmap`, for several together."""

    @staticmethod
    def forward(g: Tensor, g_cell: Tensor, again: Tensor, kind: type[Slopes], *saved: Any) -> Gradients:  # noqa: ARG004
        """Send one column back."""
        g_cell = g_cell.unsqueeze(0) if g_cell.numel() else g_cell
        found = _send_back(g.unsqueeze(1), g_cell, kind, saved)
        return _on_each(found, lambda t, axis: t.squeeze(axis))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        """Raise: slopes have no graph, so they would be treated as constants."""
        raise ModelError(
            "The gradient of a recurrent network is differentiated again, in a pass that KFAC captures.",
            "Compute second derivatives (a gradient penalty, a Hessian) in a pass that KFAC does not seen, or write "
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
        # Empty tensors have no axis for columns.
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
    """Apply a function to every non-empty gradient, passing the index of its column axis."""
    return tuple(change(t, axis) if t.ndim > 1 else t for t, axis in zip(found, _COLUMNS, strict=True))


State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def _sequence(operation: Callable[..., Any], kind: type[Slopes]) -> Callable[..., Planned]:
    """Return the rule for a recurrent network over all times.

    The rewritten operation returns outputs, last hidden states and, for an LSTM, last cell states.
    """
    states = 2 if kind is LSTM else 1

    def rule(
        call: Call,
        input: Argument,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Planned:
        if isinstance(hx, Argument) and not hx.dtype.is_floating_point:
            return None  # a packed sequence, with the batch size at every time
        if train and dropout:
            raise ModelError(
                "A recurrent network uses dropout, so its predictions are random.", "Call model.eval() first."
            )
        network = _Network(operation, kind, states, has_biases, num_layers, bidirectional, batch_first)
        return Rewrite(network.run)

    return rule


def _cell(step: Step, states: int) -> Callable[..., Planned]:
    """Return the rule for one time of a recurrent network, such as `torch.lstm_cell`."""

    def body(
        seen: Discovery, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        state = _first_states(seen, hx)
        with seen.intercepting():
            state = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return state if states == 2 else state[0]

    def rule(
        call: Call, input: Argument, hx: Any, w_ih: Argument, w_hh: Argument, b_ih: Any = None, b_hh: Any = None
    ) -> Planned:
        return Rewrite(body)

    return rule


def _first_states(seen: Discovery, hx: Tensor | Sequence[Tensor]) -> State:
    """Return first states that are marked as data: they may be zeros, but they have a batch axis."""
    found = []
    for h in (hx,) if isinstance(hx, Tensor) else hx:
        if seen.tracker.find(h) is None:
            found.append(seen.as_data(h))
        else:
            with seen.intercepting():  # a learned state is expanded over the batch
                found.append(seen.as_data(torch.zeros_like(h)) + h)
    return tuple(found)


def _lstm_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return ((1 - z) * n + z * state[0],)


@dataclass(frozen=True)
class _Network:
    """A recurrent network over all times."""

    operation: Callable[..., Any]  # PyTorch's operation
    kind: type[Slopes]
    states: int  # number of states: an LSTM has hidden states and cell states
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool

    def run(self, seen: Discovery, input: Tensor, hx: Any, params: list[Tensor], *_: Any, **__: Any) -> Any:
        """Run all layers and directions. The operation's other arguments are fields already."""
        refuse_checkpoint("A recurrent network")
        initial = _first_states(seen, hx)
        directions = 2 if self.bidirectional else 1
        per = 4 if self.has_biases else 2
        per += self.states == 2 and initial[0].shape[-1] != initial[1].shape[-1]  # a projection
        with seen.rows.with_axis(1):
            with seen.intercepting():
                x = input.transpose(0, 1).contiguous() if self.batch_first else input
            last: list[State] = []
            for layer in range(self.num_layers):
                outputs = []
                for direction in range(directions):
                    place = layer * directions + direction
                    with seen.intercepting():
                        state = tuple(h[place] for h in initial)
                    weights = params[place * per : (place + 1) * per]
                    out, state = self._layer(seen, x, state, weights, backwards=direction == 1)
                    outputs.append(out)
                    last.append(state)
                with seen.intercepting():
                    x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            with seen.intercepting():
                result = x.transpose(0, 1) if self.batch_first else x
                return (result, *(torch.stack([state[i] for state in last]) for i in range(self.states)))

    def _layer(
        self, seen: Discovery, x: Tensor, state: State, weights: Sequence[Tensor], backwards: bool
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction; return its outputs in the order of its inputs, and its last state."""
        w_ih, w_hh = weights[:2]
        b_ih, b_hh = weights[2:4] if self.has_biases else (None, None)
        w_hr = weights[-1] if len(weights) % 2 else None
        with seen.intercepting():
            x = x.flip(0) if backwards else x
        # The states are known from PyTorch's operation, so all times can be computed by one linear operation each.
        before = self._states_before(x, state, weights)
        with seen.intercepting():
            p = F.linear(x, w_ih, b_ih)
            q = F.linear(seen.as_data(before), w_hh, b_hh)
        slopes = self.kind(p, q, before, *state[1:])
        projected = None
        if w_hr is not None:
            with seen.intercepting():
                projected = F.linear(seen.as_data(slopes.states.to(before.dtype)), w_hr)
        first = state if self.states == 2 else (*state, None)
        weight, projection = w_hh.detach(), None if w_hr is None else w_hr.detach()
        found: tuple[Tensor, ...] = Recurrence.apply(p, q, projected, *first, slopes, before.dtype, weight, projection)  # type: ignore[no-untyped-call]
        out, *cell = (seen.marks.mark(t) for t in found)
        with seen.intercepting():
            last = out[-1]
            out = out.flip(0) if backwards else out
        return out, (last, *cell)

    @torch.no_grad()
    def _states_before(self, x: Tensor, state: State, weights: Sequence[Tensor]) -> Tensor:
        """Return the states before all times, computed by PyTorch's own operation."""
        first = [h.unsqueeze(0).contiguous() for h in state]
        with warnings.catch_warnings():
            # Ignore warnings that do not apply here: weights of one of several layers share memory with others, and
            # some libraries do not support projections. A user's own call shows the warnings that matter.
            warnings.simplefilter("ignore")
            hx = first if self.states == 2 else first[0]
            # One layer, no dropout, not in training, one direction, time before batch.
            states, *_ = self.operation(x, hx, list(weights), self.has_biases, 1, 0.0, False, False, False)
        return torch.cat([first[0].to(states.dtype), states[:-1]])


RULES = {
    torch.lstm: _sequence(torch.lstm, LSTM),
    torch.gru: _sequence(torch.gru, GRU),
    torch.rnn_tanh: _sequence(torch.rnn_tanh, Tanh),
    torch.rnn_relu: _sequence(torch.rnn_relu, ReLU),
    torch.lstm_cell: _cell(_lstm_step, 2),
    torch.gru_cell: _cell(_gru_step, 1),
    torch.rnn_tanh_cell: _cell(lambda from_x, from_h, _: ((from_x + from_h).tanh(),), 1),
    torch.rnn_relu_cell: _cell(lambda from_x, from_h, _: ((from_x + from_h).relu(),), 1),
}
