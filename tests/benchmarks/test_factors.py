"""The factor benchmark runs on small batches and writes its files. No test depends on run times."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import factors, gram
from benchmarks.factor_problems import Batches, cnn, factor_problems, vit
from benchmarks.problems import GPT


def small(scale: int, device: str) -> list[Batches]:
    """Return one batch of a narrow MLP and of a narrow GPT."""
    assert (scale, device) == (8, "cpu")
    mlp = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10))
    gpt = GPT(vocabulary=50, width=16, heads=2, depth=1, length=12)
    sentences = torch.randint(50, (4, 12))
    return [
        Batches("MLP", mlp, [(torch.randn(4, 20), torch.randint(10, (4,)))]),
        Batches("GPT", gpt, [(sentences, sentences)], few_columns=False, terms=12),
    ]


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as if it were not installed
    monkeypatch.setattr(factors, "factor_problems", small)
    factors.main(tmp_path, repeats=1, scale=8)
    content = json.loads((tmp_path / "factors.json").read_text(encoding="utf-8"))
    assert {row["problem"] for row in content["rows"]} == {"MLP", "GPT"}
    assert {row["library"] for row in content["rows"]} == {"torch", "kfs", "kfs, all parameters"}
    assert all(row["flop_ratio"] > 0.5 for row in content["rows"])
    assert (tmp_path / "factors.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "| GPT | mc expand | kfs |" in out
    assert "| MLP | type-2 expand | kfs |" in out
    assert "| GPT | type-2 expand |" not in out


def test_problems() -> None:
    for problem in factor_problems(scale=64):
        X, y = problem.data[0]
        with torch.no_grad():
            loss = nn.functional.cross_entropy(problem.model(X), y, reduction="none")
        assert loss.numel() == problem.terms * len(X)
    convolutions = [m for m in cnn().modules() if type(m).__name__ == "Conv2d"]
    assert len(convolutions) == 11
    assert [p.autocast is None for p in vit(16, "cpu")] == [True, True, False]


def test_strip_widths_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(gram.SIZES, "cpu", ((8, 96),))
    gram.main()
    assert "8 96 torch.float32" in capsys.readouterr().out
