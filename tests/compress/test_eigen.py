"""Pruning in the eigenbasis, against eigenvectors of the factors and literal projections."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.compress import prune
from tests.compress.problems import cnn, flat, image_risk, mlp, mlp_risk


def wide() -> tuple[nn.Module, kfs.EmpiricalRisk]:
    """A model whose layers can become smaller even if the bases count."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 9)).double().eval()
    data = torch.randn(80, 12, dtype=torch.float64), torch.randn(80, 9, dtype=torch.float64)
    return model, kfs.EmpiricalRisk(model, nn.MSELoss(), data)


def effective(module: Any) -> Tensor:
    """Return weight and bias of layers in a row as one matrix, with the bias in the last column."""
    layers: list[Any] = list(module) if isinstance(module, nn.Sequential) else [module]
    result = torch.cat([layers[0].weight.flatten(1), layers[0].bias.unsqueeze(1)], dim=1)
    for layer in layers[1:]:
        assert layer.bias is None
        result = layer.weight.flatten(1) @ result
    found: Tensor = result.detach()
    return found


def coefficients(K: kfs.KFAC, name: str, matrix: Tensor) -> Tensor:
    """Rotate a matrix into the eigenbasis of the block. Signs of eigenvectors do not affect which entries are zero."""
    block = K.blocks[name]
    Q_A, Q_B = (torch.linalg.eigh(factor).eigenvectors for factor in (block.A, block.B))
    rotated: Tensor = Q_B.T @ matrix @ Q_A
    return rotated


def test_the_cheapest_coefficients_are_zero_and_others_stay() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    small, report = prune(model, K, 0.4, basis="eigen", damping=0.01)
    costs: list[float] = []
    removed: list[bool] = []
    for name in ("0", "2"):
        block = K.blocks[name]
        before = coefficients(K, name, block.matrix(dict(model.named_parameters())).detach())
        after = coefficients(K, name, block.matrix(dict(small.named_parameters())).detach())
        a, b = torch.linalg.eigvalsh(block.A), torch.linalg.eigvalsh(block.B)
        gone = after.abs() < 1e-10
        torch.testing.assert_close(after, torch.where(gone, 0.0, before), rtol=1e-9, atol=1e-10)
        for i in range(len(b)):
            for j in range(len(a)):
                costs.append(float((b[i] * a[j] + 0.01) * before[i, j] ** 2))
                removed.append(bool(gone[i, j]))
    dearest = sorted(costs)[len(costs) - int(0.4 * 77)]
    assert [cost < dearest for cost in costs] == removed
    assert report.kept_share == 30 / 77
    assert "not counted" in repr(report)
    K_dense = K.to_dense()
    change = flat(small, K.domain.shapes) - flat(model, K.domain.shapes)
    assert sum(row.increase for row in report.rows) == pytest.approx(float(0.5 * change @ K_dense @ change), rel=1e-9)


def test_eigenvalues_of_ekfac_choose_others() -> None:
    model = mlp()
    E = kfs.EKFAC(mlp_risk(model))
    small, _ = prune(model, E, 0.4, basis="eigen", damping=0.0)
    values, Q = E.eigh()
    before, after = (Q.T @ flat(m, E.domain.shapes) for m in (model, small))
    costs = values * before**2
    assert torch.equal(after.abs() > 1e-10, costs >= costs.sort().values[-30])


def test_groups_of_channels() -> None:
    model = cnn(groups=2, padding=1)
    K = kfs.KFAC(image_risk(model))
    small, report = prune(model, K, {"3": 0.5}, basis="eigen")
    block = K.blocks["3"]
    kept = 0
    for g in range(2):
        before, after = (block.matrix(dict(m.named_parameters())).detach()[g] for m in (model, small))
        Q_A, Q_B = torch.linalg.eigh(block.A[g])[1], torch.linalg.eigh(block.B[g])[1]
        rotated = Q_B.T @ after @ Q_A
        left = rotated.abs() > 1e-10
        kept += int(left.sum())
        torch.testing.assert_close(rotated[left], (Q_B.T @ before @ Q_A)[left], rtol=1e-8, atol=1e-10)
    assert kept == report.rows[0].kept == 57
    assert report.rows[0].matrix.endswith("of 2 x 3 x 19")


@pytest.mark.parametrize("count_bases", [False, True])
@pytest.mark.parametrize("keep", [0.97, 0.8, 0.5, 0.3])
def test_rows_and_columns(keep: float, count_bases: bool) -> None:
    model, risk = wide()
    K = kfs.KFAC(risk)
    small, report = prune(model, K, keep, basis="eigen", structured=True, count_bases=count_bases)
    counted = 0
    for name, row in zip(("0", "2"), report.rows, strict=True):
        module = small.get_submodule(name)
        before = K.blocks[name].matrix(dict(model.named_parameters())).detach()
        after = effective(module)
        old, new = (coefficients(K, name, M) for M in (before, after))
        rows, columns = new.abs().amax(1) > 1e-9, new.abs().amax(0) > 1e-9
        inside = rows.unsqueeze(1) & columns
        torch.testing.assert_close(new, torch.where(inside, old, 0.0), rtol=1e-8, atol=1e-9)
        numbers = sum(p.numel() for p in module.parameters())
        if row.form == "unchanged":
            assert torch.equal(after, before)
            counted += row.kept
            continue
        assert row.kept == int(rows.sum()) * int(columns.sum())
        assert row.form == {2: "two layers", 3: "three layers"}[len(list(module.children()))]
        assert numbers == row.kept + row.bases
        assert numbers < before.numel() or not count_bases
        counted += numbers if count_bases else row.kept
    assert counted <= keep * 361
    assert report.kept_share == counted / 361
    X = torch.randn(5, 12, dtype=torch.float64)
    same = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 9)).double()
    with torch.no_grad():
        for name in ("0", "2"):
            M = effective(small.get_submodule(name))
            same.get_parameter(f"{name}.weight").copy_(M[:, :-1])
            same.get_parameter(f"{name}.bias").copy_(M[:, -1])
    torch.testing.assert_close(small(X), same(X), rtol=1e-11, atol=1e-11)


def test_bases_are_fixed_and_the_inner_layer_is_trained() -> None:
    model, risk = wide()
    small, _ = prune(model, kfs.EKFAC(risk), 0.1, basis="eigen", structured=True)
    trained = [[layer.weight.requires_grad for layer in small[place]] for place in (0, 2)]  # type: ignore[index]
    assert all(flags.count(True) == 1 for flags in trained)
    assert any(len(flags) == 3 for flags in trained)
    first = small[0][0]  # type: ignore[index]
    torch.testing.assert_close(
        first.weight @ first.weight.T + torch.outer(first.bias, first.bias),
        torch.eye(len(first.weight), dtype=torch.float64),
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2, "padding_mode": "reflect"}],
    ids=str,
)
def test_convolutions(settings: dict[str, Any]) -> None:
    model = cnn(**settings)
    K = kfs.KFAC(image_risk(model))
    images = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    small, report = prune(model, K, {"3": 0.1}, basis="eigen", structured=True, sample=(images,))
    assert report.rows[0].form == "three layers"
    same = cnn(**settings)
    same.load_state_dict(model.state_dict())
    M = effective(small[3])  # type: ignore[index]
    with torch.no_grad():
        same[3].weight.copy_(M[:, :-1].reshape(6, 4, 3, 3))  # type: ignore[index]
        same[3].bias.copy_(M[:, -1])  # type: ignore[index]
    torch.testing.assert_close(small(images), same(images), rtol=1e-11, atol=1e-12)
    small, report = prune(model, K, {"3": 0.5}, basis="eigen", structured=True, count_bases=True, sample=(images,))
    assert report.rows[0].form == "two layers"
    assert sum(p.numel() for p in small[3].parameters()) <= 111  # type: ignore[index]
    assert report.flops_after is not None
    assert report.flops_before is not None
    assert report.flops_after < report.flops_before


def test_bases_count_for_single_coefficients_too() -> None:
    """A layer stays as it is, to the last bit, if its coefficients and bases have more numbers than the layer."""
    model, risk = wide()
    K = kfs.KFAC(risk)
    small, report = prune(model, K, 0.5, basis="eigen", count_bases=True)
    assert report.kept_share <= 0.5
    assert report.parameters_after == sum(row.kept + row.bases for row in report.rows)
    _, report = prune(model, K, 0.99, basis="eigen", count_bases=True)
    assert {row.form for row in report.rows} == {"unchanged", "one layer"}
    for row in report.rows:
        if row.form == "one layer":
            M = coefficients(K, row.layer, K.blocks[row.layer].matrix(dict(small.named_parameters())).detach())
            assert int((M.abs() > 1e-10).sum()) <= row.before


def test_the_size_of_bases() -> None:
    """An eigenvector has as many numbers as the layer has outputs (output side) or inputs (input side)."""
    model, risk = wide()
    K = kfs.KFAC(risk)
    small, report = prune(model, K, 0.05, basis="eigen", damping=0.01)
    differ = []
    for row in report.rows:
        found = coefficients(K, row.layer, effective(small.get_submodule(row.layer))).abs() > 1e-10
        d_B, d_A = found.shape
        rows, columns = int(found.any(1).sum()), int(found.any(0).sum())
        assert row.kept == int(found.sum())
        assert row.bases == rows * d_B + columns * d_A
        differ.append(row.bases != rows * d_A + columns * d_B)
    assert any(differ)
