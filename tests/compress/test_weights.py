"""Pruning of single weights, against dense solutions of the quadratic problem with constraints."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import kfs
from kfs.compress import prune, surgery
from kfs.compress.choosing import DAMPINGS
from kfs.errors import KfsWarning
from kfs.factors import BlockDiagonal, exact_blocks, exact_diagonal
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
    # The diagonal alone would choose another weight, and without an update the loss is larger.
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
    monkeypatch.setattr(surgery, "_AT_ONCE", 100)  # matrices are formed in several chunks
    for name in ("_TOLERANCE", "_TOLERANCE_ROUGHLY"):
        monkeypatch.setattr(surgery, name, 1e-12)
    model = mlp()
    K = curvature(mlp_risk(model))
    small, report = prune(model, K, keep, damping=kfs.Relative(0.1))
    C = damped(K, kfs.Relative(0.1))
    w = flat(model, names_of(K))
    v = flat(small, names_of(K))
    removed = (v == 0).nonzero().flatten()
    assert len(removed) == len(w) - int(keep * len(w))
    torch.testing.assert_close(v, constrained_minimum(C, w, removed), rtol=1e-8, atol=1e-10)
    # Weights are chosen by their own costs, from the dense inverse: in one step if few are removed, otherwise in three.
    # Between steps, the remaining weights adapt.
    single = w**2 / torch.linalg.inv(C).diagonal()
    at_once = set(single.argsort()[: len(removed)].tolist())
    if keep == 0.8:
        assert set(removed.tolist()) == at_once
    else:
        expected = torch.tensor([], dtype=torch.int64)
        for share in (0.3 ** (1 / 3), 0.3 ** (2 / 3), 0.3):
            costs = constrained_minimum(C, w, expected) ** 2 / torch.linalg.inv(C).diagonal()
            costs[expected] = -1.0
            expected = costs.argsort()[: len(w) - int(share * len(w) + 1e-9)]
        assert set(removed.tolist()) == set(expected.tolist())
        assert curvature is exact_diagonal or set(removed.tolist()) != at_once
    assert report.kept_share == int(keep * len(w)) / len(w)


def test_adding_up_updates_of_single_weights_is_worse() -> None:
    """A plausible mistake: adding the updates of all removed weights, each computed alone."""
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
    """Layers compete: a layer with huge curvature keeps all its weights, and the other one loses more."""
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    for stack in K.stacks:
        stack.structure.A.scale.mul_(torch.tensor([1e12 if name == "0" else 1.0 for name in stack.names]))  # type: ignore[attr-defined]
    with pytest.warns(KfsWarning, match=r"Nothing is left of the layers '2'.*keep=\{") as seen:
        small, report = prune(model, K, 35 / 77, damping=0.0)
    assert seen[0].filename == __file__
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


@pytest.mark.parametrize("curvature", [kfs.KFAC, exact_blocks], ids=["KFAC", "blocks"])
def test_round_off_of_sums_in_float32(curvature: Curvature) -> None:
    """Due to round-off of long sums, an eigenvalue may be negative by about a hundred eps. More is an error."""
    model = mlp().float()
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), (torch.randn(60, 6), torch.randn(60, 7)))

    def with_eigenvalue(size: float) -> BlockDiagonal:
        K = curvature(risk)
        for stack in K.stacks:
            matrices = stack.structure.B.values if curvature is kfs.KFAC else stack.structure.matrix  # type: ignore[attr-defined]
            values, vectors = torch.linalg.eigh(matrices.double())
            values[:, 0] = size * values[:, -1]
            matrices.copy_((vectors * values.unsqueeze(1)) @ vectors.mT)
        return K

    assert prune(model, with_eigenvalue(-1e-5), 0.5, damping=kfs.Relative(0.1)).report.kept_share <= 0.5
    with pytest.raises(kfs.errors.SolverError, match="has a negative eigenvalue"):
        prune(model, with_eigenvalue(-1e-2), 0.5, damping=kfs.Relative(0.1))


def test_not_converged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery, "_DENSE", 0)
    monkeypatch.setattr(surgery, "_TOLERANCE", 1e-40)
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    with pytest.raises(kfs.errors.SolverError, match=r"update .* layer '0' .*did not converge.*Pass more damping"):
        prune(model, K, 0.3)


def overtrained() -> tuple[nn.Module, kfs.EmpiricalRisk]:
    """A classifier trained to a tiny loss, so that its curvature is no guide far from the minimum."""
    torch.manual_seed(0)
    X = torch.randn(60, 8, dtype=torch.float64)
    y = (X[:, :4].argmax(1) + (X[:, 4] > 0)) % 4
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    batches = list(zip(X.split(20), y.split(20), strict=True))
    return model.eval(), kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), batches)


@pytest.mark.parametrize("options", [{}, {"update": False}, {"structured": True}, {"basis": "eigen"}], ids=str)
def test_damping_is_chosen_by_training_loss(options: dict[str, Any]) -> None:
    """The returned model is that of the chosen damping. Each loss is the pruned model's, computed by the risk."""
    model, risk = overtrained()
    K = kfs.KFAC(risk)
    small, report = prune(model, K, 0.3, **options)
    made = {d: prune(model, K, 0.3, damping=d, **options) for d in DAMPINGS}
    losses = {d: risk.with_model(one.model).value() for d, one in made.items()}
    assert report.losses == pytest.approx(losses, rel=1e-2)
    assert report.loss_before == pytest.approx(risk.value())
    assert report.loss_data == 60
    assert report.damping == min(losses, key=lambda d: losses[d])
    assert max(losses.values()) > 1.02 * min(losses.values())  # so that damping matters
    expected = made[report.damping].model.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in small.state_dict().items())
    assert f"damping {report.damping}, chosen by the training loss of 60 examples: " in repr(report)


def test_steps_are_better_than_removing_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a single step, the last layer loses everything, since each of its weights alone is cheap."""
    model, risk = overtrained()
    K = kfs.KFAC(risk)
    after = prune(model, K, 0.2).report
    assert all(row.kept > 0 for row in after.rows)
    monkeypatch.setattr("kfs.compress.pruning.steps", lambda share: [share])
    with pytest.warns(KfsWarning, match="Nothing is left of the layers '4'"):
        at_once = prune(model, K, 0.2).report
    assert min(after.losses.values()) < min(at_once.losses.values())


def test_whose_data_choose_damping(tmp_path: Any) -> None:
    """A KFAC knows the data it was computed from; files, copies and other operators do not, and need a risk."""
    model, risk = overtrained()
    K = kfs.KFAC(risk)
    kfs.KFAC(risk).save(tmp_path / "k.safetensors")
    unknown = [kfs.load(tmp_path / "k.safetensors"), deepcopy(K), exact_diagonal(risk), K * 2.0]
    for C in unknown:
        report = prune(model, C, 0.3).report  # type: ignore[arg-type]
        assert report.damping == kfs.Relative(0.03)
        assert not report.losses
        assert "damping Relative(0.03), not chosen by training loss" in repr(report)
        assert prune(model, C, 0.3, risk=risk).report.losses  # type: ignore[arg-type]
    expected = prune(model, K, 0.3).report.losses
    for C in (kfs.EKFAC.from_kfac(unknown[0], risk), kfs.EKFAC(risk)):  # type: ignore[arg-type]
        assert prune(model, C, 0.3).report.losses.keys() == expected.keys()
    other = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randn(9, 8).double(), torch.randint(4, (9,))))
    assert prune(model, K, 0.3, risk=other).report.loss_data == 9
    with pytest.raises(kfs.errors.DtypeError, match=r"risk is a tuple.*EmpiricalRisk"):
        prune(model, K, 0.3, risk=(1, 2))  # type: ignore[arg-type]


def test_modes_and_random_state_stay_while_damping_is_chosen() -> None:
    """Dropout may be in training mode: losses are computed in evaluation mode. Frozen models are evaluated, too."""
    layers = (nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 7))
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    data = torch.randn(60, 6, dtype=torch.float64), torch.randn(60, 7, dtype=torch.float64)
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), data, params=[name for name, _ in model.named_parameters()])
    K = kfs.KFAC(risk)
    expected = prune(model, K, 0.5).report.losses
    model.train()
    before = torch.get_rng_state()
    small, report = prune(model, K, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in (*model.modules(), *small.modules()))
    assert report.losses == pytest.approx(expected)


def test_dampings_for_which_systems_are_not_solved_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, risk = overtrained()
    K = kfs.KFAC(risk)
    solved = surgery.adapted

    def fails(layer: Any, kept: Any, roughly: bool = False) -> Any:
        if layer.damping < limit * float(layer.structure.trace()) / layer.size:
            raise kfs.errors.SolverError("No.", "Yes.")
        return solved(layer, kept, roughly)

    monkeypatch.setattr("kfs.compress.pruning.adapted", fails)
    limit = 0.05
    losses = prune(model, K, 0.3).report.losses
    assert [loss < float("inf") for loss in losses.values()] == [False, False, True, True]
    limit = 10.0
    with pytest.raises(kfs.errors.SolverError, match="No"):
        prune(model, K, 0.3)
