"""Tensors that do not depend on data, until they meet the batch: tables, states, functions of parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.factors import EKFAC, KFAC, inspect
from kfs.operators import GGN
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import Apply, Function, between
from tests.factors.test_edges import factors
from tests.factors.test_traps import normal, same
from tests.operators.contract import close

DERIVED: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "one plus": (lambda m, x: x * (1.0 + m.v), {"v": normal(4)}),
    "exponential": (lambda m, x: x * m.v.exp(), {"v": normal(4)}),
    "twice": (lambda m, x: x * (m.v.exp() + 1).tanh(), {"v": normal(4)}),
    "used twice": (lambda m, x: x.tanh() * (z := m.v.exp()) + z, {"v": normal(4)}),
    "constant sum": (lambda m, x: x + (m.v + torch.arange(4).to(x)), {"v": normal(4)}),
    "repeated rows": (lambda m, x: x + m.v.repeat(2, 1).mean(0), {"v": normal(1, 4)}),
    "scaled table": (lambda m, x: x + (m.v * torch.ones(3, 4).to(x))[1], {"v": normal(1)}),
    "matrix times vector": (lambda m, x: x + torch.eye(4).to(x) @ m.v, {"v": normal(4)}),
    "norm of a constant": (lambda m, x: x + F.layer_norm(torch.arange(4).to(x), (4,), m.v), {"v": normal(4)}),
    "complex": (lambda m, x: x * torch.fft.fft(m.v).abs(), {"v": normal(4)}),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", DERIVED)
def test_computed_before_it_meets_the_batch(name: str, sharing: Any) -> None:
    """Functions of a parameter alone are tracked; gradients are sent back through them, for one example at a time."""
    function, params = DERIVED[name]
    torch.manual_seed(0)
    model = between(Function(function, **params)).double()
    X, y = normal(1, 3), normal(1, 2)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    close(KFAC(risk, sharing=sharing).to_dense(), GGN(risk).to_dense())
    X, y = normal(4, 3), normal(4, 2)  # as many examples as features
    whole = KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)), sharing=sharing)
    same(
        whole, KFAC(EmpiricalRisk(model, nn.MSELoss(), list(zip(X.split(1), y.split(1), strict=True))), sharing=sharing)
    )


def test_constants_of_all_kinds() -> None:
    """Plain tensors, caches, frozen parameters, and inputs without batch axis are no data, and keep no marks."""
    torch.manual_seed(0)
    index, table = torch.arange(5), normal(5, 3)

    class Cached(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.pos, self.head = kind, nn.Embedding(5, 3), nn.Linear(3, 2)
            self.table = nn.Parameter(table, requires_grad=False)
            self.mix = nn.Linear(3, 3)
            self.cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.arange(5)
            with torch.no_grad():
                fresh = torch.arange(5)
            places = {"plain": index, "cache": self.cache, "no grad": fresh, "row": index[None]}
            if self.kind == "first row":
                added = self.pos(index[None])[0]
            elif self.kind == "batch":
                added = self.pos(index.expand(len(x), 5) + (0 * x[..., 0]).long())
            else:
                added = self.pos(places[self.kind])
            x = (x + added + self.mix(self.table)).tanh()
            result: Tensor = self.head(x).mean(1)
            return result

    X, y = normal(5, 5, 3), normal(5, 2)
    expected = None
    for kind in ("batch", "plain", "cache", "no grad", "row", "first row"):
        torch.manual_seed(1)
        model = Cached(kind).double()
        for _ in range(2):
            K = KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)))
            expected = K if expected is None else expected
            same(K, expected)
        assert model.cache is not None
        assert not vars(model.cache)
    assert not vars(index)

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            result: Tensor = self.head((x + self.pos(pos)).tanh()).mean(1)
            return result

    given = Given().double()
    batches = [({"x": X, "pos": index[None]}, y)]
    K = KFAC(EmpiricalRisk(given, nn.MSELoss(), batches))
    singles = [({"x": X[n : n + 1], "pos": index[None]}, y[n : n + 1]) for n in range(5)]
    same(K, KFAC(EmpiricalRisk(given, nn.MSELoss(), singles)))


def test_states_and_functions_of_them() -> None:
    """Zeros of shape [N, ...] that are looked up, viewed, and combined with data."""
    torch.manual_seed(0)
    X, y, W = normal(4, 8, 3), normal(4, 2), normal(5, 3)
    forms: list[Callable[..., Tensor]] = [
        lambda m, x: (x + F.embedding(torch.zeros(len(x)).long(), m.W)[:, None]).tanh().mean(1)[:, :2],
        lambda m, x: (x + F.embedding((0 * x[:, 0, 0]).long(), m.W)[:, None]).tanh().mean(1)[:, :2],
    ]
    for sharing in ("expand", "reduce"):
        K, L = (factors(form, X, y, sharing, W=W) for form in forms)
        same(K, L)


def test_data_written_into_parts_and_batches_that_are_not_found() -> None:
    torch.manual_seed(0)
    X, y, W = normal(4, 3), normal(4, 2), normal(2, 3)

    def written(m: Any, x: Tensor) -> Tensor:
        rows = torch.zeros_like(x)
        rows[:, :].copy_(x)
        return F.linear(rows, m.W)

    same(factors(written, X, y, W=W), factors(lambda m, x: F.linear(x, m.W), X, y, W=W))

    def turned(m: Any, x: Tensor) -> Tensor:
        return (x.reshape(2, 6) + F.embedding(torch.zeros(6).long(), m.E).squeeze(1)).reshape(4, 3)[:, :2]

    model = Function(turned, E=normal(3, 1)).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y[:, :2]))
    close(EKFAC(risk).trace(), GGN(risk).to_dense().trace())
    columns = Function(lambda m, x: x + F.embedding((x[:, 0] > 0).long(), m.W.T), W=normal(3, 2)).double()
    risk = EmpiricalRisk(columns, nn.MSELoss(), (X, X))
    close(EKFAC(risk).trace(), GGN(risk).to_dense().trace())
    left = Function(lambda m, x: (m.W @ torch.ones(3, 2, dtype=x.dtype)).sum() * x[:, :2], W=W).double()
    assert not inspect(left, X).uncovered


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("num_data", [1, 6])
def test_a_parameter_replaces_rows_of_a_table(num_data: int, padding: int | None) -> None:
    """As in trained tokens: other rows are constants, whether the table is looked up or predicts tokens."""
    torch.manual_seed(0)
    table, out, rows = normal(7, 3), normal(3, 2), torch.tensor([5, 0, 2])
    tokens, targets = torch.tensor([0, 1, 2, 0, 5, 6])[:num_data], normal(6, 2)[:num_data]

    def looked_up(m: Any, x: Tensor) -> Tensor:
        return F.embedding(x, table.index_copy(0, rows, m.E), padding) @ out

    risk = EmpiricalRisk(Function(looked_up, E=normal(3, 3)).double(), nn.MSELoss(), (tokens, targets))
    close(KFAC(risk).to_dense(), GGN(risk).to_dense())
    close(EKFAC(risk).to_dense(), GGN(risk).to_dense())
    x = normal(num_data, 3)
    predicted = Function(lambda m, x: F.linear(x, table.index_copy(0, rows, m.E)), E=normal(3, 3)).double()
    risk = EmpiricalRisk(predicted, nn.MSELoss(), (x, normal(num_data, 7)))
    close(KFAC(risk).to_dense(), GGN(risk).to_dense())
    part = Function(lambda m, x: F.linear(x, table.index_copy(0, rows, m.E)[:6]), E=normal(3, 3)).double()
    assert list(inspect(part, x).uncovered) == ["E"]


def test_tables_as_long_as_the_batch() -> None:
    """A constant has as many rows as there are examples; its later uses show whether its rows belong to examples."""
    torch.manual_seed(0)
    W, b, X, y = normal(4, 4), normal(4), normal(3, 4), normal(3, 4)
    ones = torch.ones(3, 4, dtype=torch.float64)
    rows = torch.arange(12.0).reshape(3, 4).double()
    forms: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "states": (
            lambda m, x: (x + F.linear(torch.ones(3, 4).to(x), m.W, m.b)).tanh(),
            lambda m, x: (x + F.linear(ones + 0 * x, m.W, m.b)).tanh(),
        ),
        "one row of a table": (
            lambda m, x: (x + F.linear(torch.arange(12).reshape(3, 4).to(x), m.W, m.b)[1]).tanh(),
            lambda m, x: (x + F.linear(rows[1:2] + 0 * x, m.W, m.b)).tanh(),
        ),
    }
    for name, (constant, explicit) in forms.items():
        for sharing in ("expand", "reduce"):
            K, L = (factors(form, X, y, sharing, W=W, b=b) for form in (constant, explicit))
            if name == "states":
                same(K, L)
            else:  # the table's other rows count as positions, too; their gradients are zero
                close(K.blocks["W"].B * (3 if sharing == "expand" else 9), L.blocks["W"].B)


def test_inputs_without_batch_axis() -> None:
    """A table that is multiplied before it meets the batch, with and without an axis of length one in front."""
    torch.manual_seed(0)
    table, W, X, y = normal(5, 3), normal(4, 3), normal(2, 5, 4), normal(2, 4)
    forms: list[Callable[..., Tensor]] = [
        lambda m, x: (x.tanh() + F.linear(table.expand(len(x), 5, 3) + 0 * x[:, :1, :1], m.W)).sum(1),
        lambda m, x: (x.tanh() + F.linear(torch.zeros(5, 3).to(x) + table, m.W)).sum(1),
        lambda m, x: (x.tanh() + F.linear((torch.zeros(5, 3).to(x) + table).unsqueeze(0), m.W)).sum(1),
    ]
    m = Apply(lambda x: x)
    m.register_buffer("table", table)
    for sharing in ("expand", "reduce"):
        results = []
        for form in forms:
            model = Function(form, W=W)
            model.register_buffer("table", table)
            table = model.table  # type: ignore[assignment]
            results.append(KFAC(EmpiricalRisk(model.double(), nn.MSELoss(), (X, y)), sharing=sharing))
        same(results[0], results[1])
        same(results[0], results[2])
