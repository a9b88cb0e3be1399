"""Batches that are added to averages, inverses that are spread over steps, and events that are counted."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors.blocks import Kronecker
from kfs.factors.blocks.decompositions import BlockError
from kfs.optim import KFAC, inverses
from kfs.optim.averages import Average
from kfs.optim.inverses import Inverses
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()


def snapshot(optimizer: KFAC) -> list[Tensor]:
    """Return copies of all averages and inverses."""
    found = []
    for average in optimizer.preconditioner.curvature.averages.values():
        found += [average.factors.A.values, average.factors.B.values]
        if average.inverse is not None:
            found.append(average.inverse.to_dense())
    return [t.clone() for t in found] + [s["average"].clone() for s in optimizer.state.values()]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "options", [{}, {"factors_every": 1}, {"fisher": "empirical"}, {"eigen": True}, {"factors_every": 2}]
)
def test_bad_batches_leave_no_trace(value: float, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A batch with NaN or infinity changes neither parameters nor averages, and is counted and logged."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, **options)
    train(model, optimizer, [(X, y)] * 3, LOSS)
    before, params = snapshot(optimizer), weights(model)
    bad = X.clone()
    bad[3, 1] = value
    with caplog.at_level(logging.WARNING, "kfs.optim"):
        train(model, optimizer, [(bad, y)], LOSS)
    assert optimizer.events.skipped_steps == 1
    assert "not finite" in caplog.text
    assert torch.equal(weights(model), params)
    assert all(map(torch.equal, snapshot(optimizer), before))
    train(model, optimizer, [(X, y)], LOSS)
    assert weights(model).isfinite().all()
    assert all(t.isfinite().all() for t in snapshot(optimizer))


class Spike(torch.autograd.Function):
    """The identity, whose gradients are infinite only in the extra pass."""

    calls = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        """Return infinite gradients in the first of every two backward passes."""
        Spike.calls += 1
        return g * torch.inf if Spike.calls % 2 == 1 else g


def test_statistics_that_are_not_finite_are_refused() -> None:
    """The step uses the last curvature; after several in a row, damping rises."""
    X, y = data()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = KFAC(model, LOSS, factors_every=1, patience=2)
    train(model, optimizer, [(X, y)] * 2, LOSS)
    before = [t.clone() for t in snapshot(optimizer)[:6]]
    params = weights(model)
    handle = model[1].register_forward_hook(lambda *args: Spike.apply(args[2]))  # type: ignore[no-untyped-call]
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.events.refused_statistics == 1
    assert optimizer.events.skipped_steps == 0
    assert not torch.equal(weights(model), params)
    after = snapshot(optimizer)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert optimizer.damping_scale == 1.0
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.damping_scale == 10.0
    assert optimizer.events.raised_damping == 1
    handle.remove()
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.events.refused_statistics == 2


def test_a_failed_inverse_leaves_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous inverse is used; a block that never had one takes no step."""
    X, y = data()
    model, invert = mlp(), Inverses.invert

    def fail(self: Inverses, averages: Sequence[Average], damping: Sequence[float]) -> None:
        if averages[0].layout.weight == "2.weight":
            raise BlockError(0, "is not what it should be")
        invert(self, averages, damping)

    optimizer = KFAC(model, LOSS, factors_every=1, inverses_every=1, patience=2)
    monkeypatch.setattr(Inverses, "invert", fail)
    frozen = model[2].weight.detach().clone()
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.events.failed_inverses == 1
    assert torch.equal(model[2].weight, frozen)
    monkeypatch.setattr(Inverses, "invert", invert)
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.equal(model[2].weight, frozen)
    last = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)].inverse
    assert last is not None
    kept = last.to_dense()
    monkeypatch.setattr(Inverses, "invert", fail)
    train(model, optimizer, [(X, y)] * 2, LOSS)
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    assert average.inverse is not None
    torch.testing.assert_close(average.inverse.to_dense(), kept)
    assert optimizer.events.failed_inverses == 3


def test_inverses_are_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, every inverse is computed once per interval, and no step computes all of them."""
    X, y = data()
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
    optimizer = KFAC(model, LOSS, factors_every=1, inverses_every=4)
    invert, done = Inverses.invert, list[list[str]]()

    def noted(self: Inverses, averages: Sequence[Average], damping: Sequence[float]) -> None:
        done[-1] += [average.layout.weight for average in averages]
        invert(self, averages, damping)

    monkeypatch.setattr(Inverses, "invert", noted)
    for _ in range(30):
        done.append([])
        train(model, optimizer, [(X, y)], LOSS)
    assert len(done[0]) == 7
    later = done[10:30]
    assert max(map(len, later)) <= 2
    for start in range(0, 16, 4):
        seen = [name for names in later[start : start + 4] for name in names]
        assert set(seen) == {f"{2 * i}.weight" for i in range(7)}
    assert min(map(len, later)) >= 1


def test_inverses_of_large_layers_have_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not change if inverses are padded with zeros."""
    results = {}
    for least in (2, 10**9):
        monkeypatch.setattr(inverses, "_LARGE", least)
        model, loss = mlp(), nn.CrossEntropyLoss()
        optimizer = KFAC(model, loss)
        train(model, optimizer, 25 * [data()], loss)
        stacks = optimizer.preconditioner.curvature.inverses.stacks(
            optimizer.preconditioner.curvature.averages.values()
        )
        found = [one.stack.structure for one in stacks]
        assert any(isinstance(K, Kronecker) and inverses._has_margin(K.A) for K in found) == (least == 2)
        results[least] = weights(model)
    torch.testing.assert_close(results[2], results[10**9], rtol=1e-9, atol=1e-12)


def test_schedules_may_be_functions() -> None:
    """Factors are computed in the steps for which the function returns true."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=lambda step: 1 if step < 2 else 4, inverses_every=lambda step: 1 + step)
    captured = []
    for _ in range(9):
        before = optimizer.preconditioner.watch.first_datum
        train(model, optimizer, [(X, y)], LOSS)
        captured.append(optimizer.preconditioner.watch.first_datum > before)
    assert captured == [True, True, False, False, True, False, False, False, True]


def test_a_layer_without_gradient_stays() -> None:
    """Curvature and gradient of a layer without effect are zero, and so is its step."""
    X, y = data()
    model = mlp()
    with torch.no_grad():
        model[4].weight.zero_()  # it receives no gradient
    frozen = model[2].weight.detach().clone()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)], LOSS)
    assert torch.equal(model[2].weight, frozen)
    train(model, optimizer, [(X, y)] * 5, LOSS)
    assert weights(model).isfinite().all()
    assert not torch.equal(model[2].weight, frozen)


def test_large_numbers_are_finite() -> None:
    """Gradients and factors whose squares overflow are used."""
    X, y = data(dtype=torch.float32)
    model = mlp(torch.float32)
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(1e12 * X, y)] * 2, LOSS)
    assert optimizer.events.refused_statistics == 0
    train(model, optimizer, [(X, y)], lambda f, y: 1e25 * LOSS.forward(f, y))
    assert optimizer.events.skipped_steps == 0
    assert weights(model).isfinite().all()
