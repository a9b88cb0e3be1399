"""The benchmark of differential equations runs; solutions solve their equations; pages show its rows."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import applications, pinn
from docs import measured_applications, results
from examples import poisson


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinn, "_AT_LEAST", 0.0)
    applications.main(["pinn", "--quick"], tmp_path)
    content = json.loads((tmp_path / "applications_pinn_quick.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in content["rows"]] == list(pinn.METHODS)
    assert all(row["steps"] > 0 and len(row["errors"]) > 1 for row in content["rows"])
    costs = json.loads((tmp_path / "applications_pinn_derivatives_quick.json").read_text(encoding="utf-8"))
    assert all(row["error"] < 1e-12 for row in costs["rows"])  # all programs compute the same Laplacian
    assert "| taylor | 2 | 64 |" in capsys.readouterr().out
    assert (tmp_path / "applications_pinn_quick.png").is_file()
    # The book shows no results of quick runs.
    for file in list(tmp_path.glob("*_quick.json")):
        file.rename(file.with_name(file.name.replace("_quick", "")))
    page = results.markdown(tmp_path)
    assert "## Differential equations" in page
    assert "| EnergyNaturalGradient |" in page
    assert "| Poisson, 2-d, 257 parameters |" in measured_applications.pinn_training(tmp_path)
    assert "| 64 | 2 |" in measured_applications.pinn_derivatives(tmp_path)


@pytest.mark.parametrize("name", pinn.equations(quick=False))
def test_solutions_solve_equations(name: str) -> None:
    class Solution(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return equation.solution(x)

    equation = pinn.equations(quick=False)[name]
    x = equation.inside[:3].clone()
    torch.testing.assert_close(equation.residual(Solution(), x), torch.zeros(3, 1).double(), rtol=0, atol=1e-12)


def test_the_example_solves_its_equation() -> None:
    assert len(Path(poisson.__file__).read_text(encoding="utf-8").splitlines()) <= 40
    assert poisson.main() < 1e-3
