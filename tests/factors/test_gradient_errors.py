"""Gradients that `per_datum` refuses: values that are not finite, and gradients for indices that do not exist."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError
from tests.factors.models import Function
from tests.factors.test_gradient_streams import Tied, batches, data, risk_of


class Root(nn.Module):
    """Has an infinite slope at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).abs().sqrt()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("uncovered", "datum"), [("error", "example 5"), ("autograd", "an example from 4 to 5")])
def test_gradients_that_are_not_finite(uncovered: Any, datum: str) -> None:
    X, y = data()
    X[5] = 0
    model = (
        Root()
        if uncovered == "error"
        else Function(lambda m, x: (x @ torch.linalg.inv(m.W)).abs().sqrt(), W=torch.eye(3)).double()
    )
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), batches(X, y, 4))
    with pytest.raises(DataError, match=f"The gradient of {datum} with respect to block '.*' is not finite"):
        list(kfs.per_datum(risk, uncovered=uncovered, audit=False))


def test_large_gradients_are_finite() -> None:
    """Their norm overflows, but each entry is finite."""
    model = nn.Linear(3, 3).float()
    X, y = data()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X.float(), y))
    (batch,) = kfs.per_datum(risk, lambda f, _: 1e30 * f.sum())
    assert batch.blocks["weight"].dense().isfinite().all()


def test_indices_that_do_not_exist() -> None:
    tokens = torch.tensor([[0, 1], [2, 4], [3, 7]])
    y = torch.tensor([0, 1, 2])
    risk = kfs.EmpiricalRisk(Tied(tied=False), nn.CrossEntropyLoss(), batches(tokens, y, 2))
    with pytest.raises(DataError, match=r"The index 7 of example 2 does not exist in 'table.weight', which has 5 rows"):
        list(kfs.per_datum(risk))
    model = Function(
        lambda m, x: nn.functional.embedding(input=x.flatten(), weight=m.W).view(3, -1), W=torch.randn(5, 3)
    ).double()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (tokens, y), params=["W"])
    with pytest.raises(DataError, match="The index 7 does not exist in 'W'"):
        list(kfs.per_datum(risk))
    model = Function(lambda m, x: m.W[x].sum(1), W=torch.randn(5, 3)).double()
    with pytest.raises(DataError, match="An index is out of range: index 7"):
        list(kfs.per_datum(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (tokens, y))))

    class Once(nn.Module):
        """Raises an error only once."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(3, 3).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.times += 1
            result: Tensor = self.layer(x)
            return result if self.times > 1 else [result][self.times]

    with pytest.raises(DataError, match="An index is out of range: list index"):
        list(kfs.per_datum(risk_of(Once())))
