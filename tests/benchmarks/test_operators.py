"""The operator benchmark runs on small batches and writes its files. No test depends on run times."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kfs
from benchmarks import compiled_products, operators, problems
from benchmarks.compiled_products import ggn_arithmetic


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)  # as if it were not installed
    operators.main(tmp_path, repeats=1, scale=8)
    content = json.loads((tmp_path / "operators.json").read_text(encoding="utf-8"))
    assert {row["problem"] for row in content["rows"]} == {"MLP", "CNN", "GPT"}
    assert {row["library"] for row in content["rows"]} == {"torch", "kfs"}
    assert (tmp_path / "operators.png").stat().st_size > 1000
    assert "| GPT | GGN, 10 | kfs |" in capsys.readouterr().out


def test_compiled_products_are_those_of_operators(capsys: pytest.CaptureFixture[str]) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    problem = problems.Problem("tiny", layers, torch.randn(5, 4), torch.randint(2, (5,)))
    rows = operators.measure([problem], repeats=1, compiled=True)
    assert {row.program for row in rows if row.library == "torch.compile"} == {
        "GGN, 1",
        "GGN, 10",
        "KFAC, 1",
        "KFAC, 10",
    }
    risk = kfs.EmpiricalRisk(problem.model, torch.nn.CrossEntropyLoss(), (problem.X, problem.y))
    V = torch.randn(kfs.GGN(risk).shape[0], 2)
    # Float32: round-off of a few hundred terms.
    torch.testing.assert_close(ggn_arithmetic(problem)(V), kfs.GGN(risk) @ V, rtol=1e-4, atol=1e-5)

    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nmore")

    assert not compiled_products._works("GGN", problem, fails)
    assert capsys.readouterr().out.endswith("tiny, GGN is not compiled: no compiler\n")


def test_products_that_are_not_replayed() -> None:
    model = torch.nn.Linear(4, 2)
    problem = problems.Problem("tiny", model, torch.randn(5, 4), torch.randint(2, (5,)))
    found = operators.kfs_operators(problem, both=True)
    v = torch.randn(10)
    for name in ("Hessian", "GGN", "empirical Fisher"):
        torch.testing.assert_close(found[f"{name}, replay=False"] @ v, found[name] @ v)


def test_gpt_predicts_from_the_past_only() -> None:
    gpt = problems.GPT().eval()
    tokens = torch.randint(64, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 0
    assert torch.allclose(gpt(tokens)[:, :, :20], gpt(changed)[:, :, :20], atol=1e-5)
