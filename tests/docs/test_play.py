"""The interactive page responds, and has axes and legends."""

from pathlib import Path

import pytest

from docs import drawings
from tests.browser import CHROMIUM, browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pieces_respond(site: Path) -> None:
    with browser() as tab:
        for width in (1400, 390):
            tab.open(site / "docs" / "play.html", width)
            assert tab.problems() == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("document.querySelectorAll('.play canvas').length") == 3
            assert tab.evaluate("document.querySelectorAll('.play .ticks span').length") == 36  # 2 x (5 + 1), 4 x 6
            assert tab.evaluate("document.querySelectorAll('#play-rosenbrock .legend li').length") == 5
            assert tab.evaluate("document.querySelectorAll('.play .scale').length") == 2
        x, y, w, h = tab.box("#play-rosenbrock canvas")
        tab.point("mousePressed", x + w / 2, y + h / 2, pressed=True)
        tab.point("mouseReleased", x + w / 2, y + h / 2)
        assert tab.evaluate("document.getElementById('play-rosenbrock').dataset.state") == "0.0000,1.0000"
        shown = tab.evaluate("document.querySelector('#play-rosenbrock .numbers').textContent")
        assert "minimum of the linearized function (1, 0.00)" in shown


def test_every_figure_is_drawn_by_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for plot in drawings.PLOTS.values():
        monkeypatch.setattr(plot, "draw", lambda folder, formats, plot=plot: drawn.append((plot, folder, formats)))
    monkeypatch.setattr("kfs.tour.structure_errors.draw", drawn.append)
    for name in drawings.plots():
        drawings.draw(name, tmp_path)
    assert len(drawn) == len(drawings.PLOTS) + 1
    assert {figure.plot for figure in drawings.FIGURES} == {drawings.file_of(name) for name in drawings.plots()}
