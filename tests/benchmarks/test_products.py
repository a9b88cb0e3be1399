"""The benchmark runs, compares equal results, and writes its files. No test depends on run times."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import products
from tests.basics.cases import assert_close


def result(program) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Extract the product from the result of a program (torch.func returns tuples)."""
    value = program()
    while isinstance(value, tuple):
        value = value[-1]
    assert isinstance(value, torch.Tensor)
    return value


def test_both_libraries_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDTHS", (6, 5, 4, 3))
    tasks = products.programs()
    for product in ("vjp", "jvp", "hvp", "ggnvp"):
        ours, theirs = (result(tasks[product, library]) for library in ("kfs.basics", "torch.func"))
        assert_close(ours, theirs, atol=1e-6)  # float32
        assert ours.abs().max() > 0


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(products, "WIDTHS", (6, 5, 4, 3))
    products.main(tmp_path, repeats=1)
    content = json.loads((tmp_path / "products.json").read_text(encoding="utf-8"))
    assert content["rows"][0]["ratio"] == 1
    # FLOPs by hand: per example, layer sizes 30, 20, 12; forward 62, weights 62, activations 32, in units of 2 FLOPs.
    ratios = {(row["program"], row["library"]): row["flop_ratio"] for row in content["rows"]}
    assert ratios["vjp", "kfs.basics"] == pytest.approx((62 + 32 + 30) / (62 + 62 + 32))
    assert (tmp_path / "products.png").stat().st_size > 1000
    assert "| MLP | ggnvp | kfs.basics |" in capsys.readouterr().out
