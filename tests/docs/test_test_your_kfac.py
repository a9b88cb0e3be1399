"""The page about the kit: its code runs, its adapter passes, and its matrix is what the README counts."""

import re
from pathlib import Path

import pytest

from benchmarks import conformance
from kfs import __version__

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "test_your_kfac.md").read_text(encoding="utf-8")


def table(text: str) -> str:
    return text[text.index(conformance.BEGIN) : text.index(conformance.END)]


def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "test_your_kfac.md", "exec"), namespace)
    passed = [result for result in namespace["results"] if result.status == "passed"]  # type: ignore[attr-defined]
    assert len(passed) > 15
    assert "It is right up to a scale of 0.25" in capsys.readouterr().out


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
