"""Problems in training, and the reactions of damping and curvature, seen in parameters and counts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.optim.safety import Events, UsualSizes
from tests.optim.reference import Reference
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()
GOOD = data()
BAD = (GOOD[0] * torch.nan, GOOD[1])


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.unsqueeze(0), y.unsqueeze(0))


def test_damping_rises_only_after_events_in_a_row() -> None:
    """A good step in between resets the count; by default, the third event in a row raises damping."""
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [GOOD, *[BAD, BAD, GOOD] * 2], LOSS)
    assert optimizer.events.skipped_steps == 4
    assert optimizer.events.raised_damping == 0
    assert optimizer.damping_scale == 1
    train(model, optimizer, [BAD] * 3, LOSS)
    assert optimizer.events.raised_damping == 1
    assert optimizer.damping_scale == 10


@pytest.mark.parametrize("patience", [1, 2])
def test_damping_recovers_after_many_good_updates(patience: int) -> None:
    """Twenty times the patience without an event undo one rise."""
    model = nn.Linear(4, 3).double()
    optimizer = KFAC(model, LOSS, factors_every=1, patience=patience, lr=0.0)
    train(model, optimizer, [GOOD] * 5 + [BAD] * 2 * patience, LOSS)
    assert optimizer.damping_scale == 100
    train(model, optimizer, [GOOD] * (20 * patience - 1), LOSS)
    assert optimizer.damping_scale == 100
    train(model, optimizer, [GOOD], LOSS)
    assert optimizer.damping_scale == pytest.approx(10)
    train(model, optimizer, [GOOD] * (20 * patience - 1), LOSS)
    assert optimizer.damping_scale == pytest.approx(10)
    train(model, optimizer, [GOOD] * 25 * patience, LOSS)
    assert optimizer.damping_scale == pytest.approx(1)  # but never below the initial damping


def test_raised_damping_reaches_inverses_without_new_factors() -> None:
    """It is used by the next inverse, although no statistics were added since the last one."""
    model = mlp()
    options: dict[str, Any] = {"fisher": "type-2", "trust": None, "momentum": 0.0}
    options |= {"factors_every": 100, "inverses_every": 1}
    reference = Reference(copy.deepcopy(model), cross_entropy, **options)
    optimizer = KFAC(model, LOSS, patience=1, noise=None, **options)
    train(model, optimizer, [GOOD, BAD, GOOD], LOSS)
    reference.step(*GOOD)
    reference.damping_scale = 10.0
    reference.changed = True
    reference.step(*GOOD)
    assert optimizer.damping_scale == 10
    torch.testing.assert_close(weights(model), weights(reference.model))


class Hidden(nn.Module):
    """A linear layer that can hide one prediction: it gets no gradient, and all gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.hide: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.linear(x)
        hidden = torch.zeros_like(f, dtype=torch.bool)
        hidden[0, 0] = True
        return f if self.hide is None else f.masked_fill(hidden, self.hide)


@pytest.mark.parametrize(("value", "refused"), [(torch.nan, 1), (torch.inf, 1), (1.0, 0)])
@pytest.mark.parametrize("fisher", ["mc", "type-2", "forward-only"])
def test_predictions_that_are_not_finite(value: float, refused: int, fisher: Any) -> None:
    """Their statistics are refused even if all gradients are finite, and the step uses the last curvature."""
    (X, _), y = GOOD, torch.randn(12, 3, dtype=torch.float64)
    moved = []
    for hide in (value, None):
        torch.manual_seed(3)
        model = Hidden().double()
        every = 100 if hide is None else 1  # with 100, the last curvature is used for any predictions
        optimizer = KFAC(model, HalfSquaredError(), fisher=fisher, factors_every=every, inverses_every=1)
        train(model, optimizer, [(X, y)], HalfSquaredError())
        model.hide = value
        optimizer.zero_grad()
        f = model(X)[1:]  # the gradient of masked predictions is zero
        (0.5 * (f - y[1:]).square().sum() / len(X)).backward()
        optimizer.step()
        moved.append(weights(model))
        assert optimizer.events.refused_statistics == (0 if hide is None else refused)
        assert optimizer.events.skipped_steps == 0
    assert torch.equal(*moved) == bool(refused)


def test_logits_of_forbidden_classes() -> None:
    """Models use a logit of minus infinity on purpose, for an impossible class."""
    X, y = GOOD
    model = Hidden().double()
    model.hide = -torch.inf
    optimizer = KFAC(model, LOSS, factors_every=1)
    labels = torch.where(torch.arange(12) == 0, 1, y)
    values = train(model, optimizer, [(X, labels)] * 5, LOSS)
    assert optimizer.events.refused_statistics == 0
    assert values[-1] < values[0]


class Bent(nn.Module):
    """Uses a parameter in a way that KFAC covers, and later in a way that it does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))
        self.bent = False

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.linear(x)
        return torch.atan2(f, self.scale) if self.bent else f * self.scale


def test_curvature_of_a_parameter_that_is_not_covered_any_more() -> None:
    """The curvature is dropped, and from then on AdamW alone trains the parameter."""
    model = Bent().double()
    optimizer = KFAC(model, LOSS, factors_every=1, lr=0.1, adamw_lr=0.05)
    train(model, optimizer, [GOOD], LOSS)
    assert not optimizer.uncovered
    before = model.scale.detach().clone()
    model.bent = True
    with pytest.warns(match="KFAC does not cover"):
        train(model, optimizer, [GOOD], LOSS)
    assert set(optimizer.uncovered) == {"scale"}
    first_step = (model.scale.detach() - before).abs()
    torch.testing.assert_close(first_step, torch.full_like(first_step, 0.1 * 0.05))  # AdamW's first step is a sign


def with_spike(size: float, at: int | None, steps: int = 20) -> tuple[Tensor, KFAC]:
    """Train with a gradient of another size in one step; `None` skips that step."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    for i in range(steps):
        optimizer.zero_grad()
        LOSS(model(GOOD[0]), GOOD[1]).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= size if i == at else 1.0
        optimizer.step()
    return weights(model), optimizer


@pytest.mark.parametrize("at", [1, 7, 12, 15])
def test_one_gradient_that_is_far_too_large(at: int) -> None:
    """It is counted as an event, and training continues as if the step had been skipped."""
    expected, _ = with_spike(1.0, None, 19)
    moved, optimizer = with_spike(1e6, at)
    assert torch.equal(moved, expected)
    assert optimizer.events == Events(refused_gradients=1)
    assert "refused_gradients 1" in str(optimizer.report())
    # A gradient that is large, but not absurd, is used.
    moved, optimizer = with_spike(20.0, at)
    assert not torch.equal(moved, expected)
    assert optimizer.events == Events()


def test_one_input_that_is_far_too_large() -> None:
    """Averages of factors do not change. Otherwise, they would need hundreds of steps to forget it."""
    batch = GOOD[0].clone(), GOOD[1]
    batch[0][0] *= 1e4
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=2)
    train(model, optimizer, [GOOD] * 4, LOSS)
    before = copy.deepcopy([a.factors.to_dense() for a in optimizer.preconditioner.curvature.averages.values()])
    train(model, optimizer, [batch], LOSS)
    assert optimizer.events == Events(refused_statistics=1)
    for average, expected in zip(optimizer.preconditioner.curvature.averages.values(), before, strict=True):
        assert torch.equal(average.factors.to_dense(), expected)


@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
def test_gradients_that_grow() -> None:
    """A new scale of the loss, or of data, is refused for three steps, and then accepted."""
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [GOOD] * 12, LOSS)
    before = weights(model)
    train(model, optimizer, [GOOD] * 3, lambda f, y: 1e6 * LOSS(f, y))
    assert torch.equal(weights(model), before)
    train(model, optimizer, [GOOD] * 10, lambda f, y: 1e6 * LOSS(f, y))
    assert not torch.equal(weights(model), before)
    assert optimizer.events == Events(refused_gradients=3)
    factors = optimizer.preconditioner.curvature.averages["0.weight", (0, 6)].factors.A
    train(model, optimizer, [(GOOD[0] * 1e3, GOOD[1])] * 5, LOSS)
    assert optimizer.events.refused_statistics == 3
    assert factors.values.norm() > 1e5


def test_spikes_that_come_again_and_again() -> None:
    """Isolated spikes, such as those of a broken example, are always refused, but not if every second one is large."""
    for interval, refused in ((1000, 8), (10, 8), (2, 5)):
        sizes = UsualSizes(100.0, 3)
        accepted = []
        for i in range(8 * interval):
            large = i % interval == interval - 1
            good = sizes.check(("gradients",), torch.tensor([1e6 if large else 1.0]))[1]
            assert good or large
            accepted += [bool(good)] if large else []
        assert accepted == [False] * refused + [True] * (8 - refused)
        # After loading a state, training continues in the same way.
        other = UsualSizes(100.0, 3)
        other.restore(sizes.state())
        assert other.state() == sizes.state()


def test_a_spike_before_anything_is_known() -> None:
    """It is accepted, but does not remain the reference for other spikes, unless its size returns in time."""

    def accepted(*sizes: float) -> bool:
        usual = UsualSizes(100.0, 3)
        return [bool(usual.check(("gradients",), torch.tensor([size]))[1]) for size in sizes][-1]

    assert accepted(1e8, *[1.0] * 5, 1e8)
    assert not accepted(1e8, *[1.0] * 100, 1e8)
    assert accepted(*[1e8, *[1.0] * 20] * 5, 1e8)
    assert accepted(100.0, *[1.0] * 100, 5000.0)  # sizes that differ by less are all normal
