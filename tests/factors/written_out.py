"""Recurrent networks that are written out step by step in time, and small models with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Call, Planned, Rewrite
from kfs.problem.risk import EmpiricalRisk

N, TIMES, INPUTS, STATES = 3, 4, 3, 2
OPERATIONS = {"LSTM": torch.lstm, "GRU": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}
MODULES: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "one layer": {"batch_first": True},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False, "batch_first": True},
}
CASES = [(kind, arrangement) for kind in MODULES for arrangement in ARRANGEMENTS]
PROJECTION: dict[str, Any] = {"proj_size": 1, "num_layers": 2, "bidirectional": True}


def step(kind: str, p: Tensor, q: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one step in time, as documented by PyTorch."""
    if kind == "LSTM":
        (i_p, f_p, g_p, o_p), (i_q, f_q, g_q, o_q) = p.chunk(4, -1), q.chunk(4, -1)
        c = torch.sigmoid(f_p + f_q) * c + torch.sigmoid(i_p + i_q) * torch.tanh(g_p + g_q)
        return torch.sigmoid(o_p + o_q) * torch.tanh(c), c
    if kind == "GRU":
        (r_p, z_p, n_p), (r_q, z_q, n_q) = p.chunk(3, -1), q.chunk(3, -1)
        z = torch.sigmoid(z_p + z_q)
        return (1 - z) * torch.tanh(n_p + torch.sigmoid(r_p + r_q) * n_q) + z * h, c
    return (torch.tanh(p + q) if kind == "tanh" else torch.relu(p + q)), c


def written_out(kind: str) -> Any:
    """Return a rule that runs a network step by step: the recurrent weight is used once per step."""

    def rule(call: Call, *arguments: Any) -> Planned:  # noqa: ARG001 (all rules take it)
        _, _, _, biases, layers, _, _, bidirectional, batch_first = arguments

        def body(seen: Discovery, x: Tensor, hx: Any, params: list[Tensor], *_: Any) -> Any:
            first = hx if kind == "LSTM" else (hx, hx)
            directions = range(2 if bidirectional else 1)
            per = len(params) // (layers * len(directions))
            # A learned state gets a batch axis, as in the rule for cells.
            data = [seen.as_data(torch.zeros_like(h)) for h in first]
            with seen.rows.with_axis(0), seen.intercepting():
                initial = [a + b for a, b in zip(data, first, strict=True)]
                x = x if batch_first else x.transpose(0, 1)
                last = []
                for layer in range(layers):
                    outputs = []
                    for direction in directions:
                        place = layer * len(directions) + direction
                        mine = params[place * per : (place + 1) * per]
                        w_ih, w_hh = mine[:2]
                        b_ih, b_hh = mine[2:4] if biases else (None, None)
                        h, c = (state[place] for state in initial)
                        found = {}
                        for t in range(x.shape[1])[:: -1 if direction else 1]:
                            p, q = F.linear(x[:, t], w_ih, b_ih), F.linear(h, w_hh, b_hh)
                            h, c = step(kind, p, q, h, c)
                            h = F.linear(h, mine[-1]) if len(mine) % 2 else h
                            found[t] = h
                        outputs.append(torch.stack([found[t] for t in range(x.shape[1])], 1))
                        last.append((h, c))
                    x = torch.cat(outputs, -1)
                out = x if batch_first else x.transpose(0, 1)
                states = [torch.stack(one) for one in zip(*last, strict=True)]
                return (out, *states) if kind == "LSTM" else (out, states[0])

        return Rewrite(body)

    return rule


class Network(nn.Module):
    """A recurrent network with given first states. Predictions depend on all outputs and on all last states."""

    def __init__(self, kind: str, learned: bool = False, **settings: Any) -> None:
        super().__init__()
        self.rnn = MODULES[kind](INPUTS, STATES, **settings)
        places = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        sizes = [self.rnn.proj_size or STATES, *([STATES] if kind == "LSTM" else [])]
        self.first = nn.ParameterList(torch.randn(places, 1, size) for size in sizes)
        self.first.requires_grad_(learned)
        self.head, self.last = nn.LazyLinear(2), nn.LazyLinear(2)
        with torch.no_grad():
            self(torch.randn(1, TIMES, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        hx = tuple(h.expand(-1, len(x), -1).contiguous() for h in self.first)
        first = self.rnn.batch_first
        out, last = self.rnn(x if first else x.transpose(0, 1), hx if len(hx) == 2 else hx[0])
        out = out if first else out.transpose(0, 1)
        states = torch.cat([h.transpose(0, 1).flatten(1) for h in (last if isinstance(last, tuple) else [last])], 1)
        result: Tensor = self.head(out).tanh().sum(1) + self.last(states)
        return result


def make(kind: str, **settings: Any) -> Network:
    torch.manual_seed(0)
    return Network(kind, **settings).double()


def risk_of(model: nn.Module, n: int = N) -> EmpiricalRisk:
    torch.manual_seed(1)
    data = torch.randn(n, TIMES, INPUTS, dtype=torch.float64), torch.randint(2, (n,))
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
