"""Recurrent networks, as the linear operations that they consist of.

PyTorch runs `nn.RNN`, `nn.LSTM` and `nn.GRU` as one operation. Here, every layer and direction multiplies its inputs
for all times at once, and its state time by time: the recurrent weight is used as often as there are times.
Internally sequences are `[batch, time, features]`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.errors import ModelError
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.plan import Argument, Call, Planned, Rewrite

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def _sequence(step: Step, states: int) -> Callable[..., Planned]:
    """Return the rule for a recurrent network over all times.

    It returns outputs and last states: hidden ones, and those of the cells of an LSTM.
    """

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
        return Rewrite(_Network(step, states, has_biases, num_layers, bidirectional, batch_first).run)

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

    step: Step
    states: int  # an LSTM has two: hidden ones, and those of its cells
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool

    def run(self, capture: Capture, input: Tensor, hx: Any, params: list[Tensor], *_: Any, **__: Any) -> Any:
        """Run all layers and directions. Further arguments of the operation are fields already."""
        initial = _with_batch(capture, hx if self.states == 2 else (hx,))
        directions = 2 if self.bidirectional else 1
        per = 4 if self.has_biases else 2
        projected = self.states == 2 and initial[0].shape[-1] != initial[1].shape[-1]
        per += projected
        with capture.places().with_axis(0), capture:
            x = input if self.batch_first else input.transpose(0, 1)
            last: list[State] = []
            for layer in range(self.num_layers):
                outputs = []
                for direction in range(directions):
                    place = layer * directions + direction
                    mine = list(params[place * per : (place + 1) * per])
                    w_hr = mine.pop() if projected else None
                    state = tuple(h[place] for h in initial)
                    out, state = _layer(x, state, mine, w_hr, self.step, backwards=direction == 1)
                    outputs.append(out)
                    last.append(state)
                x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            result = x if self.batch_first else x.transpose(0, 1)
            return (result, *(torch.stack([state[i] for state in last]) for i in range(self.states)))


def _layer(
    x: Tensor, state: State, weights: list[Tensor], w_hr: Tensor | None, step: Step, backwards: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:] if len(weights) == 4 else (None, None)
    from_x = F.linear(x, w_ih, b_ih)
    outputs: list[Tensor] = []
    times = range(x.shape[1])
    for t in reversed(times) if backwards else times:
        state = step(from_x[:, t], *_recur(state, w_hh, b_hh))
        if w_hr is not None:
            state = (F.linear(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


RULES = {
    torch.lstm: _sequence(_lstm_step, 2),
    torch.gru: _sequence(_gru_step, 1),
    torch.rnn_tanh: _sequence(_tanh_step, 1),
    torch.rnn_relu: _sequence(_relu_step, 1),
    torch.lstm_cell: _cell(_lstm_step, 2),
    torch.gru_cell: _cell(_gru_step, 1),
    torch.rnn_tanh_cell: _cell(_tanh_step, 1),
    torch.rnn_relu_cell: _cell(_relu_step, 1),
}
