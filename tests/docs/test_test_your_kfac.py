"""The page about the kit: its code runs, its adapter passes, and its matrix is what the README shows."""

from pathlib import Path

from benchmarks import conformance
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


def test_matrix_is_that_of_the_readme() -> None:
    assert table(PAGE) == table((ROOT / "README.md").read_text(encoding="utf-8"))
    rows = [line.split("|") for line in table(PAGE).splitlines()[3:]]
    assert {row[2].strip() for row in rows} == {"yes"}  # ours
