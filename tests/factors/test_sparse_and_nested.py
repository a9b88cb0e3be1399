"""Sparse and nested tensors: results equal the dense model, or an error gives advice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Hessian, Jacobian, inspect
from kfs.errors import ModelError
from tests.operators.contract import close

pytestmark = [  # PyTorch's own
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

LOSS = nn.CrossEntropyLoss()
Product = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers; the first one multiplies its input in a given way."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4, bias=False).double()
        self.second = nn.Linear(4, 3).double()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.product(self, x).tanh())
        return result


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
# Products of a sparse input with a weight: with a rule for dense tensors, or without.
WITH_RULE: dict[str, Product] = {
    "matmul": lambda m, x: x @ m.first.weight.T,
    "mm": lambda m, x: torch.mm(x, m.first.weight.T),
    "linear": lambda m, x: F.linear(x, m.first.weight),
    "addmm": lambda m, x: torch.addmm(x.new_zeros(len(x), 4, layout=torch.strided), x, m.first.weight.T),
}
WITHOUT_RULE: dict[str, Product] = {
    "sparse.mm": lambda m, x: torch.sparse.mm(x, m.first.weight.T),
    "sparse.addmm": lambda m, x: torch.sparse.addmm(x.new_zeros(len(x), 4, layout=torch.strided), x, m.first.weight.T),
}


def dense(m: Net, x: Tensor) -> Tensor:
    return F.linear(x, m.first.weight)


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(4, 5, dtype=torch.float64)
    return torch.where(X > 0, X, 0), torch.arange(4) % 3


def every_computation(risk: EmpiricalRisk, x: Any) -> dict[str, Callable[[], Any]]:
    return {
        "gradient": risk.gradient,
        "GGN": lambda: GGN(risk).to_dense(),
        "GGN, one column at once": lambda: GGN(risk, chunk_size=1).to_dense(),
        "Hessian": lambda: Hessian(risk).to_dense(),
        "Jacobian": lambda: Jacobian(risk).to_dense(),
        "KFAC": lambda: KFAC(risk),
        "EKFAC": lambda: EKFAC(risk),
        "inspection": lambda: inspect(risk.model, x),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*WITH_RULE, *WITHOUT_RULE])
def test_operators_of_models_with_sparse_inputs(name: str, layout: str) -> None:
    X, y = data()
    expected = EmpiricalRisk(Net(dense), LOSS, (X, y))
    risk = EmpiricalRisk(Net((WITH_RULE | WITHOUT_RULE)[name]), LOSS, [(LAYOUTS[layout](X), y)])
    assert risk.value() == pytest.approx(expected.value(), rel=1e-14)
    exact = GGN(expected).to_dense()
    close(GGN(risk).to_dense(), exact)
    close(GGN(risk, chunk_size=1).to_dense(), exact)
    close(GGN(risk, reuse=True) @ torch.ones(len(exact), dtype=torch.float64), exact.sum(1))
    close(Hessian(risk).to_dense(), Hessian(expected).to_dense())
    close(Jacobian(risk).to_dense(), Jacobian(expected).to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*WITH_RULE, *WITHOUT_RULE])
def test_kfac_asks_for_dense_inputs(name: str, layout: str) -> None:
    X, y = data()
    model, x = Net((WITH_RULE | WITHOUT_RULE)[name]), LAYOUTS[layout](X)
    risk = EmpiricalRisk(model, LOSS, [(x, y)])
    for call in (lambda: KFAC(risk), lambda: EKFAC(risk)):
        with pytest.raises(ModelError, match=r"sparse tensor.*x\.to_dense\(\)"):
            call()
    if name in WITH_RULE:
        with pytest.raises(ModelError, match=r"uses a sparse tensor.*combined with a parameter.*x\.to_dense\(\)"):
            inspect(model, x)
        return
    assert list(inspect(model, x).uncovered) == ["first.weight"]
    # Other results equal those for dense inputs, and the exact diagonal is that of the dense model.
    expected = EmpiricalRisk(Net(dense), LOSS, (X, y))
    skipped = KFAC(risk, uncovered="skip")
    for params in (["second.weight"], ["second.bias"]):
        close(skipped.submatrix(params).to_dense(), KFAC(expected).submatrix(params).to_dense())
    diagonal = KFAC(risk, uncovered="diagonal").submatrix(["first.weight"]).to_dense()
    close(diagonal, GGN(expected).submatrix(["first.weight"]).to_dense().diagonal().diag())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kfac_works_if_the_model_makes_inputs_dense(layout: str) -> None:
    X, y = data()
    model, x = Net(lambda m, x: F.linear(x.to_dense(), m.first.weight)), LAYOUTS[layout](X)
    expected = EmpiricalRisk(Net(dense), LOSS, (X, y))
    risk = EmpiricalRisk(model, LOSS, [(x, y)])
    for kind in (KFAC, EKFAC):
        for sharing in ("expand", "reduce"):
            close(kind(risk, sharing=sharing).to_dense(), kind(expected, sharing=sharing).to_dense())
    assert inspect(model, x, audit=False) == inspect(Net(dense), X, audit=False)
    # An operation on constants alone is allowed: the parameters of the first layer are not considered.
    second = ["second.weight", "second.bias"]
    kept = EmpiricalRisk(Net(WITH_RULE["matmul"]), LOSS, [(x, y)], params=second)
    close(KFAC(kept).to_dense(), KFAC(expected).submatrix(second).to_dense())


def test_sparse_constants_are_no_business_of_kfac() -> None:
    """A sparse adjacency matrix of a graph multiplies the activations of its nodes, which are features here."""
    neighbors = (torch.rand(4, 4) > 0.5).double()
    sparse = neighbors.to_sparse()
    products: list[Product] = [
        lambda m, x: torch.sparse.mm(sparse, F.linear(x, m.first.weight).T).T,
        lambda m, x: (neighbors @ F.linear(x, m.first.weight).T).T,
    ]
    batch = data()
    one, other = (EmpiricalRisk(Net(product), LOSS, batch) for product in products)
    close(KFAC(one).to_dense(), KFAC(other).to_dense())
    close(GGN(one).to_dense(), GGN(other).to_dense())


class Nested(nn.Module):
    """Sequences of different lengths, as one nested tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x if x.is_nested else nested(x, self.layout)).tanh()
        result: Tensor = self.second(torch.nested.to_padded_tensor(h, 0.0).sum(1))
        return result


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([t[: length(t)] for t in x], layout=layout)


def length(t: Tensor) -> int:
    """Return the number of positions that count: it depends on the sequence, not on its index in the batch."""
    return 2 + int(9 * t[0, 0].abs()) % 3


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "as input"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_with_advice(layout: torch.layout, inside: bool) -> None:
    X, y = torch.randn(3, 5, 3, dtype=torch.float64), torch.arange(3)
    x = X if inside else nested(X, layout)
    model = Nested(layout)
    risk = EmpiricalRisk(model, LOSS, [(x, y)])
    assert risk.value() == pytest.approx(LOSS(model(x), y).item(), rel=1e-14)
    computations = every_computation(risk, x)
    if layout is torch.jagged:  # PyTorch has only first derivatives of these
        (expected,) = torch.autograd.grad(LOSS(model(x), y), model.first.weight)
        close(computations.pop("gradient")()["first.weight"], expected)
    for call in computations.values():
        with pytest.raises(ModelError, match=r"uses a nested tensor.*torch\.nested\.to_padded_tensor\(x, 0\.0\)"):
            call()


def test_layers_after_nested_tensors_are_covered() -> None:
    X, y = torch.randn(3, 5, 3, dtype=torch.float64), torch.arange(3)
    model = Nested(torch.jagged)
    assert len({length(x) for x in X}) > 1
    pooled = torch.stack([model.first(x[: length(x)]).tanh().sum(0) for x in X]).detach()
    names = ["second.weight", "second.bias"]
    expected = KFAC(EmpiricalRisk(model.second, LOSS, (pooled, y))).to_dense()
    close(KFAC(EmpiricalRisk(model, LOSS, (X, y), params=names)).to_dense(), expected)
