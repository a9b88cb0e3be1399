"""The benchmark of Gram matrices runs on a CPU, without its kernel. No test depends on run times."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gram
from benchmarks.triangle_kernel import TILINGS, Tiling, slices_for, tile_of, triton


def test_products_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gram, "ROWS", (8,))
    monkeypatch.setattr(gram, "COLUMNS", (3, 140))
    monkeypatch.setattr(gram, "SMALL", (20, 9))
    gram.compare("cpu", {"TF32": torch.float32}, tmp_path)
    rows = json.loads((tmp_path / "gram.json").read_text(encoding="utf-8"))["rows"]
    assert [row["problem"] for row in rows] == ["TF32, 8 x 3"] * 2 + ["TF32, 8 x 140"] * 2
    assert {row["program"] for row in rows} == {"one product", "add_gram"}
    assert all(row["error"] < 1e-5 for row in rows)
    assert "| TF32, 8 x 140 | add_gram | kfs |" in capsys.readouterr().out
    assert not torch.backends.cuda.matmul.allow_tf32


def test_errors_are_seen() -> None:
    assert gram.error(lambda total, x: total.addmm_(x.T, x), torch.float32, "cpu") < 1e-5
    assert gram.error(lambda *_: None, torch.float32, "cpu") > 0.5


@pytest.mark.skipif(triton is not None, reason="Triton wraps the function")
@pytest.mark.parametrize("size", [1, 100, 129, 300, 513, 1000])
@pytest.mark.parametrize(("height", "width"), [(128, 128), (128, 256)])
def test_tiles_cover_the_triangle_once(size: int, height: int, width: int) -> None:
    tiling = Tiling(height, width)
    columns = -(-size // width)
    found = [tile_of(number, columns, width // height) for number in range(tiling.tiles(size))]
    reach_diagonal = [
        (row, column)
        for row in range(-(-size // height))
        for column in range(columns)
        if row * height <= column * width + width - 1  # the first row of a tile is not below its last column
    ]
    assert found == reach_diagonal


def test_slices_have_enough_to_do() -> None:
    tiling = TILINGS[torch.bfloat16][0]
    assert tiling.tiles(768) == 21
    assert slices_for(tiling, 12608, 768, 132) == 6
    assert slices_for(tiling, 100, 768, 132) == 1
    assert slices_for(tiling, 12608, 4096, 132) == 1
    assert len(gram.candidates(torch.bfloat16, 12608, 768, 132)) == 12
