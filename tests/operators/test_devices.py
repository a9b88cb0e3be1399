"""Operators agree between an accelerator and the CPU, Monte Carlo draws included. Skipped without an accelerator."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, EmpiricalRisk, Fisher, Hessian, Jacobian
from kfs.errors import DataError
from kfs.losses import Loss
from tests.losses.cases import CASES, Case
from tests.operators.problems import PROBLEMS, Problem
from tests.operators.recorded import OPERATORS, columns_for, make_risk

# PyTorch's own, about cells of recurrent layers on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

DEVICES = ["cuda"] if torch.cuda.is_available() else []


def products(problem: Problem, device: str) -> dict[str, Tensor]:
    """Multiply the same columns on a device. The batches stay on the CPU, and the risk moves them."""
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


def risk_on(device: str, dtype: torch.dtype = torch.float64) -> EmpiricalRisk:
    """Return a risk on a device."""
    risk = make_risk()
    assert isinstance(risk.model, nn.Module)
    batches = [(batch.x.to(device, dtype), batch.y.to(device)) for batch in risk.batches()]
    return EmpiricalRisk(risk.model.to(device, dtype), nn.CrossEntropyLoss(), batches)


def columns_on(A: Any, number: int = 3, seed: int = 0) -> Tensor:
    """Return some columns on the operator's device."""
    return columns_for(A, number, seed).to(A.device)


def multiplied(A: Any, number: int = 3) -> Tensor:
    """Multiply until products are recorded."""
    V = columns_on(A, number)
    for _ in range(5):
        A @ V
    return V


@pytest.mark.parametrize("device", DEVICES)
class TestReplayedProducts:
    """CUDA graphs give the same results, and notice changes."""

    @pytest.mark.parametrize("number", [1, 3])
    @pytest.mark.parametrize("kind", OPERATORS)
    def test_same(self, kind: str, number: int, device: str, replayed: list[int]) -> None:
        risk = risk_on(device)
        A, B = OPERATORS[kind](risk), OPERATORS[kind](risk, replay=False)
        found = []
        for seed in range(6):
            V = columns_on(A, number, seed)
            found.append((A @ V, B @ V))
        for mine, theirs in found:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        assert len(replayed) == 2 + 4 * 4 + 3  # batches: two of four; all four, four times; the last one thrice

    @pytest.mark.parametrize("number", [1, 3])
    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_all_models(self, problem: Problem, number: int, device: str) -> None:
        """Models that cannot be recorded run eagerly."""
        _, model, X, y = problem.make()
        data = X.to(device), y.to(device)
        risk = EmpiricalRisk(model.to(device), problem.loss, data, params=problem.params)
        with torch.backends.cudnn.flags(enabled="nn" not in problem.name and problem.name not in {"lstm", "gru"}):
            for make in OPERATORS.values():
                A, B = make(risk), make(risk, replay=False)
                for seed in range(6):
                    V = columns_on(A, number, seed)
                    torch.testing.assert_close(A @ V, B @ V, rtol=1e-8, atol=1e-10)

    def test_nothing_waits(self, device: str, replayed: list[int]) -> None:
        A = GGN(risk_on(device))
        V = multiplied(A)
        torch.cuda.set_sync_debug_mode("error")
        try:
            A @ V
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(replayed) >= 5

    def test_parameters_change(self, device: str, replayed: list[int]) -> None:
        risk = risk_on(device)
        A, B = GGN(risk), GGN(risk, replay=False)
        V = multiplied(A)
        with torch.no_grad():
            for p in risk.params.values():
                p.mul_(1.5)
        times = len(replayed)
        torch.testing.assert_close(A @ V, B @ V, rtol=1e-10, atol=1e-10)
        assert len(replayed) == times + 5
        weight = risk.params["head.weight"]
        weight.data = 2 * weight.data
        for _ in range(5):
            torch.testing.assert_close(A @ V, B @ V, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype: torch.dtype, device: str, replayed: list[int]) -> None:
        risk = risk_on(device, torch.float32)
        A, B = GGN(risk), GGN(risk, replay=False)
        with torch.autocast(device, dtype):
            V = multiplied(A)
            torch.testing.assert_close(A @ V, B @ V, rtol=1e-3, atol=1e-3)
            assert replayed
            with torch.no_grad():
                for p in risk.params.values():
                    p.mul_(1.5)
        torch.testing.assert_close(A @ V, B @ V)  # without
        with torch.autocast(device, dtype):
            for _ in range(5):
                torch.testing.assert_close(A @ V, B @ V, rtol=1e-3, atol=1e-3)

    def test_nan(self, device: str, replayed: list[int]) -> None:
        risk = risk_on(device)
        A = GGN(risk)
        V = multiplied(A)
        assert replayed
        bias = risk.params["head.bias"]
        with torch.no_grad():
            bias[0] = torch.nan
        with pytest.raises(DataError, match="The prediction for example 0 is not finite"):
            A @ V
        with torch.no_grad():
            bias[0] = 1.0
        for _ in range(5):
            torch.testing.assert_close(A @ V, GGN(risk, replay=False) @ V, rtol=1e-10, atol=1e-10)

    def test_many_kinds(self, device: str, replayed: list[int]) -> None:
        """Graphs are freed together, and others are recorded instead."""
        risk = risk_on(device)
        A, B = GGN(risk), GGN(risk, replay=False)
        for _ in range(2):
            for number in range(1, 7):
                V = multiplied(A, number)
                times = len(replayed)
                torch.testing.assert_close(A @ V, B @ V, rtol=1e-10, atol=1e-10)
                assert len(replayed) == times + 5

    def test_memory(self, device: str) -> None:
        """The memory of deleted operators is free, except for a workspace of cuBLAS for each of PyTorch's streams."""
        risk = risk_on(device)
        for _ in range(32):  # PyTorch has this many streams
            multiplied(GGN(risk))
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        A = GGN(risk)
        multiplied(A)
        assert torch.cuda.memory_allocated() > before
        for _ in range(20):
            A = GGN(risk)
            multiplied(A)
        del A
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= before
