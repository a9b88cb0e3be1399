"""Tasks for the Laplace approximation: nets on digits and diabetes data, and the quality of their predictions.

The digits have 200 training examples, 200 to choose a prior, and 1,000 to test; the net is trained until it is far too
confident. The diabetes data have 300 and 142.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor, nn

import kfs
from kfs.factors.blocks import BlockDiagonal
from kfs.tour.digits import load

Data = tuple[Tensor, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
PRIORS = [float(prior) for prior in torch.logspace(-1, 4, 16)]


@dataclass(frozen=True)
class Task:
    """Data, and a net that was trained with a part of them."""

    model: nn.Module
    training: Data
    validation: Data
    test: Data


@dataclass(frozen=True)
class Predicted:
    """Predictions, and their quality.

    Attributes:
        nll: Mean negative log-likelihood of held-out targets.
        prior: The prior precision; `None` without a posterior.
        noise: The standard deviation of targets; `None` for classification.
    """

    nll: float
    prior: float | None = None
    noise: float | None = None


def mlp(inputs: int, width: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    """Return a net with two hidden layers."""
    hidden = (nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation())
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def train(model: nn.Module, data: Data, loss: LossFunction, epochs: int, lr: float) -> None:
    """Train with Adam, in batches of 50."""
    X, y = data
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for index in torch.randperm(len(X), generator=generator).split(50):
            optimizer.zero_grad()
            loss(model(X[index]), y[index]).backward()
            optimizer.step()
    model.eval()


def digits(seed: int, quick: bool = False) -> Task:
    """Train a net with few digits, for far too long."""
    X, y = load()
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    parts = [(X[part], y[part]) for part in order[:1400].split([200, 200, 1000])]
    torch.manual_seed(seed)
    model = mlp(64, 64, 10, nn.ReLU).double()
    train(model, parts[0], nn.functional.cross_entropy, epochs=2 if quick else 300, lr=1e-2)
    return Task(model, *parts)


def diabetes(seed: int, quick: bool = False) -> Task:
    """Train a net with the diabetes data, for too long; inputs and targets are standardized."""
    from sklearn.datasets import load_diabetes  # noqa: PLC0415 (optional)

    inputs, targets = load_diabetes(return_X_y=True)
    X, y = torch.from_numpy(inputs).double(), torch.from_numpy(targets).double().unsqueeze(1)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    training, test = order[:300], order[300:]
    X, y = ((t - t[training].mean(0)) / t[training].std(0) for t in (X, y))
    torch.manual_seed(seed)
    model = mlp(10, 50, 1, nn.Tanh).double()
    train(model, (X[training], y[training]), nn.functional.mse_loss, epochs=2 if quick else 200, lr=1e-3)
    empty = X[:0], y[:0]
    return Task(model, (X[training], y[training]), empty, (X[test], y[test]))


def class_nll(K: BlockDiagonal, risk: kfs.EmpiricalRisk, data: Data, prior: float) -> float:
    """Return the mean negative log-likelihood of labels, by the probit approximation."""
    X, y = data
    p = kfs.laplace.posterior(K, risk, prior).predict(X)
    assert isinstance(p, Tensor)  # noqa: S101 (they are probabilities)
    return float(nn.functional.nll_loss(p.log(), y))


def digits_nll(task: Task) -> dict[str, Predicted]:
    """Compare predictions of the net and of its posterior, for priors chosen in two ways."""
    risk = kfs.EmpiricalRisk(task.model, nn.CrossEntropyLoss(), task.training)
    K = kfs.KFAC(risk)
    with torch.no_grad():
        alone = float(nn.functional.cross_entropy(task.model(task.test[0]), task.test[1]))
    validated = min(PRIORS, key=lambda prior: class_nll(K, risk, task.validation, prior))
    likeliest = kfs.laplace.tune_prior(K, risk)
    assert isinstance(likeliest, float)  # noqa: S101 (one for all blocks)
    return {
        "MAP": Predicted(alone),
        "prior by validation data": Predicted(class_nll(K, risk, task.test, validated), validated),
        "prior by marginal likelihood": Predicted(class_nll(K, risk, task.test, likeliest), likeliest),
    }


def diabetes_nll(task: Task) -> dict[str, Predicted]:
    """Compare predictions of the net and of its posterior. The noise is estimated from training data, or tuned."""
    X, y = task.training
    risk = kfs.EmpiricalRisk(task.model, nn.MSELoss(), task.training)
    K = kfs.KFAC(risk)
    with torch.no_grad():
        noise = float((task.model(X) - y).square().mean().sqrt())
        f = task.model(task.test[0])

    def nll(variance: Tensor) -> float:
        terms = (2 * pi * variance).log() + (f - task.test[1]).square() / variance
        return float(0.5 * terms.mean())

    def with_posterior(prior: float, noise: float) -> Predicted:
        _, covariance = kfs.laplace.posterior(K, risk, prior, noise=noise).predict(task.test[0], noise=True)
        return Predicted(nll(covariance[:, 0]), prior, noise)

    likeliest = kfs.laplace.tune_prior(K, risk, noise=noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the noise is overestimated, which the benchmark shows
        both = kfs.laplace.tune_prior_and_noise(K, risk)
    assert isinstance(likeliest, float)  # noqa: S101 (one for all blocks)
    assert isinstance(both[0], float)  # noqa: S101
    return {
        "MAP": Predicted(nll(torch.full_like(f, noise**2)), None, noise),
        "prior by marginal likelihood": with_posterior(likeliest, noise),
        "prior and noise by marginal likelihood": with_posterior(both[0], both[1]),
    }
