"""What audits rarely meet: batches that take other ways, results that cannot be compared, owners that are not known."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, inspect, optim
from kfs.errors import DataError, KfsWarning, ModelError
from kfs.kfac.capture import Audits, audits, backward
from kfs.kfac.capture.comparison import IN_HALF_PRECISION, Results, difference_of, tolerance_for, wrong_rule
from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.ownership import measured
from kfs.kfac.capture.sites import Placed, Unknown
from kfs.kfac.capture.tracking import Tracker
from kfs.kfac.rules import new_session
from kfs.kfac.sums.gradient_sums import GradientSums
from kfs.kfac.sums.owners import Listed, Regular, by_length
from kfs.state import restored
from tests.kfac.models import Function
from tests.kfac.test_traps import normal
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()


@torch.jit.script
def scripted(h: Tensor, weight: Tensor) -> Tensor:
    """Hide a product."""
    return torch.nn.functional.linear(h, weight)


def branches(m: Any, x: Tensor) -> Tensor:
    product = scripted if x.sum() > 0 else F.linear
    return product(x, m.W)


def two_batches(first: Tensor, second: Tensor) -> EmpiricalRisk:
    y = torch.arange(len(first)) % 3
    return EmpiricalRisk(Function(branches, W=normal(3, 4)), LOSS, [(first, y), (second, y)])


def test_batches_that_take_another_way() -> None:
    """A use that is hidden in some batches only is found in them, whichever comes first."""
    x = torch.rand(6, 4, dtype=torch.float64)
    assert list(KFAC(two_batches(-x, -x)).blocks) == ["W"]
    for first, second in ((x, -x), (-x, x)):
        with pytest.raises(ModelError, match=r"'W'.*not seen"):
            KFAC(two_batches(first, second))


def test_not_more_ways_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes ever new ways is not audited for ever."""
    monkeypatch.setattr(audits, "_MOST_WAYS", 1)
    x = torch.rand(6, 4, dtype=torch.float64)
    KFAC(two_batches(-x, x))


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


def test_small_differences_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than rounding errors, and less than the tolerance, is reported only."""

    def slightly_off(_: GradientSums, exact: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
        return dict.fromkeys(exact, (5e-8, 1.0, 1e-12))

    monkeypatch.setattr(GradientSums, "differences", slightly_off)
    audit = inspect(Function(lambda m, x: x @ m.W, W=normal(4, 3)).double(), normal(5, 4)).audit
    assert audit is not None
    assert audit.gradients == {"W": 5e-8}
    assert not audit.missed


def test_gradient_sums_are_not_kept() -> None:
    sums = GradientSums()
    sums.restore(sums.state())
    assert sums.state() == {}


def test_results_that_differ() -> None:
    assert difference_of(torch.ones(2), torch.ones(3)) == torch.inf
    assert difference_of(torch.zeros(2), torch.zeros(2)) == 0
    assert difference_of(torch.zeros(2), torch.ones(2)) == 1
    assert tolerance_for(torch.float32, torch.device("cuda")) > tolerance_for(torch.float32, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance_for(torch.float32, torch.device("cpu")) == IN_HALF_PRECISION
    nothing = Results(Tracker({}))
    assert "first operation" not in str(wrong_rule(nothing, nothing, 0.5, 1e-3))


def test_owners() -> None:
    assert not Listed(torch.tensor([1, 0]), 2).in_order(2)
    assert Regular(2, 3).by_datum(torch.ones(0, 4)).shape == (2, 0, 4)
    assert by_length(3, (6,), axis=1) == Regular(3, 1)
    assert by_length(3, (4, 3), axis=1) == Regular(3, 1)
    assert by_length(3, (6, 2)) == Regular(3, 4)
    assert by_length(3, (0, 2)) == Regular(3, 1)
    for leading, axis in (((4, 2), None), ((2, 3, 3), None), ((4, 2), 1)):
        with pytest.raises(DataError, match="is not found"):
            by_length(3, leading, axis)


def test_owners_that_are_not_known() -> None:
    owners = Unknown(DataError("Whose is it?", "Ask."), 2)
    assert not owners.in_order(2)
    with pytest.raises(DataError, match="Whose"):
        owners.by_datum(torch.ones(2, 1))
    with pytest.raises(DataError, match="Whose"):
        owners.counts(2, torch.ones(()))
    with pytest.raises(DataError, match="Whose"):
        owners.index(2)


def test_number_of_owners() -> None:
    gradients = torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64)
    (found,) = measured([gradients, gradients * torch.tensor([[1.0], [2.0], [1.0]])], [3], 2, torch.float32)
    assert found.owners.tolist() == [0, 1, -1]
    assert found.number_of_owners == 2
    assert not found.mixes


def test_backward_passes_without_taps() -> None:
    """Gradients of what was asked for are there, also if no use was seen."""
    W = normal(4, 3).requires_grad_()
    capture = Capture(new_session({"W": W}), GradientSums(), 2)
    f = scripted(normal(2, 4), W.T.contiguous().detach()) @ W.T @ W
    v = torch.ones_like(f).unsqueeze(0)
    (g,) = backward(f, capture, v, keep_graph=True, also=[W])
    assert g is not None
    assert backward(f, capture, v) == ()
    assert backward(f.detach(), capture, v, also=[W]) == [None]


def test_casts_of_expanded_parameters() -> None:
    """The cast has a row for every datum, and counts like the parameter."""
    p, X, y = normal(1, 3), normal(5, 3), torch.arange(5) % 3
    model = Function(lambda m, x: (m.p.expand(len(x), -1).type(torch.float64).clone() + x).tanh(), p=p).double()
    single = Function(lambda m, x: (m.p.float().expand(len(x), -1).double() + x).tanh(), p=p).double()
    for one in (model, single):
        risk = EmpiricalRisk(one, LOSS, (X, y))
        torch.testing.assert_close(EKFAC(risk).trace().double(), GGN(risk).to_dense().trace(), rtol=1e-6, atol=1e-9)


def test_models_that_use_torch_func() -> None:
    def cosine(m: Any, x: Tensor) -> Tensor:
        z, pull_back, *_ = torch.func.vjp(torch.sin, x @ m.W)
        result: Tensor = pull_back(torch.ones_like(z))[0]
        return result

    risk = EmpiricalRisk(Function(cosine, W=normal(4, 3)).double(), LOSS, (normal(5, 4), torch.arange(5) % 3))
    close(EKFAC(risk).trace(), GGN(risk).to_dense().trace())


class Counts(nn.Module):
    """Remembers how often it was called, where nobody can restore it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        result: Tensor = self.linear(x) * (1 + 0.1 * self.calls[0])
        return result


def test_models_that_are_not_repeatable() -> None:
    X, y = torch.randn(6, 3), torch.arange(6) % 3
    with pytest.raises(ModelError, match="not the same function in every call"):
        KFAC(EmpiricalRisk(Counts(), LOSS, (X, y)))
    model = Counts()
    optimizer = optim.KFAC(model, LOSS, factors_every=1)
    with pytest.warns(KfsWarning, match="cannot be audited"):
        LOSS(model(X), y).backward()
    optimizer.step()
    assert optimizer.audit is None
    assert not optimizer.uncovered


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


def test_audits_need_a_batch() -> None:
    """Nothing is there before the first one."""
    model = nn.Linear(3, 3)
    risk = EmpiricalRisk(model, LOSS, (torch.randn(4, 3), torch.arange(4) % 3))
    unused = Audits(model, new_session(risk.params))
    batch = next(iter(risk.batches()))
    assert unused.report is None
    assert unused.follow_up(risk, batch, 0) == set()


def test_orders_in_other_batches() -> None:
    """An order carries over if the batch axis alone has another length."""
    first, last = (Placed(("linear", "W"), shape, 4, inner) for shape, inner in (((4, 5), 5), ((5, 4), 1)))
    assert first.owners(8, (8, 5)) == Regular(8, 5)
    assert last.owners(8, (5, 8)) == Regular(8, 1)
    for num_data, leading in ((8, (8, 6)), (8, (7, 5)), (8, (8,)), (5, (4, 5))):
        assert first.owners(num_data, leading) is None
    assert last.owners(8, (10, 4)) is None
