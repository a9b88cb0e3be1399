"""Marginal likelihoods and the best priors, against dense matrices and fine grids."""

import warnings
from math import log, pi

import pytest
import torch
from torch import nn

import kfs
from kfs.errors import KfsWarning, ModelError, SolverError
from kfs.factors import exact_blocks
from kfs.laplace import log_marginal_likelihood, posterior, tune_prior, tune_prior_and_noise
from kfs.operators.linear_operator import LinearOperator
from tests.laplace.problems import PROBLEMS, Problem, classification, close, regression, vectors


def dense_evidence(
    K: LinearOperator, risk: kfs.EmpiricalRisk, prior: torch.Tensor, noise: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """Compute the formula with dense matrices; PyTorch evaluates the loss."""
    assert isinstance(risk.model, nn.Module)
    is_regression = risk.loss.name == "MSELoss"
    log_likelihood = 0.0
    for batch in risk.batches():
        f = risk.model(batch.x).detach()
        if is_regression:
            log_likelihood -= float((f - batch.y).square().sum()) / 2 / noise**2 / temperature
            log_likelihood -= batch.y.numel() * log(noise * (2 * pi) ** 0.5)
        else:
            log_likelihood -= float(nn.functional.cross_entropy(f, batch.y, reduction="sum")) / temperature
    theta = torch.cat([p.detach().flatten() for p in risk.params.values()])
    H = K.to_dense() / (risk.reduction_factor * noise**2 * temperature)
    diagonal = prior.expand(len(theta))
    ratio = torch.logdet(H + torch.diag(diagonal)) - diagonal.log().sum()
    return log_likelihood - 0.5 * (ratio + (diagonal * theta.square()).sum())


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_classification(problem: Problem) -> None:
    risk = classification(problem)
    prior = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    again = prior.detach().clone().requires_grad_()
    for K in (kfs.KFAC(risk), kfs.EKFAC(risk), exact_blocks(risk)):
        found = log_marginal_likelihood(K, risk, prior, temperature=0.5)
        expected = dense_evidence(K, risk, again, temperature=0.5)
        close(found, expected)
        close(torch.autograd.grad(found, prior)[0], torch.autograd.grad(expected, again)[0], 1e-7)
        close(posterior(K, risk, 0.3, temperature=0.5).log_marginal_likelihood(), expected)
        wrong = log_marginal_likelihood(K, risk, prior)
        assert (wrong - expected).abs() > 0.1


def test_regression_and_a_prior_for_every_block() -> None:
    risk = regression()
    K = kfs.KFAC(risk)
    diagonal = torch.cat([torch.full((25,), 0.5), torch.full((12,), 3.0)]).double()
    found = log_marginal_likelihood(K, risk, {"0": 0.5, "2": 3.0}, noise=0.3)
    close(found, dense_evidence(K, risk, diagonal, 0.3))
    assert (found - dense_evidence(K, risk, diagonal.flip(0), 0.3)).abs() > 0.1


@pytest.mark.parametrize("per_block", [False, True])
def test_best_prior(per_block: bool) -> None:
    """The marginal likelihood falls on both sides of the best prior."""
    risk = classification(PROBLEMS[0], num_data=30)
    K = kfs.KFAC(risk)
    best = tune_prior(K, risk, per_block=per_block)
    at_best = log_marginal_likelihood(K, risk, best)
    for factor in (0.5, 0.99, 1.01, 2.0):
        for name in best if isinstance(best, dict) else [""]:
            other = best | {name: factor * best[name]} if isinstance(best, dict) else factor * best
            assert log_marginal_likelihood(K, risk, other) < at_best
    everywhere = tune_prior(K, risk)
    assert at_best >= log_marginal_likelihood(K, risk, everywhere) - 1e-9
    grid = torch.logspace(-4, 4, 41, dtype=torch.float64)
    assert max(log_marginal_likelihood(K, risk, value) for value in grid) <= at_best + 1e-9


@pytest.mark.parametrize("size", [1e-3, 20.0])
def test_best_prior_far_away(size: float) -> None:
    """Tiny parameters have a precise prior, and huge ones a vague one."""
    risk = classification(PROBLEMS[0])
    with torch.no_grad():
        for p in risk.params.values():
            p.mul_(size)
    K = kfs.KFAC(risk)
    best = tune_prior(K, risk)
    assert isinstance(best, float)
    at_best = log_marginal_likelihood(K, risk, best)
    assert at_best > log_marginal_likelihood(K, risk, 1.01 * best)
    assert at_best > log_marginal_likelihood(K, risk, 0.99 * best)


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("num_data", [8, 60])
def test_best_prior_and_noise(per_block: bool, num_data: int) -> None:
    risk = regression(num_data)
    K = kfs.KFAC(risk)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about few examples
        prior, noise = tune_prior_and_noise(K, risk, per_block=per_block)
    at_best = log_marginal_likelihood(K, risk, prior, noise=noise)
    for factor in (0.99, 1.01):
        assert log_marginal_likelihood(K, risk, prior, noise=factor * noise) < at_best
        scaled = {name: factor * one for name, one in prior.items()} if isinstance(prior, dict) else factor * prior
        assert log_marginal_likelihood(K, risk, scaled, noise=noise) < at_best
    again = tune_prior(K, risk, noise=noise, per_block=per_block)
    if isinstance(prior, dict):
        assert isinstance(again, dict)
        close(list(prior.values()), list(again.values()), 1e-6)
    else:
        close(prior, again, 1e-6)


def test_noise_is_overestimated() -> None:
    """With more parameters than examples, KFAC overestimates the number of effective ones, and a warning says so.

    For the best noise and prior, the formula for the noise gives the number of effective parameters; the oracle counts
    them with the dense matrix. The exact curvature of this linear model has at most one per example, but KFAC's has
    more.
    """
    torch.manual_seed(0)
    model = nn.Linear(12, 2).double()
    X = torch.randn(60, 12).double()
    y = model(X).detach() + 0.1 * torch.randn(60, 2).double()
    few, many = (kfs.EmpiricalRisk(model, nn.MSELoss(), (X[:n], y[:n])) for n in (10, 60))
    K = kfs.KFAC(few)
    with pytest.warns(KfsWarning, match="The noise is probably overestimated") as seen:
        prior, noise = tune_prior_and_noise(K, few)
    assert seen[0].filename == __file__
    assert isinstance(prior, float)
    values = K.eigenvalues() / (few.reduction_factor * noise**2)
    effective = float((values / (values + prior)).sum())
    message = str(seen[0].message)
    assert f"number of parameters is {effective / 20:.0%} of the number of targets" in message
    residual = few.value() ** 0.5
    assert f"it is {noise:.3g}, but the residuals have a root mean square of {residual:.3g}" in message
    assert f"tune_prior(K, risk, noise={residual:.3g})" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tune_prior_and_noise(kfs.KFAC(many), many)[1] < 1.2 * many.value() ** 0.5


def test_no_best_prior() -> None:
    risk = classification(PROBLEMS[0])
    K = kfs.KFAC(risk)
    with torch.no_grad():
        for p in risk.params.values():
            p.zero_()
    changed = "computed at other values"
    whole = r"parameters of the model are zero.*Choose a prior precision"
    with pytest.warns(KfsWarning, match=changed), pytest.raises(SolverError, match=whole):
        tune_prior(K, risk)
    with pytest.warns(KfsWarning, match=changed), pytest.raises(SolverError, match="parameters of block '0' are zero"):
        tune_prior(K, risk, per_block=True)
    # The last layer is zero, and the first one receives no gradient.
    with torch.no_grad():
        risk.params["0.weight"].fill_(1.0)
    with pytest.raises(SolverError, match="There is no curvature in block '0'"):
        tune_prior(kfs.KFAC(risk), risk, per_block=True)


def test_no_best_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    risk = classification(PROBLEMS[0])
    with pytest.raises(ModelError, match=r"CrossEntropyLoss has no noise.*tune_prior"):
        tune_prior_and_noise(kfs.KFAC(risk), risk)
    model = nn.Linear(4, 2).double()
    X = vectors(5)
    exact = kfs.EmpiricalRisk(model, nn.MSELoss(), (X, model(X).detach()))
    with pytest.raises(SolverError, match="predicts all targets exactly"):
        tune_prior_and_noise(kfs.KFAC(exact), exact)
    monkeypatch.setattr("kfs.laplace.evidence._MOST_ROUNDS", 1)
    noisy = regression()
    with pytest.raises(SolverError, match="have not converged after 1 rounds"):
        tune_prior_and_noise(kfs.KFAC(noisy), noisy)


def test_negative_curvature() -> None:
    risk = classification(PROBLEMS[0])
    negative = -1.0 * exact_blocks(risk)
    with pytest.raises(SolverError, match=r"Block '\d' has a negative eigenvalue.*use the GGN or the Fisher"):
        log_marginal_likelihood(negative, risk, 1.0)  # type: ignore[arg-type]
