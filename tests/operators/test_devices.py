"""Operators give the same numbers on an accelerator as on the CPU, Monte Carlo draws included. Skipped without one."""

import copy

import pytest
import torch
from torch import Tensor

from kfs import GGN, EmpiricalRisk, Fisher, Hessian, Jacobian
from kfs.losses import Loss
from tests.losses.cases import CASES, Case
from tests.operators.problems import PROBLEMS, Problem

DEVICES = ["cuda"] if torch.cuda.is_available() else []


def products(problem: Problem, device: str) -> dict[str, Tensor]:
    """Multiply the same columns on a device. The batches stay on the CPU: a risk moves them."""
    _, model, X, y = problem.make()
    risk = EmpiricalRisk(model.to(device), problem.loss, (X, y), params=problem.params)
    operators = {
        "hessian": Hessian(risk),
        "ggn": GGN(risk),
        "jacobian": Jacobian(risk),
        "draws": Fisher(risk, "type-1", mc_samples=2, seed=5),
        "empirical": Fisher(risk, "empirical"),
    }
    V = torch.linspace(-1, 1, 3 * operators["ggn"].shape[1], dtype=torch.float64).reshape(-1, 3).to(device)
    return {name: (A @ V).cpu() for name, A in operators.items()} | {
        "gradient": risk.gradient()[next(iter(risk.params))].cpu()
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_same_products(problem: Problem, device: str) -> None:
    # cuDNN's recurrent kernels cannot be differentiated twice.
    with torch.backends.cudnn.flags(enabled="nn" not in problem.name and problem.name not in {"lstm", "gru"}):
        expected, actual = products(problem, "cpu"), products(problem, device)
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [c for c in CASES if c.fisher not in {"none", "draws"}], ids=str)
def test_same_losses(case: Case, device: str) -> None:
    loss, f, y = case.make()

    def moved() -> Loss:
        other = copy.copy(loss)
        for holder in (other, getattr(other, "base", None)):
            for name in ("weight", "pos_weight"):
                if isinstance(getattr(holder, name, None), Tensor):
                    setattr(holder, name, getattr(holder, name).to(device))
        return other

    for method in ("gradient", "hessian_product"):
        extra, extra_moved = ((), ()) if method == "gradient" else ((f,), (f.to(device),))
        value = getattr(loss, method)(f, y, *extra)
        other = getattr(moved(), method)(f.to(device), y.to(device), *extra_moved)
        assert torch.allclose(other.cpu(), value, rtol=1e-10, atol=1e-12), method
