"""The report: its data equal those of operators, its page needs no other files, and its interactive parts respond."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.drawings import FIGURES
from kfs.factors import EKFAC, KFAC
from kfs.operators import GGN, Fisher
from kfs.plots.heatmaps import problem
from kfs.tour import digits, page, play
from kfs.tour import run as tour
from kfs.tour.page import write_report
from kfs.tour.run import Report
from tests.browser import CHROMIUM, Page, browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [tour.run_definition(file) for file in tour.definitions()[:2]]
    failed = Report("lie", (), 0.0, "False: 1 = 2.")
    steps: list[str] = []
    target = write_report(tmp_path_factory.mktemp("report"), [*results, failed], quick=True, step=steps.append)
    assert steps == ["figures", "things to play with", "digits", "influence"]
    return target


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def test_play_data_are_those_of_operators() -> None:
    state = torch.get_rng_state()
    data = play.play_data(quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    risk = problem()

    def close(rows: Any, matrix: Tensor) -> None:
        torch.testing.assert_close(torch.tensor(rows, dtype=torch.float64), matrix, rtol=1e-3, atol=1e-12)  # 4 digits

    G = GGN(risk).to_dense()
    close(data["samples"]["matrices"][1], Fisher(risk, "type-1", mc_samples=4).to_dense())
    errors = data["samples"]["errors"]
    assert errors[0] > errors[-1] > 0
    expected = torch.linalg.matrix_norm(Fisher(risk, "type-1", mc_samples=16).to_dense() - G, ord=2)
    assert errors[-1] == pytest.approx(float(expected / torch.linalg.matrix_norm(G, ord=2)))
    for name, operator in (("exact", GGN(risk)), ("KFAC", KFAC(risk)), ("EKFAC", EKFAC(risk))):
        for flattening in ("cvec", "rvec"):
            close(data["structures"]["matrices"][flattening][name], operator.to_dense(flattening))
    errors = data["structures"]["errors"]
    assert errors["exact"] == 0 < errors["block-diagonal"] < errors["EKFAC"] < errors["KFAC"]
    assert data["structures"]["blocks"][0] == ["0.weight", 0, 20]
    assert data["structures"]["blocks"][-1][2] == len(G)


def test_digits() -> None:
    found = digits.examine(quick=True)
    assert found.accuracy > 0.5
    assert {row.layer for row in found.comparison.rows} == {"0", "2", "4"}
    assert list(found.factors.blocks) == ["0", "2", "4"]
    assert {row.block for row in found.inspection.rows} == {"0", "2", "4"}
    assert found.solution.converged
    assert found.density.nodes.max() > 0
    assert found.ratios["forward and backward pass"] == 1


def test_page_stands_alone(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    for words in ("What was verified", "lie failed: False: 1 = 2.", "one example", "KFAC, one draw", "data:image/png"):
        assert words in text
    calls = re.findall(r"<figcaption>[^<]*, by ([\w.]+)\(", text)
    density_and_solution = ["kfs.operators.spectral_density", "kfs.operators.solve"]
    assert calls == ["kfs.inspect", "K.plot", "K.plot_spectrum", *density_and_solution, "kfs.compare"]
    assert ">structure</th>" in text.partition(">What it costs</h3>")[0]  # the comparison as HTML
    places = re.findall(r'id="([^"]+)"', text)
    assert len(places) == len(set(places))
    for link in re.findall(r'href="#([^"]+)"', text):
        assert link in places


def test_each_figure_has_a_caption_with_its_result(report: Path) -> None:
    """A caption has one sentence about the contents, and one about the result to notice."""
    captions = re.findall(r"<figcaption>([^<]+)</figcaption>", report.read_text(encoding="utf-8"))
    assert len(captions) >= 7
    for caption in (*captions, *page.CAPTIONS.values()):
        if not re.match(r"\d", caption):  # digits of the last section have their index
            assert len(re.findall(r"[.;:](?: |$)", caption)) >= 2, caption
    drawn = {figure.name for figure in FIGURES}
    assert drawn == page.CAPTIONS.keys()
    assert play.HINTS.keys() == play.TITLES.keys()


def test_missing_parts_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda _: None)
    text = write_report(tmp_path, [], quick=True).read_text(encoding="utf-8")
    assert "pip install matplotlib" in text
    assert "pip install scikit-learn" in text
    assert page.left_out() == [sentence for sentence in page._MISSING.values() if sentence in text]
    assert len(page.left_out()) == 2
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "sklearn" else name)
    assert page.left_out() == ["Left out: digits. They need scikit-learn: pip install scikit-learn"]


def test_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(folder: Any, *_: Any) -> list[Path]:
        path = Path(folder) / "some.png"
        path.write_bytes(b"picture")
        return [path]

    for module in ("linearized_rosenbrock", "synthetic_hessian", "synthetic_fisher", "synthetic_kfac"):
        monkeypatch.setattr(f"kfs.plots.{module}.draw", drawn)
    monkeypatch.setattr("kfs.tour.structure_errors.draw", lambda path: path.write_bytes(b"picture"))
    assert page._figures(quick=False).count("<figure>") == 5
    assert page._figures(quick=True).count("<figure>") == 1


@needs_chromium
@pytest.mark.parametrize("width", [1400, 390])
def test_layout_and_errors(report: Path, tab: Page, width: int) -> None:
    tab.open(report, width)
    assert tab.problems() == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelectorAll('.play canvas').length") == 3
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 7)")
    assert tab.evaluate("[...document.querySelectorAll('.example img')].every((image) => image.naturalWidth == 8)")
    figures = "[...document.querySelectorAll('figure:not(.datum) img')]"
    assert tab.evaluate(f"{figures}.every((image) => image.naturalWidth > 100)")
    assert tab.evaluate(OVERLAPS) == []


# Pairs of overlapping captions, and captions that are wider than their figure.
OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll(".datum")].map((example) => example.getBoundingClientRect());
  const found = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    if (!apart) found.push([i, i + 1 + j]);
  }));
  document.querySelectorAll(".datum").forEach((example, i) => {
    if (example.scrollWidth > example.clientWidth + 1) found.push(i);
  });
  return found;
})()"""


def state(tab: Page, name: str) -> str:
    return str(tab.evaluate(f"document.getElementById('play-{name}').dataset.state"))


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes(report: Path, tab: Page, theme: str) -> None:
    """Pages follow the system's theme, with sufficient contrast of text, and figures on white."""
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.open(report, 1400)
    ground, ink = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    red = [int(re.findall(r"\d+", color)[0]) for color in (ground, ink)]
    assert (red[0] > red[1]) == (theme == "light")
    assert abs(red[0] - red[1]) > 180
    card = tab.evaluate("getComputedStyle(document.querySelector('figure:not(.datum) > img')).backgroundColor")
    assert card == "rgb(255, 255, 255)"


@needs_chromium
def test_the_contents_follow(report: Path, tab: Page) -> None:
    """They stay visible, and mark the current section."""
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    tab.open(report, 1400)
    current = "document.querySelector('nav [aria-current]')?.textContent"
    tab.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    assert tab.evaluate(current) is None
    tab.box("#digits h2")
    tab.evaluate("document.getElementById('digits').scrollIntoView(true); mark()")
    assert tab.evaluate(current) == "Digits"
    box = "document.querySelector('nav').getBoundingClientRect()"
    assert tab.evaluate(f"{box}.top") == 0
    assert tab.evaluate(f"{box}.left") >= 0
    assert tab.evaluate(f"{box}.height") > 300


@needs_chromium
def test_the_anchor_can_be_dragged(report: Path, tab: Page) -> None:
    tab.open(report, 1400)
    assert state(tab, "rosenbrock") == "-0.5000,1.0000"
    x, y, width, height = tab.box("#play-rosenbrock canvas")
    tab.point("mousePressed", x + width / 2, y + height / 2, pressed=True)
    tab.point("mouseMoved", x + 0.75 * width, y + 0.25 * height, pressed=True)
    tab.point("mouseReleased", x + 0.75 * width, y + 0.25 * height)
    assert state(tab, "rosenbrock") == "1.0000,2.0000"
    text = str(tab.evaluate("document.querySelector('[data-name=GGN]').textContent"))
    alpha, first = 10.0, 1.0  # at (1, 2): G = 2 [1 + 4 a, -2 a; -2 a, a]
    assert f"[{2 * (1 + 4 * alpha * first):.1f}  {-4 * alpha * first:.1f}; " in text
    tab.point("mouseMoved", x + 5, y + 5)
    assert state(tab, "rosenbrock") == "1.0000,2.0000"  # no button is pressed


@needs_chromium
def test_the_slider_changes_the_samples(report: Path, tab: Page) -> None:
    tab.open(report, 1400)
    assert state(tab, "samples") == "1"
    x, y, width, height = tab.box("#play-samples input")
    for kind, pressed in (("mousePressed", True), ("mouseReleased", False)):
        tab.point(kind, x + width - 3, y + height / 2, pressed=pressed)
    assert state(tab, "samples") == "16"
    x, y, width, height = tab.box("#play-samples canvas")
    tab.point("mouseMoved", x + 2, y + 2)
    said = str(tab.evaluate("document.querySelector('#play-samples p:last-of-type').textContent"))
    assert said.startswith("0.weight[0], 0.weight[0]: ")


@needs_chromium
def test_structures_can_be_switched(report: Path, tab: Page) -> None:
    tab.open(report, 1400)
    assert state(tab, "structures") == "exact,rvec"
    for value in ("EKFAC", "cvec"):
        x, y, width, height = tab.box(f"#play-structures input[value={value}]")
        tab.point("mousePressed", x + width / 2, y + height / 2, pressed=True)
        tab.point("mouseReleased", x + width / 2, y + height / 2)
    assert state(tab, "structures") == "EKFAC,cvec"
    assert "EKFAC, cvec: relative error" in str(tab.evaluate("document.getElementById('play-structures').textContent"))
