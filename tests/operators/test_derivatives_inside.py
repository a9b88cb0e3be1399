"""Models that differentiate inside, as physics-informed networks do. The oracle is autograd on the model itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, KFAC, EmpiricalRisk, Hessian, Jacobian, inspect
from kfs.errors import ModelError
from tests.operators.contract import close

LOSS = nn.MSELoss()


class WithGradient(nn.Module):
    """Predicts a function and its gradient with respect to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x.detach().requires_grad_()
        u = self.second(self.first(x).tanh())
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([u, g], 1)


def problem() -> tuple[WithGradient, EmpiricalRisk, Tensor, Tensor]:
    X, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    model = WithGradient()
    return model, EmpiricalRisk(model, LOSS, [(X[:2], y[:2]), (X[2:], y[2:])]), X, y


def test_values_and_derivatives_are_autograds() -> None:
    model, risk, X, y = problem()
    value = LOSS(model(X), y)
    assert risk.value() == pytest.approx(value.item(), rel=1e-14)
    params = list(model.parameters())
    for g, exact in zip(
        risk.gradient().values(), torch.autograd.grad(value, params, materialize_grads=True), strict=True
    ):
        close(g, exact)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, params, retain_graph=True, materialize_grads=True)])
        for f in model(X).flatten()
    ]
    J = torch.stack(rows)
    close(Jacobian(risk).to_dense(), J)
    for settings in ({}, {"chunk_size": 1}, {"memory": 10_000}):
        close(GGN(risk, **settings).to_dense(), 2 / y.numel() * J.T @ J)  # type: ignore[arg-type]
    H = Hessian(risk).to_dense()
    close(H, H.T)


def test_a_graph_is_recorded_only_if_the_model_needs_one() -> None:
    """The first batch is evaluated twice, and no other: the risk remembers the result."""
    model, risk, _, _ = problem()
    risk.count()
    for expected in (3, 2):
        model.calls = 0
        risk.value()
        assert model.calls == expected
    seen = []
    plain = nn.Sequential(nn.Linear(2, 3), nn.Identity()).double()
    plain[1].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    EmpiricalRisk(plain, LOSS, (torch.randn(5, 2).double(), torch.randn(5, 3).double())).value()
    assert seen == [False]


def test_kfac_says_that_it_is_not_defined() -> None:
    model, risk, X, _ = problem()
    calls: list[Callable[[], Any]] = [lambda: KFAC(risk), lambda: inspect(model, X)]
    for call in calls:
        with pytest.raises(
            ModelError, match=r"differentiates its own predictions.*kfs\.pinn\.taylor.*howto_pinn.*params="
        ):
            call()


def test_other_errors_without_a_graph_are_the_models_own() -> None:
    class Fails(WithGradient):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            raise RuntimeError("something else")

    model = Fails()
    risk = EmpiricalRisk(model, LOSS, (torch.randn(2, 2).double(), torch.randn(2, 3).double()))
    with pytest.raises(RuntimeError, match="something else"):
        risk.value()
    assert model.calls == 1
