"""The training picture of the README: it draws what is stored, and the committed file is of the same size."""

import struct
from pathlib import Path

from benchmarks import training_picture

COMMITTED = Path(__file__).parents[2] / "docs" / "assets" / "training.png"


def size(picture: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG file."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_it_draws_the_best_run_of_every_optimizer() -> None:
    assert {name: run["lr"] for name, run in training_picture.best("gpt").items()} == {
        "adamw": 0.003,
        "muon": 0.02,
        "soap": 0.01,
        "kfs": 1.0,
    }
    # Two runs of kfs end at zero; the faster one is drawn.
    assert training_picture.best("deep")["kfs"]["lr"] == 0.3


def test_the_committed_picture_is_of_the_same_size(tmp_path: Path) -> None:
    drawn = training_picture.draw(tmp_path)
    # Bytes depend on versions of matplotlib and its fonts.
    assert size(drawn) == size(COMMITTED)
    assert COMMITTED.stat().st_size < 100_000
