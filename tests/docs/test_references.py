"""The references: every work that the library cites is listed, and linked files cite that work."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

ROOT = DOCS.parent
PAGE = (DOCS / "references.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
# A name, perhaps others, and a year.
CITATION = re.compile(r"\b([A-Z][\w-]+)(?:,? (?:and|&) (?:Van )?[A-Z]\w+| et al\.)?,? \(?((?:19|20)\d\d)\b")


def citations(text: str) -> set[tuple[str, str]]:
    """Return surnames and years of all works that a text cites."""
    return set(CITATION.findall(re.sub(r"[\s#]+", " ", text)))


CITED = {
    found: file for file in sorted((ROOT / "kfs").rglob("*.py")) for found in sorted(citations(file.read_text("utf-8")))
}


def test_citations_are_found() -> None:
    assert len(CITED) > 30
    assert {("Martens", "2015"), ("Eschenhagen", "2023"), ("Loan", "1993")} <= set(CITED)


@pytest.mark.parametrize(("name", "year"), CITED)
def test_every_citation_is_listed(name: str, year: str) -> None:
    assert any(re.search(rf"\b{name}\b.*\b{year}\b", row) for row in ROWS), CITED[name, year]


def test_linked_files_cite_the_work() -> None:
    _, _, others = PAGE.partition("## Others")
    rows = [re.split(r" \| ", line.strip("| ")) for line in others.splitlines() if line.startswith("| ")]
    for cited, _, link in rows[1:]:
        file = ROOT / "docs" / re.findall(r"\((\S+)\)", link)[0]
        assert citations(cited) <= citations(Path(file).read_text(encoding="utf-8")), cited


def test_rows_are_in_order() -> None:
    first, _, others = PAGE.partition("## Others")
    for part in (first, others):
        works = re.findall(r"^\| ((?:Van )?[A-Z]\w+)", part, flags=re.MULTILINE)
        assert len(works) > 15
        assert all(one <= other for one, other in pairwise(works)), works


def test_kfac_is_cited_where_it_is_defined() -> None:
    for path in ("kfs/factors/kfac.py", "kfs/kfac/scaffold.py"):
        assert ("Martens", "2015") in citations((ROOT / path).read_text(encoding="utf-8"))
