"""The book, built once for all tests of it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import build, pages
from tests.definitions import report_of

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 3"></svg>'


def stand_ins(folder: Path) -> None:
    for figures in pages.FIGURES.values():
        for name in figures:
            (folder / f"{name}.svg").write_text(SVG, encoding="utf-8")


def pictures(page: Path, folder: Path) -> None:
    for name in re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text(encoding="utf-8")):
        (folder / name).write_text(SVG, encoding="utf-8")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the site. Figures are drawn by tests/plots, and pictures of pages by test_markdown.py."""
    folder = tmp_path_factory.mktemp("book") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "draw_figures", stand_ins)
        patch.setattr(build, "draw_pictures", pictures)
        patch.setattr(build, "run_definition", report_of)
        count = build.build(folder)
    assert count == len(list(folder.glob("*.html")))
    return (yield folder)
