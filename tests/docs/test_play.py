"""The page of things to play with responds, and figures are where pages expect them."""

from pathlib import Path

import pytest

from docs import pages
from tests.browser import CHROMIUM, browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pieces_respond(site: Path) -> None:
    with browser() as tab:
        for width in (1400, 390):
            tab.open(site / "play.html", width)
            assert tab.problems() == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("document.querySelectorAll('.play canvas').length") == 3
        x, y, w, h = tab.box("#play-rosenbrock canvas")
        tab.point("mousePressed", x + w / 2, y + h / 2, pressed=True)
        tab.point("mouseReleased", x + w / 2, y + h / 2)
        assert tab.evaluate("document.getElementById('play-rosenbrock').dataset.state") == "0.0000,1.0000"


def test_every_figure_is_drawn_by_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for plot in pages.PLOTS:
        monkeypatch.setattr(plot, "draw", lambda folder, formats, plot=plot: drawn.append((plot, folder, formats)))
    monkeypatch.setattr("kfs.plots.structure_errors.draw", drawn.append)
    pages.draw_figures(tmp_path)
    assert len(drawn) == len(pages.PLOTS) + 1
    for page, figures in pages.FIGURES.items():  # a figure that no plot draws is an error there
        assert pages.figure(page).count("<figure>") == len(figures)
