"""The training picture of the README shows the stored results, and the committed file has the same size."""

import struct
from pathlib import Path

from benchmarks import training_picture

COMMITTED = Path(__file__).parents[2] / "docs" / "assets" / "training.png"


def size(picture: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG file."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_it_draws_kfs_with_default_settings_beside_tuned_optimizers() -> None:
    rates = {name: run.lr for name, run in training_picture.runs("gpt").items()}
    assert rates == {"adamw": 0.003, "muon": 0.02, "soap": 0.01, "kfs": 1.0}
    assert all(len(run.tried) == 5 for name, run in training_picture.runs("gpt").items() if name != "kfs")
    assert len(training_picture.runs("gpt")["kfs"].tried) == 1


def test_the_committed_picture_is_of_the_same_size(tmp_path: Path) -> None:
    drawn = training_picture.draw(tmp_path)
    # The bytes depend on versions of matplotlib and its fonts.
    assert size(drawn) == size(COMMITTED)
    assert COMMITTED.stat().st_size < 100_000
