"""The benchmark of applications writes its files, and its tasks match their descriptions."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import applications, merging


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ways = {
        name: merging.WAYS[name]
        for name in ("diagonal (Fisher merging)", merging.REGMEAN, "KFAC", "KFAC, factored damping")
    }
    monkeypatch.setattr(merging, "WAYS", ways | {"GGN": merging.Merge(merging.WAYS["GGN"].curvature, tolerance=0.5)})
    threads = torch.get_num_threads()
    applications.main(["merging", "--quick"], tmp_path)
    assert torch.get_num_threads() == threads
    content = json.loads((tmp_path / "applications_merging_quick.json").read_text(encoding="utf-8"))
    rows = content["rows"]
    assert {(row["start"], row["tasks"]) for row in rows} == {
        (s, t) for s in merging.STARTS for t in ("rotate", "halves")
    }
    assert [row["way"] for row in rows[:5]] == [merging.OWN, "start", merging.JOINT, "average", *list(ways)[:1]]
    assert all(0 <= value <= 100 for row in rows for value in row["accuracies"])
    assert (tmp_path / "applications_merging_quick.png").exists()
    shown = capsys.readouterr().out
    assert "| strong | rotate | KFAC |" in shown
    assert "KFAC minus RegMean (weak, halves): " in shown
    with_preconditioner, without = content["environment"]["iterations with and without preconditioner"]
    assert 0 < with_preconditioner < without
    with pytest.raises(SystemExit, match="Unknown: painting"):
        applications.main(["painting"], tmp_path)


def test_tasks() -> None:
    """Rotated images have the same pixels; halves have different labels. Training and test data are disjoint."""
    first, second = merging.tasks("rotate")
    assert torch.equal(first.training[0].sum(1), second.training[0].sum(1))
    assert not torch.equal(first.training[0], second.training[0])
    low, high = merging.tasks("halves")
    assert int(low.test[1].max()) < 5 <= int(high.test[1].min())
    assert (
        len(first.training[1]) + len(first.test[1])
        == 1797
        == sum(len(t.training[1]) + len(t.test[1]) for t in (low, high))
    )


def test_averages() -> None:
    torch.manual_seed(0)
    models = [merging.network() for _ in range(2)]
    result = merging.averaged(models)
    for p, q, r in zip(models[0].parameters(), models[1].parameters(), result.parameters(), strict=True):
        assert torch.allclose(r, (p + q) / 2)
