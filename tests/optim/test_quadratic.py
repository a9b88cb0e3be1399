"""Steps of the quadratic model: they minimize it, and damping follows its accuracy."""

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, EmpiricalRisk
from kfs.distributed import Ranks
from kfs.errors import ModelError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.optim.across_ranks import Exchange
from kfs.optim.quadratic_model import QuadraticModel, Trial
from tests.optim.training import data, mlp, weights

LOSS = nn.CrossEntropyLoss()


def closure_for(model: nn.Module, optimizer: torch.optim.Optimizer, X: Tensor, y: Tensor) -> object:
    """Return a closure for a step, in the style of `torch.optim.LBFGS`, which counts its calls."""

    def closure() -> Tensor:
        closure.calls += 1  # type: ignore[attr-defined]
        optimizer.zero_grad()
        value: Tensor = LOSS(model(X), y)
        value.backward()
        return value

    closure.calls = 0  # type: ignore[attr-defined]
    return closure


def test_steps_minimise_the_exact_model() -> None:
    """No other combination of natural gradient and last step decreases the damped model with the dense GGN further."""
    X, y = data(40)
    model = mlp()
    delta = 0.1
    optimizer = KFAC(
        model, LOSS, quadratic_model=True, damping=delta, damping_unit="absolute", fisher="type-2", factors_every=1
    )
    closure = closure_for(model, optimizer, X, y)
    last = torch.zeros_like(weights(model))
    for _ in range(4):
        risk = EmpiricalRisk(model, LOSS, (X, y))
        H = GGN(risk).to_dense() + delta * optimizer.damping_scale * torch.eye(len(last), dtype=torch.float64)
        g = torch.cat([t.flatten() for t in risk.gradient().values()])
        before = weights(model)
        optimizer.step(closure)  # type: ignore[arg-type]
        step = weights(model) - before
        gradient_of_model = g + H @ step
        torch.testing.assert_close(gradient_of_model @ step, torch.zeros((), dtype=torch.float64), atol=1e-10, rtol=0)
        torch.testing.assert_close(gradient_of_model @ last, torch.zeros((), dtype=torch.float64), atol=1e-10, rtol=0)
        last = step
    assert gradient_of_model.norm() > 1e-3  # the model has another minimum


def test_a_quadratic_loss_is_predicted_and_damping_falls() -> None:
    """For a linear model and the square loss, the quadratic model is exact: predictions are right, damping falls."""
    X, _ = data(40)
    y = torch.randn(40, 2, dtype=torch.float64)
    model, loss = nn.Linear(4, 2).double(), HalfSquaredError()
    optimizer = KFAC(model, loss, quadratic_model=True, fisher="type-2", factors_every=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        return value

    for _ in range(30):
        value = optimizer.step(closure)
    assert optimizer.damping_scale < 0.9
    solution = torch.linalg.lstsq(torch.cat([X, torch.ones(40, 1).double()], 1), y).solution
    best = loss(torch.cat([X, torch.ones(40, 1).double()], 1) @ solution, y)
    torch.testing.assert_close(value.detach(), best)


def test_damping_follows_the_ratio() -> None:
    """It falls if predictions are good, rises if they are bad, and stays in between."""
    model = QuadraticModel(mlp(), HalfSquaredError(), Exchange(Ranks(None)))
    model._predicted = (-2.0, 2.0)  # the model predicts a decrease by one

    def factor(change: float, share: float = 1.0, noise: float = 0.0) -> float:
        return model.finish({}, Trial(share, change), 1.0, noise)

    assert factor(-1.2) == factor(-0.95) < factor(-0.8) < 1
    assert factor(-0.5) == 1
    assert factor(-0.1) > 1
    assert factor(0.5, noise=2.0) == 1
    assert 1 < factor(5.0, share=0.9) < factor(5.0, share=0.2) < factor(5.0, share=1e-3) == factor(5.0, share=0.0)


def test_closures() -> None:
    """They are required, called once more per step, and leave buffers and random state as after one call."""
    X, y = data(40)
    model = mlp()
    model.insert(1, nn.BatchNorm1d(6).double())
    model.insert(2, nn.Dropout(0.2))
    optimizer = KFAC(model, LOSS, quadratic_model=True)
    with pytest.raises(ModelError, match=r"step\(closure\)"):
        optimizer.step()
    inner = closure_for(model, optimizer, X, y)
    states: list[Tensor] = []

    def closure() -> Tensor:
        states.append(torch.get_rng_state())
        return inner()  # type: ignore[operator, no-any-return]

    for _ in range(6):
        seen = len(states)
        before = torch.get_rng_state()
        optimizer.step(closure)
        now = states[seen:]
        assert len(now) >= 2
        assert all(torch.equal(state, before) for state in now)  # both calls draw the same numbers
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        model[2](torch.ones(40, 6).double())
        assert torch.equal(torch.get_rng_state(), after)  # the random state is that after one call
    assert inner.calls == 12 + optimizer.events.shortened_steps  # type: ignore[attr-defined]
    assert int(model[1].num_batches_tracked) == 6
    other = mlp()
    plain = KFAC(other, LOSS)
    assert plain.step(closure_for(other, plain, X, y)).requires_grad  # type: ignore[arg-type]
