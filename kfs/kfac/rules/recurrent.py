"""Recurrent networks, as the linear operations that they consist of.

PyTorch runs `nn.RNN`, `nn.LSTM` and `nn.GRU` as one operation. Here, the same operation computes the states of each
layer and direction, without graph. Given the states before all times, the layer consists of linear maps for all times
at once: of inputs, of these states, and of states that are projected. So every weight is used once, at as many shared
positions as there are times. The states that a layer returns are computed from these products. If one of them were
misread, predictions would be others, which the audit notices. Gradients go back through time in `recurrence`.
Internally sequences are `[time, batch, features]`.

Cells (`nn.LSTMCell` and others) run for one time, and are linear maps of input and state.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint

from kfs.errors import ModelError
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.plan import Argument, Call, Planned, Rewrite
from kfs.kfac.rules.recurrence import Recurrence
from kfs.kfac.rules.slopes import GRU, LSTM, ReLU, Slopes, Tanh, slopes_of

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def _sequence(operation: Callable[..., Any], kind: type[Slopes]) -> Callable[..., Planned]:
    """Return the rule for a recurrent network over all times.

    It returns outputs and last states: hidden ones, and those of the cells of an LSTM.
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
            return None  # a packed sequence, with the number of sequences at every time
        if train and dropout:
            raise ModelError(
                "A recurrent network drops out, so its prediction depends on chance.", "Call model.eval() first."
            )
        network = _Network(operation, kind, states, has_biases, num_layers, bidirectional, batch_first)
        return Rewrite(network.run)

    return rule


def _cell(step: Step, states: int) -> Callable[..., Planned]:
    """Return the rule for one time of a recurrent network."""

    def body(
        capture: Capture, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        state = _with_batch(capture, hx if states == 2 else (hx,))
        with capture:
            state = step(F.linear(input, w_ih, b_ih), *_recur(state, w_hh, b_hh))
        return state if states == 2 else state[0]

    def rule(
        call: Call, input: Argument, hx: Any, w_ih: Argument, w_hh: Argument, b_ih: Any = None, b_hh: Any = None
    ) -> Planned:
        return Rewrite(body)

    return rule


def _with_batch(capture: Capture, state: Iterable[Tensor]) -> State:
    """Return states that count as data: they may consist of zeros only, but they have a batch axis."""
    return tuple(_first_state(capture, h) for h in state)


def _first_state(capture: Capture, h: Tensor) -> Tensor:
    """Return a first state that counts as data; a learned one is expanded over the batch."""
    if capture.tracker.find(h) is None:
        return capture.as_data(h)
    with capture:
        return capture.as_data(torch.zeros_like(h)) + h


def _recur(state: State, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, State]:
    """Return what the state contributes, and the state."""
    return F.linear(state[0], weight, bias), state


def _lstm_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return ((1 - z) * n + z * state[0],)


def _tanh_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    return ((from_x + from_h).tanh(),)


def _relu_step(from_x: Tensor, from_h: Tensor, state: State) -> State:
    return ((from_x + from_h).relu(),)


@dataclass(frozen=True)
class _Network:
    """A recurrent network over all times."""

    operation: Callable[..., Any]  # PyTorch's
    kind: type[Slopes]
    states: int  # an LSTM has two: hidden ones, and those of its cells
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool

    def run(self, capture: Capture, input: Tensor, hx: Any, params: list[Tensor], *_: Any, **__: Any) -> Any:
        """Run all layers and directions. Further arguments of the operation are fields already."""
        _refuse_checkpoint()
        initial = _with_batch(capture, hx if self.states == 2 else (hx,))
        directions = 2 if self.bidirectional else 1
        per = 4 if self.has_biases else 2
        per += self.states == 2 and initial[0].shape[-1] != initial[1].shape[-1]  # a projection
        with capture.places().with_axis(1):
            with capture:
                x = input.transpose(0, 1).contiguous() if self.batch_first else input
            last: list[State] = []
            for layer in range(self.num_layers):
                outputs = []
                for direction in range(directions):
                    place = layer * directions + direction
                    with capture:
                        state = tuple(h[place] for h in initial)
                    weights = params[place * per : (place + 1) * per]
                    out, state = self._layer(capture, x, state, weights, backwards=direction == 1)
                    outputs.append(out)
                    last.append(state)
                with capture:
                    x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            with capture:
                result = x.transpose(0, 1) if self.batch_first else x
                return (result, *(torch.stack([state[i] for state in last]) for i in range(self.states)))

    def _layer(
        self, capture: Capture, x: Tensor, state: State, weights: Sequence[Tensor], backwards: bool
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction; return its outputs in the order of its inputs, and its last state."""
        w_ih, w_hh = weights[:2]
        b_ih, b_hh = weights[2:4] if self.has_biases else (None, None)
        w_hr = weights[-1] if len(weights) % 2 else None
        with capture:
            x = x.flip(0) if backwards else x
        before = self._states_before(x, state, weights)
        with capture:
            p = F.linear(x, w_ih, b_ih)
            q = F.linear(capture.as_data(before), w_hh, b_hh)
        slopes = slopes_of(self.kind, p, q, before, *state[1:])
        projected = None
        if w_hr is not None:
            with capture:
                projected = F.linear(capture.as_data(slopes.states.to(before.dtype)), w_hr)
        first = state if self.states == 2 else (*state, None)
        weight, projection = w_hh.detach(), None if w_hr is None else w_hr.detach()
        found: tuple[Tensor, ...] = Recurrence.apply(p, q, projected, *first, slopes, before.dtype, weight, projection)  # type: ignore[no-untyped-call]
        out, *cell = (capture.marks.mark(t) for t in found)
        with capture:
            last = out[-1]
            out = out.flip(0) if backwards else out
        return out, (last, *cell)

    @torch.no_grad()
    def _states_before(self, x: Tensor, state: State, weights: Sequence[Tensor]) -> Tensor:
        """Return the states before all times, which PyTorch's own operation computes."""
        first = [h.unsqueeze(0).contiguous() for h in state]
        with warnings.catch_warnings():
            # PyTorch warns of what nobody can change here: weights of one of several layers share memory with others,
            # and some libraries do not know projections. A user's own call warns of what is wrong with it.
            warnings.simplefilter("ignore")
            hx = first if self.states == 2 else first[0]
            # One layer, no dropout, not in training, one direction, time before batch.
            states, *_ = self.operation(x, hx, list(weights), self.has_biases, 1, 0.0, False, False, False)
        return torch.cat([first[0].to(states.dtype), states[:-1]])


def _refuse_checkpoint() -> None:
    """Refuse to run inside of a checkpoint: nobody watches when it runs again, so it would not be the same operations.

    Tensors that were kept would then be mistaken for others, and gradients could be wrong.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__:
        raise ModelError(
            "A recurrent network runs inside of an activation checkpoint (torch.utils.checkpoint).",
            "Call it outside of the checkpoint, or leave its parameters out with params=.",
        )


RULES = {
    torch.lstm: _sequence(torch.lstm, LSTM),
    torch.gru: _sequence(torch.gru, GRU),
    torch.rnn_tanh: _sequence(torch.rnn_tanh, Tanh),
    torch.rnn_relu: _sequence(torch.rnn_relu, ReLU),
    torch.lstm_cell: _cell(_lstm_step, 2),
    torch.gru_cell: _cell(_gru_step, 1),
    torch.rnn_tanh_cell: _cell(_tanh_step, 1),
    torch.rnn_relu_cell: _cell(_relu_step, 1),
}
