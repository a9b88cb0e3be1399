"""Comparisons of an audit: results, and sums over uses with gradients."""

import pytest
import torch
from torch import Tensor

from kfs.factors import inspect
from kfs.factors.audit.audit import GradientSums, Results, difference_of, wrong_rule
from kfs.factors.trace.tracking import Tracker
from kfs.runtime.precision import IN_HALF_PRECISION, tolerance_for
from tests.factors.arrangements import normal
from tests.factors.models import Function


def test_small_differences_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences above rounding errors and below the tolerance are only reported."""

    def slightly_off(_: GradientSums, exact: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
        return dict.fromkeys(exact, (5e-8, 1.0, 1e-12))

    monkeypatch.setattr(GradientSums, "differences", slightly_off)
    audit = inspect(Function(lambda m, x: x @ m.W, W=normal(4, 3)).double(), normal(5, 4)).audit
    assert audit is not None
    assert audit.gradients == {"W": 5e-8}
    assert not audit.missed


def test_results_that_differ() -> None:
    assert difference_of(torch.ones(2), torch.ones(3)) == torch.inf
    assert difference_of(torch.zeros(2), torch.zeros(2)) == 0
    assert difference_of(torch.zeros(2), torch.ones(2)) == 1
    assert tolerance_for(torch.float32, torch.device("cuda")) > tolerance_for(torch.float32, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance_for(torch.float32, torch.device("cpu")) == IN_HALF_PRECISION
    nothing = Results(Tracker({}))
    assert "first operation" not in str(wrong_rule(nothing, nothing, 0.5, 1e-3))
