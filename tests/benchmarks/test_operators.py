"""The operator benchmark runs on small batches and writes its files. Nothing here depends on how long anything took."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import operators, problems


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as where it is not installed
    operators.main(tmp_path, repeats=1, scale=8)
    content = json.loads((tmp_path / "operators.json").read_text(encoding="utf-8"))
    assert {row["problem"] for row in content["rows"]} == {"MLP", "CNN", "GPT"}
    assert {row["library"] for row in content["rows"]} == {"torch", "kfs"}
    assert (tmp_path / "operators.png").stat().st_size > 1000
    assert "| GPT | GGN, 10 | kfs |" in capsys.readouterr().out


def test_gpt_predicts_from_the_past_only() -> None:
    gpt = problems.GPT().eval()
    tokens = torch.randint(64, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 0
    assert torch.allclose(gpt(tokens)[:, :, :20], gpt(changed)[:, :, :20], atol=1e-5)
