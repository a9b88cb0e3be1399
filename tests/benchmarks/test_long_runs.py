"""The benchmark of long runs writes its files, and its variants match their descriptions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import long_runs
from benchmarks.baseline_optimizers import factories
from benchmarks.long_runs import GRIDS, LIMITS, RecurrentModel, places_of_lr, share_of_lr, tanh, train
from benchmarks.training_tasks import token_cross_entropy
from kfs.losses import TokenCrossEntropy


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(long_runs, "CORPUS", 20_000)
    monkeypatch.setattr(long_runs, "RecurrentModel", lambda: RecurrentModel(4, 6))
    long_runs.main(["tanh", "why", "--quick"], tmp_path)
    rows = json.loads((tmp_path / "long_runs_tanh_quick.json").read_text(encoding="utf-8"))["rows"]
    assert [row["optimizer"] for row in rows] == list(GRIDS)
    for row in rows:
        assert row["end"] == pytest.approx(sum(row["ends"]) / 2)
        assert row["ends"][0] != row["ends"][1]  # Seeds choose networks and data.
    rows = json.loads((tmp_path / "long_runs_why_quick.json").read_text(encoding="utf-8"))["rows"]
    assert set(rows[0]["lengths"]) == set(rows[0]["ranks"]) == {"24x5", "24x7", "256x7"}  # a bias is a column
    assert "| lstm | whole step |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="Unknown: rnn"):
        long_runs.main(["rnn"], tmp_path)


def test_learning_rates_rise_and_fall_to_zero() -> None:
    shares = [share_of_lr(step, 100) for step in range(101)]
    assert shares[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert abs(shares[100]) < 1e-12


@pytest.mark.parametrize("name", GRIDS)
def test_schedules_reach_every_part_of_an_optimizer(name: str) -> None:
    """With a learning rate of zero, no parameter moves."""
    model = RecurrentModel(4, 6)
    optimizer = factories(TokenCrossEntropy())[name](model, 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for place in places_of_lr(optimizer):
        place["lr"] = 0.0
    x = torch.arange(20).reshape(2, 10)
    for _ in range(2):  # the first step of SOAP does nothing
        optimizer.zero_grad()
        token_cross_entropy(model(x), x).backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_variants_of_the_trust_region() -> None:
    """By variant, one long direction shortens the other one or not, and large inputs shrink the region or not."""
    D = torch.diag(torch.tensor([10.0, 0.01])).reshape(1, 1, 2, 2)
    two = torch.full((1, 1, 1, 1), 2.0)
    results = [rule(D, 1.0, two, False)[0, 0].diagonal() for rule in LIMITS.values()]
    expected = [[1.0, 0.001], [0.5, 0.0005], [0.995, 0.01], [0.4994, 0.01]]
    # In float32 on a CPU, the limit is accurate to 13 %.
    torch.testing.assert_close(torch.stack(results), torch.tensor(expected), rtol=0.13, atol=0.0)


def test_last_good_step_is_reported() -> None:
    task = replace(tanh(), steps=40, model=lambda: nn.Linear(64, 64))
    run = train(task, "sgd", factories(task.description)["sgd"], 1e38)
    assert run.end == float("inf")
