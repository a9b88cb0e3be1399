"""Initial guesses, preconditioned series, least squares, inverses, matrices: against dense matrices and SciPy."""

from typing import Any

import pytest
import torch
from scipy.sparse.linalg import lsmr as scipy_lsmr
from torch import Tensor

from kfs import GGN, KFAC, Hessian, Jacobian
from kfs.errors import DtypeError, ModelError, ShapeError, SolverError
from kfs.operators import Dense, Inverse, LinearOperator, OuterProducts, lsmr, neumann, solve
from kfs.operators.solve import Solution
from kfs.operators.space import Space
from tests.operators.contract import check_contract, close
from tests.operators.matrices import POSITIVE, with_spectrum
from tests.operators.problems import PROBLEMS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_start_saves_iterations() -> None:
    A = with_spectrum(torch.logspace(-2, 1, 12))
    B = random(12, 2)
    X = torch.linalg.solve(A.matrix, B)
    cold = solve(A, B, tolerance=1e-10)
    near = X + 1e-8 * random(12, 2, seed=1)
    warm = solve(A, B, start=near, tolerance=1e-10)
    assert warm.converged
    assert 0 < warm.iterations < cold.iterations
    torch.testing.assert_close(warm.x, X, rtol=1e-7, atol=1e-7)
    there = solve(A, B, start=cold.x, tolerance=1e-8)
    assert (there.iterations, there.converged) == (0, True)
    assert torch.equal(there.x, cold.x)
    # The result does not depend on the initial guess, and a bad guess is not accepted as the result.
    close(solve(A, B, start=1e3 * random(12, 2, seed=2), tolerance=1e-13).x, X)
    close(solve(A, 0 * B, start=B).x, torch.zeros_like(B))
    tiny = solve(A, 1e-150 * B[:, 0], start=1e-150 * near[:, 0], tolerance=1e-10)
    assert tiny.iterations < cold.iterations
    as_dict = {"a": B[:4, 0].reshape(2, 2), "b": B[4:, 0]}
    first = solve(A, as_dict, start={"a": X[:4, 0].reshape(2, 2), "b": X[4:, 0]}, tolerance=1e-8)
    assert first.iterations == 0
    with pytest.raises(ShapeError, match=r"start is a 'vector' with 1 columns.*'matrix' with 2"):
        solve(A, B, start=B[:, 0])
    with pytest.raises(ShapeError, match="in one form"):
        solve(A, B, start=B[:, :1])
    with pytest.raises(SolverError, match="start is not finite"):
        solve(A, B, start=B * torch.nan)


def test_preconditioned_neumann_series() -> None:
    scale = torch.logspace(0, 3, 12, dtype=torch.float64)
    noise = random(12, 12)
    A = Dense(torch.diag(scale) + 0.01 * noise @ noise.T)
    P = Dense(torch.diag(1 / scale))
    b = random(12)
    solution = neumann(A, b, scale=0.9, terms=40, preconditioner=P)
    assert solution.converged
    torch.testing.assert_close(solution.x, torch.linalg.solve(A.matrix, b), rtol=1e-5, atol=1e-8)
    close((b - A @ solution.x).norm() / b.norm(), torch.tensor(solution.residuals[-1], dtype=torch.float64))
    assert not neumann(A, b, scale=1e-3, terms=40).converged
    short = neumann(A, b, scale=0.5, terms=3, preconditioner=P)
    step = torch.eye(12, dtype=torch.float64) - 0.5 * P.matrix @ A.matrix
    first = P.matrix @ b
    close(short.x, 0.5 * (first + step @ first + step @ step @ first))
    with pytest.raises(DtypeError, match=r"preconditioner is torch\.float32"):
        neumann(A, b, scale=0.5, preconditioner=Dense(torch.eye(12)))


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_lsmr_solves_least_squares(shape: tuple[int, int], damping: float) -> None:
    matrix = random(*shape)
    A = Dense(matrix)
    B = random(shape[0], 3, seed=1)
    B[:, 2] = 0
    solution = lsmr(A, B, damping=damping, tolerance=1e-12)
    assert solution.converged
    assert len(solution.residuals) == solution.iterations
    if damping:
        gram = matrix.T @ matrix + damping * torch.eye(shape[1], dtype=torch.float64)
        expected = torch.linalg.solve(gram, matrix.T @ B)
    else:
        expected = torch.linalg.pinv(matrix) @ B
    torch.testing.assert_close(solution.x, expected, rtol=1e-8, atol=1e-9)
    gradient = matrix.T @ (B - matrix @ solution.x) - damping * solution.x
    largest = (gradient[:, :2].norm(dim=0) / (matrix.T @ B[:, :2]).norm(dim=0)).max()
    assert solution.residuals[-1] == pytest.approx(float(largest), rel=1e-3, abs=1e-15)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_lsmr_goes_the_way_of_scipy(damping: float, iterations: int) -> None:
    """Not only the limit, but every iterate is that of SciPy. Without the square root of the damping, it is not."""
    matrix, b = random(12, 7), random(12, seed=1)
    mine = lsmr(Dense(matrix), b, damping=damping, tolerance=0.0, max_iterations=iterations)
    options: Any = {"atol": 0.0, "btol": 0.0, "conlim": 0.0, "maxiter": iterations}
    theirs = scipy_lsmr(matrix.numpy(), b.numpy(), damp=damping**0.5, **options)[0]
    close(mine.x, torch.from_numpy(theirs))
    assert (mine.iterations, mine.converged) == (iterations, False)
    if damping:
        other = scipy_lsmr(matrix.numpy(), b.numpy(), damp=damping, **options)[0]
        assert (mine.x - torch.from_numpy(other)).norm() > 1e-3 * mine.x.norm()


def test_lsmr_in_all_forms_and_for_indefinite_operators() -> None:
    risk, *_ = PROBLEMS[0].make()
    J, H = Jacobian(risk), Hessian(risk).shift(-0.05)
    u = random(*J.codomain.shapes["prediction"])
    solution = lsmr(J, {"prediction": u}, tolerance=1e-10)
    assert list(solution.x) == list(risk.params)
    flat = torch.cat([t.flatten() for t in solution.x.values()])
    torch.testing.assert_close(flat, torch.linalg.pinv(J.to_dense()) @ u.flatten(), rtol=1e-6, atol=1e-7)
    values = torch.linalg.eigvalsh(H.to_dense())
    assert values[0] < 0 < values[-1]
    b = random(31)
    with pytest.raises(SolverError, match="not positive definite") as refused:
        solve(H, b)
    # The error gives a lower bound of the missing damping: a quotient between the smallest eigenvalue and zero.
    assert values[0] <= 1.01 * float(str(refused.value).split("curvature ")[1].split(". ")[0]) < 0
    torch.testing.assert_close(lsmr(H, b, tolerance=1e-12).x, torch.linalg.solve(H.to_dense(), b), rtol=1e-5, atol=1e-6)
    nothing = lsmr(J, {"prediction": 0 * u})
    assert (nothing.iterations, nothing.converged, float(nothing.x["0.bias"].abs().max())) == (0, True, 0.0)
    with pytest.raises(ModelError, match="damping is -1"):
        lsmr(J, {"prediction": u}, damping=-1)
    low = lsmr(Dense(random(12, 7).float()), random(12).float(), tolerance=1e-5)
    assert low.converged


INVERSES: dict[str, Any] = {
    "cg": lambda A: Inverse(A, tolerance=1e-14),
    "cg with a start": lambda A: Inverse(A, "cg", tolerance=1e-14, max_iterations=500),
    "lsmr": lambda A: Inverse(A, "lsmr", tolerance=1e-13),
    "neumann": lambda A: Inverse(A, "neumann", scale=0.5, terms=200),
    "a function": lambda A: Inverse(A, solve, tolerance=1e-14),
}


@pytest.mark.parametrize("name", INVERSES)
def test_inverses_are_operators(name: str) -> None:
    A = with_spectrum(POSITIVE)
    inverse = INVERSES[name](A)
    check_contract(inverse, torch.linalg.inv(A.matrix))
    close((inverse @ A) @ random(12), random(12))
    assert inverse.symmetric


def test_inverses_of_operators_that_are_not_symmetric() -> None:
    matrix = random(7, 7) + 5 * torch.eye(7, dtype=torch.float64)
    A = Dense(matrix)
    assert not A.symmetric
    check_contract(Inverse(A, "lsmr", tolerance=1e-14), torch.linalg.inv(matrix))
    wide = Dense(random(4, 9))
    check_contract(Inverse(wide, "lsmr", tolerance=1e-14), torch.linalg.pinv(wide.matrix))


def test_inverses_refuse() -> None:
    A = with_spectrum(POSITIVE)
    b = random(12)
    with pytest.raises(ModelError, match=r"solver is 'gmres'.*'lsmr'"):
        Inverse(A, "gmres")  # type: ignore[arg-type]
    with pytest.raises(SolverError, match=r"has not converged: after 2 iterations.*check=False"):
        Inverse(A, max_iterations=2, tolerance=1e-12) @ b
    cut_off = Inverse(A, "neumann", scale=0.1, terms=2, check=False)
    close(cut_off @ b, neumann(A, b, scale=0.1, terms=2).x)

    def gives_up(_: LinearOperator, b: Any) -> Solution[Any]:
        return Solution(b, 0, (), False)

    with pytest.raises(SolverError, match="residual is nan"):
        Inverse(A, gives_up) @ b


def test_an_inverse_preconditions_another() -> None:
    """The parts together, on a network: GGN, KFAC's inverse, and conjugate gradients."""
    risk, *_ = PROBLEMS[1].make((2, 3))
    G = GGN(risk).shift(1e-3)
    plain = Inverse(G, tolerance=1e-10)
    better = Inverse(G, tolerance=1e-10, preconditioner=KFAC(risk).inverse(1e-3))
    g = risk.gradient()
    both = {name: torch.stack([t, -2 * t]) for name, t in g.items()}
    expected = torch.linalg.solve(G.to_dense(), G.domain.flatten({n: t[None] for n, t in g.items()})[0])
    for inverse in (plain, better):
        x = inverse @ g
        torch.testing.assert_close(torch.cat([t.flatten() for t in x.values()]), expected, rtol=1e-6, atol=1e-8)
        several = inverse @ both
        for name, t in several.items():
            torch.testing.assert_close(t, torch.stack([x[name], -2 * x[name]]), rtol=1e-6, atol=1e-8)


def test_matrices_are_operators() -> None:
    space = Space({"a": (2, 2), "b": (3,)}, torch.float64, torch.device("cpu"))
    square, wide = random(7, 7), random(4, 7)
    check_contract(Dense(square), square)
    check_contract(Dense(square + square.T, space), square + square.T)
    assert Dense(square + square.T, space).symmetric
    assert not Dense(square).symmetric
    check_contract(Dense(wide), wide)
    check_contract(Dense(wide, space), wide)
    other = Space({"y": (4,)}, torch.float64, torch.device("cpu"))
    check_contract(Dense(wide, space, other), wide)
    for bad in (random(3), [[1.0]]):
        with pytest.raises(ShapeError, match=r"shape \[rows, columns\]"):
            Dense(bad)  # type: ignore[arg-type]
    for matrix, domain in ((random(6, 6), space), (square.float(), space)):
        with pytest.raises(ShapeError, match="spaces of the right size and dtype"):
            Dense(matrix, domain)


def test_outer_products_are_operators() -> None:
    space = Space({"a": (2, 2), "b": (3,)}, torch.float64, torch.device("cpu"))
    V, weights = random(7, 5), random(5, seed=1)
    expected = sum(w * torch.outer(v, v) for w, v in zip(weights, V.T, strict=True))
    assert isinstance(expected, Tensor)
    by_name = space.unflatten(V.T)
    for A in (
        OuterProducts(V, weights),
        OuterProducts(V, weights, space),
        OuterProducts(by_name, weights),
        OuterProducts(list(by_name.values()), weights, space),
    ):
        check_contract(A, expected)
    check_contract(OuterProducts(V), V @ V.T)
    with pytest.raises(ShapeError, match="one number for each vector"):
        OuterProducts(V, weights[:2])
    with pytest.raises(ShapeError, match="single vector"):
        OuterProducts(V[:, 0])
    for bad in ([V], {}, {"a": 1.0}):
        with pytest.raises(DtypeError, match="need a space"):
            OuterProducts(bad)  # type: ignore[arg-type]
