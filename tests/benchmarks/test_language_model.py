"""The benchmark of a language model runs on a CPU with a small model. No test depends on run times."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import language_model

SIZES = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 20, "batch": 2, "length": 6, "batches": 2, "max-dim": 12}
TURNS = {"few": 1, "many": 2, "repeats": 1}
SMALL = ["cpu", *(f"--{name}={value}" for name, value in (SIZES | TURNS).items())]


def test_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    language_model.main(SMALL, tmp_path)
    content = json.loads((tmp_path / "language_model.json").read_text(encoding="utf-8"))
    found = {row["program"]: row for row in content["rows"]}
    assert found["forward+backward"]["ratio"] == 1
    expected = {"KFAC mc, first", "KFAC mc", "KFAC mc, marginal batch", "EKFAC mc", "GGN product, one batch", "save"}
    assert expected | {"inspect, one batch"} <= found.keys()
    assert found["save"]["result"] > 0
    assert found["KFAC mc"]["peak"] is None  # not on a CPU
    assert "| KFAC mc | " in capsys.readouterr().out


def test_size_of_gpt2_small() -> None:
    given = language_model.options([])
    with torch.device("meta"):
        model = language_model.LanguageModel(given.vocabulary, given.width, given.heads, given.layers, given.length)
    assert sum(p.numel() for p in model.parameters()) // 1_000_000 == 163


def test_out_of_memory_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError

    def broken(*_: object) -> None:
        raise ValueError("something else")

    monkeypatch.setattr(language_model.Benchmark, "product", too_large)
    monkeypatch.setattr(language_model.Benchmark, "inspection", broken)
    language_model.main(SMALL, tmp_path)
    out = capsys.readouterr().out
    assert "| GGN product, one batch | out of memory |" in out
    assert "| inspect, one batch | ValueError: something else |" in out
    assert "| save | " in out
