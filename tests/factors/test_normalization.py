"""Scales and shifts of normalizations: their inputs depend on all settings, and running statistics change once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import GGN, KFAC, EmpiricalRisk
from tests.factors.models import Function
from tests.operators.contract import close

EPS = 0.5  # so large that ignoring it changes results
MEAN = torch.linspace(-1, 1, 4, dtype=torch.float64)
VARIANCE = torch.linspace(0.5, 2, 4, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pairs(x: Tensor) -> Tensor:
    """Two channels of two pixels."""
    return x.reshape(len(x), 2, 2)


NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer_norm": lambda m, x: F.layer_norm(x, (4,), m.s, m.b, EPS),
    "rms_norm": lambda m, x: F.rms_norm(x, (4,), m.s, EPS) + m.b,
    "group_norm": lambda m, x: F.group_norm(x, 2, m.s, m.b, EPS),
    "batch_norm": lambda m, x: F.batch_norm(x, MEAN, VARIANCE, m.s, m.b, eps=EPS),
    "instance_norm": lambda m, x: F.instance_norm(pairs(x), None, None, m.s[:2], m.b[:2], eps=EPS).flatten(1),
    "instance_norm by running statistics": lambda m, x: F.instance_norm(
        pairs(x), MEAN[:2], VARIANCE[:2], m.s[:2], m.b[:2], use_input_stats=False, eps=EPS
    ).flatten(1),
}


@pytest.mark.parametrize("name", NORMS)
def test_eps(name: str) -> None:
    """For one example, `reduce` is exact: the gradient of a scale or shift is a sum over positions."""
    model = Function(lambda m, x: NORMS[name](m, x).tanh(), s=normal(4), b=normal(4))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(1, 4), normal(1, 4)))
    K, exact = KFAC(risk, sharing="reduce"), GGN(risk)
    for parameter in ("s", "b"):
        close(K.submatrix(parameter).to_dense(), exact.submatrix(parameter).to_dense())
    assert exact.submatrix("s").to_dense().norm() > 1e-3


def test_running_statistics_change_once() -> None:
    """The input of a scale is recomputed when gradients arrive, which must not update running statistics."""
    X, y = normal(6, 4), normal(6, 4)
    averages = torch.zeros(2).double(), torch.ones(2).double()

    def forward(m: Any, x: Tensor) -> Tensor:
        return F.instance_norm(pairs(x), *averages, m.s, m.b, use_input_stats=True, momentum=0.3).flatten(1)

    model = Function(forward, s=normal(2), b=normal(2))
    model(X)
    expected = [t.clone() for t in averages]
    assert (averages[0] != 0).all()
    averages[0].zero_()
    averages[1].fill_(1)
    KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)), audit=False)  # an audit calls the model several times
    for actual, once in zip(averages, expected, strict=True):
        close(actual, once)
