"""The figure is drawn, and shows the computed errors."""

import runpy
import sys
from pathlib import Path

import pytest

from kfs.tour import structure_errors


def test_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    panels = structure_errors.draw(tmp_path / "a.svg", steps=2)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("after 2 steps", "optimal Kronecker", "convolution"):
        assert words in text
    for comparison in panels.values():
        errors = {(row.layer, row.structure): row.frobenius for row in comparison.rows}
        for layer in map(str, structure_errors.NAMES):
            assert errors[layer, "EKFAC"] < errors[layer, "KFAC"]
            assert errors[layer, "optimal Kronecker"] <= errors[layer, "KFAC"]
    monkeypatch.setattr(sys, "argv", ["structure_errors.py", str(tmp_path / "b.png")])
    runpy.run_path(structure_errors.__file__, run_name="__main__")
    assert (tmp_path / "b.png").stat().st_size > 1000
    assert "Written" in capsys.readouterr().out
