"""The backend for laplace-torch: against KFAC of all data at once, and dense matrices by autograd."""

import copy
import pickle
import sys
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import ModelError
from kfs.laplace.backend import make_backend
from tests.laplace import stand_in
from tests.laplace.problems import PROBLEMS, Problem, close, jacobian, mlp, trained, vectors

INSTALLED = find_spec("laplace") is not None


@pytest.fixture(params=["stand-in", "installed"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class, made with the real library or with its stand-in."""
    if request.param == "installed":
        if not INSTALLED:
            pytest.skip("laplace-torch is not installed.")
        pytest.importorskip("laplace")
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "laplace"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    made = make_backend()
    monkeypatch.setitem(vars(kfs.laplace), "Backend", made)
    return made


def fitted(backend: Any, method: str, batches: list[tuple[Tensor, Tensor]], **settings: Any) -> tuple[Tensor, Tensor]:
    """Add up the results of the backend over all batches, as laplace-torch does."""
    num_data = sum(len(y) for _, y in batches)
    results = [getattr(backend, method)(x, y, N=num_data, **settings) for x, y in batches]
    total = results[0][1]
    for _, more in results[1:]:
        total = total + more
    matrix = total.to_matrix() if hasattr(total, "to_matrix") else total
    return torch.stack([loss for loss, _ in results]).sum(), matrix


def batches_of(problem: Problem, sizes: tuple[int, ...] = (5, 3)) -> list[tuple[Tensor, Tensor]]:
    X = problem.inputs(sum(sizes))
    y = torch.randint(problem.outputs, (sum(sizes),))
    return list(zip(X.split(list(sizes)), y.split(list(sizes)), strict=True))


def dense_ggn(model: nn.Module, batches: list[tuple[Tensor, Tensor]], names: list[str]) -> Tensor:
    """Multiply Jacobians by autograd with explicit Hessians of the cross-entropy."""
    total = torch.zeros(())
    for X, _ in batches:
        J = jacobian(model, X, names)
        p = torch.softmax(model(X).detach(), 1)
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        total = total + (J.transpose(1, 2) @ H @ J).sum(0)
    return total


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.name != "groups"], ids=lambda problem: problem.name)
def test_factors_of_all_batches(backend: Any, problem: Problem) -> None:
    model = trained(problem)
    batches = batches_of(problem)
    loss, found = fitted(backend(model, "classification"), "kron", batches)
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), batches)
    close(loss, risk.value())
    close(found, kfs.KFAC(risk, joint_bias=False).to_dense())
    # It differs from the sum of the batches' curvatures by far more than round-off.
    parts = [kfs.KFAC(kfs.EmpiricalRisk(model, risk.loss, batch), joint_bias=False).to_dense() for batch in batches]
    assert (sum(parts) - found).norm() > 1e-5 * found.norm()


def test_one_datum_is_exact(backend: Any) -> None:
    model = trained(PROBLEMS[0])
    batches = batches_of(PROBLEMS[0], (1,))
    names = [name for name, _ in model.named_parameters()]
    _, found = fitted(backend(model, "classification"), "kron", batches)
    exact = dense_ggn(model, batches, names)
    blocks = torch.block_diag(*[torch.ones(p.numel(), p.numel()) for p in model.parameters()]).bool()
    close(found, torch.where(blocks, exact, 0.0))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_full_and_diagonal(backend: Any, problem: Problem) -> None:
    model = trained(problem)
    batches = batches_of(problem)
    exact = dense_ggn(model, batches, [name for name, _ in model.named_parameters()])
    loss, full = fitted(backend(model, "classification"), "full", batches)
    close(full, exact)
    losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in batches]
    close(loss, torch.stack(losses).sum().detach())
    close(fitted(backend(model, "classification"), "diag", batches)[1], exact.diagonal())


def test_regression(backend: Any) -> None:
    model = mlp(2).double()
    X, y = vectors(6), torch.randn(6, 2, dtype=torch.float64)
    batches = [(X[:4], y[:4]), (X[4:], y[4:])]
    J = jacobian(model, X, [name for name, _ in model.named_parameters()]).flatten(0, 1)
    loss, full = fitted(backend(model, "regression"), "full", batches)
    close(full, J.T @ J)
    close(loss, 0.5 * (model(X) - y).square().sum().detach())
    close(fitted(backend(model, "regression"), "diag", batches)[1], J.square().sum(0))
    half = kfs.EmpiricalRisk(model, kfs.losses.HalfSquaredError("sum"), (X, y))
    close(fitted(backend(model, "regression"), "kron", batches)[1], kfs.KFAC(half, joint_bias=False).to_dense())


class WithLastLayer(nn.Module):
    """Like laplace-torch's `FeatureExtractor`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.last_layer = model[2]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def test_last_layer(backend: Any) -> None:
    model = WithLastLayer(trained(PROBLEMS[0]))
    batches = batches_of(PROBLEMS[0])
    names = ["model.2.weight", "model.2.bias"]
    exact = dense_ggn(model, batches, names)
    close(fitted(backend(model, "classification", last_layer=True), "full", batches)[1], exact)
    close(fitted(backend(model, "classification", last_layer=True), "diag", batches)[1], exact.diagonal())
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), batches, names)
    _, found = fitted(backend(model, "classification", last_layer=True), "kron", batches)
    close(found, kfs.KFAC(risk, joint_bias=False).to_dense())


def test_subnetwork_and_frozen_parameters(backend: Any) -> None:
    model = trained(PROBLEMS[0])
    batches = batches_of(PROBLEMS[0])
    chosen = torch.tensor([1, 7, 30])
    names = [name for name, _ in model.named_parameters()]
    exact = dense_ggn(model, batches, names)
    close(
        fitted(backend(model, "classification", subnetwork_indices=chosen), "full", batches)[1],
        exact[chosen][:, chosen],
    )
    close(
        fitted(backend(model, "classification", subnetwork_indices=chosen), "diag", batches)[1],
        exact.diagonal()[chosen],
    )
    model.get_submodule("0").requires_grad_(False)
    close(fitted(backend(model, "classification"), "full", batches)[1], exact[25:, 25:])


def test_labels_that_are_drawn(backend: Any) -> None:
    model = trained(PROBLEMS[0])
    batches = batches_of(PROBLEMS[0])
    drawn = {"stochastic": True, "num_samples": 3}
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), batches)
    _, found = fitted(backend(model, "classification", **drawn), "kron", batches)
    close(found, kfs.KFAC(risk, "mc", mc_samples=3, joint_bias=False).to_dense())
    _, full = fitted(backend(model, "classification", **drawn), "full", batches)
    close(full, kfs.Fisher(risk, "mc", mc_samples=3).to_dense())
    close(fitted(backend(model, "classification", **drawn), "diag", batches)[1], full.diagonal())


def test_settings_of_kfac(backend: Any) -> None:
    model = trained(PROBLEMS[1])
    batches = batches_of(PROBLEMS[1])
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), batches)
    one = backend(model, "classification")
    sharings: tuple[Literal["reduce", "expand"], ...] = ("reduce", "expand")
    for sharing in sharings:  # a second fit may have other settings
        _, found = fitted(one, "kron", batches, sharing=sharing)
        close(found, kfs.KFAC(risk, sharing=sharing, joint_bias=False).to_dense())


def test_what_kron_cannot_hold(backend: Any) -> None:
    problem = PROBLEMS[3]
    (batch,) = batches_of(problem, (4,))
    with pytest.raises(ModelError, match=r"'2\.weight' has 2 groups of channels.*Use kfs\.laplace\.posterior"):
        backend(trained(problem), "classification").kron(*batch, N=4)
    transposed = nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(ModelError, match=r"'0\.weight' has a Kronecker product with sides that are not its rows"):
        backend(transposed, "classification").kron(*batch, N=4)

    class ByRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight[:3]) * nn.functional.linear(x, self.weight[3:]).tanh()

    y = torch.randint(3, (4,))
    with pytest.raises(ModelError, match=r"Rows of 'weight' have Kronecker products of their own"):
        backend(ByRows().double(), "classification").kron(vectors(4), y, N=4)


def test_errors_end_a_pass_and_the_next_batch_starts_another(backend: Any) -> None:
    model = trained(PROBLEMS[0])
    batches = batches_of(PROBLEMS[0])
    made = backend(model, "classification")
    expected = fitted(made, "kron", batches)[1]
    with pytest.raises(kfs.errors.DataError, match="not finite"):
        made.kron(torch.full((2, 4), torch.nan, dtype=torch.float64), torch.zeros(2, dtype=torch.long), N=2)
    close(fitted(made, "kron", batches)[1], expected)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        close(fitted(copied, "kron", batches)[1], expected)


def test_parameters_without_rule(backend: Any) -> None:
    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.power = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.softplus(self.inner(x)) ** self.power

    model = Power().double()
    batches = batches_of(PROBLEMS[0])
    with pytest.raises(ModelError, match="power"):
        fitted(backend(model, "classification"), "kron", batches)
    exact = dense_ggn(model, batches, [name for name, _ in model.named_parameters()])
    close(fitted(backend(model, "classification"), "full", batches)[1], exact)
    close(fitted(backend(model, "classification"), "diag", batches)[1], exact.diagonal())


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace.curvature", None)
    monkeypatch.delitem(vars(kfs.laplace), "Backend", raising=False)
    with pytest.raises(ModelError, match=r"laplace-torch, which cannot be imported.*pip install laplace-torch"):
        kfs.laplace.Backend  # noqa: B018


def test_the_name_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(vars(kfs.laplace), "Backend", raising=False)
    first = kfs.laplace.Backend
    assert first is kfs.laplace.Backend
    assert first.__module__ == "kfs.laplace"
    monkeypatch.delitem(vars(kfs.laplace), "Backend")
