"""The benchmark of recurrent networks runs on a CPU. No test depends on run times."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recurrent


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = recurrent.measure

    def small(device: str, repeats: int) -> object:
        return measure(device, repeats, kinds=("GRU", "LSTM"), layers=(2,), batches=(4,), width=3, times=5)

    monkeypatch.setattr(recurrent, "measure", small)
    threads = torch.get_num_threads()
    recurrent.main("cpu", tmp_path, repeats=1)
    torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "recurrent_cpu.json").read_text(encoding="utf-8"))["rows"]
    programs = ["SGD, step", "watched pass", "KFAC, watched step", "KFAC, step"]
    assert [row["program"] for row in rows] == 2 * programs
    assert [row["problem"] for row in rows[::4]] == ["GRU, layers: 2, batch: 4", "LSTM, layers: 2, batch: 4"]
    assert all(row["ratio"] == 1 for row in rows[::4])
    assert "| LSTM, layers: 2, batch: 4 | watched pass |" in capsys.readouterr().out
