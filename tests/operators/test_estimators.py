"""Estimators of trace, diagonal and norm, on operators whose dense value is known."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfs import Jacobian
from kfs.errors import ShapeError
from kfs.operators import diagonal, squared_frobenius_norm, trace
from kfs.operators.estimate import random_columns
from kfs.operators.space import Columns
from tests.operators.contract import close
from tests.operators.matrices import DECAYING, POSITIVE, Dense, with_spectrum
from tests.operators.problems import PROBLEMS

METHODS: list[Any] = ["hutchinson", "hutch++", "xtrace"]


def definition(method: str, A: Tensor, products: int, seed: int, probes: Any = "rademacher") -> Tensor:
    """The samples whose mean is the estimate, by dense matrices and a loop over test vectors."""
    num = {"hutchinson": products, "hutch++": 2 * (products // 3), "xtrace": products // 2}[method]
    omega = random_columns(probes, len(A), num, A.dtype, A.device, seed)
    samples = []
    for place in range(num // 2 if method == "hutch++" else 0, num):
        w = omega[:, place]
        sketch = torch.zeros(len(A), 0, dtype=A.dtype)
        if method == "hutch++":
            sketch = omega[:, : num // 2]
        elif method == "xtrace":
            sketch = torch.cat([omega[:, :place], omega[:, place + 1 :]], 1)
        Q, _ = torch.linalg.qr(A @ sketch)
        P = Q @ Q.T  # the projection to the sketch's range
        rest = w - P @ w
        samples.append((P @ A).trace() + rest @ A @ rest)
    return torch.stack(samples)


@pytest.mark.parametrize("probes", ["rademacher", "normal"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("products", [24, 25, 26])
def test_traces_are_the_definition(method: Any, products: int, probes: Any) -> None:
    A = with_spectrum(torch.linspace(0.5, 2, 40))
    samples = definition(method, A.matrix, products, 5, probes)
    estimate = trace(A, method=method, products=products, seed=5, probes=probes)
    close(estimate.value, samples.mean())
    squares = ((samples - samples.mean()) ** 2).sum()
    close(estimate.error, (squares / (len(samples) - 1) / len(samples)).sqrt())


class Counting(Dense):
    """A matrix that counts the columns of its products."""

    count = 0

    def multiply(self, columns: Columns) -> Columns:
        self.count += len(columns["a"])
        return super().multiply(columns)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("products", [6, 7, 8, 39, 40, 60])
def test_products_are_counted(method: Any, products: int) -> None:
    A = Counting(with_spectrum(torch.linspace(0.5, 2, 40)).matrix)
    assert trace(A, method=method, products=products).products == A.count <= products


def test_signs_are_exact_for_diagonal_matrices() -> None:
    """The square of a sign is one, so that every single sample is the exact value."""
    numbers = torch.randn(20, dtype=torch.float64)
    A, zero = Dense(torch.diag(numbers)), torch.tensor(0.0, dtype=torch.float64)
    for estimate, exact in (
        (trace(A, method="hutchinson", products=8), numbers.sum()),
        (squared_frobenius_norm(A, products=8), (numbers**2).sum()),
        (diagonal(A, products=8), numbers),
    ):
        close(estimate.value, exact)
        close(estimate.error, zero.expand_as(exact))
        assert estimate.products == 8


@pytest.mark.parametrize("method", METHODS)
def test_traces_come_with_honest_error_bars(method: Any) -> None:
    A = with_spectrum(torch.linspace(0.5, 2, 40))
    exact = A.matrix.trace()
    estimates = [trace(A, method=method, products=24, seed=seed) for seed in range(300)]
    deviations = torch.stack([e.value - exact for e in estimates])
    bars = torch.stack([e.error for e in estimates])
    # Root mean squares over 300 seeds are accurate to about five percent, and single small error bars hardly matter.
    # The samples of XTrace are not independent, so its error bars are too small by a factor of up to two.
    ratio = deviations.square().mean().sqrt() / bars.square().mean().sqrt()
    assert 0.8 < ratio < (2 if method == "xtrace" else 1.25)
    assert deviations.mean().abs() < 4 * deviations.std() / 300**0.5
    again = trace(A, method=method, products=24, seed=3)
    assert torch.equal(again.value, estimates[3].value)


def test_decaying_spectra_are_easy_for_the_better_methods() -> None:
    A = with_spectrum(DECAYING)
    exact = A.matrix.trace()
    errors: dict[str, Tensor] = {}
    for method in METHODS:
        values = torch.stack([trace(A, method=method, products=30, seed=seed).value for seed in range(20)])
        errors[method] = (values - exact).abs().mean()
    assert errors["hutch++"] < 0.02 * errors["hutchinson"]
    assert errors["xtrace"] < 0.5 * errors["hutch++"]


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_low_rank_is_exact(method: Any) -> None:
    A = with_spectrum(torch.cat([torch.tensor([3.0, 1.0, 0.2]), torch.zeros(37)]))
    estimate = trace(A, method=method, products=30)
    assert estimate.value.item() == pytest.approx(4.2, rel=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_traces_scale_with_the_operator(method: Any, size: float) -> None:
    matrix = with_spectrum(torch.linspace(0.5, 2, 40)).matrix.float()
    one, scaled = (trace(Dense(factor * matrix), method=method, products=24) for factor in (1.0, size))
    # Float32's eps, 1.2e-7, times some hundred operations.
    assert scaled.value.item() / size == pytest.approx(one.value.item(), rel=1e-4)
    assert scaled.error.item() / size == pytest.approx(one.error.item(), rel=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_small_and_zero_operators(method: Any) -> None:
    for size in (5, 8):
        estimate = trace(with_spectrum(torch.linspace(1, 2, size)), method=method)
        assert estimate.value.item() == pytest.approx(1.5 * size)
        assert (estimate.error.item(), estimate.products) == (0, size)
    zero = trace(Dense(torch.zeros(20, 20)), method=method, products=12)
    assert (zero.value.item(), zero.error.item()) == (0, 0)


def xdiag_samples(A: Tensor, omega: Tensor) -> Tensor:
    """The samples whose mean is the estimate, by dense matrices and a loop over test vectors."""
    samples = []
    for place in range(omega.shape[1]):
        w = omega[:, place]
        Q, _ = torch.linalg.qr(A @ torch.cat([omega[:, :place], omega[:, place + 1 :]], 1))
        P = Q @ Q.T  # the projection to the range of the sketch of all other vectors
        samples.append((P @ A).diagonal() + w * (A @ w - P @ A @ w))
    return torch.stack(samples, 1)


@pytest.mark.parametrize("probes", ["rademacher", "normal"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_xdiag_is_the_definition(probes: Any, symmetric: bool) -> None:
    matrix = with_spectrum(torch.linspace(0.5, 2, 40)).matrix
    matrix = matrix if symmetric else matrix + torch.randn(40, 40, dtype=torch.float64) / 10
    A = Dense(matrix, symmetric=symmetric)
    for products in (24, 25):
        omega = random_columns(probes, 40, products // 2, matrix.dtype, matrix.device, 5)
        samples = xdiag_samples(matrix, omega)
        estimate = diagonal(A, method="xdiag", products=products, probes=probes, seed=5)
        close(estimate.value, samples.mean(1))
        close(estimate.error, samples.std(1) / samples.shape[1] ** 0.5)
        assert estimate.products == 24


@pytest.mark.parametrize("probes", ["rademacher", "normal"])
def test_xdiag_is_unbiased_and_wrong_variants_are_not(probes: Any) -> None:
    """The mean over many seeds is exact; it is biased without the part outside the sketch, or with a full sketch."""
    A = with_spectrum(torch.linspace(0.5, 2, 20))
    exact = A.matrix.diagonal()
    estimates, inside_only, all_sketched = [], [], []
    for seed in range(400):
        estimates.append(diagonal(A, method="xdiag", products=10, probes=probes, seed=seed).value)
        omega = random_columns(probes, 20, 5, torch.float64, torch.device("cpu"), seed)
        Q, _ = torch.linalg.qr(A.matrix @ omega)
        P = Q @ Q.T
        inside_only.append((P @ A.matrix).diagonal())
        # The product with a vector in the sketch has no part outside its range.
        all_sketched.append(inside_only[-1] + (omega * (A.matrix @ omega - P @ A.matrix @ omega)).mean(1))

    def largest_z(values: list[Tensor]) -> float:
        stacked = torch.stack(values)
        return float(((stacked.mean(0) - exact) / (stacked.std(0) / 400**0.5)).abs().max())

    # The largest of 20 standard normal numbers exceeds 4.5 in one of 7000 cases.
    assert largest_z(estimates) < 4.5
    assert largest_z(inside_only) > 10
    assert largest_z(all_sketched) > 10


def test_xdiag_needs_fewer_products_for_decaying_spectra() -> None:
    A = with_spectrum(DECAYING)
    errors: dict[str, float] = {}
    methods: list[Any] = ["hutchinson", "xdiag"]
    for method in methods:
        values = [diagonal(A, method=method, products=30, seed=seed).value for seed in range(20)]
        errors[method] = float((torch.stack(values) - A.matrix.diagonal()).square().mean().sqrt())
    assert errors["xdiag"] < 0.01 * errors["hutchinson"]
    small = with_spectrum(torch.linspace(1, 2, 8))
    exact = diagonal(small, method="xdiag")
    close(exact.value, small.matrix.diagonal())
    assert (float(exact.error.max()), exact.products) == (0, 8)
    zero = diagonal(Dense(torch.zeros(20, 20)), method="xdiag", products=12)
    assert (float(zero.value.abs().max()), zero.products) == (0, 6)
    for size in (1e-30, 1e30):
        scaled = diagonal(Dense(size * A.matrix.float()), method="xdiag", products=24)
        one = diagonal(Dense(A.matrix.float()), method="xdiag", products=24)
        # Float32's eps, 1.2e-7, times some hundred operations.
        torch.testing.assert_close(scaled.value / size, one.value, rtol=1e-3, atol=1e-4)


def test_normal_probes_scatter_as_they_should() -> None:
    """Variances are `2 |A|^2` for the trace, and without the diagonal's part for signs. A wrong scale is far off."""
    A = with_spectrum(torch.linspace(0.5, 2, 20))
    exact, squares = A.matrix.trace(), A.matrix.square()
    expected = {
        "normal": 2 * squares.sum(),
        "rademacher": 2 * (squares.sum() - squares.diagonal().sum()),
    }
    kinds: list[Any] = list(expected)
    for probes in kinds:
        values = torch.stack(
            [trace(A, method="hutchinson", products=8, probes=probes, seed=seed).value for seed in range(400)]
        )
        assert abs(values.mean() - exact) < 4 * values.std() / 20
        # A variance from 400 numbers is accurate to seven percent.
        assert values.var() * 8 == pytest.approx(float(expected[probes]), rel=0.3)
        assert abs(1.1 * values.mean() - exact) > 4 * values.std() / 20  # a variance of 1.1 instead of one
        norm = torch.stack([squared_frobenius_norm(A, products=8, probes=probes, seed=s).value for s in range(200)])
        assert abs(norm.mean() - squares.sum()) < 4 * norm.std() / 200**0.5
        diagonals = torch.stack([diagonal(A, products=8, probes=probes, seed=seed).value for seed in range(400)])
        assert ((diagonals.mean(0) - A.matrix.diagonal()).abs() < 4.5 * diagonals.std(0) / 20).all()


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
    with pytest.raises(ShapeError, match=r"method is 'exact'.*xdiag"):
        diagonal(A, method="exact")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"probes is 'uniform'.*'normal'"):
        trace(A, probes="uniform", products=6)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="Spend at least 6"):
        trace(A, products=5)
    risk, *_ = PROBLEMS[0].make()
    with pytest.raises(ShapeError, match="maps a space to itself"):
        trace(Jacobian(risk))
    J = Jacobian(risk)
    norm = squared_frobenius_norm(J, products=200)
    assert abs(norm.value - (J.to_dense() ** 2).sum()) < 4 * norm.error
