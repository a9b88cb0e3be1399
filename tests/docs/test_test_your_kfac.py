"""The page about the kit: its code runs, its adapter passes, and its matrix is what the README counts."""

import re
from pathlib import Path

from benchmarks import conformance
from kfs import __version__
from tests.docs.pages import run_of

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "test_your_kfac.md").read_text(encoding="utf-8")


def table(text: str) -> str:
    return text[text.index(conformance.BEGIN) : text.index(conformance.END)]


def test_its_adapter_passes() -> None:
    run = run_of("test_your_kfac").executed
    passed = [result for result in run.namespace["results"] if result.status == "passed"]  # type: ignore[attr-defined]
    assert len(passed) > 15
    assert "It is right up to a scale of 0.25" in "".join(filter(None, run.outputs))


def test_matrix_is_what_the_readme_counts() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(PAGE).splitlines()[1:]]
    assert f"in {len(rows)} settings" in readme
    _, ours, *libraries = head
    assert ours == f"kfs {__version__}"
    assert {row[1] for row in rows} == {"yes"}
    assert f"{ours} is right in {len(rows)}." in readme
    for place, library in enumerate(libraries, start=2):
        cells = [row[place] for row in rows]
        counts = re.search(rf"{library} (?:is right )?in (\d+) and (?:silently wrong in )?(\d+)[,.]", readme)
        assert counts is not None, library
        assert [int(count) for count in counts.groups()] == [cells.count("yes"), cells.count("**wrong**")], library
