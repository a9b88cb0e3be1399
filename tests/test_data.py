"""Data: every pass is the same one, users' generators are left alone, and data that change or are none are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kfs.errors import DataError
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import PROBLEMS


@pytest.mark.parametrize("progress", [False, True])
def test_loaders_with_a_generator_are_repeatable_and_leave_it_alone(progress: bool) -> None:
    _, model, X, y = PROBLEMS[1].make()
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    loader = DataLoader(TensorDataset(X, y), batch_size=2, shuffle=True, generator=generator)
    risk = EmpiricalRisk(model, PROBLEMS[1].loss, loader, progress=progress)
    J = Jacobian(risk)
    close(J.T.to_dense().T, J.to_dense())
    F = Fisher(risk, "type-1")
    close(F.to_dense(), F.to_dense().T)
    assert torch.equal(generator.get_state(), state)


class OneAtATime:
    """Starts its only iterator anew, as a `DataLoader` with persistent workers does."""

    def __init__(self, *batches: Any) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self.rest()

    def rest(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]


def test_data_are_iterated_once_at_a_time() -> None:
    whole, model, X, y = PROBLEMS[0].make()
    v = torch.ones(31, dtype=torch.float64)
    for kind in (GGN, Hessian, Jacobian):
        for settings in ({}, {"memory": 10_000}):
            risk = EmpiricalRisk(model, PROBLEMS[0].loss, OneAtATime((X[:2], y[:2]), (X[2:], y[2:])))
            close(kind(risk, **settings) @ v, kind(whole) @ v)  # type: ignore[arg-type]
    diagonal = GGN(EmpiricalRisk(model, PROBLEMS[0].loss, OneAtATime((X[:2], y[:2]), (X[2:], y[2:])))).diagonal()
    close(diagonal, GGN(whole).diagonal())


@pytest.mark.parametrize("num_batches", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_data_are_refused_everywhere(num_batches: int, reduction: str) -> None:
    _, model, X, y = PROBLEMS[0].make()
    risk = EmpiricalRisk(model, nn.MSELoss(reduction=reduction), [(X[:0], y[:0])] * num_batches)
    v = torch.ones(31, dtype=torch.float64)
    for call in (
        risk.value,
        risk.gradient,
        lambda: GGN(risk) @ v,
        lambda: Hessian(risk) @ v,
        lambda: Fisher(risk) @ v,
        GGN(risk).diagonal,
        lambda: Jacobian(risk),
        lambda: GGN(risk, memory=10**6),
    ):
        with pytest.raises(DataError, match="data set is empty"):
            call()


def test_means_over_other_targets_than_before_are_refused() -> None:
    _, model, X, y = PROBLEMS[1].make()
    v = torch.ones(31, dtype=torch.float64)
    masked, weight = y.clone(), torch.ones(3, dtype=torch.float64)
    risks = [
        EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, masked)),
        EmpiricalRisk(model, nn.CrossEntropyLoss(weight=weight), (X, y)),
    ]
    operators = [GGN(risk, reuse=reuse) for risk in risks for reuse in (False, True)]
    for operator in operators:
        operator @ v
    masked[:3] = -100
    weight.mul_(2)
    for call in (*(risk.value for risk in risks), *(risk.gradient for risk in risks)):
        with pytest.raises(DataError, match=r"mean was over 5 targets at first, and is over .* now.*new EmpiricalRisk"):
            call()
    for operator in operators:
        with pytest.raises(DataError, match="mean was over"):
            operator @ v


def test_sums_do_not_care_what_counts() -> None:
    _, model, X, y = PROBLEMS[1].make()
    loss, masked = nn.CrossEntropyLoss(reduction="sum"), y.clone()
    risk = EmpiricalRisk(model, loss, (X, masked))
    for masked[0] in (1, -100):
        assert risk.value() == pytest.approx(loss(model(X), masked).item())
    assert EmpiricalRisk(model, loss, (X, torch.full_like(y, -100))).value() == 0


@pytest.mark.parametrize("wrong", [lambda batch: batch[1], lambda batch: batch[:1], lambda batch: (*batch, 3)])
def test_unpack_returns_a_pair(wrong: Any) -> None:
    X, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    with pytest.raises(DataError, match=r"unpack= returned a (Tensor|tuple), expected a pair"):
        EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), [(X, y)], unpack=wrong).value()
