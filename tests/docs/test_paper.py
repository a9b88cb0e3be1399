"""The page about the paper: nothing that it names is missing, and every file, command, claim and erratum is real."""

import re
from collections import Counter
from pathlib import Path

import pytest

from docs import bridge, paper
from docs.drawings import FIGURES, file_of, plots
from kfs.tour.run import definitions
from tests.docs.test_book import ROOT, article

# As counted in the source of the paper.
NAMED = {"listing": 27, "figure": 11, "definition": 23, "test": 2, "example": 17, "setup": 8, "caveat": 2, "outlook": 1}
RUN = {file.relative_to(ROOT).as_posix() for file in definitions()}
DRAWN = {file_of(name) for name in plots()}


def named_errata() -> list[str]:
    """Return all errata that the page links to, with repetitions."""
    in_text = [title for section in paper.sections() for title in section.errata]
    return in_text + [title for entry in paper.entries() for title in entry.errata]


def test_nothing_is_missing() -> None:
    entries = paper.entries()
    assert Counter(entry.kind for entry in entries) == NAMED
    assert len({(entry.kind, entry.name) for entry in entries}) == len(entries)


@pytest.mark.parametrize("entry", paper.entries(), ids=lambda entry: entry.title)
def test_pages_exist_and_files_run(entry: paper.Entry) -> None:
    assert (ROOT / entry.page).is_file()
    assert entry.page.endswith(".md") or entry.page in RUN | DRAWN
    assert (entry.page in DRAWN) == bool(entry.pictures)
    if entry.command is not None:
        assert entry.command.split()[:2] == ["python", entry.page]


def test_figures_are_numbered_as_in_the_document() -> None:
    numbers = [entry.number for entry in paper.entries() if entry.kind == "figure"]
    assert numbers == [None, *range(1, 11)]
    for figure in FIGURES:
        shown = [entry for entry in paper.entries() if figure.name in entry.pictures]
        assert tuple(entry.number for entry in shown) == figure.document
        assert all(entry.page == figure.plot for entry in shown)
        assert all(f"{number}" in figure.origin for number in figure.document)


def test_errata_are_linked() -> None:
    titles = paper.errata()
    assert len(titles) > 10
    assert set(named_errata()) == set(titles)


def test_a_claim_that_is_not_made_is_refused() -> None:
    with pytest.raises(ValueError, match="which it does not"):
        paper.markdown(lambda _: ["something else"])


def test_page(site: Path) -> None:
    text = article(site, "docs/paper")
    rows = re.findall(r"<tr class=\"row-\w+\"><td>.*?</tr>", text, flags=re.DOTALL)
    assert len(rows) == sum(NAMED.values())
    assert text.count("errata.html#") == len(named_errata())
    plain = re.sub(r"<[^>]+>", "", text)
    assert "python kfs/kfac_tests/mlp_batch_size_1.py" in plain
    assert "KFAC-empirical equals the empirical Fisher" in plain


def test_listings_are_one_screen() -> None:
    """They are read between two paragraphs."""
    files = [file for file in sorted(RUN) if file.startswith(("kfs/kfac/", "kfs/kfac_tests/"))]
    for file in files:
        shown = bridge.functions((ROOT / file).read_text(encoding="utf-8"), file)
        assert 20 < len(shown.splitlines()) <= 60, file


def test_chapters_show_listings_and_the_drawing(site: Path) -> None:
    overview, layers = article(site, "docs/kfac_overview"), article(site, "docs/kfac_layers")
    assert overview.count('class="code listing') == 3
    assert layers.count('class="code listing') == 10
    assert "Step 5: return the factors." in re.sub(r"<[^>]+>", "", overview)
    assert 'aria-label="The way of a batch' in article(site, "docs/engine")
    assert article(site, "docs/gallery").count("<figure") == len(FIGURES)
