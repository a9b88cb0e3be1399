"""The site in a real browser, opened from the disk: search works, formulas are drawn, and nothing is too wide."""

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest

from docs.site_checks import read
from tests.browser import CHROMIUM, Page, browser
from tests.docs.test_book import DEFINED, written

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
# One page of each kind, and those with the widest formulas, tables and pictures.
LOOKED_AT = (
    "docs/index",
    "docs/kfac_overview",
    "docs/kfac_layers",
    "docs/api/kfs.KFAC",
    "docs/api/index",
    "docs/benchmarks",
    "docs/cheatsheet_basics",
    "docs/cheatsheet_kfac",
    "docs/references",
    "docs/symbols",
    "docs/errata",
    "docs/exercises",
    "docs/which_kfac",
    "docs/howto_looking",
    "docs/right",
    "docs/test_your_kfac",
    "kfs/__init__",
    "kfs/basics/ggns",
    "kfs/kfac/scaffold",
    "CONTRIBUTING",
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


def eventually(value: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return a value once it is true, or the last value after a timeout."""
    end = time.monotonic() + seconds
    while not (found := value()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


LINKS = "[...document.querySelectorAll('#search-results li a')].map((link) => link.getAttribute('href')).join(' ')"


def found(site: Path, tab: Page, words: str, expected: str) -> list[str]:
    """Search, wait until a page is among the results, and return their addresses, best first."""
    tab.open(site / "search.html", 1400)
    tab.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q={quote_plus(words)}")
    assert eventually(lambda: expected in (tab.evaluate(LINKS) or "")), tab.evaluate(LINKS)
    assert tab.problems() == []
    return str(tab.evaluate(LINKS)).split()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("install", "README.html"),
        ("shuffle", "docs/"),
        ("synthetic_fisher_convergence", "kfs/basics/mc_fisher_convergence.html"),
        ("EKFAC", "docs/api/kfs.EKFAC.html"),
    ],
)
def test_search(site: Path, tab: Page, word: str, expected: str) -> None:
    """Search works without a server."""
    found(site, tab, word, expected)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("eigenvalues", "docs/howto_spectra"),
        ("checkpoint", "docs/howto_checkpoints"),
        ("influence", "docs/howto_influence"),
        ("language model", "docs/howto_language_model"),
        ("GPU", "docs/gpu"),
        ("merge", "docs/howto_merge"),
        ("uncertainty", "docs/howto_laplace"),
        ("benchmarks", "docs/benchmarks"),
        # Names in the spelling of code are looked up.
        ("KFAC", "docs/api/kfs.KFAC"),
        ("EmpiricalRisk", "docs/api/kfs.EmpiricalRisk"),
        ("kfs.load", "docs/api/kfs.load"),
    ],
)
def test_search_finds_instructions_first(site: Path, tab: Page, words: str, page: str) -> None:
    """Instructions come before the reference, and the reference before files of the library."""
    links = found(site, tab, words, f"{page}.html")
    assert links[0].startswith(f"{page}.html"), links[:3]
    first = next((place for place, link in enumerate(links) if link.startswith("kfs/")), len(links))
    assert not any(link.startswith("docs/") for link in links[first:]), links


@pytest.mark.parametrize("width", [1400, 1280, 390])
def test_layout(site: Path, tab: Page, width: int) -> None:
    for name in LOOKED_AT:
        tab.open(site / f"{name}.html", width)
        assert tab.problems() == [], name
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, name


# Over all listings: by how many pixels the widest line exceeds the visible area.
CLIPPED = """Math.max(...[...document.querySelectorAll("div.code, div.code pre")].map(
  (block) => block.scrollWidth - block.clientWidth))"""


@pytest.mark.parametrize("width", [1800, 1400, 1280, 390])
def test_code_is_not_clipped(site: Path, tab: Page, width: int) -> None:
    """Beside prose, long lines are wrapped; on a wide screen, prose is on the left of code."""
    for name in (*(path.removesuffix(".py") for path in DEFINED), "docs/kfac_overview", "docs/kfac_layers"):
        tab.open(site / f"{name}.html", width)
        assert tab.evaluate(CLIPPED) <= 0, name
    tab.open(site / "kfs" / "basics" / "ggns.html", width)
    prose, code = (tab.evaluate(f"document.querySelector('div.{kind}').offsetLeft") for kind in ("prose", "code"))
    assert (prose < code) == (width > 1200)


def test_all_formulas_are_drawn(site: Path, tab: Page) -> None:
    """On a few pages, each formula is drawn; and MathJax knows all commands of the book."""
    formulas = {file: found for file in written(site) if (found := latex(file))}
    assert len(formulas) > 50
    most = sorted(formulas, key=lambda file: -len(formulas[file]))[:2]
    drawn = "[...document.querySelectorAll('.math')].every((formula) => formula.querySelector('mjx-container svg'))"
    for file in (*most, site / "kfs" / "basics" / "ggns.html"):
        tab.open(file, 1400)
        assert tab.evaluate("document.querySelectorAll('.math').length") == len(formulas[file])
        assert eventually(lambda: tab.evaluate(drawn)), file
        assert tab.problems() == []
    # Unknown commands are shown in red, mistakes as errors.
    all_of_them = [*(tex for found in formulas.values() for tex in found), r"\nonsense"]
    tab.evaluate(
        f"window.wrong = {json.dumps(all_of_them)}.filter((tex) => "
        "MathJax.tex2svg(tex).querySelector('[data-mml-node=merror], [fill=red]')).join(' ')"
    )
    assert tab.evaluate("window.wrong") == r"\nonsense"


@pytest.mark.parametrize("name", ["cheatsheet_basics", "cheatsheet_kfac"])
def test_a_cheatsheet_is_printed_on_one_sheet(site: Path, tab: Page, name: str) -> None:
    tab.open(site / "docs" / f"{name}.html", 1400)
    drawn = "[...document.querySelectorAll('.math')].every((formula) => formula.querySelector('mjx-container svg'))"
    assert eventually(lambda: tab.evaluate(drawn))
    pdf = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    (box,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)  # one page
    assert [round(float(side) / 72 * 25.4) for side in box] == [210, 297]  # A4, in mm


def latex(file: Path) -> list[str]:
    """Return the formulas of a page."""
    found = [element for element in read(file).elements if "math" in element.attrib.get("class", "").split()]
    return [re.sub(r"^\\[(\[]|\\[)\]]$", "", (element.text or "").strip()) for element in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dark_mode(site: Path, tab: Page, theme: str) -> None:
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.open(site / "docs" / "index.html", 1400)
    color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(color.partition("(")[2].split(",")[0])
    assert (red > 200) == (theme == "light")
