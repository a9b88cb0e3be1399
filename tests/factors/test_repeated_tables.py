"""A learned table that is copied for every example before it meets data, in all usual formulations.

No shape shows whether a row belongs to an example. Oracles: the same function of `p + 0 * x`, which depends on data;
gradients of single examples; and batches of other sizes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.factors import EKFAC, KFAC
from kfs.operators import GGN
from kfs.problem.risk import EmpiricalRisk
from tests.factors.arrangements import Instance, Problem, normal
from tests.factors.models import Function
from tests.factors.test_ownership import SHARING, check_traces, check_traces_and_batches, same_factors
from tests.operators.contract import close

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, about take

Form = Callable[[Tensor, int], Tensor]


def order(p: Tensor, n: int) -> Tensor:
    """Return row indices `[n, rows]`, the same for every example: the last row first."""
    return torch.arange(len(p)).flip(0).expand(n, -1)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


# The table without changes: `[L, H]` to `[N, L, H]`.
COPIES: dict[str, Form] = {
    "repeat": lambda p, n: p.repeat(n, 1, 1),
    "repeat of a row": lambda p, n: p.unsqueeze(0).repeat(n, 1, 1),
    "repeat, flat": lambda p, n: p.flatten().repeat(n).view(n, *p.shape),
    "repeat of the transpose": lambda p, n: p.T.repeat(n, 1, 1).mT,
    "tile": lambda p, n: p.tile(n, 1, 1),
    "torch.tile": lambda p, n: torch.tile(p, (n, 1, 1)),
    "expand": lambda p, n: p.expand(n, -1, -1),
    "expand, clone": lambda p, n: p.expand(n, -1, -1).clone(),
    "expand, contiguous": lambda p, n: p.expand(n, -1, -1).contiguous(),
    "broadcast_to": lambda p, n: torch.broadcast_to(p, (n, *p.shape)),
    "stack": lambda p, n: torch.stack([p] * n),
    "stack along the second axis": lambda p, n: torch.stack([p] * n, 1).transpose(0, 1),
    "cat": lambda p, n: torch.cat([p.unsqueeze(0)] * n),
    "cat, flat": lambda p, n: torch.cat([p] * n).view(n, *p.shape),
    "repeat_interleave": lambda p, n: p.unsqueeze(0).repeat_interleave(n, 0),
    "repeat_interleave of rows": lambda p, n: p.repeat_interleave(n, 0).view(len(p), n, -1).transpose(0, 1),
    "zeros plus": lambda p, n: torch.zeros(n, *p.shape, dtype=p.dtype) + p,
    "times ones": lambda p, n: p * ones(n, 1, 1),
    "outer": lambda p, n: torch.outer(ones(n), p.flatten()).view(n, *p.shape),
    "einsum": lambda p, n: torch.einsum("n,lh->nlh", ones(n), p),
    "product with ones": lambda p, n: (ones(n, 1) @ p.reshape(1, -1)).view(n, *p.shape),
    "where": lambda p, n: torch.where(ones(n, 1, 1) > 0, p, 0.0),
    "take": lambda p, n: p.take(torch.arange(p.numel()).repeat(n)).view(n, *p.shape),
    "embedding of repeated indices": lambda p, n: F.embedding(torch.arange(len(p)).repeat(n, 1), p),
}
# Its rows in another order.
PICKS: dict[str, Form] = {
    "index": lambda p, n: p[order(p, n)],
    "index, flat": lambda p, n: p[order(p, n).flatten()].view(n, *p.shape),
    "gather": lambda p, n: p.expand(n, -1, -1).gather(1, order(p, n).unsqueeze(2).expand(-1, -1, p.shape[1])),
    "gather of copies": lambda p, n: p.repeat(n, 1, 1).gather(1, order(p, n).unsqueeze(2).expand(-1, -1, p.shape[1])),
    "index_select": lambda p, n: p.index_select(0, order(p, n).flatten()).view(n, *p.shape),
    "take_along_dim": lambda p, n: torch.take_along_dim(p.unsqueeze(0), order(p, n).unsqueeze(2), 1),
    "embedding": lambda p, n: F.embedding(order(p, n), p),
    "flip": lambda p, n: p.flip(0).repeat(n, 1, 1),
}
# The table after a function is applied.
FUNCTIONS: dict[str, Form] = {
    "function, repeat": lambda p, n: p.exp().repeat(n, 1, 1),
    "repeat, function": lambda p, n: p.repeat(n, 1, 1).exp(),
    "embedding, function": lambda p, n: F.embedding(torch.arange(len(p)).expand(n, -1), p).exp(),
    "function, expand, clone": lambda p, n: p.exp().expand(n, -1, -1).clone(),
    "ones to a power": lambda p, n: (torch.zeros(n, 1, 1, dtype=p.dtype) + p).exp(),
}
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(COPIES, lambda z: z),
    **dict.fromkeys(PICKS, lambda z: z.flip(1)),
    **dict.fromkeys(FUNCTIONS, torch.exp),
}
FORMS = COPIES | PICKS | FUNCTIONS


class Table(nn.Module):
    """A table that multiplies data `[N, L, 3]`, in one of these forms, or as a function of `p + 0 * x`."""

    def __init__(self, form: str, rows: int, explicit: bool = False) -> None:
        super().__init__()
        self.p = nn.Parameter(normal(rows, 3))
        self.o = nn.Linear(3, 3)
        self.form = form
        self.explicit = explicit

    def forward(self, x: Tensor) -> Tensor:
        table = REFERENCES[self.form](self.p + 0 * x) if self.explicit else FORMS[self.form](self.p, len(x))
        result: Tensor = self.o((table * x).tanh().sum(1))
        return result


@cache
def instance(form: str, num_data: int, rows: int, explicit: bool = False) -> Instance:
    return Problem(form, lambda: Table(form, rows, explicit), lambda _: normal(1, rows, 3)).instance(num_data)


@pytest.mark.parametrize("form", FORMS)
def test_one_datum(form: str) -> None:
    check_traces(instance(form, 1, 5), "type-2", "expand")


@pytest.mark.parametrize("form", FORMS)
def test_as_many_data_as_rows(form: str) -> None:
    one, explicit = (instance(form, 4, 4, explicit) for explicit in (False, True))
    assert torch.equal(one.predict(0), explicit.predict(0))
    check_traces(one, "empirical", "expand")
    for sharing in SHARING:
        same_factors(*(KFAC(each.risk(), "empirical", sharing, joint_bias=False) for each in (one, explicit)))


@pytest.mark.parametrize("form", FORMS)
def test_batches_as_long_as_the_table(form: str) -> None:
    """There are more examples than rows, but one batch has as many examples as rows."""
    one = instance(form, 4, 2)
    check_traces_and_batches(one, [3], [2, 1], [0])
    same_factors(*(KFAC(risk, joint_bias=False) for risk in (one.risk(), one.risk([3], [2, 1], [0]))))


WAYS = ("expand", "contiguous", "repeat", "zeros plus", "function")


class FirstState(nn.Module):
    """A recurrent network with a learned first state."""

    def __init__(self, kind: Any, how: str, **settings: Any) -> None:
        super().__init__()
        self.how = how
        self.rnn = kind(3, 2, **settings)
        directions = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
        self.h = nn.Parameter(normal(directions, 1, 2))
        self.c = nn.Parameter(normal(directions, 1, 2)) if kind is nn.LSTM else None
        self.o = nn.LazyLinear(3)

    def state(self, p: Tensor, n: int) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "expand": lambda: p.expand(-1, n, -1),
            "contiguous": lambda: p.expand(-1, n, -1).contiguous(),
            "repeat": lambda: p.repeat(1, n, 1),
            "zeros plus": lambda: torch.zeros(len(p), n, 2, dtype=p.dtype) + p,
            "function": lambda: p.tanh().repeat(1, n, 1),
        }
        return forms[self.how]()

    def forward(self, x: Tensor) -> Tensor:
        states = tuple(self.state(p, len(x)) for p in (self.h, self.c) if p is not None)
        first = self.rnn.batch_first
        out = self.rnn(x if first else x.transpose(0, 1), states if len(states) == 2 else states[0])[0]
        result: Tensor = self.o(out.tanh().mean(1 if first else 0))
        return result


@pytest.mark.parametrize(
    ("kind", "how", "num_data"),
    [
        *((nn.RNN, how, num_data) for how in WAYS for num_data in (1, 3)),
        *((kind, how, 3) for kind in (nn.LSTM, nn.GRU) for how in WAYS[:3]),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_learned_first_states(kind: Any, how: str, num_data: int) -> None:
    """There are as many steps as examples, so that lengths do not tell axes apart."""
    settings: dict[Any, dict[str, Any]] = {
        nn.RNN: {"batch_first": True},
        nn.LSTM: {},
        nn.GRU: {"bidirectional": True},
    }
    problem = Problem(how, lambda: FirstState(kind, how, **settings[kind]), lambda _: normal(1, 3, 3))
    one = problem.instance(num_data)
    if num_data == 1:
        check_traces(one, "type-2", "expand")
    else:
        check_traces_and_batches(one, [2], [0, 1])


class Cell(nn.Module):
    """A recurrent cell with a learned first state."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.cell = nn.GRUCell(3, 2)
        self.h = nn.Parameter(normal(2))
        self.o = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        forms: dict[str, Callable[[], Tensor]] = {
            "expand": lambda: self.h.expand(n, -1),
            "repeat": lambda: self.h.repeat(n, 1),
            "ones": lambda: ones(n, 2) * self.h,
        }
        state = forms[self.how]()
        for step in x.unbind(1):
            state = self.cell(step, state)
        result: Tensor = self.o(state)
        return result


class Tokens(nn.Module):
    """A learned token before a sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.t = nn.Parameter(normal(1, 1, 4))
        self.e = nn.MultiheadAttention(4, 2, batch_first=True)
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        forms: dict[str, Callable[[int], Tensor]] = {
            "expand": lambda n: self.t.expand(n, -1, -1),
            "repeat": lambda n: self.t.repeat(n, 1, 1),
            "plus data": lambda n: self.t.expand(n, -1, -1) + x[:, :1],
            "function": lambda n: self.t.tanh().expand(n, -1, -1),
        }
        tokens = torch.cat([forms[self.how](len(x)), x], 1)
        result: Tensor = self.o(self.e(tokens[:, :1], tokens, tokens)[0].squeeze(1))
        return result


class Queries(nn.Module):
    """Learned queries, as many as examples, which attend to a sequence."""

    def __init__(self, how: str, batch_first: bool) -> None:
        super().__init__()
        self.how, self.batch_first = how, batch_first
        self.q = nn.Parameter(normal(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        forms: dict[str, Callable[[int], Tensor]] = {
            "expand": lambda n: self.q.expand(n, -1, -1),
            "repeat": lambda n: self.q.repeat(n, 1, 1),
            "function": lambda n: self.q.tanh().expand(n, -1, -1),
            "plus data": lambda n: self.q.expand(n, -1, -1) + x[:, :1],
        }
        q = forms[self.how](len(x))
        if not self.batch_first:
            q, x = q.transpose(0, 1), x.transpose(0, 1)
        result: Tensor = self.o(self.attention(q, x, x)[0].tanh().mean(1 if self.batch_first else 0))
        return result


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"cell, {how}": (lambda how=how: Cell(how), (3, 3)) for how in ("expand", "repeat", "ones")},  # type: ignore[misc]
    **{
        f"token, {how}": (lambda how=how: Tokens(how), (4, 4))  # type: ignore[misc]
        for how in ("expand", "repeat", "plus data", "function")
    },
    **{
        f"queries, {how}, {first}": (lambda how=how, first=first: Queries(how, first), (4, 4))  # type: ignore[misc]
        for how in ("repeat", "function", "plus data")
        for first in (True, False)
    },
    "one row": (lambda: Function(lambda m, x: (x + m.p[1].repeat(len(x), 1)).tanh(), p=normal(4, 3)), (3,)),
    "one row by constant indices": (
        lambda: Function(lambda m, x: (x + m.p[torch.full((len(x),), 2)]).tanh(), p=normal(4, 3)),
        (3,),
    ),
    "one row by unit vectors": (
        lambda: Function(
            lambda m, x: (x + F.one_hot(torch.ones(len(x)).long(), 4).double() @ m.p).tanh(), p=normal(4, 3)
        ),
        (3,),
    ),
    "a row for each example, by its value": (
        lambda: Function(lambda m, x: (x + F.embedding((x[:, 0] > 0).long(), m.p)).tanh(), p=normal(4, 3)),
        (3,),
    ),
    "one of two rows, by value": (
        lambda: Function(lambda m, x: torch.where(x[:, :1] > 0, m.p[0], m.p[3]).tanh() * x, p=normal(4, 3)),
        (3,),
    ),
    "linear map of constants": (
        lambda: Function(
            lambda m, x: F.linear(torch.eye(4, dtype=x.dtype).expand(len(x), -1, -1), m.p.T).tanh().sum(1) * x,
            p=normal(4, 3),
        ),
        (3,),
    ),
    "mean of a table": (
        lambda: Function(lambda m, x: (x + m.p.mean(0).repeat(len(x), 1)).tanh(), p=normal(4, 3)),
        (3,),
    ),
    "keys of attention": (
        lambda: Function(
            lambda m, x: F.scaled_dot_product_attention(x.unsqueeze(1), *[m.p.repeat(len(x), 1, 1)] * 2).squeeze(1),
            p=normal(4, 3),
        ),
        (3,),
    ),
    "distances": (
        lambda: Function(
            lambda m, x: (x.unsqueeze(1) - m.p.repeat(len(x), 1, 1)).square().sum(2).tanh(), p=normal(4, 3)
        ),
        (3,),
    ),
    "sum of two tables": (
        lambda: Function(lambda m, x: (x + (m.p.tanh() + m.q).exp()).tanh().sum(1), p=normal(4, 3), q=normal(3)),
        (4, 3),
    ),
    "a table that is joined to a function of itself": (
        lambda: Function(lambda m, x: (x + torch.cat([m.p[:2].exp(), m.p[1:]])).tanh().sum(1), p=normal(3, 3)),
        (4, 3),
    ),
    "a projection of a normalized table": (
        lambda: Function(
            lambda m, x: (x + F.linear(F.layer_norm(m.p, (2,), m.s, m.b), m.W, m.c)).tanh().sum(1),
            p=normal(4, 2),
            s=normal(2),
            b=normal(2),
            W=normal(3, 2),
            c=normal(3),
        ),
        (4, 3),
    ),
    "keys that are computed": (
        lambda: Function(_attends_to_positions, p=normal(5, 4), W=normal(4, 4), b=normal(4)),
        (3, 4),
    ),
    "changed in place": (
        lambda: Function(_changes_in_place, p=normal(4, 2), W=normal(3, 2)),
        (4, 3),
    ),
}


def _attends_to_positions(m: Any, x: Tensor) -> Tensor:
    """Multiply two heads `[N, 2, 3, 2]` with keys `[1, 2, 2, 5]`, which do not depend on data, as DeBERTa does."""
    keys = F.linear(m.p.unsqueeze(0), m.W, m.b).view(1, 5, 2, 2).permute(0, 2, 1, 3)
    keys /= 2.0  # a view is changed in place
    queries = x.view(len(x), 3, 2, 2).transpose(1, 2)
    return (queries @ keys.transpose(-1, -2)).tanh().sum(1).flatten(1)


def _changes_in_place(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.p, m.W)
    h.sin_()  # the result is not used
    h.T.mul_(2.0)  # nor here
    return (x * (F.dropout(F.relu(h, inplace=True), 0.5, False, True) + h)).tanh().sum(1)


# Small networks of positions `[..., 4, 2]`, and their parameters.
NETWORKS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, tuple[int, ...]]]] = {
    "two layers": (lambda m, c: F.linear(F.linear(c, m.W, m.b).relu(), m.V), {"W": (5, 2), "b": (5,), "V": (3, 5)}),
    "in place": (
        lambda m, c: F.linear(F.relu(F.linear(c, m.W, m.b), inplace=True), m.V, m.d),
        {"W": (5, 2), "b": (5,), "V": (3, 5), "d": (3,)},
    ),
    "products": (lambda m, c: ((c @ m.W).tanh() @ m.V).tanh() @ m.Q.T, {"W": (2, 4), "V": (4, 4), "Q": (3, 4)}),
    "one weight for two layers": (
        lambda m, c: F.linear(F.linear(c, m.V, m.b).tanh(), m.V.T, m.d)[..., [0, 1, 0]],
        {"V": (3, 2), "b": (3,), "d": (2,)},
    ),
    "normalized": (
        lambda m, c: F.rms_norm(F.layer_norm(F.linear(c, m.W), (3,), m.s, m.b).tanh(), (3,), m.t),
        {"W": (3, 2), "s": (3,), "b": (3,), "t": (3,)},
    ),
}


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_positions(name: str, joint: bool) -> None:
    """Their factors are those of a network whose positions are data, the same ones for all examples."""
    torch.manual_seed(0)
    network, shapes = NETWORKS[name]
    positions = normal(4, 2)
    params = {parameter: normal(*shape) for parameter, shape in shapes.items()}
    one = Function(lambda m, x: (x * (1 + network(m, positions))).tanh().sum(1), **params)
    other = Function(lambda m, x: (x * (1 + network(m, positions + 0 * x[:, :, :1]))).tanh().sum(1), **params)
    data = [(normal(n, 4, 3), normal(n, 3)) for n in (3, 1, 4)]
    for sharing in SHARING:
        for make in (KFAC, EKFAC):
            found, expected = (
                make(EmpiricalRisk(model, nn.MSELoss(), data), sharing=sharing, joint_bias=joint)
                for model in (one, other)
            )
            close(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("num_data", [1, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str, num_data: int) -> None:
    make, shape = OTHERS[name]
    one = Problem(name, make, lambda _: normal(1, *shape)).instance(num_data)
    if num_data == 1:
        check_traces(one, "type-2", "expand")
    else:
        check_traces_and_batches(one, [2], [1, 0], [3])


@pytest.mark.parametrize("split", [[[2, 0], [1, 3]], [[2], [1, 0, 3]]], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_queries_that_are_expanded(batch_first: bool, split: list[list[int]]) -> None:
    one = Problem("queries", lambda: Queries("expand", batch_first), lambda _: normal(1, 4, 4)).instance(4)
    check_traces_and_batches(one, *split)


@pytest.mark.parametrize("like", [torch.ones_like, torch.zeros_like, lambda p: p.new_full(p.shape, 2.0)])
def test_the_shape_of_a_parameter_is_not_a_use(like: Any) -> None:
    """A mask with the shape of a weight does not use its values."""
    W, b, X, y = normal(3, 3), normal(3), normal(4, 3), torch.arange(4) % 3
    found = []
    for mask in (like, lambda p: like(p.detach())):
        model = Function(
            lambda m, x, mask=mask: F.linear(x, m.W) + m.b + (x.unsqueeze(1) * mask(m.W)).sum(2) + mask(m.b), W=W, b=b
        )
        found.append(KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))))
    K, L = found
    for name, block in L.blocks.items():
        assert K.blocks[name].operations == block.operations
        close(K.blocks[name].A, block.A)
        close(K.blocks[name].B, block.B)


def test_casts_of_expanded_parameters() -> None:
    """The cast has a row for every example, and is treated like the parameter."""
    p, X, y = normal(1, 3), normal(5, 3), torch.arange(5) % 3
    model = Function(lambda m, x: (m.p.expand(len(x), -1).type(torch.float64).clone() + x).tanh(), p=p).double()
    single = Function(lambda m, x: (m.p.float().expand(len(x), -1).double() + x).tanh(), p=p).double()
    for one in (model, single):
        risk = EmpiricalRisk(one, nn.CrossEntropyLoss(), (X, y))
        torch.testing.assert_close(EKFAC(risk).trace().double(), GGN(risk).to_dense().trace(), rtol=1e-6, atol=1e-9)
