"""Steps of the quadratic model on badly scaled problems: the loss on the batch never rises, and falls considerably."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.optim.curvature import Curvature
from kfs.optim.inverses import Inverses
from kfs.optim.quadratic_model import Trial, try_step
from kfs.optim.safety import Events
from tests.optim.training import data, mlp, train, weights
from tests.optim.unseen import averages_of

Problem = tuple[nn.Module, Tensor, Tensor]
HALF = HalfSquaredError()


class Rosenbrock(nn.Module):
    """The residuals of Rosenbrock's function, for inputs of one."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Linear(1, 2, bias=False)
        self.point.weight.data = torch.tensor([[-1.2], [1.0]])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.point(x).unbind(1)
        return torch.stack([1 - a, 10 * (b - a**2)], 1)


class Poisson(nn.Module):
    """A tanh network on the unit square: its Laplacian inside, and its value on the boundary (third input zero)."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a + 1, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x, inside = x[:, :2], x[:, 2:]
        zero = torch.zeros(len(x), 1, 2).to(x)
        one = torch.zeros(len(x), 4, 1).to(x)
        one[:, 0] = 1  # A bias contributes to the value, but not to derivatives.
        # Value, both first derivatives, and the Laplacian.
        Z = torch.cat([x[:, None], torch.eye(2).to(x).expand(len(x), 2, 2), zero], 1)
        for k, layer in enumerate(self.layers):
            Z = layer(torch.cat([Z, one], 2))
            if k < len(self.layers) - 1:
                t = Z[:, 0].tanh()
                d = 1 - t.square()
                laplacian = d * Z[:, 3] - 2 * t * d * Z[:, 1:3].square().sum(1)
                Z = torch.stack([t, d * Z[:, 1], d * Z[:, 2], laplacian], 1)
        return torch.cat([inside * Z[:, 3], (1 - inside) * Z[:, 0]], 1)


def ill_conditioned() -> Problem:
    """Return a linear regression whose Hessian has eigenvalues from 1 to 1e-12, which affect the loss equally."""
    n = 8
    scales = torch.logspace(0, -6, n)
    U = torch.linalg.qr(torch.randn(40, n)).Q
    V = torch.linalg.qr(torch.randn(n, n)).Q
    X = math.sqrt(40) * U * scales @ V.T
    return nn.Linear(n, 1, bias=False), X, X @ V @ (torch.randn(n) / scales)[:, None]


def rosenbrock() -> Problem:
    return Rosenbrock(), torch.ones(4, 1), torch.zeros(4, 2)


def poisson() -> Problem:
    """Return the residual of a Poisson equation, for a deep network."""
    line = torch.linspace(0, 1, 12)
    grid = torch.cartesian_prod(line, line)
    inside = ((grid > 0) & (grid < 1)).all(1, keepdim=True).double()
    y = -2 * math.pi**2 * (math.pi * grid).sin().prod(1, keepdim=True) * inside
    return Poisson([2, 32, 32, 32, 1]), torch.cat([grid, inside], 1), torch.cat([y, 0 * y], 1)


def make(problem: Any) -> Problem:
    """Make a problem in float64, the same in every call."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        result: Problem = problem()
    finally:
        torch.set_default_dtype(default)
    return result


def closure_of(model: nn.Module, optimizer: KFAC, X: Tensor, y: Tensor) -> Any:
    """Return a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = HALF(model(X), y)
        value.backward()
        return value

    return closure


@pytest.mark.parametrize(("problem", "share"), [(ill_conditioned, 1e-10), (rosenbrock, 1e-15), (poisson, 1e-2)])
@pytest.mark.parametrize("fisher", ["mc", "ggn"])
def test_loss_never_rises(problem: Any, share: float, fisher: Any) -> None:
    """Over 50 steps, the loss falls by orders of magnitude, and damping stays within its limits."""
    model, X, y = make(problem)
    optimizer = KFAC(model, HALF, quadratic_model=True, fisher=fisher)
    closure = closure_of(model, optimizer, X, y)
    values = [float(optimizer.step(closure).detach()) for _ in range(50)]
    values.append(float(HALF(model(X), y).detach()))
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(values))
    assert values[-1] < share * values[0]
    assert 1e-10 <= optimizer.damping_scale <= 1e10


def test_first_step_is_shortened_and_damping_rises() -> None:
    """The natural gradient of the Poisson residual is far too long at first."""
    model, X, y = make(poisson)
    optimizer = KFAC(model, HALF, quadratic_model=True, fisher="ggn")
    closure = closure_of(model, optimizer, X, y)
    before = float(optimizer.step(closure).detach())
    assert optimizer.events.shortened_steps == 1
    assert optimizer.damping_scale > 1
    assert float(HALF(model(X), y).detach()) < before


def test_rejected_step() -> None:
    """If the loss rises for all lengths of a step, parameters and last step are restored, and damping rises."""
    model, X, y = make(rosenbrock)
    optimizer = KFAC(model, HALF, quadratic_model=True, fisher="ggn", weight_decay=0.1)
    closure = closure_of(model, optimizer, X, y)
    optimizer.step(closure)
    scale = optimizer.damping_scale
    before = weights(model)
    previous = optimizer.state_dict()["kfac"]["previous"]
    calls = 0

    def rising() -> Tensor:
        nonlocal calls
        calls += 1
        value: Tensor = closure()
        return value.detach() + calls

    optimizer.step(rising)
    assert torch.equal(weights(model), before)
    assert optimizer.state_dict()["kfac"]["previous"] == previous
    assert optimizer.events.rejected_steps == 1
    assert optimizer.damping_scale == pytest.approx(10 * scale)
    optimizer.step(closure)  # Training continues.
    assert not torch.equal(weights(model), before)


def test_trials_of_steps() -> None:
    """A step is shortened until the loss falls, also if the loss is not finite; otherwise, parameters are restored."""
    old = torch.tensor([1.0, -2.0]).double()

    def tried(values: list[float], noise: float = 0.0) -> tuple[Trial, Tensor]:
        p = old + 100
        left = iter(values)
        return try_step([p], [old], lambda: next(left), slope=-4.0, noise=noise), p

    whole, p = tried([-1.0])
    assert whole == Trial(1.0, -1.0)
    assert torch.equal(p, old + 100)
    shorter, p = tried([math.nan, math.inf, -1.0])
    assert shorter.share == pytest.approx(0.01)
    torch.testing.assert_close(p, old + 1)
    slightly, _ = tried([-1e-9, -1.0])  # the loss falls less than the slope demands, but the parabola is wide
    assert slightly.share == pytest.approx(0.5)
    below_its_slope = try_step([old.clone()], [old], iter([1.0, 1.0, -3.0]).__next__, slope=2.0, noise=0.0)
    assert below_its_slope.share == pytest.approx(0.01)
    back, p = tried([1.0] * 11)
    assert back == Trial(0.0, 1.0)
    assert torch.equal(p, old)
    assert try_step([old.clone()], [old], lambda: 1e-12, slope=-1e-12, noise=1e-11).share == 1.0


class Powers(nn.Module):
    """A model with a parameter that KFAC does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.power = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(self.linear(x), self.power)


@pytest.mark.filterwarnings("ignore:KFAC does not cover")
@pytest.mark.parametrize("frozen", [False, True])
def test_adamw_is_part_of_a_tried_step(frozen: bool) -> None:
    """Its parameters move in the tried step, and are restored with the others; they may be the only parameters."""
    model = Powers().double()
    model.linear.requires_grad_(not frozen)
    X, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 2, dtype=torch.float64)
    optimizer = KFAC(model, HALF, quadratic_model=True)
    closure = closure_of(model, optimizer, X, y)
    before = weights(model)
    values = [float(optimizer.step(closure).detach()) for _ in range(10)]
    assert values == sorted(values, reverse=True)
    assert not torch.equal(weights(model)[:2], before[:2])  # "power" is the first parameter
    assert torch.equal(weights(model)[2:], before[2:]) == frozen
    calls: list[int] = []

    def rising() -> Tensor:
        calls.append(1)
        value: Tensor = closure()
        return value.detach() + len(calls)

    before = weights(model)
    optimizer.step(rising)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("result", [None, "loss", torch.ones(3)])
def test_closures_that_return_no_loss(result: Any) -> None:
    """The error says so."""
    model, X, y = make(rosenbrock)
    optimizer = KFAC(model, HALF, quadratic_model=True)
    closure = closure_of(model, optimizer, X, y)

    def wrong() -> Any:
        closure()
        return result

    with pytest.raises(ModelError, match="instead of the loss"):
        optimizer.step(wrong)


def test_losses_that_are_not_finite() -> None:
    """Losses cannot be compared, so the step is skipped."""
    model, X, y = make(rosenbrock)
    optimizer = KFAC(model, HALF, quadratic_model=True)
    closure = closure_of(model, optimizer, X, y)
    before = weights(model)

    def infinite() -> float:
        closure()
        return math.inf

    optimizer.step(infinite)
    assert optimizer.events == Events(skipped_steps=1)
    assert torch.equal(weights(model), before)


def test_damping_has_limits() -> None:
    """However often it is multiplied."""
    curvature = Curvature(0.9, Inverses("factored", "relative", False), 10, 1)
    for _ in range(100):
        curvature.damping.note_trouble("skipped_steps", "something is wrong")
    assert curvature.damping.scale == 1e10
    assert curvature.damping.events.raised_damping == 10
    for _ in range(100):
        curvature.damping.multiply(0.5)
    assert curvature.damping.scale == 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_that_overflow(dtype: torch.dtype) -> None:
    """If inverses are so large that steps are not finite, steps are skipped, and damping rises."""
    X, y = data(dtype=dtype)
    model, loss = mlp(dtype), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, factors_every=100)
    train(model, optimizer, [(X, y)] * 3, loss)
    last = optimizer.preconditioner.curvature.averages["4.weight", (0, 3)]
    assert last.inverse is not None
    last.inverse.like.fill_(torch.inf)
    last.changed = False
    before = weights(model)
    state = [t.clone() for t in averages_of(optimizer)]
    train(model, optimizer, [(X, y)], loss)
    assert torch.equal(weights(model), before)
    assert all(map(torch.equal, averages_of(optimizer), state))
    assert optimizer.events.skipped_steps == 1
    train(model, optimizer, [(X, y)] * 4, loss)
    assert optimizer.events.raised_damping == 1
    assert not torch.equal(weights(model), before)
    assert weights(model).isfinite().all()
