"""The benchmark of compression writes its files, and its baselines match their descriptions."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import kfs
from benchmarks import applications, compression, pruning
from kfs.compress import low_rank, prune


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    applications.main(["compression", "--quick"], tmp_path)
    rows = json.loads((tmp_path / "compression_quick.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len({row["method"] for row in rows}) == 12
    smaller = [row for row in rows if row["method"].startswith(("channels", "low rank", "EigenDamage, bases counted"))]
    assert len(smaller) == 5
    assert all(0 < row["stored"] <= 0.21 for row in smaller)  # biases of the smallest layers stay
    printed = capsys.readouterr().out
    assert "| magnitude | " in printed
    assert (tmp_path / "compression_quick.png").exists()
    assert torch.get_num_threads() == threads


def test_unknown_parts() -> None:
    with pytest.raises(SystemExit, match=r"Unknown: painting\. Say .*compression"):
        applications.main(["painting"])


def test_without_curvature_weights_go_by_magnitude_and_ranks_by_singular_values() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double().eval()
    data = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 7, dtype=torch.float64)
    none = compression.identity_like(kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data)))
    small, _ = prune(model, none, 0.5, update=False, damping=0.0)
    before, after = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, small))
    assert torch.equal(after, torch.where(before.abs() >= before.abs().sort().values[-38], before, 0.0))
    found, _ = low_rank(model, none, {"0": 12 / 35}, damping=0.0)
    weight, bias = (model.get_parameter(f"0.{leaf}").detach() for leaf in ("weight", "bias"))
    U, s, V = torch.linalg.svd(torch.cat([weight, bias.unsqueeze(1)], dim=1))
    best = s[0] * torch.outer(U[:, 0], V[0])
    product = found.get_parameter("0.1.weight") @ found.get_parameter("0.0.weight")
    torch.testing.assert_close(product.detach(), best[:, :-1])


def test_one_threshold_for_all_singular_values() -> None:
    """The result fits the budget, and the smallest singular values are removed first, however little that saves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Tanh(), nn.Linear(20, 10, bias=False)).double().eval()
    data = torch.randn(50, 20, dtype=torch.float64), torch.randn(50, 10, dtype=torch.float64)
    K = compression.identity_like(kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), data)))
    small, report = compression.above_one_threshold(model, K, 0.5)
    assert report.stored_after <= 300
    kept, dropped = [], []
    for name in ("0", "2"):
        values = torch.linalg.svdvals(model.get_parameter(f"{name}.weight").detach())
        rank = len(small.get_parameter(f"{name}.0.weight"))
        kept.append(float(values[rank - 1]))
        dropped.append(float(values[rank]))
    assert max(dropped) < min(kept)


def test_files_of_pruning_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    applications.main(["pruning", "--quick"], tmp_path)
    content = json.loads((tmp_path / "pruning_quick.json").read_text(encoding="utf-8"))
    assert {(row["task"], row["method"]) for row in content["rows"]} == {
        ("table, MLP", method)
        for method in (
            *("", *pruning.PEERS, pruning.DEFAULT),
            *("prune, KFAC with drawn labels", "prune, KFAC without data"),
        )
    }
    fixed = [row["dampings"] for row in content["rows"] if row["method"] == "prune, KFAC without data"]
    assert fixed == [[0.03, 0.03]]
    printed = capsys.readouterr().out
    assert "prune, KFAC minus SparseGPT, with the standard error over 2 seeds" in printed


def test_sparsegpt() -> None:
    """For one row of weights, it is optimal brain surgeon from left to right: each removal adapts the columns after it.

    For convolutions, patches times the matrix are the layer's output. The share counts biases, which stay.
    """
    torch.manual_seed(0)
    X, W = torch.randn(50, 6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    found = pruning.without_weights(W, X, 0.5)
    assert int((found != 0).sum()) == 3
    H = X.T @ X
    H.diagonal().add_(0.01 * H.diagonal().mean())
    expected = W[0].clone()
    for column in range(6):
        if found[0, column] == 0:
            rest = torch.arange(column + 1, 6)
            # Earlier columns are fixed already; later ones minimize the damped squared error.
            expected[rest] += torch.linalg.solve(H[rest][:, rest], H[rest, column] * expected[column])
            expected[column] = 0.0
    torch.testing.assert_close(found[0], expected)
    model = nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.GELU(), nn.Flatten(), nn.Linear(24, 4)).double()
    series = torch.randn(7, 2, 8, dtype=torch.float64)
    rows = pruning.patches(model[0], series)
    conv: nn.Conv1d = model[0]  # type: ignore[assignment]
    assert conv.bias is not None
    products = (rows @ conv.weight.flatten(1).T + conv.bias).reshape(7, 8, 3).transpose(1, 2)
    torch.testing.assert_close(products, conv(series))
    small = pruning.sparsegpt(model, series, 0.5)
    total = sum(p.numel() for p in model.parameters())
    assert abs(sum(int((p != 0).sum()) for p in small.parameters()) - 0.5 * total) <= 2
