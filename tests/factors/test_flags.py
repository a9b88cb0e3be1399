"""Deferred checks of values on an accelerator: later errors have the same text as immediate ones.

There is no accelerator here: the CPU is treated as one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import DataError, LossError
from kfs.factors import KFAC, compute
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime import sync
from kfs.runtime.sync import DeferredChecks, not_finite
from tests.factors.test_replay import make_risk
from tests.operators.contract import close


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Treat the CPU as an accelerator until a list is empty."""
    found = [True]
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: bool(found))
    return found


def test_explained_vectors(behind: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, a root of a negative curvature is NaN; the reason is found on the CPU."""
    explain = compute.explain_vectors

    def on_a_cpu(*args: Any) -> None:
        behind.clear()
        explain(*args)

    monkeypatch.setattr("kfs.factors.compute.explain_vectors", on_a_cpu)
    X, y = torch.randn(4, 3), torch.full((4, 2), 3.0)
    risk = EmpiricalRisk(nn.Linear(3, 2), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(0.1)), (X, y))
    with pytest.raises(LossError, match="negative curvature"):
        KFAC(risk)


def test_unexplained_vectors(behind: list[bool]) -> None:
    """If no reason is found, factors that are not finite are still an error."""
    X = torch.full((4, 3), 1e30)
    with pytest.raises(DataError, match=r"inputs of block '.*' are not finite"):
        KFAC(EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), (X, torch.randn(4, 2))))
    assert behind


def test_flags(behind: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors about examples that are raised at the end are as precise as immediate errors."""
    first_failure = DeferredChecks.first_failure

    def read(flags: DeferredChecks) -> int | None:
        behind.clear()  # from now on, the CPU counts as a CPU
        return first_failure(flags)

    monkeypatch.setattr(DeferredChecks, "first_failure", read)
    risk = make_risk()
    batches = [b[:2] for b in risk.batches()]
    batches[3][1][2] = 17
    with pytest.raises(DataError, match=r"Labels go from . to 17, but there are 3 classes"):
        KFAC(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), batches), "mc")


def test_flags_of_a_computation_within_another(behind: list[bool]) -> None:
    """A hook runs a computation with the same risk: invalid data from before it are still reported."""
    risk = make_risk()
    batches = [b[:2] for b in risk.batches()]
    batches[1][1][2] = 17
    risk = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), batches)
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            with risk.checking_later():
                pass

    assert isinstance(risk.model, nn.Module)
    risk.model.register_forward_hook(hook)
    with pytest.raises(DataError, match="target of example 6 failed a check"):
        KFAC(risk, "mc", audit=False)
    assert risk.flags is None
    assert behind


class TestDeviceChecks:
    """Checks that are made at once on an accelerator, because deferred checks are not read later."""

    def test_label(self, behind: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
        risk = make_risk(1, last=0)
        (batch,) = risk.batches()
        batch.y[1] = 17
        check = type(risk.loss).check

        def on_a_cpu(loss: Any, f: Tensor, y: Tensor) -> None:
            if y.max() > 2 and checked:
                behind.clear()
            checked.append(1)
            check(loss, f, y)

        checked: list[int] = []
        monkeypatch.setattr(type(risk.loss), "check", on_a_cpu)
        with pytest.raises(DataError, match="to 17, but there are 3 classes"):
            EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), (batch.x, batch.y)).gradient()

    def test_right_labels(self, behind: list[bool]) -> None:
        risk = make_risk(1, last=0)
        gradient = risk.gradient()
        behind.clear()
        for name, g in make_risk(1, last=0).gradient().items():
            close(gradient[name], g)

    def test_nothing_wrong_any_more(self, behind: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
        """A check has failed, but the same example is valid when it is evaluated again."""
        monkeypatch.setattr(DeferredChecks, "first_failure", lambda _: 5)
        with pytest.raises(DataError, match="example 5 failed a check, but passed it when evaluated again"):
            KFAC(make_risk(2), "mc")
        assert behind


def test_flags_of_nothing() -> None:
    assert not_finite(torch.zeros(3, 0)).tolist() == [False] * 3
    assert not_finite(torch.tensor([1.0, torch.nan, -torch.inf])).tolist() == [False, True, False]
    flags = DeferredChecks(torch.device("cpu"))
    assert flags.first_failure() is None


def test_constants(behind: list[bool]) -> None:
    """Constants are created once, and only a few are cached."""
    device = torch.device("cpu")
    assert sync.counting(3, device) is sync.counting(3, device)
    assert sync.ones(3, torch.float32, device).tolist() == [1.0] * 3
    assert sync.ones(3, torch.int64, device).tolist() == [1] * 3
    for size in range(200):
        assert len(sync.counting(size, device)) == size
    assert len(sync._constants) <= 64
    sync._constants.clear()
    assert sync.numbers([]) == []
    assert behind
