"""The scale of steps: their overshoot, and shorter steps until it is small."""

import copy
import math
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import KfsWarning, ModelError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.optim.step_scale import LossTrend, StepScale, next_numbers
from kfs.optim.update_rule import KEPT_OF_STEPS
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()


class Valley(nn.Module):
    """A model with a parabola as its loss: linear regression."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        y: Tensor = self.linear(x)
        return y


def noisy(seed: int, steps: int, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    """Return small batches of a regression in which noise dominates the targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        X = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        batches.append((X, X.sum(1, keepdim=True) + torch.randn(size, 1, generator=generator, dtype=torch.float64)))
    return batches


def overshoot_by_definition(before: list[Tensor], gradient: Tensor) -> float:
    """Return half the slope of a loss at the last parameters, on the way from the average of all parameters so far."""
    average = before[0]
    for theta in before[1:]:
        average = KEPT_OF_STEPS * average + (1 - KEPT_OF_STEPS) * theta
    return 0.5 * float(gradient @ (before[-1] - average))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_overshoot_is_that_of_the_definition(reduction: str) -> None:
    """With a constant scale, the measured overshoot is the average of its definition over steps."""
    model, loss = Valley(), HalfSquaredError(reduction)
    optimizer = KFAC(model, loss, lr=0.2, noise=1e6, weight_decay=0.0)
    seen, mean, weight = [weights(model)], 0.0, 0.0
    for X, y in noisy(0, 12):
        train(model, optimizer, [(X, y)], loss)
        g = model.linear.weight.grad
        assert g is not None
        overshoot = overshoot_by_definition(seen, g.flatten()) / (64 if reduction == "sum" else 1)
        mean, weight = 0.8 * mean + 0.2 * overshoot, 0.8 * weight + 0.2
        seen.append(weights(model))
    found = optimizer._scale.numbers_on(torch.device("cpu"))
    expected = torch.tensor([mean, weight, 0.0, 0.0, 12.0], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    # Along the last step alone, without the average of parameters, the result is different.
    assert g is not None
    along_last_step = 0.5 * float(g.flatten() @ (seen[-2] - seen[-3]))
    assert abs(along_last_step - overshoot) > 0.01 * abs(overshoot)


def scales_of(overshoots: list[float], start: float = 1.0, allowed: float = 1.0, age: float = 0.0) -> list[float]:
    """Return the scale before and after each step."""
    numbers = torch.tensor([0.0, 0.0, math.log(start), 0.0, age], dtype=torch.float64)
    scales = [start]
    for overshoot in overshoots:
        numbers = next_numbers(numbers, torch.tensor(overshoot, dtype=torch.float64), allowed)
        scales.append(float(numbers[2].exp()))
    return scales


def test_scale_falls_and_rises() -> None:
    """It falls while overshoot exceeds the limit, rises again up to one, and changes by at most its rates."""
    scales = scales_of([2.5] * 40 + [-1.0] * 90, age=100)
    changes = [after / before for before, after in pairwise(scales)]
    assert scales[4] == 1.0  # there are too few overshoots
    assert 0.1 < min(scales) < 0.25
    assert scales[-1] == 1.0
    assert min(changes) >= 0.94
    assert max(changes) == pytest.approx(math.exp(0.03))
    assert scales_of([10.0] * 20, allowed=torch.inf)[-1] == 1.0  # The limit is not known.


def test_scale_rises_slowly_after_overshoot_that_was_far_too_large() -> None:
    """After that, it rises by one percent per step, from its lowest value; otherwise by three."""
    mild, severe = ([overshoot] * 40 + [-1.0] * 40 for overshoot in (2.5, 10.0))
    rises = [scales_of(overshoots, age=100)[-20:] for overshoots in (mild, severe)]
    for rise, rate in zip(rises, (0.03, 0.01), strict=True):
        assert [b / a for a, b in pairwise(rise)] == pytest.approx([math.exp(rate)] * 19)


def test_first_steps_are_short() -> None:
    """With a learning rate of one, the scale starts at 0.2 and reaches one in seven steps if there is no overshoot."""
    scale = StepScale(0.05)
    scale.allowed(1.0, math.inf, [{"lr": 1.0}, {"lr": 0.1}])
    assert scale.value() == pytest.approx(0.2)
    scales = scales_of([-1.0] * 8, start=0.2)
    assert scales[1] == pytest.approx(0.2)  # There is no information before the first step.
    assert scales[2] == pytest.approx(0.2 * math.exp(0.3))
    assert scales[6] < 1.0
    assert scales[7] == 1.0
    assert max(scales_of([1.5] * 8, start=0.2)) == 0.2
    # A schedule that begins with smaller rates is a warm-up itself, so its peak is not another start.
    warming = StepScale(0.05)
    for lr in (0.05, 0.2, 1.0):
        warming.allowed(1.0, math.inf, [{"lr": lr}])
        assert warming.value() == 1.0


def test_more_is_allowed_when_a_schedule_has_lowered_the_learning_rate() -> None:
    scale = StepScale(0.05)
    assert scale.allowed(2.0, math.inf, [{"lr": 0.5}]) == pytest.approx(0.1)  # warm-up
    assert scale.allowed(2.0, math.inf, [{"lr": 1.0}]) == pytest.approx(0.1)
    assert scale.allowed(2.0, math.inf, [{"lr": 0.5}, {"lr": 0.1}]) == pytest.approx(0.4)
    assert scale.allowed(2.0, math.inf, [{"lr": 0.0}]) == torch.inf
    assert scale.allowed(2.0, math.inf, [{"lr": 1e-200}]) == torch.inf  # The square of one divided by it overflows.
    assert scale.allowed(-1.0, math.inf, [{"lr": 1.0}]) == torch.inf
    assert scale.allowed(torch.inf, math.inf, [{"lr": 1.0}]) == torch.inf


def test_less_is_allowed_where_the_loss_does_not_fall() -> None:
    """The limit is twice the recent decrease of the loss, or a small part of the share if the loss has risen."""
    scale = StepScale(0.05)
    groups = [{"lr": 1.0}]
    assert scale.allowed(2.0, 1.0, groups) == pytest.approx(0.1)
    assert scale.allowed(2.0, 0.02, groups) == pytest.approx(0.04)
    assert scale.allowed(2.0, -1.0, groups) == pytest.approx(0.003)
    assert scale.allowed(2.0, 0.0, [{"lr": 0.1}]) == pytest.approx(0.3)  # The schedule reduces noise.


def test_progress_is_the_fall_over_the_last_steps() -> None:
    """Averages by definition, with weights that grow with the index of a loss; no progress before some losses."""
    trend = LossTrend()
    means, progress = [], []
    for step in range(60):
        trend.note(step, 1 + 2 / (1 + step), 1.0)
        means.append(trend.mean)
        progress.append(trend.progress)
    assert not any(math.isfinite(one) for one in progress[:14])

    def average(power: int) -> float:
        # The weights with which the n-th loss enters an average at the rate `(power + 1) / (power + n)`.
        weight = [math.comb(n + power, power) for n in range(len(means))]
        return sum(w * m for w, m in zip(weight, means, strict=True)) / sum(weight)

    assert progress[-1] == pytest.approx(average(5) - average(15))
    assert 0 < progress[-1] < progress[20]
    again = LossTrend.from_state(trend.state())
    assert again.progress == trend.progress
    for one in (trend, again):
        one.note(60, 5.0, 1.0)
    assert again.progress == trend.progress < 0


def test_noise_around_a_constant_loss_is_no_rise() -> None:
    """The lowest of many noisy losses is low by chance. A rise far above the noise is reported."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        trend = LossTrend()
        noise = (0.05 * torch.randn(1500, generator=generator)).tolist()
        flat = [trend.note(10 * n, 1 + noise[n], 1.0) for n in range(1000)]
        assert not any(flat), seed
        risen = [trend.note(10 * n, 1.6 + noise[n], 1.0) for n in range(1000, 1020)]
        assert any(risen), seed


def test_the_optimizer_knows_loss_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit in every step follows from the losses before it."""
    given: list[tuple[float, float]] = []
    allowed = StepScale.allowed

    def spy(self: StepScale, loss: float, progress: float, groups: Any) -> float:
        given.append((loss, progress))
        return allowed(self, loss, progress, groups)

    monkeypatch.setattr(StepScale, "allowed", spy)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [data()] * 20, LOSS)
    losses = [one.loss for one in optimizer.report().history]
    trend = LossTrend()
    expected = []
    for step, loss in enumerate(losses):
        trend.note(step, loss, 1.0)
        expected.append((trend.mean, trend.progress))
    assert given == expected
    assert 0 < given[-1][1] < given[-1][0]


def excess(noise: float | None, steps: int = 400) -> tuple[float, float]:
    """Return the distance of parameters from the minimum in the last half of a noisy training, and the final scale."""
    torch.manual_seed(0)
    model = Valley()
    optimizer = KFAC(model, HalfSquaredError(), noise=noise, trust=None)
    distances = []
    for X, y in noisy(1, steps, size=8):
        train(model, optimizer, [(X, y)], HalfSquaredError())
        distances.append(0.5 * float((weights(model) - 1).square().sum()))
    return sum(distances[steps // 2 :]) / (steps // 2), optimizer.step_scale


def test_noise_does_no_more_harm_than_asked_for() -> None:
    """The smallest loss is one half, so noise may raise it by about a share of that; without the setting, by more."""
    free, one = excess(None)
    limited, scale = excess(0.01)
    assert one == 1.0
    assert scale < 0.5
    # Overshoot of the last ten steps is less than the whole effect of noise: a part of it is older.
    assert limited < 2 * 0.01 * 0.5
    assert free > 5 * limited


def test_training_without_noise_keeps_whole_steps() -> None:
    """Whole batches decrease the loss: the training equals that without the setting, to the bit."""
    X, y = data(num_data=64)
    one, other = mlp(), mlp()
    optimizer = KFAC(one, LOSS, lr=0.2, fisher="type-2")
    train(one, optimizer, [(X, y)] * 15, LOSS)
    train(other, KFAC(other, LOSS, lr=0.2, fisher="type-2", noise=None), [(X, y)] * 15, LOSS)
    assert optimizer.step_scale == 1.0
    assert torch.equal(weights(one), weights(other))


def test_weight_decay_has_the_same_scale() -> None:
    """Weights decay by the scaled learning rate; decay is not a step, and causes no overshoot."""
    model = mlp()
    optimizer = KFAC(model, LOSS, lr=0.5, weight_decay=0.1, noise=1e-6, fisher="type-2")
    optimizer._scale.restore({"numbers": [0.0, 0.0, -1.0, 0.0, 0.0], "peak": 0.5})
    X, y = data()
    other = copy.deepcopy(model)
    train(model, optimizer, [(X, y)], LOSS)
    plain = KFAC(other, LOSS, lr=0.5 * math.exp(-1), weight_decay=0.1, noise=None, fisher="type-2")
    train(other, plain, [(X, y)], LOSS)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-9, atol=1e-12)


def run(model: nn.Module, optimizer: KFAC, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Train, and return parameters."""
    train(model, optimizer, batches, HalfSquaredError())
    return weights(model)


def test_resumed_training_has_the_scale() -> None:
    """A state has averages of steps, overshoot and losses: a resumed training equals an uninterrupted one."""
    batches = noisy(2, 60, size=8)
    torch.manual_seed(0)
    model = Valley()
    optimizer = KFAC(model, HalfSquaredError(), noise=0.01, trust=None)
    run(model, optimizer, batches[:40])
    assert optimizer.step_scale < 1.0
    resumed = Valley()
    resumed.load_state_dict(model.state_dict())
    again = KFAC(resumed, HalfSquaredError(), noise=0.01, trust=None)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.step_scale == optimizer.step_scale
    assert torch.equal(run(resumed, again, batches[40:]), run(model, optimizer, batches[40:]))
    assert again.report().history == optimizer.report().history


def test_states_without_scale_are_read() -> None:
    """The state may be that of an optimizer without the setting, or with it."""
    X, y = data()
    states = []
    for noise in (None, 0.05):
        model = mlp()
        optimizer = KFAC(model, LOSS, noise=noise)
        train(model, optimizer, [(X, y)] * 3, LOSS)
        states.append((model.state_dict(), optimizer.state_dict()))
    for noise, (of_model, state) in zip((0.05, None), states, strict=True):
        model = mlp()
        model.load_state_dict(of_model)
        optimizer = KFAC(model, LOSS, noise=noise)
        optimizer.load_state_dict(state)
        train(model, optimizer, [(X, y)] * 3, LOSS)
        assert optimizer.steps == 6


def test_bad_batches_do_not_count() -> None:
    """A skipped step does not change overshoot and averages of steps."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)] * 4, LOSS)
    before = optimizer._scale.numbers_on(torch.device("cpu")).clone()
    averages = [state["mean_step"].clone() for state in optimizer.state.values()]
    train(model, optimizer, [(X * torch.nan, y)], LOSS)
    assert torch.equal(optimizer._scale.numbers_on(torch.device("cpu")), before)
    assert all(torch.equal(a, s["mean_step"]) for a, s in zip(averages, optimizer.state.values(), strict=True))


def test_a_quadratic_model_has_steps_of_its_own() -> None:
    """Whatever `noise` is, steps are those that the model asks for."""
    assert KFAC(mlp(), LOSS, quadratic_model=True, noise=1e-6)._scale.noise is None


@pytest.mark.parametrize("noise", [0.0, -1.0, torch.nan, "little"])
def test_bad_settings(noise: Any) -> None:
    with pytest.raises(ModelError, match="noise is"):
        KFAC(mlp(), LOSS, noise=noise)
    model = mlp()
    with pytest.raises(ModelError, match="the same for all parameters"):
        KFAC(model, LOSS, [{"params": model.parameters(), "noise": 0.1}])


def trend_of(losses: list[float], every: int = 1) -> list[str]:
    trend = LossTrend()
    return [text for i, loss in enumerate(losses) if (text := trend.note(every * i, loss, 1.0))]


def test_losses_that_rise_are_told() -> None:
    """There is an event if half of the progress is lost for many steps, but not for a peak, a plateau, or noise."""
    falling = [3.0 * 0.95**i + 0.5 for i in range(60)]
    generator = torch.Generator().manual_seed(0)
    noise = (1 + 0.3 * torch.randn(400, generator=generator)).tolist()
    assert trend_of(falling + [0.5] * 200) == []
    assert trend_of(falling + [3.0] * 20 + [0.6] * 200) == []
    assert trend_of(noise) == []
    told = trend_of(falling + [2.8] * 80)
    assert len(told) == 1
    assert "lowest value, 0.766 at step 59" in told[0]
    assert trend_of([1.0 + 0.02 * i for i in range(200)])  # from the first step
    assert trend_of([1.0 + 0.2 * i for i in range(20)], every=10)
    assert trend_of([torch.nan] * 100) == []


def test_a_run_that_gets_worse_warns_once() -> None:
    """Targets grow faster than any training can follow: there are events, and one warning with the way out."""
    model = Valley()
    optimizer = KFAC(model, HalfSquaredError())
    batches = [(X, (1 + 0.05 * i) * y) for i, (X, y) in enumerate(noisy(3, 300, size=8))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, batches, HalfSquaredError())
    told = [str(w.message) for w in caught if issubclass(w.category, KfsWarning)]
    assert len(told) == 1
    assert told[0].startswith("The loss has been rising")
    assert "smaller lr" in told[0]
    assert optimizer.events.rising_losses > 1


def test_history_is_thinned_out() -> None:
    trend = LossTrend()
    for step in range(5_000):
        trend.note(step, 1.0, 0.5)
    assert len(trend.history) <= 2_000
    assert trend.history[0].step == 0
    assert trend.history[-1] == (4_999, 1.0, 0.5)


@pytest.mark.parametrize("known", [True, False])
def test_loss_of_a_square_without_targets_is_that_of_its_gradient(known: bool) -> None:
    """Accumulated halves have the loss of the batch, with and without known targets."""
    torch.manual_seed(0)
    model, loss = Valley(), nn.MSELoss()
    X, y = noisy(4, 1)[0]
    optimizer = KFAC(model, loss)
    value = 0.5 * (model(X) - y).square().sum(1).mean()
    for part, of_part in zip(X.chunk(2), y.chunk(2), strict=True):
        f = model(part)
        (0.5 * (loss(f, of_part) if known else (f - of_part).square().mean())).backward()
    optimizer.step()
    assert optimizer.report().history[-1].loss == pytest.approx(float(value.detach()), rel=1e-9)


def test_history_is_drawn() -> None:
    """There is one line for losses, and one for the scale."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    assert not optimizer.report().plot().lines[0].get_xdata().size  # type: ignore[union-attr]
    train(model, optimizer, [(X, y)] * 5, LOSS)
    axes = optimizer.report().plot()
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert axes.get_ylabel() == "loss"
