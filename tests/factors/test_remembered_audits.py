"""Audits that are remembered, and audits that are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors import EKFAC, KFAC
from kfs.factors.audit import Audits, audits
from kfs.factors.audit.audit import audit
from kfs.factors.rules import new_trace
from kfs.problem.risk import EmpiricalRisk
from tests.factors.arrangements import normal
from tests.factors.models import Function

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
        """Apply the model."""
        result: Tensor = x @ params["W"]
        return result


def test_models_that_cannot_be_remembered() -> None:
    risk = EmpiricalRisk(NoReferences(), LOSS, (normal(5, 4), torch.arange(5) % 3), params={"W": normal(4, 3)})
    assert KFAC(risk).audit is not None


def test_audits_need_a_batch() -> None:
    """There is no audit result before the first batch."""
    model = nn.Linear(3, 3)
    risk = EmpiricalRisk(model, LOSS, (torch.randn(4, 3), torch.arange(4) % 3))
    unused = Audits(model, new_trace(risk.params))
    batch = next(iter(risk.batches()))
    assert unused.report is None
    assert unused.follow_up(risk, batch, batch.x, 0) == set()


class Toggled(nn.Module):
    """Takes sequences with either batch axis; counts calls and remembers their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.time_first = False
        self.settings = {"layers": [1, {"scale": 1.0}]}
        self.calls = 0
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.detach().clone()
        h = self.embed(x.transpose(0, 1) if self.time_first else x).tanh()
        f: Tensor = self.head(h.mean(0 if self.time_first else 1))
        return f


@pytest.fixture
def number_of_audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one entry per audit."""
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return audit(*args, **kwargs)

    monkeypatch.setattr(audits, "audit", counted)
    return made


def traces(model: nn.Module) -> tuple[float, float]:
    x = torch.randn(4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # as many rows as columns
    risk = EmpiricalRisk(model.double(), LOSS, (x, torch.arange(4) % 3))
    kfac, ekfac = KFAC(risk, sharing="reduce"), EKFAC(risk, "empirical", "reduce")
    return float(kfac.to_dense().trace()), float(ekfac.to_dense().trace())


def test_a_layout_that_changes_is_audited_again(number_of_audits: list[int]) -> None:
    model = Toggled()
    before = traces(model)
    made = len(number_of_audits)
    model.time_first = True
    assert traces(model) == pytest.approx(before, rel=1e-12)  # it is the same function
    assert len(number_of_audits) > made
    made = len(number_of_audits)
    for time_first in (False, True, False):
        model.time_first = time_first
        assert traces(model) == pytest.approx(before, rel=1e-12)
    assert len(number_of_audits) == made  # both have been audited
    model.settings["layers"][1]["scale"] = 2.0  # type: ignore[index]
    traces(model)
    assert len(number_of_audits) == made + 1


def test_what_passes_change_is_no_setting(number_of_audits: list[int]) -> None:
    model = Toggled()
    for _ in range(3):
        traces(model)
    assert len(number_of_audits) == 1
    assert model.calls > 3


def test_attributes_that_change_all_the_time_are_left_out(
    number_of_audits: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audits, "_MOST_STATES", 3)
    model = Toggled()
    with caplog.at_level("INFO", "kfs.factors"):
        for step in range(10):
            model.step = step  # type: ignore[assignment]
            traces(model)
    assert len(number_of_audits) == 4
    assert "'step'" in caplog.text
    expected = traces(model)
    model.time_first = True  # is still valid
    assert traces(model) == pytest.approx(expected, rel=1e-12)
