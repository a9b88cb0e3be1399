"""The algebra benchmark runs on small batches and writes its files. No test depends on run times."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import algebra
from tests.benchmarks.test_factors import small


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as if it were not installed
    monkeypatch.setattr(algebra, "factor_problems", lambda scale, device: small(scale, device)[1:])
    algebra.main(tmp_path, repeats=1, scale=8)
    content = json.loads((tmp_path / "algebra.json").read_text(encoding="utf-8"))
    programs = {row["program"] for row in content["rows"] if row["library"] == "kfs"}
    assert programs >= {"KFAC", "EKFAC", "product", "exact inverse", "factored inverse"}
    assert (tmp_path / "algebra.png").stat().st_size > 1000
    assert "| GPT | EKFAC | kfs |" in capsys.readouterr().out
