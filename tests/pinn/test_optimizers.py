"""Directions equal dense least squares; momentum, line search, state and errors of the optimizers of problems."""

import copy
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, DtypeError, ModelError, SolverError, StorageError
from kfs.pinn import EnergyNaturalGradient, Problem, Term, TermwiseKFAC, taylor
from kfs.pinn.natural_gradient import by_cholesky, by_qr, jacobian
from kfs.pinn.optimizer import Params, Rows, line_search
from tests.pinn.networks import ByAutograd, dense_jacobian, mlp, poisson, square, torch64

DAMPING = 1e-3


def network() -> nn.Sequential:
    return mlp((2, 5, 4, 1))


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def least_squares(J: Tensor, r: Tensor, damping: float, last: Tensor) -> Tensor:
    """Return the minimizer of |J d - r|^2 + damping |d - last|^2, as an ordinary least-squares problem."""
    eye = damping**0.5 * torch.eye(J.shape[1], **torch64)
    solved: Tensor = torch.linalg.lstsq(torch.cat([J, eye]), torch.cat([r, eye @ last]), driver="gelsd").solution
    return solved


def exact(net: nn.Module) -> tuple[Tensor, Tensor]:
    return dense_jacobian(net, ByAutograd(net, *square(), 2.0))


@pytest.mark.parametrize("solver", ["parameters", "residuals", "iterative", "auto"])
def test_steps_are_those_of_damped_least_squares(solver: Any) -> None:
    """Two steps with a learning rate and momentum, against dense Jacobians by nested autograd."""
    net = network()
    oracle = copy.deepcopy(net)
    optimizer = EnergyNaturalGradient(poisson(net), lr=0.05, damping=DAMPING, momentum=0.7, solver=solver)
    last = torch.zeros(flat(net).numel(), **torch64)
    trace = 0.0
    for step in range(2):
        r, J = exact(oracle)
        loss = optimizer.step()
        assert loss == pytest.approx(0.5 * float(r.square().sum()))
        if step == 0:
            # The matrix-free way estimates the trace with one random vector.
            trace = float(J.square().sum()) if solver != "iterative" else float(optimizer.trace or 0)
        assert optimizer.trace == pytest.approx(trace)
        direction = least_squares(J, r, DAMPING * trace, 0.7 * last)
        nn.utils.vector_to_parameters(flat(oracle) - 0.05 * direction, oracle.parameters())
        # Conjugate gradients stop early.
        tolerance: dict[str, Any] = (
            {"rtol": 1e-3, "atol": 1e-5} if solver == "iterative" else {"rtol": 1e-6, "atol": 1e-8}
        )
        torch.testing.assert_close(flat(net), flat(oracle), **tolerance)
        wrong = least_squares(J, r, DAMPING * trace, 0 * last)  # without momentum
        assert step == 0 or not torch.allclose(wrong, direction, rtol=1e-3)
        last = direction
    assert optimizer.steps == 2


def test_large_problems_need_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice depends on the sides of the Jacobian. A few iterations already reduce the loss."""
    monkeypatch.setattr("kfs.pinn.natural_gradient._SIDE", 5)
    monkeypatch.setattr("kfs.pinn.natural_gradient.jacobian", None)
    optimizer = EnergyNaturalGradient(poisson(network()), max_iterations=3, damping=1e-6)
    losses = [optimizer.step() for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_linear_model_is_solved_in_one_step() -> None:
    x, y = torch.randn(30, 3, **torch64), torch.randn(30, 2, **torch64)
    net = nn.Linear(3, 2).double()
    optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x, y: u(x) - y, (x, y))]), damping=1e-14)
    optimizer.step()
    with_ones = torch.cat([x, torch.ones(30, 1, **torch64)], 1)
    solution = torch.linalg.lstsq(with_ones, y).solution.T
    torch.testing.assert_close(torch.cat([net.weight, net.bias.unsqueeze(1)], 1).detach(), solution)
    assert optimizer.step() == pytest.approx(0.5 * float((with_ones @ solution.T - y).square().sum()) / 30)


@pytest.mark.parametrize("shape", [(300, 20), (30, 40)])
def test_solvers_of_the_least_squares_problem(shape: tuple[int, int]) -> None:
    J, r = torch.randn(*shape, **torch64), torch.randn(shape[0], **torch64)
    expected = least_squares(J, r, 0.1, torch.zeros(shape[1], **torch64))
    for solve in (by_qr, by_cholesky):
        torch.testing.assert_close(solve(J, r, 0.1), expected)
    singular = torch.cat([J, J])  # needs more damping than round-off
    assert by_cholesky(singular, torch.cat([r, r]), 1e-30).isfinite().all()
    with pytest.raises(SolverError, match="damping"):
        by_cholesky(J * torch.nan, r, 0.1)


def test_energy_natural_gradient_solves_the_poisson_equation() -> None:
    net = mlp((2, 12, 12, 1))
    optimizer = EnergyNaturalGradient(poisson(net, weight=1.0, count=9), damping=1e-7)
    before = [optimizer.step() for _ in range(45)]
    x = torch.rand(200, 2, **torch64)
    truth = (math.pi * x).sin().prod(1, keepdim=True)
    with torch.no_grad():
        assert float((net(x) - truth).norm() / truth.norm()) < 1e-2
    assert all(b <= a for a, b in pairwise(before))  # the line search never raises the loss


def test_termwise_kfac_is_the_inverse_of_a_sum() -> None:
    """One step against the gradient and the closed form of two Kronecker products, formed densely."""
    net = network()
    problem = poisson(net)
    parts = [kfs.KFAC(part.risk, fisher="ggn", audit=False) for part in problem.parts()]
    gradient = problem.risk.gradient()
    expected: dict[str, Tensor] = {}
    for one, other in zip(parts[0].blocks.values(), parts[1].blocks.values(), strict=True):
        eye = {len(t): torch.eye(len(t), **torch64) for t in (one.A, one.B)}
        dense = sum(torch.kron(b.B + DAMPING * eye[len(b.B)], b.A + DAMPING * eye[len(b.A)]) for b in (one, other))
        M = one.matrix(gradient)
        expected |= one.tensors(torch.linalg.solve(dense, M.flatten()).view_as(M))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = TermwiseKFAC(problem, lr=0.1, damping=DAMPING)
    loss = optimizer.step()
    assert loss == pytest.approx(problem.risk.value(), rel=10)
    for name, p in net.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), 0.1 * expected[f"model.{name}"], rtol=1e-6, atol=1e-9)


def test_termwise_kfac_averages_factors_and_trains() -> None:
    net = network()
    problem = poisson(net)
    first = kfs.KFAC(problem.parts()[0].risk, fisher="ggn", audit=False).blocks["model.2"].A
    optimizer = TermwiseKFAC(problem, damping=1e-2, momentum=0.5, decay=0.75)
    losses = [optimizer.step()]
    second = kfs.KFAC(problem.parts()[0].risk, fisher="ggn", audit=False).blocks["model.2"].A
    losses.append(optimizer.step())
    averages = optimizer.state_dict()["averages"][0]["model.2"][0][0]
    torch.testing.assert_close(averages, 0.75 * first + 0.25 * second)
    losses += [optimizer.step() for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    alone = TermwiseKFAC(problem.parts()[1], damping=1e-2)
    assert alone.step() >= alone.step()


@pytest.mark.parametrize("kind", [EnergyNaturalGradient, TermwiseKFAC])
def test_a_restored_optimizer_takes_the_same_steps(kind: Any) -> None:
    options = {"points_per_step": 20} if kind is EnergyNaturalGradient else {"decay": 0.5}
    net = network()
    optimizer = kind(poisson(net), damping=DAMPING, momentum=0.5, **options)
    for _ in range(2):
        optimizer.step()
    state, copied = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net)
    expected = [optimizer.step() for _ in range(2)]
    other = kind(poisson(copied), damping=0.5, momentum=0.5, **options)
    other.load_state_dict(state)
    assert [other.step() for _ in range(2)] == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(flat(copied), flat(net))
    with pytest.raises(StorageError, match="lacks"):
        other.load_state_dict({})
    small = kind(poisson(mlp((2, 3, 1))))
    with pytest.raises(StorageError, match="another model"):
        small.load_state_dict(state)


def test_line_search() -> None:
    assert line_search(lambda a: (a - 0.25) ** 2, 1.0, -10) == (0.25, 0.0)
    assert line_search(lambda a: (a - 2.0) ** 2, 4.0, -10) == (1.0, 1.0)
    assert line_search(lambda a: 1 + a, 1.0, -5) == (0.0, 1.0)
    assert line_search(lambda a: math.inf if a > 0.01 else 0.5, 1.0, -10)[0] == 2.0**-7


def test_a_direction_that_does_not_help_raises_the_damping() -> None:
    class Uphill(EnergyNaturalGradient):
        def direction(self, rows: list[Rows], params: Params, r: Tensor, last: Params) -> Params:
            return {name: -1e-3 * g for name, g in super().direction(rows, params, r, last).items()}

    net = network()
    optimizer = Uphill(poisson(net), damping=DAMPING, momentum=0.9)
    before, rise = flat(net), [optimizer.step() for _ in range(2)]
    assert rise[0] == rise[1]
    assert torch.equal(flat(net), before)
    assert optimizer.damping == 16 * DAMPING
    assert not optimizer.state_dict()["direction"]


def test_nothing_else_changes() -> None:
    net = network().eval()
    layer = net[2].requires_grad_(False)
    assert isinstance(layer, nn.Linear)
    frozen = layer.weight.clone()
    state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    with torch.no_grad():
        optimizer = EnergyNaturalGradient(poisson(net), points_per_step=10)
        optimizer.step()
        TermwiseKFAC(poisson(net), damping=1e-2).step()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == mode
    assert torch.equal(layer.weight, frozen)
    assert all(p.grad is None for p in net.parameters())


def test_residuals_that_are_not_finite_stop_a_step() -> None:
    """Parameters and state stay. In a line search, such steps are too long."""
    net = network()
    bound = torch.tensor(5.0, **torch64)

    def residual(u: nn.Module, x: Tensor) -> Tensor:
        return taylor(u, x).laplacian + bound.sqrt()

    x = torch.rand(6, 2, **torch64)
    optimizer = EnergyNaturalGradient(Problem(net, [Term(residual, x, name="equation")]))
    optimizer.step()
    before, steps = flat(net), optimizer.steps
    bound -= 10
    with pytest.raises(DataError, match="equation is not finite at point 0"):
        optimizer.step()
    assert torch.equal(flat(net), before)
    assert optimizer.steps == steps


def test_fresh_points_are_drawn_before_each_later_step() -> None:
    calls = []

    def draw() -> Tensor:
        calls.append(1)
        return torch.rand(8, 2, generator=torch.Generator().manual_seed(len(calls)), **torch64)

    net = network()
    optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x: u(x) - 1, draw)]))
    for _ in range(3):
        optimizer.step()
    assert len(calls) == 3


def test_float32_and_systems() -> None:
    net = mlp((1, 8, 2)).float()
    x = torch.linspace(0, 1, 20).unsqueeze(1)

    def oscillator(u: nn.Module, x: Tensor) -> Tensor:
        t = taylor(u, x, second=None)
        return t.gradient[:, 0] - torch.stack([t.value[:, 1], -t.value[:, 0]], 1)

    start = Term(lambda u, x: u(x) - torch.tensor([0.0, 1.0]), x[:1])
    optimizer = EnergyNaturalGradient(Problem(net, [Term(oscillator, x), start]))
    losses = [optimizer.step() for _ in range(30)]
    assert losses[-1] < 1e-4
    assert float((net(x)[:, 0] - x[:, 0].sin()).detach().abs().max()) < 2e-2


def test_settings() -> None:
    problem = poisson(network())
    for options, message in (
        ({"lr": 0.0}, "lr is 0.0"),
        ({"damping": -1.0}, "damping is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": "0"}, "momentum is '0'"),
        ({"points_per_step": 1}, "points_per_step is 1 for 2 terms"),
        ({"points_per_step": 2.5}, "points_per_step is 2.5 for 2 terms"),
        ({"solver": "parameter"}, "solver is 'parameter'.*Did you mean 'parameters'"),
        ({"max_iterations": 0}, "max_iterations is 0"),
    ):
        with pytest.raises(ModelError, match=message):
            EnergyNaturalGradient(problem, **options)
    with pytest.raises(ModelError, match="decay is 1"):
        TermwiseKFAC(problem, decay=1.0)
    with pytest.raises(DtypeError, match="problem is a Sequential"):
        EnergyNaturalGradient(problem.model)  # type: ignore[arg-type]
    assert "lr=0.1, damping=1e-09" in str(EnergyNaturalGradient(problem, lr=0.1, damping=1e-9))


def squeezed(u: Any, x: Tensor) -> Tensor:
    found: Tensor = u(x).tanh().squeeze()
    return found


@pytest.mark.parametrize("out", [1, 2])
def test_residuals_whose_axes_are_squeezed(out: int) -> None:
    """For a single point, `squeeze` removes the axis of points, too."""
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(0), **torch64)
    losses = []
    for residual in (squeezed, lambda u, x: u(x).tanh()):
        optimizer = EnergyNaturalGradient(
            Problem(mlp((2, 3, out)), [Term(residual, x), Term(lambda u, x: u(x) - 1, x)])
        )
        losses.append([optimizer.step() for _ in range(3)])
    assert losses[0] == losses[1]


class Scaled(nn.Module):
    """Residuals as a module without arguments, scaled for a number of points."""

    def __init__(self, residual: Callable[[], Tensor], count: int) -> None:
        super().__init__()
        self.residual, self.count = residual, count

    def forward(self) -> Tensor:
        scaled: Tensor = self.residual() / self.count**0.5
        return scaled


def test_coefficients_that_depend_on_the_point() -> None:
    """The Jacobian of a point by `vmap` equals that of all points."""
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(0), **torch64)
    for full in (0.0, 0.5):

        def residual(u: Any, x: Tensor, full: float = full) -> Tensor:
            C = torch.diag_embed(1 + x**2) + full * torch.ones(2, 2, **torch64)
            return taylor(u, x, second=C).second.squeeze(1)  # type: ignore[union-attr]

        net = mlp((2, 3, 1))
        optimizer = EnergyNaturalGradient(Problem(net, [Term(residual, x)]))
        params = {name: p.detach() for name, p in net.named_parameters()}
        J = jacobian(optimizer._rows(), params, 5)
        _, expected = dense_jacobian(net, Scaled(partial(residual, net, x), 5))
        torch.testing.assert_close(J, expected, rtol=1e-10, atol=1e-12)


def test_a_module_that_occurs_twice() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, **torch64)
    net = nn.Sequential(nn.Linear(1, 3, **torch64), nn.Tanh(), layer, nn.Tanh(), layer, nn.Linear(3, 1, **torch64))
    x = torch.linspace(0, 1, 20, **torch64).unsqueeze(1)
    optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x: u(x) - x.sin(), x)]))
    weight = layer.weight
    params = {name: p.detach() for name, p in net.named_parameters()}
    J = jacobian(optimizer._rows(), params, 20)
    assert layer.weight is weight
    _, expected = dense_jacobian(net, Scaled(lambda: net(x).squeeze(1), 20))
    torch.testing.assert_close(J, expected, rtol=1e-10, atol=1e-12)
    for _ in range(2):
        before = weight.detach().clone()
        optimizer.step()
        assert layer.weight is weight
        assert not torch.equal(weight, before)


@pytest.mark.parametrize("solver", ["parameters", "residuals", "iterative"])
def test_parameters_of_the_residual_are_refused(solver: Literal["parameters", "residuals", "iterative"]) -> None:
    x = torch.linspace(0, 1, 5, **torch64).unsqueeze(1)
    scale = nn.Parameter(torch.ones(1, **torch64))
    problem = Problem(mlp((1, 3, 1)), [Term(lambda u, x: scale * u(x) - 1, x, name="data")])
    optimizer = EnergyNaturalGradient(problem, solver=solver)
    with pytest.raises(ModelError, match=r"esidual (of data )?depends on parameters"):
        optimizer.step()


def test_a_parameter_that_is_released_has_no_momentum_yet() -> None:
    net, x = mlp((1, 3, 1)), torch.linspace(0, 1, 9, **torch64).unsqueeze(1)
    bias = net.get_parameter("0.bias").requires_grad_(False)
    optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x: u(x) - x.sin(), x)]), momentum=0.5)
    optimizer.step()
    before = bias.clone()
    bias.requires_grad_()
    optimizer.step()
    assert not torch.equal(bias, before)


@pytest.mark.parametrize("solver", ["parameters", "residuals", "iterative"])
def test_a_jacobian_of_zeros_changes_nothing(solver: Any) -> None:
    net = nn.Sequential(nn.Linear(1, 2, bias=False, **torch64), nn.Linear(2, 1, bias=False, **torch64))
    for p in net.parameters():
        nn.init.zeros_(p)
    x = torch.linspace(0, 1, 5, **torch64).unsqueeze(1)
    optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x: u(x) - 1, x)]), lr=0.1, solver=solver)
    assert optimizer.step() == pytest.approx(0.5)
    assert not any(p.any() for p in net.parameters())


def test_the_loss_of_some_of_the_points_has_the_scale_of_all() -> None:
    """Residuals that are the same everywhere have the same loss for any points."""
    x = torch.linspace(0, 1, 40, **torch64).unsqueeze(1)
    terms = [Term(lambda u, x: 0 * u(x) + 1, x, 3.0), Term(lambda u, x: 0 * u(x) + 2, x[:8])]
    problem = Problem(mlp((1, 3, 1)), terms)
    assert EnergyNaturalGradient(problem, points_per_step=12).step() == pytest.approx(float(problem().detach()))
