"""The picture of the README: three panels of the synthetic figures, and the committed file has the same size."""

import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from kfs.plots import synthetic_kfac
from kfs.plots.heatmaps import problem
from kfs.tour import at_a_glance

COMMITTED = Path(__file__).parent.parent.parent / "docs" / "assets" / "at_a_glance.png"


def size(picture: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG file."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_panels_are_those_of_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr(at_a_glance, "save", lambda figure, *_: seen.append(figure))
    at_a_glance.draw(tmp_path)
    panels = [axes for axes in seen[0].axes if axes.get_title()]
    matrices = synthetic_kfac.data("cvec", problem())
    assert [axes.get_title() for axes in panels] == list(matrices)[:3]
    for axes in panels:
        (image,) = axes.images
        assert np.array_equal(np.asarray(image.get_array()), matrices[axes.get_title()].numpy())


def test_command_draws_the_committed_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["at_a_glance.py", str(tmp_path)])
    runpy.run_path(str(at_a_glance.__file__), run_name="__main__")
    drawn = Path(capsys.readouterr().out.strip())
    assert drawn.parent == tmp_path
    # The bytes depend on versions of matplotlib and its fonts.
    assert size(drawn) == size(COMMITTED)
    assert COMMITTED.stat().st_size < 100_000
