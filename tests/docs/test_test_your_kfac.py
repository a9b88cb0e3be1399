"""The page about the kit: its code runs, its adapter passes, and the README counts the rows of its matrix."""

import re
from pathlib import Path

from docs.measured import generated
from kfs import __version__
from tests.docs.pages import run_of

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "test_your_kfac.md").read_text(encoding="utf-8")


def test_its_adapter_passes() -> None:
    run = run_of("test_your_kfac").executed
    passed = [result for result in run.namespace["results"] if result.status == "passed"]  # type: ignore[attr-defined]
    assert len(passed) > 15
    assert "It is right up to a scale of 0.25" in "".join(filter(None, run.outputs))


def test_the_readme_counts_the_rows_of_the_matrix() -> None:
    readme = " ".join(re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8")).split())
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in generated("conformance").splitlines()
    ]
    assert head[1] == f"kfs {__version__}"
    assert {row[1] for row in rows} == {"yes"}
    assert f"in {len(rows)} settings" in readme
    assert generated("conformance_counts") in readme
