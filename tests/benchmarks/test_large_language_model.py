"""The benchmark of large language models runs on a CPU with a tiny one. No test depends on run times."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import large_language_model

SMALL = ["tiny", "--device=cpu", "--dtype=float32"]


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "large_language_model_tiny.json").read_text(encoding="utf-8"))
    return {row["program"]: row for row in content["rows"] if row["library"] == "kfs"}


@pytest.mark.parametrize("more", [[], ["--dtype=bfloat16", "--factor-device=cpu", "--query-rank=2"]])
def test_file_is_written(more: list[str], tmp_path: Path) -> None:
    large_language_model.main([*SMALL, *more, f"--results={tmp_path}"])
    found = rows(tmp_path)
    expected = ["forward+backward", "KFAC, first batches", "KFAC, marginal batch", "eigh of 12", "EKFAC", "inverse"]
    assert list(found) == [*expected, "scores, one eighth", "scores"]
    assert all(row["seconds"] is not None for row in found.values())
    assert found["scores"]["agreement"] == pytest.approx(1)
    assert found["EKFAC"]["goal"] == "seconds <= 300: yes, peak <= 100: unknown"


def test_other_programs_run_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(large_language_model, "KFAC", too_large)
    monkeypatch.setattr(large_language_model.Benchmark, "inverse", too_large)
    large_language_model.main(SMALL, tmp_path)
    found = rows(tmp_path)
    assert found["KFAC, marginal batch"]["why"] == "OutOfMemoryError: CUDA out of memory."
    assert found["EKFAC"]["seconds"] is not None
    assert found["scores"]["why"] == "no inverse"


def test_no_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_language_model, "find_spec", lambda _: None)
    large_language_model.main([*SMALL, "--seconds=0"], tmp_path)
    assert {row["why"] for row in rows(tmp_path).values()} == {"no time left", "no EKFAC", "no inverse"}


@pytest.mark.parametrize(("shape", "gib"), [("3B", 30.1), ("1B", 14.3)])
def test_bytes(shape: str, gib: float) -> None:
    given = large_language_model.options([shape, "--device=meta"])
    model = large_language_model.llama(given)
    shapes = [model.get_parameter(f"{name}.weight").shape for name in large_language_model.tracked(model)]
    assert len(shapes) == 7 * given.layers
    factors = sum(4 * (d_B**2 + d_A**2) for d_B, d_A in shapes)
    assert round(factors / 2**30, 1) == gib


def test_settings() -> None:
    given = large_language_model.options(["3B", "--layers=2"])
    assert (given.layers, given.width, given.kronfluence) == (2, 3072, False)
    assert given.factor_device == "cpu"
    assert large_language_model.options(["3B", "--factor-device=none"]).factor_device is None
    assert large_language_model.options(["1B"]).kronfluence


def test_some_programs(tmp_path: Path) -> None:
    large_language_model.main([*SMALL, "--factor-train=4", "--only", "EKFAC", "inverse", "scores, one"], tmp_path)
    found = rows(tmp_path)
    assert list(found) == ["EKFAC", "inverse", "scores, one eighth"]
    assert all(row["seconds"] is not None for row in found.values())
