"""The overhead benchmark runs on few batches and writes its files. No test depends on run times."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import overhead
from benchmarks.report import Row


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as if it were not installed
    monkeypatch.setattr(overhead, "DEPTHS", (2, 3))
    monkeypatch.setattr(overhead, "FEW_BATCHES", 1)
    monkeypatch.setattr(overhead, "MANY_BATCHES", 2)
    monkeypatch.setattr(overhead, "MANY_LARGE_BATCHES", 2)
    monkeypatch.setattr(overhead, "CALLS", 2)
    overhead.main(tmp_path, repeats=1, scale=32)
    content = json.loads((tmp_path / "overhead.json").read_text(encoding="utf-8"))
    assert {row["problem"] for row in content["rows"]} == {overhead.USE, overhead.DEEP, overhead.POSITIONS}
    assert {row["library"] for row in content["rows"]} == {"torch", "kfs"}
    assert (tmp_path / "overhead.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "| a use of a 16 x 16 layer | KFAC mc: backward | kfs |" in out
    assert "| 20 layers, width 16 | EKFAC mc | kfs |" in out
    assert "| positions: batch of KFAC mc, ms |" in out
    assert gc.get_freeze_count() == 0


def test_chains_note_every_pass() -> None:
    chain, data = overhead.Chain(3), overhead.small_batches(4)
    overhead.forward(chain, data, 1)
    assert [len(chain.forward_spans), len(chain.backward_spans)] == [1, 0]
    overhead.forward_backward(chain, data, 2)
    assert [len(chain.forward_spans), len(chain.backward_spans)] == [3, 2]
    overhead.without_weight_gradients(chain, data, 1)
    assert [len(chain.forward_spans), len(chain.backward_spans)] == [4, 3]
    assert all(p.requires_grad and p.grad is None for p in chain.parameters())
    overhead.kfs_factors(chain, data, 4)
    assert len(chain.forward_spans) >= 8  # an engine may need further passes
    assert len(chain.backward_spans) >= 7
    assert min(chain.forward_spans + chain.backward_spans) > 0


def test_one_time_work_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def program(count: int) -> None:
        nonlocal now
        now += 100 + 3 * count

    monkeypatch.setattr(overhead, "clock", lambda: now)
    assert overhead.per_batch(program, 5, 25) == pytest.approx(3)


def test_ratios_are_taken_within_a_turn() -> None:
    key = "KFAC mc", "kfs"
    turns = [{overhead.UNIT: unit, key: 2 * unit} for unit in (1.0, 5.0, 2.0)]
    assert overhead.rows("problem", turns) == [Row("problem", *overhead.UNIT, 2.0, 1.0), Row("problem", *key, 4.0, 2.0)]


def test_positions_are_added_to_every_datum() -> None:
    model, x = overhead.Positions(4, 3), torch.randn(2, 4, 3)
    with torch.no_grad():
        model.positions.fill_(1)
        assert torch.allclose(model(x), model.head(x.mean(1) + 1), atol=1e-6)
