"""The matrix is made from results, and written where it belongs."""

import json
from pathlib import Path

import pytest

from benchmarks import conformance
from kfs.conformance import Check, Result, checks


def few() -> list[Check]:
    return [check for check in checks() if check.name.startswith(("state", "exact: one example, mse"))]


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conformance, "checks", few)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{conformance.BEGIN}\nold\n{conformance.END}\nafter\n", encoding="utf-8")
    conformance.main(["--write"], tmp_path, [page])
    out = capsys.readouterr().out
    assert "Left out: curvlinops cannot be imported" in out
    assert "| one example | yes |" in page.read_text(encoding="utf-8")
    assert "old" not in page.read_text(encoding="utf-8")
    content = json.loads((tmp_path / "conformance.json").read_text(encoding="utf-8"))
    assert {result["status"] for found in content["results"].values() for result in found} == {"passed"}
    before = page.read_text(encoding="utf-8")
    conformance.main([], tmp_path, [page])
    assert page.read_text(encoding="utf-8") == before


def test_topics_and_the_worst_of_them() -> None:
    names = {conformance.topic(check.name) for check in checks()}
    assert {"one example", "one example, no bias", "mean and sum", "Monte Carlo draws", "user state untouched"} <= names
    results = [
        Result("exact: one example, mse mean, type-2, expand", (), "passed", outcome="passed"),
        Result("exact: one example, ce sum, empirical, reduce", (), "silently wrong", outcome="silently wrong"),
        Result("relation: NaN, type-2", (), "not supported", outcome="not supported"),
        Result("relation: NaN, empirical", (), "failed", outcome="failed"),
    ]
    assert conformance.matrix({"x 1": results}).splitlines()[2:] == ["| one example | **wrong** |", "| NaN | error |"]
