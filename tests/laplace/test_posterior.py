"""Posterior, covariance of outputs and samples against dense matrices."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import inf, nan
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, DtypeError, KfsWarning, ModelError, UnknownAttributeError
from kfs.factors import exact_blocks, exact_diagonal
from kfs.factors.blocks import BlockDiagonal
from kfs.laplace import functional_variance, posterior
from kfs.laplace.posterior import probabilities
from kfs.laplace.variance import block_covariance
from kfs.losses import TokenCrossEntropy, describe
from tests.laplace.problems import (
    PROBLEMS,
    Problem,
    classification,
    close,
    dense_covariance,
    dense_variance,
    mlp,
    regression,
    vectors,
)

CURVATURES: dict[str, Callable[[kfs.EmpiricalRisk], BlockDiagonal]] = {
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "separate biases": lambda risk: kfs.KFAC(risk, joint_bias=False),
    "exact blocks": exact_blocks,
    "exact diagonal": exact_diagonal,
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("kind", CURVATURES)
def test_covariance_of_outputs(problem: Problem, kind: str) -> None:
    if (problem.name, kind) == ("groups", "exact blocks"):
        pytest.skip("Exact blocks join groups of channels, and gradients by example do not: see below.")
    risk = classification(problem)
    K = CURVATURES[kind](risk)
    X = problem.inputs(3)
    expected = dense_variance(risk, dense_covariance(K, 8, 0.7), X)  # the loss is a mean over eight examples
    close(functional_variance(K, risk, X, 0.7), expected)
    close(functional_variance(K, risk, X, 0.7, batch_size=2), expected)
    unscaled = dense_variance(risk, dense_covariance(K, 1, 0.7), X)
    assert (unscaled - expected).norm() > 0.1 * expected.norm()


def test_exact_blocks_of_groups_are_refused() -> None:
    problem = PROBLEMS[3]
    risk = classification(problem)
    with pytest.raises(ModelError, match=r"\['2.weight', '2.bias'\] are used in another way"):
        functional_variance(exact_blocks(risk), risk, problem.inputs(2), 1.0)


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=lambda problem: problem.name)
def test_reduction_does_not_matter(problem: Problem) -> None:
    X = problem.inputs(2)
    mean, total = (classification(problem, reduction=reduction) for reduction in ("mean", "sum"))
    a, b = (functional_variance(kfs.KFAC(risk), risk, X, 2.0) for risk in (mean, total))
    close(a, b)
    assert isinstance(mean.model, nn.Module)
    close(functional_variance(kfs.EKFAC(mean), mean.model, X, 2.0), functional_variance(kfs.EKFAC(mean), mean, X, 2.0))


def test_a_prior_for_every_block_noise_and_temperature() -> None:
    risk = regression()
    K = kfs.KFAC(risk)
    priors: dict[str, float | Tensor] = {"0": 0.5, "2": torch.tensor([3.0])}
    diagonal = torch.cat([torch.full((25,), 0.5), torch.full((12,), 3.0)]).double()
    # The risk is a mean over all targets, of twice the criterion.
    scale = 1 / (risk.reduction_factor * 0.2**2 * 0.8)
    covariance = dense_covariance(K, scale, diagonal)
    belief = posterior(K, risk, priors, noise=0.2, temperature=0.8)
    close(belief.covariance.to_dense(), covariance)
    close(belief.precision.to_dense(), torch.linalg.inv(covariance))
    X = vectors(3)
    close(belief.functional_variance(X), dense_variance(risk, covariance, X))
    close(functional_variance(K, risk, X, priors, noise=0.2, temperature=0.8), belief.functional_variance(X))
    assert str(belief.describe().facts[0]) == "curvature: KFAC; prior precision: 0.5 to 3, by block"
    assert belief.describe().facts[1:] == ("noise: 0.2", "temperature: 0.8")


def test_sums_of_curvatures_and_unknown_losses() -> None:
    risk = classification(PROBLEMS[0])
    K = kfs.KFAC(risk, joint_bias=False)
    L = kfs.KFAC(risk, fisher="empirical", joint_bias=False)
    both = K + L
    assert isinstance(both, BlockDiagonal)
    X = vectors(2)
    expected = dense_variance(risk, dense_covariance(both, 8, 1.0), X)
    close(functional_variance(both, risk, X, 1.0), expected, 1e-5)  # by conjugate gradients


def test_samples_have_the_covariance() -> None:
    risk = regression()
    belief = posterior(kfs.KFAC(risk), risk, 5.0, noise=0.5)
    draws = belief.sample(20_000, seed=1)
    flat = torch.cat([p.detach().flatten() for p in risk.params.values()])
    covariance = belief.covariance.to_dense()
    # Deviations are at most 5^-1/2, so means have errors of 0.003, and the largest of 37 is a few times larger.
    # A covariance of 37 numbers that are nearly independent has a relative error of about (37 / 20,000)^1/2 = 0.043.
    assert (draws.mean(1) - flat).abs().max() < 0.02
    assert (torch.cov(draws) - covariance).norm() < 0.05 * covariance.norm()
    by_name = belief.sample(20_000, seed=1, form="dict")
    close(by_name["0.weight"].flatten(1).T, draws[:20])
    before = flat.clone()
    with torch.no_grad():
        next(iter(risk.params.values())).add_(1.0)  # the mean is a copy
    close(torch.cat([p.flatten() for p in belief.mean.values()]), before)


def test_several_axes_of_outputs_and_inputs_that_are_not_tensors() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.layer(a + b).reshape(-1, 3, 2)
            return out

    model = TwoInputs().double()
    a, b = vectors(5), vectors(5)
    data = [((a, b), torch.randint(3, (5, 2)))]
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    K = kfs.KFAC(risk)
    found = functional_variance(K, risk, (a, b), 1.0)
    J = torch.stack([torch.kron(torch.eye(6).double(), row) for row in torch.cat([a + b, torch.ones(5, 1)], 1)])
    order = torch.cat([torch.arange(6 * 5).reshape(6, 5)[:, :4].flatten(), torch.arange(6 * 5).reshape(6, 5)[:, 4]])
    J = J.reshape(5, 6, -1)[:, :, order]  # weight first, then bias
    close(found, J @ dense_covariance(K, 1 / risk.reduction_factor, 1.0) @ J.transpose(1, 2))


def test_outputs_in_another_order_of_memory() -> None:
    """A language model returns logits `[batch, classes, positions]`, as a transposed view."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x).transpose(1, 2)
            return out

    torch.manual_seed(1)
    X = torch.randn(5, 2, 4).double()
    model = Transposed().double()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, torch.randint(3, (5, 2))))
    K = kfs.KFAC(risk)
    flat = kfs.EmpiricalRisk(nn.Sequential(model, nn.Flatten()), nn.MSELoss(), [])
    expected = dense_variance(flat, dense_covariance(K, 1 / risk.reduction_factor, 1.0), X)
    close(functional_variance(K, risk, X, 1.0), expected)


def test_parameters_without_rule() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.power = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = nn.functional.softplus(self.inner(x)) ** self.power
            return out

    torch.manual_seed(0)
    model = Scaled().double()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (vectors(8), torch.randint(3, (8,))))
    K = kfs.KFAC(risk, uncovered="diagonal")
    X = vectors(3)
    close(functional_variance(K, risk, X, 1.0), dense_variance(risk, dense_covariance(K, 8, 1.0), X))


def test_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few examples, for large Jacobians, give the same result."""
    problem = PROBLEMS[1]
    risk = classification(problem)
    K = kfs.EKFAC(risk)
    X = problem.inputs(5)
    expected = functional_variance(K, risk, X, 1.0)
    monkeypatch.setattr("kfs.laplace.variance._NUMBERS", 1)
    close(functional_variance(K, risk, X, 1.0), expected)


def test_unused_blocks_have_no_covariance() -> None:
    risk = classification(PROBLEMS[0])
    K = kfs.KFAC(risk)
    batch = next(iter(kfs.per_datum(risk, blocks=K)))
    block = replace(batch.blocks["0"], uses=())
    structure = K.stacks[0].structure[0:1].eigenbasis()
    assert block_covariance(structure, [block, block]).abs().max() == 0


BAD_PRIORS: list[Any] = [0, -1.0, inf, nan, "1", True, torch.ones(2), kfs.Relative(0.1), {"0": 1.0, "2": 0.0}]


@pytest.mark.parametrize("prior", BAD_PRIORS, ids=str)
def test_priors_that_are_none(prior: Any) -> None:
    risk = classification(PROBLEMS[0])
    with pytest.raises(ModelError, match=r"The prior precision is .*tune_prior"):
        posterior(kfs.KFAC(risk), risk, prior)


def test_other_bad_input() -> None:
    risk = classification(PROBLEMS[0])
    K = kfs.KFAC(risk)
    X = vectors(2)
    with pytest.raises(ModelError, match=r"lacks the blocks '2', and has '22' too many.*Did you mean '2'"):
        posterior(K, risk, {"0": 1.0, "22": 1.0})
    with pytest.raises(ModelError, match=r"CrossEntropyLoss has no noise.*Leave noise= out"):
        posterior(K, risk, 1.0, noise=1.0)
    with pytest.raises(DtypeError, match="The temperature is 0"):
        posterior(K, risk, 1.0, temperature=0)
    with pytest.raises(ModelError, match=r"takes an operator with blocks, but this is a GGN"):
        posterior(kfs.GGN(risk), risk, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not symmetric"):
        posterior(K @ kfs.KFAC(risk, fisher="empirical"), risk, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"risk is a Sequential.*Pass the kfs\.EmpiricalRisk"):
        posterior(K, risk.model, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="A BlockDiagonal does not know the loss"):
        functional_variance(exact_blocks(risk), risk.model, X, 1.0)
    with pytest.raises(ModelError, match="A function does not have parameters"):
        functional_variance(K, lambda _, x: x, X, 1.0)
    for batch_size in (0, 1.5, True):
        with pytest.raises(ModelError, match="batch_size is"):
            functional_variance(K, risk, X, 1.0, batch_size=batch_size)  # type: ignore[arg-type]
    nothing: list[Any] = [X[:0], [], torch.tensor(1.0)]
    for empty in nothing:
        with pytest.raises(DataError, match="There are no inputs"):
            functional_variance(K, risk, empty, 1.0)
    with pytest.raises(UnknownAttributeError, match=r"kfs\.laplace has no 'posterio'\. Did you mean 'posterior'"):
        kfs.laplace.posterio  # noqa: B018


def test_curvature_of_something_else() -> None:
    risk = classification(PROBLEMS[0])
    K = kfs.KFAC(risk)
    X = vectors(2)
    other = classification(PROBLEMS[1])
    with pytest.raises(ModelError, match=r"has the parameters '0\.bias', '2\.weight', .* which the model lacks"):
        posterior(K, kfs.EmpiricalRisk(other.model, nn.CrossEntropyLoss(), [], params=["0.weight"]), 1.0)
    with pytest.raises(ModelError, match=r"'0\.weight' has shape \[2, 1, 3, 3\] in the model, and \[5, 4\]"):
        functional_variance(K, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Linear(5, 3)).double(), X, 1.0)
    more = classification(PROBLEMS[0], num_data=9)
    with pytest.raises(ModelError, match="computed from 8 examples, and the risk has 9"):
        posterior(K, more, 1.0)
    total = classification(PROBLEMS[0], reduction="sum")
    with pytest.raises(ModelError, match="The losses differ"):
        posterior(K, total, 1.0)


def test_curvature_at_other_values() -> None:
    """A warning on the user's line, if the model has changed or is another one; a lower precision does not count."""
    risk = classification(PROBLEMS[0])
    X = vectors(2)
    K = kfs.KFAC(risk)
    E = kfs.EKFAC(risk)
    diagonal = exact_diagonal(risk)
    assert isinstance(risk.model, nn.Module)
    functional_variance(K, deepcopy(risk.model).float(), X.float(), 1.0)
    belief = {C: posterior(C, risk, 1.0) for C in (K, E)}
    with torch.no_grad():
        risk.params["2.bias"] += 1
    calls: list[Callable[[kfs.KFAC | kfs.EKFAC], Any]] = [
        lambda C: posterior(C, risk, 1.0),
        lambda C: functional_variance(C, risk, X, 1.0),
        lambda C: functional_variance(C, cast("nn.Module", risk.model), X, 1.0),
        lambda C: kfs.laplace.log_marginal_likelihood(C, risk, 1.0),
        lambda C: belief[C].functional_variance(X),
        lambda C: belief[C].predict(X),
        lambda C: belief[C].log_marginal_likelihood(),
    ]
    for call in calls:
        for C in (K, E):
            with pytest.warns(
                KfsWarning, match=r"The curvature was computed at other values .* compute it again"
            ) as seen:
                call(C)
            assert seen[0].filename == __file__
    posterior(diagonal, risk, 1.0)  # it does not know its parameter values


def test_regression_without_noise() -> None:
    risk = regression()
    K = kfs.KFAC(risk)
    with pytest.raises(ModelError, match=r"MSELoss is the loss of a regression.*tune_prior_and_noise"):
        posterior(K, risk, 1.0)
    with pytest.raises(ModelError, match="depends on the noise"):
        functional_variance(exact_diagonal(risk), risk, vectors(2), 1.0)
    with pytest.raises(DtypeError, match="The noise is -1"):
        posterior(K, risk, 1.0, noise=-1)


def test_batch_norm_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double().eval()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (vectors(6), torch.randint(2, (6,))))
    K = kfs.KFAC(risk)
    model.train()
    for what in (risk, model):
        with pytest.raises(ModelError, match="eval"):
            functional_variance(K, what, vectors(2), 1.0)


def test_predictions_of_a_regression() -> None:
    risk = regression()
    K = kfs.KFAC(risk)
    belief = posterior(K, risk, 2.0, noise=0.3)
    X = vectors(5)
    mean, covariance = belief.predict(X, batch_size=2)
    assert isinstance(risk.model, nn.Module)
    close(mean, risk.model(X).detach())
    close(covariance, dense_variance(risk, dense_covariance(K, 1 / (risk.reduction_factor * 0.3**2), 2.0), X))
    of_targets = belief.predict(X, noise=True)[1]
    close(of_targets, covariance + 0.3**2 * torch.eye(2).double())


def test_predictions_of_classes() -> None:
    """All links approximate the mean of the softmax over draws of logits; the test draws them by other code."""
    risk = classification(PROBLEMS[0])
    belief = posterior(kfs.KFAC(risk), risk, 2.0)
    X = vectors(4)
    predict: Callable[..., Tensor] = cast("Any", belief.predict)
    assert isinstance(risk.model, nn.Module)
    logits = torch.distributions.MultivariateNormal(risk.model(X).detach(), belief.functional_variance(X))
    expected = logits.sample((20_000,)).softmax(2).mean(0)
    state = torch.get_rng_state()
    # Both averages have an error of at most 0.5 / sqrt(20,000) = 0.0035.
    close(predict(X, link="mc", num_samples=20_000), expected, 0.015)
    close(predict(X), expected, 0.05)
    close(predict(X, link="bridge"), expected, 0.1)
    assert torch.equal(torch.get_rng_state(), state)
    alone = risk.model(X).detach().softmax(1)
    assert (predict(X) - expected).abs().max() < 0.5 * (alone - expected).abs().max()
    one, other = (predict(X, link="mc", num_samples=50, seed=seed, batch_size=3) for seed in (0, 1))
    close(one, predict(X, link="mc", num_samples=50))  # batches do not matter
    assert (one - other).abs().max() > 1e-3


def test_predictions_of_labels() -> None:
    """Against integrals of the logistic function over normal distributions, by the trapezoidal rule."""
    torch.manual_seed(0)
    model = mlp(2).double()
    y = torch.randint(2, (8, 2)).double()
    risk = kfs.EmpiricalRisk(model, nn.BCEWithLogitsLoss(), (vectors(8), y))
    belief = posterior(kfs.KFAC(risk), risk, 1.0)
    X = 3 * vectors(3)
    f, variance = model(X).detach(), belief.functional_variance(X).diagonal(dim1=1, dim2=2)
    z = torch.linspace(-8, 8, 2001).double()
    weights = torch.softmax(-0.5 * z**2, 0)
    expected = ((f.unsqueeze(2) + variance.sqrt().unsqueeze(2) * z).sigmoid() * weights).sum(2)
    close(belief.predict(X), expected, 0.03)  # the accuracy of probit
    close(belief.predict(X, link="mc", num_samples=20_000), expected, 0.015)
    with pytest.raises(ModelError, match=r"the Laplace bridge changes nothing.*link='probit'"):
        belief.predict(X, link="bridge")


def test_laplace_bridge() -> None:
    """It must find the Dirichlet distribution with the given mode and curvature, over logits that sum to zero.

    Curvature is computed by autograd. A random shift of all logits is added, which does not change the softmax.
    """
    torch.manual_seed(0)
    alpha = torch.rand(4, 2, 3).double() * 5 + 0.1  # [data, positions, classes]
    mode = alpha.log() - alpha.log().mean(2, keepdim=True)
    covariance = torch.zeros(4, 6, 6).double()
    for n in range(4):
        for s in range(2):
            H = torch.autograd.functional.hessian(
                lambda z, a=alpha[n, s]: -(a * z.log_softmax(0)).sum(), mode[n, s], vectorize=True
            )
            some = slice(3 * s, 3 * s + 3)
            covariance[n, some, some] = torch.linalg.pinv(H, hermitian=True) + (0.0 if s else 0.7)
    expected = alpha / alpha.sum(2, keepdim=True)
    tokens = probabilities(TokenCrossEntropy(shift=False), mode + 3.0, covariance, "bridge", 1, 0)
    # If the sum is random, it determines the shift of the logits.
    close(tokens[:, 1], expected[:, 1])
    shifted = probabilities(TokenCrossEntropy(shift=False), mode, covariance, "bridge", 1, 0)
    close(shifted, expected)
    order = torch.arange(6).reshape(2, 3).T.flatten()
    loss = describe(nn.CrossEntropyLoss())
    moved = probabilities(loss, mode.transpose(1, 2), covariance[:, order][:, :, order], "bridge", 1, 0)
    close(moved.transpose(1, 2), expected)
    large = probabilities(
        loss, torch.tensor([[800.0, -800.0, 0.0]]).double(), torch.eye(3).double()[None], "bridge", 1, 0
    )
    close(large, [[1.0, 0.0, 0.0]])


def test_draws_of_singular_covariances() -> None:
    """Two logits with equal draws have constant probabilities."""
    f = torch.tensor([[1.0, -1.0], [0.5, 0.0]]).double()
    covariance = torch.stack([torch.ones(2, 2), torch.eye(2)]).double()
    found = probabilities(describe(nn.CrossEntropyLoss()), f, covariance, "mc", 200, 0)
    close(found[0], f[0].softmax(0))
    assert (found[1] - f[1].softmax(0)).abs().max() > 1e-3


def test_what_is_not_predicted() -> None:
    classes = classification(PROBLEMS[0])
    belief = posterior(kfs.KFAC(classes), classes, 1.0)
    with pytest.raises(ModelError, match=r"There is no link 'probits'. Did you mean 'probit'?"):
        belief.predict(vectors(2), link="probits")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has no noise that could be added"):
        belief.predict(vectors(2), noise=True)
    with pytest.raises(ModelError, match="num_samples is 0"):
        belief.predict(vectors(2), link="mc", num_samples=0)
    numbers = regression()
    with pytest.raises(ModelError, match=r"link='mc' is for probabilities of classes. Leave link= out"):
        posterior(kfs.KFAC(numbers), numbers, 1.0, noise=1.0).predict(vectors(2), link="mc")
    counts = kfs.EmpiricalRisk(mlp(1).double(), nn.PoissonNLLLoss(), (vectors(5), torch.ones(5, 1).double()))
    with pytest.raises(ModelError, match=r"PoissonNLLLoss has no classes.*Use functional_variance"):
        posterior(kfs.KFAC(counts), counts, 1.0).predict(vectors(2))


def test_shown() -> None:
    risk = classification(PROBLEMS[0])
    text = repr(posterior(kfs.EKFAC(risk), risk, 2.5))
    assert "Posterior of Sequential with CrossEntropyLoss (mean): 43 parameters, 2 blocks" in text
    assert "curvature: EKFAC; prior precision: 2.5" in text
