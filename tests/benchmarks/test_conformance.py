"""The matrix is made from results, and written to the right page."""

import json
from pathlib import Path

import pytest

from benchmarks import conformance
from kfs import __version__
from kfs.conformance import Check, Result, checks


def few() -> list[Check]:
    return [check for check in checks() if check.name.startswith(("state", "exact: one example, mse"))]


def test_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conformance, "checks", few)
    conformance.main(tmp_path)
    out = capsys.readouterr().out
    assert "Left out: curvlinops cannot be imported" in out
    assert "| one example | yes |" in out
    content = json.loads((tmp_path / "conformance.json").read_text(encoding="utf-8"))
    assert content["environment"]["kfs"] == __version__
    assert {outcome for found in content["results"].values() for outcome in found.values()} == {"passed"}


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
