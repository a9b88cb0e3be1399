"""The Laplace benchmark runs, with and without laplace-torch, and its tasks match their descriptions."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import kfs
from benchmarks import applications, laplace, laplace_tasks
from docs import results


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "has_peer", lambda: False)
    applications.main(["laplace", "--quick"], tmp_path)
    content = json.loads((tmp_path / "applications_laplace_quick.json").read_text(encoding="utf-8"))
    shown = capsys.readouterr().out
    assert "laplace-torch is not installed" in shown
    assert all(row["seconds"] > 0 for row in content["rows"])
    predicted = json.loads((tmp_path / "applications_laplace_predictions_quick.json").read_text(encoding="utf-8"))
    assert {row["data"] for row in predicted["rows"]} == {"digits", "diabetes"}
    # The book shows no results of quick runs.
    for file in list(tmp_path.glob("*_quick.json")):
        file.rename(file.with_name(file.name.replace("_quick", "")))
    page = results.markdown(tmp_path)
    assert "| prior by validation data |" in page
    assert "with a pass over the data" in page
    assert "| digits | prior by validation data |" in shown
    with pytest.raises(SystemExit, match="Unknown: painting"):
        applications.main(["painting"], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_beside_the_other_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not laplace.has_peer():
        pytest.skip("laplace-torch is not installed")
    applications.main(["laplace", "--quick"], tmp_path)
    content = json.loads((tmp_path / "applications_laplace_quick.json").read_text(encoding="utf-8"))
    mine = [row for row in content["rows"] if row["library"].startswith("kfs") and row["error"] is not None]
    assert len(mine) > 5
    in_single = [row for row in mine if "float32 against float64" in row["task"]]
    assert len(in_single) == 6  # two data sets, three priors
    assert all(0 < row["error"] < 1e-2 for row in in_single)
    others = [row for row in mine if row not in in_single and not row["task"].startswith("best prior")]
    assert all(row["error"] < 1e-9 for row in others)
    assert "LayerNorm" in capsys.readouterr().out


def test_tasks() -> None:
    task = laplace_tasks.digits(0, quick=True)
    assert [len(part[1]) for part in (task.training, task.validation, task.test)] == [200, 200, 1000]
    few = laplace_tasks.diabetes(0, quick=True)
    assert few.training[0].mean(0).abs().max() < 1e-12
    assert len(few.training[1]) + len(few.test[1]) == 442


def test_blocks_keep_groups_apart() -> None:
    """For one example and one position, the blocks equal those of KFAC."""
    torch.manual_seed(0)
    model = laplace._one_position(groups=2).double()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randn(1, 64).double(), torch.tensor([2])))
    found = laplace._blocks(risk)
    K = kfs.KFAC(risk, joint_bias=False)
    torch.testing.assert_close(K.to_dense(), found)
    assert (kfs.GGN(risk, block_diagonal=True).to_dense() - found).norm() > 1e-4
