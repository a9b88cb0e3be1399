"""Solvers and eigenvalues on operators whose dense value is known."""

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import Linear, MSELoss, Sequential, Tanh

from kfs import GGN, KFAC, EmpiricalRisk, Hessian, Jacobian
from kfs.errors import DtypeError, ShapeError, SolverError
from kfs.operators import Identity, LinearOperator, eigenvalues, neumann, solve, spectral_density, trace
from tests.operators.contract import check_contract, close
from tests.operators.matrices import POSITIVE, Dense, with_spectrum
from tests.operators.problems import PROBLEMS


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


def sum_of_two_networks() -> tuple[LinearOperator, Tensor]:
    """A linear system from two networks, with a condition number of some thousand."""
    torch.manual_seed(0)
    models = [Sequential(Linear(4, 3), Tanh(), Linear(3, 2)).double() for _ in range(2)]
    data = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    first, second = (GGN(EmpiricalRisk(model, MSELoss(), data)) for model in models)
    point, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    return (first + second).shift(1e-3), first @ point + second @ other


def test_more_iterations_than_rows() -> None:
    """Due to round-off, they are necessary. A limit of one iteration per row is too low, as the report says."""
    A, b = sum_of_two_networks()
    rows = A.shape[0]
    assert torch.linalg.cond(A.to_dense()) < 1e4
    expected = torch.linalg.solve(A.to_dense(), b)
    solution = solve(A, b)
    assert solution.converged
    assert rows < solution.iterations < 10 * rows
    error = (solution.x - expected).norm()
    assert error < 1e-6 * 1e4 * expected.norm()  # the tolerance times the condition number
    early = solve(A, b, max_iterations=rows)
    assert (early.iterations, early.converged) == (rows, False)
    assert (early.x - expected).norm() > 10 * error
    for x, residuals in ((solution.x, solution.residuals), (early.x, early.residuals)):
        assert residuals[-1] == pytest.approx(float((b - A @ x).norm() / b.norm()), rel=1e-3)


def test_iterations_end_without_convergence() -> None:
    """If float32 cannot reach the tolerance, iterations end, by default, after at most ten iterations per row."""
    torch.manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64))
    A = Dense((Q @ torch.diag(torch.logspace(-9, 0, 30, dtype=torch.float64)) @ Q.T).float())
    A.matrix = (A.matrix + A.matrix.T) / 2 + 1e-6 * torch.eye(30)
    solution = solve(A, torch.randn(30), tolerance=1e-9)
    assert not solution.converged
    assert 30 < solution.iterations <= 300
    assert solution.residuals[-1] > 1e-9


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
    noise[0], noise[1] = 1, 1e-15  # as small as a rounding error, so its negative curvature might be round-off, too
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


def test_neumann_series_stop_as_soon_as_they_diverge() -> None:
    A = Dense(17 * torch.eye(6, dtype=torch.float64))
    b = torch.ones(6, dtype=torch.float64)
    # Every term is -16 times the previous one, so residuals are 16, 256, ..., and 16^5 is the first above a million.
    with pytest.raises(SolverError, match=r"residual is 1\.0e\+06 after 5 terms"):
        neumann(A, b, scale=1.0)
    assert neumann(A, b, scale=1.0, terms=4).residuals == (16.0, 16.0**2, 16.0**3, 16.0**4)
    with pytest.raises(SolverError, match="residual is nan after 1 terms"):
        neumann(Dense(torch.nan * A.matrix), b, scale=1.0)


def test_outermost_eigenvalues() -> None:
    A = with_spectrum(torch.linspace(-1, 4, 20))
    dense = torch.linalg.eigvalsh(A.matrix)
    values, vectors = eigenvalues(A, 3)
    close(values, dense.flip(0)[:3])
    close(A @ vectors, vectors * values)
    values, _ = eigenvalues(A, 2, largest=False)
    close(values, dense[:2].flip(0))
    for k in (0, 20, 2.0):
        with pytest.raises(ShapeError, match="1 <= k < rows"):
            eigenvalues(A, k)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="not known to be symmetric"):
        eigenvalues(Dense(A.matrix, symmetric=False), 2)
    with pytest.raises(SolverError, match="Lanczos method failed"):
        eigenvalues(Dense(torch.zeros(20, 20)), 2)


def test_eigenvectors_of_signs_are_found() -> None:
    A = Dense(torch.block_diag(torch.ones(2, 2, dtype=torch.float64), torch.zeros(10, 10, dtype=torch.float64)))
    for seed in range(4):  # every second vector of signs is orthogonal to the dominant eigenvector
        close(eigenvalues(A, 1, seed=seed)[0], torch.tensor([2.0], dtype=torch.float64))


def test_spectral_density_has_the_right_moments() -> None:
    A = with_spectrum(torch.linspace(-1, 4, 20))
    density = spectral_density(A, num_vectors=200, num_steps=20)
    close(density.weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    for power in (1, 2, 3):
        exact = torch.linalg.matrix_power(A.matrix, power).trace().item() / 20
        # 200 random vectors of 20 entries have an error of about one percent; the third power has a heavier tail.
        assert density.expectation(power) == pytest.approx(exact, rel=0.05)
    # With as many steps as rows, the nodes are the eigenvalues themselves.
    distances = (density.nodes.unsqueeze(1) - torch.linalg.eigvalsh(A.matrix)).abs().min(1).values
    assert distances.max() < 1e-6
    grid = torch.linspace(-4, 8, 2000, dtype=torch.float64)
    smooth = density.on(grid, width=0.3)
    assert torch.trapezoid(smooth, grid).item() == pytest.approx(1, abs=1e-3)
    assert (smooth >= 0).all()
    few = spectral_density(with_spectrum(torch.ones(20)), num_vectors=2)  # one eigenvalue: Lanczos ends early
    close(few.nodes, torch.ones(2, dtype=torch.float64))


def test_spectral_density_has_no_ghosts() -> None:
    """Without reorthogonalization, Lanczos finds outer eigenvalues a second time, and misses inner ones."""
    A = with_spectrum(torch.cat([torch.tensor([1e8, 1e4]), torch.linspace(0, 1, 38)]))
    nodes = spectral_density(A, num_vectors=1, num_steps=40).nodes
    # Float64's eps, 2.2e-16, times the largest eigenvalue and some hundred operations. A ghost is wrong by 1 or more.
    assert (nodes.sort().values - torch.linalg.eigvalsh(A.matrix)).abs().max() < 1e-5


def test_largest_by_magnitude() -> None:
    A = with_spectrum(torch.tensor([-5.0, -2.0, -0.1, 0.2, 0.5, 1.0, 1.5, 3.0]))
    values, vectors = eigenvalues(A, 3, by="magnitude")
    close(values, torch.tensor([3.0, -2.0, -5.0], dtype=torch.float64))
    close(A.matrix @ vectors, vectors * values)
    close(eigenvalues(A, 3)[0], torch.tensor([3.0, 1.5, 1.0], dtype=torch.float64))
    small = eigenvalues(A, 2, largest=False, by="magnitude")[0]
    # Two float32 numbers in the spectrum, and an iteration that converges slowly.
    torch.testing.assert_close(small, torch.tensor([0.2, -0.1], dtype=torch.float64), rtol=1e-6, atol=0.0)
    with pytest.raises(ShapeError, match=r"by is 'size'.*'magnitude'"):
        eigenvalues(A, 2, by="size")  # type: ignore[arg-type]


def test_densities_on_a_logarithmic_axis() -> None:
    spectrum = torch.cat([torch.zeros(4), 10.0 ** torch.linspace(-3, 1, 8), -torch.ones(4)])
    A = with_spectrum(spectrum)
    density = spectral_density(A, num_vectors=100, num_steps=16, probes="normal")
    floor = 1e-5
    logs = density.log10(floor)
    assert torch.equal(logs.weights, density.weights)
    exact = float((spectrum.double().abs() + floor).log10().mean())
    # 100 vectors of 16 entries have an error of some percent.
    assert logs.expectation(1) == pytest.approx(exact, rel=0.1)
    grid = torch.linspace(-7, 3, 2000, dtype=torch.float64)
    smooth = logs.on(grid, width=0.1)
    assert torch.trapezoid(smooth, grid).item() == pytest.approx(1, abs=1e-3)
    at_zero = smooth[(grid - torch.tensor(floor).log10()).abs() < 0.5].sum() * (grid[1] - grid[0])
    assert float(at_zero) == pytest.approx(4 / 16, abs=0.05)  # four eigenvalues of zero are at the floor
    # By default, the floor is at the round-off.
    assert density.log10().nodes.min() > torch.tensor(10 * torch.finfo(torch.float64).eps / 2).log10()
    assert spectral_density(with_spectrum(torch.zeros(9)), num_vectors=1).log10().nodes.isfinite().all()
    with pytest.raises(ShapeError, match="floor is 0"):
        density.log10(0.0)


def test_densities_of_normal_vectors_have_the_right_moments() -> None:
    A = with_spectrum(torch.linspace(-1, 4, 20))
    density = spectral_density(A, num_vectors=400, num_steps=20, probes="normal")
    for power in (1, 2):
        exact = torch.linalg.matrix_power(A.matrix, power).trace().item() / 20
        assert density.expectation(power) == pytest.approx(exact, rel=0.05)


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


def test_sums_of_a_list() -> None:
    """`sum` starts with zero; other numbers are not operators."""
    A, B = with_spectrum(POSITIVE), with_spectrum(POSITIVE - 1)
    close(sum([A, B, A]).to_dense(), 2 * A.matrix + B.matrix)  # type: ignore[union-attr]
    with pytest.raises(DtypeError, match=r"A int cannot be added.*A\.shift"):
        1 + A


def test_indices_of_numpy() -> None:
    A = with_spectrum(POSITIVE)
    places = numpy.array([5, 1, -1])
    expected = A.matrix[places][:, places]
    backward = places[::-1].copy()[::-1]
    fixed = places.copy()
    fixed.flags.writeable = False
    for index in (places, list(places), places.tolist(), torch.from_numpy(places), backward, fixed):
        close(A.submatrix(index).to_dense(), expected)
    with pytest.raises(ShapeError, match=r"An index of shape \[\]"):
        A.submatrix(numpy.array(3))
    mask = numpy.arange(12) < 3
    close(A.submatrix(mask).to_dense(), A.matrix[:3, :3])


@pytest.mark.parametrize("nothing", [3, 2.5, None])
def test_single_numbers_are_no_choice_of_rows(nothing: object) -> None:
    A = with_spectrum(POSITIVE)
    message = rf"{nothing} does not choose rows or columns.*\[3\] for one"
    with pytest.raises(ShapeError, match=message):
        A.submatrix(nothing)  # type: ignore[arg-type]
    if nothing is not None:  # without columns, they are the rows
        with pytest.raises(ShapeError, match=message):
            A.submatrix(["a"], nothing)  # type: ignore[arg-type]


def test_dictionaries_of_something_else() -> None:
    with pytest.raises(DtypeError, match="The dictionary has a float"):
        with_spectrum(POSITIVE) @ {"a": 1.0, "b": torch.zeros(8, dtype=torch.float64)}  # type: ignore[dict-item]


def test_what_only_multiplies_says_who_can_do_more() -> None:
    model = Sequential(Linear(2, 3), Tanh(), Linear(3, 2)).double()
    data = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, MSELoss(), data)
    with pytest.raises(AttributeError, match=r"GGN has no 'inverse'.*kfs\.operators\.Inverse\(A\.shift\(damping\)\)"):
        GGN(risk).inverse(0.1)  # type: ignore[attr-defined]
    other_blocks = KFAC(risk) + KFAC(risk, joint_bias=False)
    with pytest.raises(AttributeError, match=r"KFAC \+ KFAC has no 'solve': it is not made of blocks"):
        other_blocks.solve(torch.ones(17))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="object has no attribute 'inverze'"):
        other_blocks.inverze  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(GGN(risk), "logdet")
