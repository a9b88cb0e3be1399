"""Posteriors on an accelerator: covariances, evidence, priors and the backend agree with the CPU."""

import sys
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kfs
from kfs.laplace import (
    functional_variance,
    log_marginal_likelihood,
    posterior,
    tune_prior,
    tune_prior_and_noise,
)
from kfs.laplace.backend import make_backend
from tests.laplace import stand_in
from tests.laplace.problems import PROBLEMS, Problem, classification, regression, vectors
from tests.laplace.test_backend import batches_of, fitted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
BY_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)


def moved(risk: kfs.EmpiricalRisk) -> kfs.EmpiricalRisk:
    """Return a risk with the same data and a model on the accelerator. Data are moved to the parameters' device."""
    model = deepcopy(risk.model).to(DEVICE)  # type: ignore[union-attr]
    return kfs.EmpiricalRisk(model, risk.loss, [(batch.x, batch.y) for batch in risk.batches()])


def same(there: Any, here: Any) -> None:
    """Compare with a tolerance for other orders of sums, and for eigenvectors of another library."""
    there, here = (torch.as_tensor(value, dtype=torch.float64).detach().cpu() for value in (there, here))
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
@BY_PROBLEM
def test_classification(problem: Problem, make: Any) -> None:
    here = classification(problem)
    there = moved(here)
    X = problem.inputs(7)
    K, L = make(here), make(there)
    found = functional_variance(L, there, X.to(DEVICE), 0.7, batch_size=4)
    assert found.device.type == DEVICE
    same(found, functional_variance(K, here, X, 0.7, batch_size=4))
    expected = log_marginal_likelihood(K, here, 0.7)
    same(log_marginal_likelihood(L, there, 0.7), expected)
    for device in ("cpu", DEVICE):
        prior = torch.tensor(0.7, dtype=torch.float64, device=device)
        same(log_marginal_likelihood(L, there, prior), expected)
    same(tune_prior(L, there), tune_prior(K, here))
    if problem.name == "tokens":
        return  # biases of zero have no best prior
    by_block = tune_prior(K, here, per_block=True)
    found_by_block = tune_prior(L, there, per_block=True)
    assert isinstance(by_block, dict)
    assert isinstance(found_by_block, dict)
    for name, best in by_block.items():
        same(found_by_block[name], best)


def test_gradients_by_the_prior() -> None:
    here = classification(PROBLEMS[0])
    there = moved(here)
    priors = [torch.tensor(0.7, dtype=torch.float64, requires_grad=True, device=device) for device in ("cpu", DEVICE)]
    gradients = [
        torch.autograd.grad(log_marginal_likelihood(kfs.KFAC(risk), risk, prior), prior)[0]
        for risk, prior in zip((here, there), priors, strict=True)
    ]
    same(gradients[1], gradients[0])


def test_regression() -> None:
    here = regression()
    there = moved(here)
    K, L = kfs.KFAC(here), kfs.KFAC(there)
    X = vectors(5)
    expected, found = tune_prior_and_noise(K, here), tune_prior_and_noise(L, there)
    same(found[0], expected[0])
    same(found[1], expected[1])
    same(functional_variance(L, there, X.to(DEVICE), 2.0, noise=0.3), functional_variance(K, here, X, 2.0, noise=0.3))
    same(tune_prior(L, there, noise=0.3), tune_prior(K, here, noise=0.3))


def test_posterior() -> None:
    """Samples are drawn on the accelerator, around its parameters, and have the same covariance as on the CPU."""
    here = classification(PROBLEMS[0])
    there = moved(here)
    expected, found = (posterior(kfs.KFAC(risk), risk, 0.7) for risk in (here, there))
    same(found.covariance.to_dense(), expected.covariance.to_dense())
    same(found.precision.to_dense(), expected.precision.to_dense())
    same(found.log_marginal_likelihood(), expected.log_marginal_likelihood())


@pytest.fixture(params=["stand-in", "installed"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class, made with the real library or with its stand-in."""
    if request.param == "installed":
        if find_spec("laplace") is None:
            pytest.skip("laplace-torch is not installed.")
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "laplace"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    return make_backend()


def on_device(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches]


@pytest.mark.parametrize("method", ["kron", "diag", "full"])
@BY_PROBLEM
def test_backend(backend: Any, problem: Problem, method: str) -> None:
    if method == "kron" and problem.name == "groups":
        pytest.skip("Kron has no groups of channels.")
    torch.manual_seed(1)
    here = problem.make().double().eval()
    there = deepcopy(here).to(DEVICE)
    batches = batches_of(problem)
    loss, matrix = fitted(backend(here, "classification"), method, batches)
    loss_there, matrix_there = fitted(backend(there, "classification"), method, on_device(batches))
    assert matrix_there.device.type == DEVICE
    same(loss_there, loss)
    same(matrix_there, matrix)


@pytest.mark.skipif(find_spec("laplace") is None, reason="laplace-torch is not installed.")
@pytest.mark.filterwarnings("ignore")  # warnings of the other library
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_with_laplace_torch(subset: str, structure: str) -> None:
    """Fits, evidence and predictions by the other library."""
    from laplace import Laplace  # noqa: PLC0415 (optional)

    torch.manual_seed(1)
    here = PROBLEMS[0].make().double().eval()
    X, y = vectors(20), torch.randint(3, (20,))
    found = []
    for device in ("cpu", DEVICE):
        model: nn.Module = deepcopy(here).to(device)
        la = Laplace(model, "classification", subset, structure, backend=kfs.laplace.Backend)
        la.fit(DataLoader(TensorDataset(X.to(device), y.to(device)), batch_size=8))
        la.prior_precision = torch.tensor(2.0, dtype=torch.float64, device=device)
        found.append((la.log_marginal_likelihood(), la(X[:3].to(device), link_approx="probit")))
    same(found[1][0], found[0][0])
    same(found[1][1], found[0][1])
