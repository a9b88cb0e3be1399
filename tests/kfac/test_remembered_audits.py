"""Which audits are remembered, and which are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.kfac import KFAC
from kfs.kfac.capture import Audits, audits
from kfs.kfac.rules import new_session
from kfs.risk import EmpiricalRisk
from tests.kfac.arrangements import normal
from tests.kfac.models import Function

LOSS = nn.CrossEntropyLoss()


def test_shapes_are_forgotten_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "_MOST_SHAPES", 1)
    model = Function(lambda m, x: x.sum(1) @ m.W, W=normal(4, 3)).double()
    for length in (2, 3):
        KFAC(EmpiricalRisk(model, LOSS, (normal(5, length, 4), torch.arange(5) % 3)))
    assert len(audits._DONE[model]) == 1


class NoReferences:
    """A model that cannot be remembered."""

    __slots__ = ()

    def __call__(self, params: Any, x: Tensor) -> Tensor:
        """Multiply."""
        result: Tensor = x @ params["W"]
        return result


def test_models_that_cannot_be_remembered() -> None:
    risk = EmpiricalRisk(NoReferences(), LOSS, (normal(5, 4), torch.arange(5) % 3), params={"W": normal(4, 3)})
    assert KFAC(risk).audit is not None


def test_audits_need_a_batch() -> None:
    """Nothing is there before the first one."""
    model = nn.Linear(3, 3)
    risk = EmpiricalRisk(model, LOSS, (torch.randn(4, 3), torch.arange(4) % 3))
    unused = Audits(model, new_session(risk.params))
    batch = next(iter(risk.batches()))
    assert unused.report is None
    assert unused.follow_up(risk, batch, 0) == set()
