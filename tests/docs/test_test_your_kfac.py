"""The page about the kit: its code runs, its adapter passes, and its matrix is what the README shows."""

import re
from pathlib import Path

import pytest

from benchmarks import conformance

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


def test_matrix_is_that_of_the_readme() -> None:
    assert table(PAGE) == table((ROOT / "README.md").read_text(encoding="utf-8"))
    rows = [line.split("|") for line in table(PAGE).splitlines()[3:]]
    assert {row[2].strip() for row in rows} == {"yes"}  # ours
