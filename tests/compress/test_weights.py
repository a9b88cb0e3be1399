"""Pruning of single weights, against dense solutions of the quadratic problem with constraints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kfs
from kfs.compress import prune, surgery
from kfs.kfac import BlockDiagonal, exact_blocks, exact_diagonal
from tests.compress.problems import cnn, constrained_minimum, cost, damped, flat, image_risk, mlp, mlp_risk

DAMPING = 0.01
Curvature = Callable[[kfs.EmpiricalRisk], BlockDiagonal]


def names_of(K: BlockDiagonal) -> list[str]:
    return list(K.domain.shapes)


def test_one_weight_is_removed_as_dense_algebra_says() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    C, w = damped(K, DAMPING), flat(model, names_of(K))
    best = {i: constrained_minimum(C, w, torch.tensor([i])) for i in range(len(w))}
    costs = {i: float(cost(C, w, v)) for i, v in best.items()}
    cheapest = min(costs, key=lambda i: costs[i])
    keep = (len(w) - 1) / len(w)
    small, report = prune(model, K, keep, damping=DAMPING)
    v = flat(small, names_of(K))
    assert (v == 0).nonzero().flatten().tolist() == [cheapest]
    torch.testing.assert_close(v, best[cheapest], rtol=1e-10, atol=1e-12)
    # The diagonal alone would choose another weight, and without an update more is lost.
    damage = 0.5 * C.diagonal() * w**2
    assert float(damage[cheapest]) > costs[cheapest]
    undamped = float(cost(K.to_dense(), w, v))
    assert sum(row.increase for row in report.rows) == pytest.approx(undamped, rel=1e-9)


@pytest.mark.parametrize("limit", [4096, 0], ids=["Cholesky", "conjugate gradients"])
@pytest.mark.parametrize("keep", [0.3, 0.8])
@pytest.mark.parametrize(
    "curvature", [kfs.KFAC, kfs.EKFAC, exact_blocks, exact_diagonal], ids=["KFAC", "EKFAC", "blocks", "diagonal"]
)
def test_a_set_of_weights_is_removed_together(
    curvature: Curvature, keep: float, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surgery, "_DENSE", limit)
    monkeypatch.setattr(surgery, "_AT_ONCE", 100)  # matrices are formed in several parts
    monkeypatch.setattr(surgery, "_TOLERANCE", 1e-12)
    model = mlp()
    K = curvature(mlp_risk(model))
    small, report = prune(model, K, keep, damping=kfs.Relative(0.1))
    C = damped(K, kfs.Relative(0.1))
    w = flat(model, names_of(K))
    v = flat(small, names_of(K))
    removed = (v == 0).nonzero().flatten()
    assert len(removed) == len(w) - int(keep * len(w))
    torch.testing.assert_close(v, constrained_minimum(C, w, removed), rtol=1e-8, atol=1e-10)
    # Weights are chosen by their own costs, from the dense inverse.
    single = w**2 / torch.linalg.inv(C).diagonal()
    assert set(removed.tolist()) == set(single.argsort()[: len(removed)].tolist())
    assert report.kept_share == int(keep * len(w)) / len(w)


def test_adding_up_updates_of_single_weights_is_worse() -> None:
    """What one might compute instead: the update of every removed weight by itself, all of them added."""
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    C, w = damped(K, DAMPING), flat(model, names_of(K))
    small, _ = prune(model, K, 0.5, damping=DAMPING)
    v = flat(small, names_of(K))
    removed = (v == 0).nonzero().flatten()
    steps = [constrained_minimum(C, w, torch.tensor([int(i)])) - w for i in removed]
    added = w + torch.stack(steps).sum(0)
    added[removed] = 0.0
    masked = torch.where(v == 0, 0.0, w)
    assert float(cost(C, w, v)) < 0.95 * min(float(cost(C, w, added)), float(cost(C, w, masked)))


@pytest.mark.parametrize("settings", [{}, {"groups": 2, "stride": 2, "padding": 1, "dilation": 2}], ids=str)
def test_convolutions(settings: dict[str, Any]) -> None:
    model = cnn(**settings)
    K = kfs.KFAC(image_risk(model))
    small, _ = prune(model, K, 0.4, damping=kfs.Relative(0.05))
    C = damped(K, kfs.Relative(0.05))
    w = flat(model, names_of(K))
    v = flat(small, names_of(K))
    removed = (v == 0).nonzero().flatten()
    assert len(removed) == len(w) - int(0.4 * len(w))
    torch.testing.assert_close(v, constrained_minimum(C, w, removed), rtol=1e-8, atol=1e-10)
    images = torch.randn(2, 2, 7, 6, dtype=torch.float64)
    assert small(images).shape == model(images).shape


@pytest.mark.parametrize("curvature", [kfs.KFAC, exact_diagonal], ids=["KFAC", "diagonal"])
def test_damage_sets_the_cheapest_weights_to_zero_and_leaves_others(curvature: Curvature) -> None:
    model = mlp()
    K = curvature(mlp_risk(model))
    small, report = prune(model, K, 0.25, update=False, damping=DAMPING)
    w, v = flat(model, names_of(K)), flat(small, names_of(K))
    diagonal = K.to_dense().diagonal()
    costs = sorted((float(w[i]) ** 2 * (float(diagonal[i]) + DAMPING), i) for i in range(len(w)))
    removed = {i for _, i in costs[: len(w) - int(0.25 * len(w))]}
    assert all(float(v[i]) == (0.0 if i in removed else float(w[i])) for i in range(len(w)))
    assert report.parameters_after == int(0.25 * len(w)) == int((v != 0).sum())
    assert report.stored_after == len(w)


def test_shares_by_layer() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    small, report = prune(model, K, {"2": 0.5}, damping=DAMPING)
    assert torch.equal(flat(small, ["0.weight", "0.bias"]), flat(model, ["0.weight", "0.bias"]))
    assert int((flat(small, ["2.weight", "2.bias"]) != 0).sum()) == 21
    assert [row.layer for row in report.rows] == ["2"]
    both, report = prune(model, K, {"2": 0.5, "0": 1.0}, damping=DAMPING)
    assert torch.equal(flat(both, names_of(K)), flat(small, names_of(K)))
    assert [row.form for row in report.rows] == ["unchanged", "masked"]


def test_a_layer_of_which_all_or_nothing_is_left() -> None:
    """Layers compete: one whose curvature is huge keeps all its weights, at the expense of the other one."""
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    for stack in K.stacks:
        stack.structure.A.scale.mul_(torch.tensor([1e12 if name == "0" else 1.0 for name in stack.names]))  # type: ignore[attr-defined]
    small, report = prune(model, K, 35 / 77, damping=0.0)
    assert torch.equal(flat(small, ["0.weight", "0.bias"]), flat(model, ["0.weight", "0.bias"]))
    assert not flat(small, ["2.weight", "2.bias"]).any()
    assert [row.kept for row in report.rows] == [35, 0]


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("basis", ["parameters", "eigen"])
def test_all_is_kept_to_the_last_bit(basis: Any, structured: bool) -> None:
    model = cnn().float()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    images = torch.randn(20, 2, 7, 6)
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (images, torch.randint(3, (20,))))
    K = kfs.KFAC(risk, "mc")
    for keep in (1, 1.0, {"0": 1.0, "3": 1}):
        small, report = prune(model, K, keep, basis=basis, structured=structured)
        assert small is not model
        assert small.state_dict().keys() == before.keys()
        assert all(torch.equal(t, before[name]) for name, t in small.state_dict().items())
        assert report.kept_share == 1
        assert {row.form for row in report.rows} == {"unchanged"}


def test_the_model_is_not_changed_and_the_result_stands_alone(tmp_path: Any) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    small, _ = prune(model, K, 0.3)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    storages = {p.data_ptr() for p in model.parameters()}
    assert storages.isdisjoint(p.data_ptr() for p in small.parameters())
    assert all(type(module).__module__.startswith("torch.nn") for module in small.modules())
    torch.save(small.state_dict(), tmp_path / "small.pt")
    again = mlp()
    again.load_state_dict(torch.load(tmp_path / "small.pt"))
    X = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(again(X), small(X))


def test_a_bias_with_a_block_of_its_own_stays() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model), joint_bias=False)
    small, report = prune(model, K, 0.3)
    assert torch.equal(flat(small, ["0.bias", "2.bias"]), flat(model, ["0.bias", "2.bias"]))
    assert report.parameters_after == int(0.3 * 65) + 12


def test_the_root_of_a_model_may_be_a_layer() -> None:
    model = nn.Linear(4, 3).double()
    data = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data))
    for small in (prune(model, K, 0.4).model, prune(model, K, 0.4, basis="eigen").model):
        assert isinstance(small, nn.Linear)
        assert not torch.equal(small.weight, model.weight)


def test_not_converged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery, "_DENSE", 0)
    monkeypatch.setattr(surgery, "_TOLERANCE", 1e-40)
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(kfs.errors.SolverError, match=r"update .* layer '0' .*did not converge.*Pass more damping"):
        prune(model, K, 0.3)
