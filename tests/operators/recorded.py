"""Problems whose products are recorded, and functions that report recordings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, EmpiricalRisk, Fisher, Hessian
from tests.factors.tape import Tapes

OPERATORS: dict[str, Callable[..., Any]] = {
    "ggn": GGN,
    "mc": lambda risk, **settings: Fisher(risk, "mc", mc_samples=2, **settings),
    "empirical": lambda risk, **settings: Fisher(risk, "empirical", **settings),
    "type-2": Fisher,
    "hessian": Hessian,
    "layers": lambda risk, **settings: GGN(risk, block_diagonal="layer", **settings),
}


class Net(nn.Module):
    """A network with a setting; it counts its calls in a class attribute."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        Net.calls += 1
        f: Tensor = self.head(self.norm(torch.tanh(self.first(x)))) / self.temperature
        return f


def make_risk(model: nn.Module | None = None, batches: int = 4, loss: Any = None) -> EmpiricalRisk:
    """Return a risk with some batches of three examples, and a last one of two."""
    torch.manual_seed(0)
    net = (Net() if model is None else model).double().eval()
    X = torch.randn(3 * batches + 2, 4, dtype=torch.float64)
    y = torch.randint(3, (len(X),))
    data = list(zip(X.split(3), y.split(3), strict=True))
    return EmpiricalRisk(net, nn.CrossEntropyLoss() if loss is None else loss, data)


def columns_for(A: Any, number: int = 3, seed: int = 0) -> Tensor:
    """Return some columns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(A.shape[1], number, dtype=A.dtype, generator=generator)


def recordings(tapes: list[Tapes]) -> int:
    """Return the number of recorded products of batches."""
    return sum(len(one.made) for one in tapes)


def recorded(A: Any, number: int = 3) -> Tensor:
    """Multiply until products of all batches are recorded, and return the columns."""
    V = columns_for(A, number)
    for _ in range(4):
        A @ V
    return V


def same(actual: Tensor, expected: Tensor) -> None:
    """Compare products, up to the order of sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about replay."""
    return [record.getMessage() for record in caplog.records if "replayed" in record.getMessage()]
