"""Solvers, eigenvalues and estimators on operators whose dense value is known."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfs import GGN, Hessian, Jacobian
from kfs.errors import DtypeError, ShapeError, SolverError
from kfs.operators import (
    Identity,
    LinearOperator,
    diagonal,
    eigenvalues,
    neumann,
    solve,
    spectral_density,
    squared_frobenius_norm,
    trace,
)
from kfs.operators.space import Columns, Space
from tests.operators.contract import check_contract, close
from tests.operators.problems import PROBLEMS


class Dense(LinearOperator):
    """A given matrix on a space of two tensors."""

    def __init__(self, matrix: Tensor, symmetric: bool = True) -> None:
        size = len(matrix)
        space = Space({"a": (2, 2), "b": (size - 4,)}, matrix.dtype, matrix.device)
        super().__init__(space, space)
        self.matrix, self.symmetric = matrix, symmetric

    def multiply(self, columns: Columns) -> Columns:
        return self.domain.unflatten(self.domain.flatten(columns) @ self.matrix.T)

    def multiply_transposed(self, columns: Columns) -> Columns:
        return self.domain.unflatten(self.domain.flatten(columns) @ self.matrix)


def with_spectrum(spectrum: Tensor) -> Dense:
    Q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))
    return Dense(Q @ torch.diag(spectrum.double()) @ Q.T)


POSITIVE = torch.linspace(0.5, 3, 12)
DECAYING = 0.5 ** torch.arange(40)


def test_the_helper_is_an_operator() -> None:
    A = Dense(torch.randn(7, 7, dtype=torch.float64), symmetric=False)
    check_contract(A, A.matrix)


def test_solve_in_all_forms() -> None:
    A = with_spectrum(POSITIVE)
    B = torch.randn(12, 3, dtype=torch.float64)
    B[:, 2] = 0
    X = torch.linalg.solve(A.matrix, B)
    solution = solve(A, B, tolerance=1e-12)
    assert solution.converged
    assert 0 < solution.iterations <= 13
    assert len(solution.residuals) == solution.iterations
    close(solution.x, X)
    close(solve(A, B[:, 0], tolerance=1e-12).x, X[:, 0])
    as_dict = {"a": B[:4, 0].reshape(2, 2), "b": B[4:, 0]}
    x = solve(A, as_dict, tolerance=1e-12, progress=True).x
    close(torch.cat([x["a"].flatten(), x["b"]]), X[:, 0])
    nothing = solve(A, B[:, 2])
    assert (nothing.iterations, nothing.converged, float(nothing.x.abs().max())) == (0, True, 0.0)


def test_a_preconditioner_saves_iterations() -> None:
    scale = torch.logspace(0, 4, 30, dtype=torch.float64)
    noise = torch.randn(30, 30, dtype=torch.float64)
    A = Dense(torch.diag(scale) + 0.01 * noise @ noise.T)
    b = torch.randn(30, dtype=torch.float64)
    plain = solve(A, b, tolerance=1e-10, max_iterations=200)
    better = solve(A, b, tolerance=1e-10, max_iterations=200, preconditioner=Dense(torch.diag(1 / scale)))
    assert better.converged
    assert better.iterations < plain.iterations / 2
    close(A @ better.x, b)


def test_solvers_report_and_refuse() -> None:
    A = with_spectrum(POSITIVE)
    b = torch.randn(12, dtype=torch.float64)
    early = solve(A, b, tolerance=1e-12, max_iterations=2)
    assert (early.iterations, early.converged) == (2, False)
    close((b - A @ early.x).norm() / b.norm(), torch.tensor(early.residuals[-1], dtype=torch.float64))
    with pytest.raises(SolverError, match=r"not positive definite.*A\.shift\(damping\)"):
        solve(with_spectrum(POSITIVE - 1), b, tolerance=1e-12)
    risk, *_ = PROBLEMS[0].make()
    for call in (solve, lambda A, b: neumann(A, b, scale=0.1)):
        for wrong in (Jacobian(risk), Dense(A.matrix, symmetric=False)):
            with pytest.raises(ShapeError, match="symmetric one that maps a space to itself"):
                call(wrong, b)
        with pytest.raises(SolverError, match="right-hand side is not finite"):
            call(A, b * torch.nan)
        with pytest.raises(ShapeError, match="no columns"):
            call(A, torch.zeros(12, 0, dtype=torch.float64))


def test_reported_residuals_are_true_in_low_precision() -> None:
    spectrum = torch.logspace(-4, 2, 60)
    Q, _ = torch.linalg.qr(torch.randn(60, 60))
    A, b = Dense(Q @ torch.diag(spectrum) @ Q.T), torch.randn(60)
    A.matrix = (A.matrix + A.matrix.T) / 2
    solution = solve(A, b, tolerance=1e-6, max_iterations=3000)
    true = ((b - A @ solution.x).norm() / b.norm()).item()
    assert solution.residuals[-1] == pytest.approx(true, rel=0.5)
    assert solution.converged == (solution.residuals[-1] <= 1e-6)
    tiny = solve(Dense(torch.eye(6)), torch.full((6,), 1e-30))
    assert torch.allclose(tiny.x, torch.full((6,), 1e-30))


def test_what_precision_cannot_resolve_is_not_blamed_on_the_operator() -> None:
    A = with_spectrum(torch.logspace(-1, 0, 10))
    b = torch.randn(10, dtype=torch.float64)
    solution = solve(A, b, tolerance=0.0, max_iterations=1000)
    assert not solution.converged
    assert solution.residuals[-1] < 1e-13  # float64's eps, 2.2e-16, times a condition number of ten and some rounding
    signs = torch.ones(10, dtype=torch.float64)
    signs[1] = -1
    noise = torch.zeros(10, dtype=torch.float64)
    noise[0], noise[1] = 1, 1e-15  # as small as a rounding error, so its negative curvature might be one, too
    solution = solve(Dense(torch.diag(signs)), noise, tolerance=0.0)
    assert not solution.converged
    assert solution.residuals[-1] < 1e-14
    half = Dense(A.matrix.half())
    solution = solve(half, b.half())
    assert not solution.converged
    assert solution.x.dtype == torch.float16
    assert solution.residuals[-1] < 0.02  # float16's eps, 1e-3, times a condition number of ten
    single, b = Dense(A.matrix.float()), b.float()
    for size in (1e-30, 1e30):
        assert solve(single, b, tolerance=1e-4, preconditioner=size * Identity(single.domain)).converged
        assert solve(Dense(size * single.matrix), b, tolerance=1e-4).converged


def test_breakdowns_name_their_cause() -> None:
    A = with_spectrum(POSITIVE)
    b = torch.ones(12, dtype=torch.float64)
    for factor in (-1.0, 0.0):
        with pytest.raises(SolverError, match=r"preconditioner is not positive definite.*or none"):
            solve(A, b, preconditioner=factor * Identity(A.domain))
    with pytest.raises(SolverError, match="operator is not positive definite"):
        solve(0 * A, b)
    with pytest.raises(SolverError, match=r"left the range of torch\.float32.*wider dtype"):
        solve(Dense(1e-42 * A.matrix.float()), b.float())
    with pytest.raises(DtypeError, match=r"preconditioner is torch\.float64, but the operator is torch\.float32"):
        solve(Dense(A.matrix.float()), b.float(), preconditioner=A)


def test_tiny_right_hand_sides_have_honest_residuals() -> None:
    A = with_spectrum(POSITIVE)
    b = 1e-170 * torch.randn(12, dtype=torch.float64)
    solution = neumann(A, b, scale=0.1, terms=1)
    assert not solution.converged
    assert solution.residuals[0] == pytest.approx(float((1e170 * (b - A @ solution.x)).norm() / (1e170 * b).norm()))
    close(1e170 * neumann(A, b, scale=0.5, terms=150).x, torch.linalg.solve(A.matrix, 1e170 * b))


def test_neumann_series() -> None:
    A = with_spectrum(POSITIVE)
    b = torch.randn(12, dtype=torch.float64)
    solution = neumann(A, b, scale=0.5, terms=150)
    assert solution.converged
    close(solution.x, torch.linalg.solve(A.matrix, b))
    assert not neumann(A, b, scale=0.001, terms=2).converged
    short = neumann(A, b, scale=0.5, terms=3)
    term = torch.eye(12, dtype=torch.float64) - 0.5 * A.matrix
    close(short.x, 0.5 * (b + term @ b + term @ term @ b))
    close((b - A @ short.x).norm() / b.norm(), torch.tensor(short.residuals[-1], dtype=torch.float64))
    with pytest.raises(SolverError, match="diverges"):
        neumann(A, b, scale=5.0)


def test_outermost_eigenvalues() -> None:
    A = with_spectrum(torch.linspace(-1, 4, 20))
    dense = torch.linalg.eigvalsh(A.matrix)
    values, vectors = eigenvalues(A, 3)
    close(values, dense.flip(0)[:3])
    close(A @ vectors, vectors * values)
    values, _ = eigenvalues(A, 2, largest=False)
    close(values, dense[:2].flip(0))
    for k in (0, 20):
        with pytest.raises(ShapeError, match="1 <= k < rows"):
            eigenvalues(A, k)
    with pytest.raises(ShapeError, match="not known to be symmetric"):
        eigenvalues(Dense(A.matrix, symmetric=False), 2)


def test_eigenvectors_of_signs_are_found() -> None:
    A = Dense(torch.block_diag(torch.ones(2, 2, dtype=torch.float64), torch.zeros(10, 10, dtype=torch.float64)))
    for seed in range(4):  # every second vector of signs is orthogonal to the only eigenvector that matters
        close(eigenvalues(A, 1, seed=seed)[0], torch.tensor([2.0], dtype=torch.float64))


def test_spectral_density_has_the_right_moments() -> None:
    A = with_spectrum(torch.linspace(-1, 4, 20))
    density = spectral_density(A, num_vectors=200, num_steps=20)
    close(density.weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    for power in (1, 2, 3):
        exact = torch.linalg.matrix_power(A.matrix, power).trace().item() / 20
        # 200 random vectors of 20 entries scatter by one percent and some; the third power has a heavier tail.
        assert density.expectation(power) == pytest.approx(exact, rel=0.05)
    # With as many steps as rows the nodes are the eigenvalues themselves.
    distances = (density.nodes.unsqueeze(1) - torch.linalg.eigvalsh(A.matrix)).abs().min(1).values
    assert distances.max() < 1e-6
    grid = torch.linspace(-4, 8, 2000, dtype=torch.float64)
    smooth = density.on(grid, width=0.3)
    assert torch.trapezoid(smooth, grid).item() == pytest.approx(1, abs=1e-3)
    assert (smooth >= 0).all()
    few = spectral_density(with_spectrum(torch.ones(20)), num_vectors=2)  # one eigenvalue: Lanczos ends early
    close(few.nodes, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_traces_come_with_honest_error_bars(method: Any) -> None:
    A = with_spectrum(torch.linspace(0.5, 2, 40))
    exact = A.matrix.trace()
    estimates = [trace(A, method=method, products=24, seed=seed) for seed in range(40)]
    deviations = torch.stack([(e.value - exact) / e.error for e in estimates])
    # Student's t with seven degrees of freedom or more: standard deviation about one, mean about zero. The samples of
    # XTrace are not independent, so its bars are too short by a factor of up to two.
    assert 0.6 < deviations.std() < (2.2 if method == "xtrace" else 1.7)
    assert deviations.mean().abs() < 4 * deviations.std() / 40**0.5
    assert all(e.products <= 24 for e in estimates)
    again = trace(A, method=method, products=24, seed=3)
    assert torch.equal(again.value, estimates[3].value)


def test_decaying_spectra_are_easy_for_the_better_methods() -> None:
    A = with_spectrum(DECAYING)
    exact = A.matrix.trace()
    errors: dict[str, Tensor] = {}
    for method in ("hutchinson", "hutch++", "xtrace"):
        values = torch.stack([trace(A, method=method, products=30, seed=seed).value for seed in range(20)])
        errors[method] = (values - exact).abs().mean()
    assert errors["hutch++"] < 0.02 * errors["hutchinson"]
    assert errors["xtrace"] < 0.5 * errors["hutch++"]


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_low_rank_is_exact(method: Any) -> None:
    A = with_spectrum(torch.cat([torch.tensor([3.0, 1.0, 0.2]), torch.zeros(37)]))
    estimate = trace(A, method=method, products=30)
    assert estimate.value.item() == pytest.approx(4.2, rel=1e-7)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_traces_scale_with_the_operator(method: Any, size: float) -> None:
    matrix = with_spectrum(torch.linspace(0.5, 2, 40)).matrix.float()
    one, scaled = (trace(Dense(factor * matrix), method=method, products=24) for factor in (1.0, size))
    # Float32's eps, 1.2e-7, times some hundred operations.
    assert scaled.value.item() / size == pytest.approx(one.value.item(), rel=1e-4)
    assert scaled.error.item() / size == pytest.approx(one.error.item(), rel=1e-2)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_small_and_zero_operators(method: Any) -> None:
    for size in (5, 8):
        estimate = trace(with_spectrum(torch.linspace(1, 2, size)), method=method)
        assert estimate.value.item() == pytest.approx(1.5 * size)
        assert (estimate.error.item(), estimate.products) == (0, size)
    zero = trace(Dense(torch.zeros(20, 20)), method=method, products=12)
    assert (zero.value.item(), zero.error.item()) == (0, 0)
    with pytest.raises(SolverError, match="Lanczos method failed"):
        eigenvalues(Dense(torch.zeros(20, 20)), 2)


def test_diagonal_and_norm_estimates() -> None:
    A = Dense(torch.randn(12, 12, dtype=torch.float64), symmetric=False)
    estimate = diagonal(A, products=400, seed=1)
    assert ((estimate.value - A.matrix.diagonal()).abs() < 4.5 * estimate.error).all()
    norm = squared_frobenius_norm(A, products=400, seed=1)
    assert abs(norm.value - (A.matrix**2).sum()) < 4 * norm.error
    state = torch.get_rng_state()
    diagonal(A)
    assert torch.equal(torch.get_rng_state(), state)


def test_estimators_refuse_bad_settings() -> None:
    A = with_spectrum(POSITIVE)
    with pytest.raises(ShapeError, match="method is 'exact'"):
        trace(A, method="exact")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="Spend at least 6"):
        trace(A, products=5)
    risk, *_ = PROBLEMS[0].make()
    with pytest.raises(ShapeError, match="maps a space to itself"):
        trace(Jacobian(risk))
    J = Jacobian(risk)
    norm = squared_frobenius_norm(J, products=200)
    assert abs(norm.value - (J.to_dense() ** 2).sum()) < 4 * norm.error


def test_everything_on_a_network() -> None:
    risk, *_ = PROBLEMS[1].make((2, 3))
    G, H = GGN(risk), Hessian(risk)
    gradient = risk.gradient()
    step = solve(G.shift(1e-2), gradient, tolerance=1e-10)
    assert step.converged
    flat = torch.cat([g.flatten() for g in gradient.values()])
    expected = torch.linalg.solve(G.to_dense() + 1e-2 * torch.eye(31, dtype=torch.float64), flat)
    close(torch.cat([x.flatten() for x in step.x.values()]), expected)
    close(eigenvalues(H, 2)[0], torch.linalg.eigvalsh(H.to_dense()).flip(0)[:2])
    estimate = trace(H, products=24)
    assert abs(estimate.value - H.to_dense().trace()) < 5 * estimate.error + 1e-6
