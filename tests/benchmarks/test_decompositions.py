"""The benchmark of decompositions runs on small matrices. No test depends on run times."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decompositions
from benchmarks.decompositions import Method, Time
from tests.basics.cases import assert_close


def test_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decompositions.main("cpu", (3, 5), tmp_path)
    found = json.loads((tmp_path / "decompositions.json").read_text(encoding="utf-8"))["rows"]
    assert {row["problem"] for row in found} == {"1 x 3", "12 x 3", "1 x 5", "12 x 5"}
    for problem in ("1 x 3", "12 x 5"):
        for program, methods in (("inverse", 8), ("eigh", 2)):
            ratios = [row["ratio"] for row in found if (row["problem"], row["program"]) == (problem, program)]
            assert len(ratios) == methods
            assert min(ratios) == 1
    out = capsys.readouterr().out
    assert "| eigh, milliseconds | CPU float32 | CPU float32, loop |" in out
    assert "| 12 x 5 |" in out


@pytest.mark.parametrize("method", decompositions.inverse_methods(), ids=lambda method: method.name)
def test_inverses_are_inverses(method: Method) -> None:
    A = decompositions.matrices(4, 3, "cpu").double()
    found: Any = method(A)
    inverse = torch.cat(found) if method.loop else found
    assert_close(inverse @ A, torch.eye(4, dtype=A.dtype).expand_as(A))


@pytest.mark.parametrize(
    "eigh", [decompositions.eigh, decompositions.eigh_in_double, decompositions.eigh_on_cpu], ids=lambda f: f.__name__
)
def test_decompositions_multiply_to_the_matrix(eigh: Any) -> None:
    A = decompositions.matrices(4, 3, "cpu").double()
    L, Q = eigh(A)
    assert_close(Q @ L.diag_embed() @ Q.mT, A)


def test_long_cases_are_scaled_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # A matrix of size 2 takes 0.08 seconds in each case, and others in proportion to their cubes.
    def timed(program: Any) -> float:
        A = program.args[0]
        return float(len(A) * A.shape[-1] ** 3 / 100)

    monkeypatch.setattr(decompositions, "timed", timed)
    method = Method("any", lambda A: A)
    found = dict(decompositions.times_of(method, (2, 3, 4, 5, 20), "cpu"))
    assert found.keys() == {(size, n) for size in (2, 3, 4, 5) for n in (1, 12)}
    assert found[2, 12] == Time(12 * 0.08)
    assert found[3, 12].scaled
    assert math.isclose(found[3, 12].seconds, 12 * 0.27)
    assert found[4, 12] == Time(12 * 0.64, scaled=True)  # twelve times a single one


def test_missing_methods_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(_: object) -> None:
        raise RuntimeError("compiled without MAGMA")

    methods = [Method("magma", missing), Method("other", lambda A: A)]
    found = decompositions.measure(methods, (2,), "cpu", time.perf_counter() + 60)
    assert list(found[2, 1]) == ["other"]
    assert decompositions.measure(methods, (2,), "cpu", time.perf_counter() - 1) == {}
    out = capsys.readouterr().out
    assert "magma: compiled without MAGMA" in out
    assert "No time is left for: other." in out
