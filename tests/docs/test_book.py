"""The book builds, every page has its math and code, no formula is left unrendered, and all links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import build
from kfs import tour
from kfs.tour import Report, definitions

ROOT = Path(build.__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("book") / "site"
    assert build.build(folder) == len(definitions()) + 1 + len(build.PAGES)
    return (yield folder)


@pytest.mark.parametrize("name", [file.stem for file in definitions()])
def test_page(site: Path, name: str) -> None:
    text = (site / f"{name}.html").read_text(encoding="utf-8")
    assert "<math" in text
    assert '<div class="highlight">' in text
    assert "What running it verified" in text
    article = re.sub(r"<math.*?</math>", "", text.split("<article>")[1].split("</article>")[0], flags=re.DOTALL)
    assert "$" not in article, "a formula was not recognised"
    for formula in re.findall(r"<math.*?</math>", text, flags=re.DOTALL):
        visible = re.sub(r"<[^>]*>", "", formula)
        assert "\\" not in visible, f"LaTeX left unrendered: {visible}"
        assert "&amp;" not in visible, f"alignment left unrendered: {visible}"


def test_all_links_lead_somewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        for link in re.findall(r'href="([^"]+)"', page.read_text(encoding="utf-8")):
            assert (site / link).is_file(), f"{page.name} links to {link}"


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    for page in site.iterdir():
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|href)="(?:https?:)?//|@import|url\((?!#)', text)


def test_errata_name_existing_files(site: Path) -> None:
    text = (site / "errata.html").read_text(encoding="utf-8")
    files = re.findall(r"<code>([\w/]+\.py)</code>", text)
    assert files
    for name in files:
        assert (ROOT / name).is_file() or (ROOT / "kfs" / "basics" / name).is_file(), name


def test_a_failing_definition_stops_the_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "definitions", lambda: tour.definitions()[:1])
    monkeypatch.setattr(build, "run_definition", lambda file: Report(file.stem, (), 0.0, "False: a lie."))
    with pytest.raises(RuntimeError, match=r"reduction_factors: False: a lie\."):
        build.build(tmp_path)


def test_a_definition_without_prose_is_refused(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no module docstring"):
        build.read_definition(tmp_path / "silent.py")
