"""A problem is one risk: loss, gradient, GGN, KFAC and optimizers; errors; fresh points."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, DtypeError, ModelError, ShapeError
from kfs.factors import BlockDiagonal
from kfs.pinn import Problem, Term, taylor
from tests.pinn.networks import ByAutograd, dense_jacobian, mlp, poisson, square, torch64


def network() -> nn.Sequential:
    return mlp((2, 5, 4, 1))


def by_autograd(net: nn.Module, weight: float = 2.0) -> tuple[Tensor, Tensor]:
    return dense_jacobian(net, ByAutograd(net, *square(), weight))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def test_loss_gradient_and_ggn_equal_nested_autograd() -> None:
    net = network()
    problem = poisson(net)
    r, J = by_autograd(net)
    torch.testing.assert_close(problem(), 0.5 * r.square().sum())
    assert problem.risk.value() == pytest.approx(0.5 * float(r.square().sum()))
    torch.testing.assert_close(flat(problem.risk.gradient()), J.T @ r)
    torch.testing.assert_close(kfs.GGN(problem.risk).to_dense(), J.T @ J)
    unweighted = by_autograd(net, weight=1.0)[1]
    assert not torch.allclose(unweighted.T @ unweighted, J.T @ J, rtol=1e-3)
    problem().backward()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]), J.T @ r)


def test_parts_add_up() -> None:
    net = network()
    problem = poisson(net)
    inside, boundary = problem.parts()
    torch.testing.assert_close(inside() + boundary(), problem())
    total = kfs.GGN(inside.risk).to_dense() + kfs.GGN(boundary.risk).to_dense()
    torch.testing.assert_close(total, kfs.GGN(problem.risk).to_dense())
    assert [len(part.terms) for part in problem.parts((0, 1), (1,))] == [2, 1]


def test_kfac_of_a_problem_and_of_its_terms() -> None:
    """A single layer without activation has exact Kronecker factors for the boundary; a sum of terms has an inverse."""
    net = network()
    problem = poisson(net)
    K = kfs.KFAC(problem.risk, fisher="ggn")
    assert list(K.blocks) == ["model.0", "model.2", "model.4"]
    inside, boundary = (kfs.KFAC(part.risk, fisher="ggn") for part in problem.parts())
    both = inside + boundary
    assert isinstance(both, BlockDiagonal)
    inverse = both.inverse(1e-3, method="per-factor")
    names = [block.layout.params for block in inside.blocks.values()]
    for params, one, other in zip(names, inside.blocks.values(), boundary.blocks.values(), strict=True):
        damped = [t + 1e-3 * torch.eye(len(t), **torch64) for t in (one.A, one.B, other.A, other.B)]
        dense = torch.kron(damped[1], damped[0]) + torch.kron(damped[3], damped[2])
        M = torch.randn(one.B.shape[0], one.A.shape[0], **torch64)
        solved = torch.linalg.solve(dense, M.flatten()).view_as(M)
        v = {name: torch.zeros(p.shape, **torch64) for name, p in problem.risk.params.items()} | one.tensors(M)
        found = inverse @ v
        torch.testing.assert_close(one.matrix(found), solved, rtol=1e-7, atol=1e-7)
        assert params
    assert inverse.shape == K.shape
    # The last layer sees the boundary once per point: there, KFAC is exact.
    last = kfs.GGN(problem.parts()[1].risk).submatrix(names[-1]).to_dense()
    block = boundary.submatrix(names[-1]).to_dense()
    torch.testing.assert_close(block, last)


@pytest.mark.parametrize("make", ["adam", "kfac"])
def test_optimizers_of_modules_train_it(make: str) -> None:
    net = network()
    problem = poisson(net)
    optimizer: Any
    if make == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    else:
        optimizer = kfs.optim.KFAC(problem.residuals, problem.loss, fisher="ggn", quadratic_model=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = problem()
        value.backward()
        return value

    losses = [float(optimizer.step(closure).detach()) for _ in range(15)]
    assert losses[-1] < losses[0]


def test_systems_data_and_terms_of_different_widths() -> None:
    """Terms may have several residuals, tensors of points of different widths, and measured values."""
    net = mlp((2, 6, 2))
    x, y = torch.rand(5, 2, **torch64), torch.rand(3, 2, **torch64)
    measured = torch.rand(3, 2, **torch64)

    def two(u: nn.Module, x: Tensor) -> Tensor:
        t = taylor(u, x)
        return torch.cat([t.laplacian, t.gradient[:, 0]], 1)

    problem = Problem(
        net,
        [
            Term(two, x),
            Term(lambda u, x, y: (u(x) - y)[:, :1], (y, measured), name="data"),
            Term(lambda u, x: u(x)[:, 1] - 1, x[:2]),
        ],
    )
    value = torch.tensor(0.0, **torch64)
    for residual, points, scale in problem.term_points():
        value = value + 0.5 * scale**2 * residual(net, *points).square().sum()
    torch.testing.assert_close(problem(), value)
    assert problem.inputs[0].shape == (10, 4)
    assert problem.targets.shape == (10, 4)
    # Examples may come in any order.
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    shuffled = problem.residuals(problem.inputs[0][order], problem.inputs[1][order])
    torch.testing.assert_close(shuffled, problem.residuals(*problem.inputs)[order])
    assert "term 0" in str(problem)
    assert "data" in str(problem)


def test_fresh_points() -> None:
    calls = []

    def draw() -> Tensor:
        calls.append(1)
        return torch.full((2, 1), len(calls), **torch64)

    net = mlp((1, 3, 1))
    fixed = torch.zeros(1, 1, **torch64)
    problem = Problem(net, [Term(lambda u, x: u(x) - x, draw), Term(lambda u, x: u(x), fixed)])
    assert problem.draws
    risk = problem.risk
    first, model = problem().item(), problem.residuals
    problem.draw()
    assert problem().item() != first
    assert problem.residuals is model  # an optimizer that watches it stays valid
    assert risk.value() == pytest.approx(first)
    assert len(calls) == 2
    assert not poisson(network()).draws


X = torch.rand(4, 2, **torch64)


def term(residual: Any = lambda u, x: u(x), points: Any = X, **options: Any) -> Term:
    return Term(residual, points, name="bad", **options)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no terms": (list, DataError, "no terms"),
    "no points": (lambda: [term(points=X[:0])], DataError, "bad has no points"),
    "no tensors": (lambda: [term(points=())], DataError, "bad has no points"),
    "one axis": (lambda: [term(points=X[:, 0])], ShapeError, r"shape \[4\].*unsqueeze"),
    "lengths": (lambda: [term(points=(X, X[:2]))], ShapeError, r"lengths \[4, 2\]"),
    "dtype": (lambda: [term(points=X.float())], DtypeError, "float32, but the model is torch.float64"),
    "type": (lambda: [term(points=[1.0])], DtypeError, "points of bad are list"),
    "shape": (lambda: [term(lambda u, x: u(x).sum())], ShapeError, r"shape \[\] for 4 points.*\[N, m\]"),
    "rows": (lambda: [term(lambda u, x: u(x[:2]))], ShapeError, r"shape \[2, 1\] for 4 points"),
    "no tensor": (lambda: [term(lambda *_: 1.0)], ShapeError, "type float"),
    "not finite": (lambda: [term(lambda u, x: u(x) / (x[:, :1] - X[2, 0]))], DataError, "bad is not finite at point 2"),
    "NaN": (lambda: [term(lambda u, x: u(x)[:, 0] * torch.nan)], DataError, "bad is not finite at point 0"),
    "weight": (lambda: [term(weight=0.0)], ModelError, "weight of bad is 0.0"),
    "text": (lambda: [term(weight="1")], ModelError, "weight of bad is '1'"),
    "infinite": (lambda: [term(weight=float("inf"))], ModelError, "weight of bad is inf"),
    "function": (lambda: [term(X)], DtypeError, "residual of bad is a Tensor"),
    "pair": (lambda: [(lambda u, x: u(x), X)], DtypeError, r"terms\[0\] is a tuple"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_term(name: str) -> None:
    terms, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        Problem(network(), terms())


def test_errors_of_the_model() -> None:
    with pytest.raises(DtypeError, match="model is a function"):
        Problem(lambda x: x, [term()])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="requires gradients"):
        Problem(network().requires_grad_(False), [term()])
    with pytest.raises(ModelError, match="training mode"):
        Problem(nn.Sequential(network(), nn.Dropout()), [term()])
    with pytest.raises(ModelError, match=re.escape("Module '1' (ReLU)")):
        Problem(nn.Sequential(network(), nn.ReLU()), [term(lambda u, x: taylor(u, x).laplacian)])


def test_frozen_parameters_stay_out() -> None:
    net = network()
    net[0].requires_grad_(False)
    problem = poisson(net)
    assert "model.0.weight" not in problem.risk.params
    assert problem.risk.params["model.2.weight"] is net[2].weight
