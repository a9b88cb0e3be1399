"""Estimators of trace, diagonal and norm, on operators whose dense value is known."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfs import Jacobian
from kfs.errors import ShapeError
from kfs.operators import diagonal, squared_frobenius_norm, trace
from kfs.operators.probes import rademacher
from kfs.operators.space import Columns
from tests.operators.contract import close
from tests.operators.matrices import DECAYING, POSITIVE, Dense, with_spectrum
from tests.operators.problems import PROBLEMS

METHODS: list[Any] = ["hutchinson", "hutch++", "xtrace"]


def definition(method: str, A: Tensor, products: int, seed: int) -> Tensor:
    """The samples whose mean is the estimate, by dense matrices and one test vector at a time."""
    num = {"hutchinson": products, "hutch++": 2 * (products // 3), "xtrace": products // 2}[method]
    omega = rademacher(len(A), num, A.dtype, A.device, seed)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("products", [24, 25, 26])
def test_traces_are_the_definition(method: Any, products: int) -> None:
    A = with_spectrum(torch.linspace(0.5, 2, 40))
    samples = definition(method, A.matrix, products, seed=5)
    estimate = trace(A, method=method, products=products, seed=5)
    close(estimate.value, samples.mean())
    squares = ((samples - samples.mean()) ** 2).sum()
    close(estimate.error, (squares / (len(samples) - 1) / len(samples)).sqrt())


class Counting(Dense):
    """A matrix that counts the columns that it is multiplied with."""

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
    # Root mean squares over 300 seeds are known to about five percent, and a single short bar does not matter in them.
    # The samples of XTrace are not independent, so its bars are too short by a factor of up to two.
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
