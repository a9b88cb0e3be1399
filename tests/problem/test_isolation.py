"""Models that change their input, or cache their weights, are refused; random generators are restored."""

import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.operators import GGN, Hessian, Jacobian
from kfs.problem.isolation import restored
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import call_with


class InPlace(nn.Module):
    """Shifts its input in place, or a copy of it."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.layer, self.copy = nn.Linear(3, 2), copy

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copy else x
        x -= 0.1
        result: Tensor = self.layer(x)
        return result


def test_models_that_change_their_input_are_refused() -> None:
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    calls: list[Callable[[EmpiricalRisk], Any]] = [EmpiricalRisk.value, EmpiricalRisk.gradient, Jacobian]
    for kind, size in product((GGN, Hessian), (1, 4)):
        calls.append(lambda risk, kind=kind, size=size: kind(risk, chunk_size=size).to_dense())  # type: ignore[misc]
    for call in calls:
        # After data were changed, a new risk is needed.
        risk = EmpiricalRisk(InPlace(copy=False).double(), nn.MSELoss(), (X, y))
        with pytest.raises(ModelError, match=r"changed its input in place.*clone its input"):
            call(risk)
    layers = EmpiricalRisk(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double(), nn.MSELoss(), ((X,), y))
    with pytest.raises(ModelError, match="changed its input"):
        layers.value()


def test_models_may_change_copies_and_inputs_may_be_inference_tensors() -> None:
    with torch.inference_mode():
        X = torch.randn(5, 3, dtype=torch.float64)
    model, y = InPlace(copy=True).double(), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    assert risk.value() == pytest.approx(nn.MSELoss()(model.layer(X - 0.1), y).item())


def test_cached_parametrizations_are_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()).double()
    plain = nn.Linear(3, 2).double()
    data = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    with nn.utils.parametrize.cached():
        with pytest.raises(ModelError, match=r"'0'.*cached\(\) is active.*Exit the context parametrize\.cached\(\)"):
            risk.gradient()
        EmpiricalRisk(plain, nn.MSELoss(), data).gradient()
    risk.gradient()


@pytest.mark.parametrize("numpy", [True, False])
def test_other_generators_are_restored(numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    random.seed(0)
    expected = random.random()
    random.seed(0)
    with restored(None, torch.device("cpu")):
        random.random()
    assert random.random() == expected


def test_a_module_that_occurs_twice_keeps_its_parameters_and_buffers() -> None:
    """PyTorch's `functional_call` leaves the tensors that it was given in such modules."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    X, y = torch.randn(5, 3), torch.randn(5, 3)
    weight, bias = layer.weight, layer.bias
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    gradient = risk.gradient()
    assert layer.weight is weight
    product = GGN(risk) @ gradient
    assert (layer.weight, layer.bias) == (weight, bias)
    assert product["0.weight"].any()
    nn.MSELoss()(model(X), y).backward()
    torch.testing.assert_close(weight.grad, gradient["0.weight"])

    layer.register_buffer("shift", shift := torch.ones(3))
    given = {"0.weight": torch.zeros(3, 3), "0.shift": torch.zeros(3)}
    assert torch.equal(call_with(model, given, (X,)), bias.expand(5, 3))
    assert layer.weight is weight
    assert layer.shift is shift
