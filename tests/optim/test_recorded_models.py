"""Recorded passes of models that change between passes, or whose counts depend on data.

Tapes stand in for CUDA graphs (see `tests.factors.tape`).
"""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC
from kfs.optim.factor_graphs import FactorGraph
from kfs.runtime import cuda_graphs
from tests.factors.tape import Tapes
from tests.optim.training import data, mlp, recorded_passes, weights

LOSS = nn.CrossEntropyLoss()


def kinds_of(optimizer: KFAC) -> list[Any]:
    """Return what is known about the passes of an optimizer, by mode of the model."""
    replayer = optimizer.preconditioner.watch._graphs._replayer
    return [] if replayer is None else list(replayer._kinds.values())


pytestmark = pytest.mark.usefixtures("tapes")


class Tempered(nn.Module):
    """Has settings that are not parameters, in attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.temperature = 1.0
        self.mask = torch.ones(6, dtype=torch.float64)
        self.settings = {"scale": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        """Use all settings."""
        h = torch.tanh(self.first(x) / self.temperature) * self.mask
        result: Tensor = self.last(h * self.settings["scale"][0])
        return result


def _heat(model: Tempered) -> None:
    model.temperature = 3.0


def _hide(model: Tempered) -> None:
    model.mask = torch.tensor([0.0, 1, 0, 2, 1, 1], dtype=torch.float64)


def _scale(model: Tempered) -> None:
    model.settings["scale"][0] = 2.0


def _replace(model: Tempered) -> None:
    last = model.last
    last.forward = lambda x: 3 * nn.functional.linear(x, last.weight, last.bias)  # type: ignore[assignment,method-assign]


def _hook(model: Tempered) -> None:
    model.first.register_forward_hook(lambda _, __, output: 3 * output)


@pytest.mark.parametrize("change", [_heat, _hide, _scale, _replace, _hook])
def test_a_model_that_was_changed_is_recorded_anew(
    change: Callable[[Tempered], None], tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording contains Python numbers of the recorded pass, so it is not used any more."""
    X, y = data(6)
    passes: list[FactorGraph] = []
    replay_pass = FactorGraph.replay

    def noted(one: FactorGraph, *args: Any) -> Any:
        passes.append(one)
        return replay_pass(one, *args)

    monkeypatch.setattr(FactorGraph, "replay", noted)

    def run(replay: bool) -> tuple[Tensor, KFAC]:
        torch.manual_seed(0)
        model = Tempered().double()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, replay=replay)
        for step in range(8):
            if step == 4:
                assert recorded_passes(optimizer) == replay
                change(model)
                passes.clear()
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
        return weights(model), optimizer

    recorded, optimizer = run(replay=True)
    # A model with hooks is not replayed; its recording is kept until they are removed.
    assert any(tape.freed for one in tapes for tape in one.made) == (change is not _hook)
    assert recorded_passes(optimizer) == 1
    assert bool(passes) == (change is not _hook)
    torch.testing.assert_close(recorded, run(replay=False)[0], rtol=1e-9, atol=1e-10)


def test_models_that_change_all_the_time_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    """After several unused recordings, there are no more."""
    X, y = data(6)
    model = Tempered().double()
    optimizer = KFAC(model, LOSS, factors_every=1)
    with caplog.at_level("INFO", "kfs.optim"):
        for step in range(12):
            model.temperature = 1 + 0.1 * step
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
    assert caplog.text.count("attributes of the model change between its passes") == 1


def test_a_model_that_is_changed_for_the_step() -> None:
    """A pass is recorded only if the model is the same as in the watched pass."""
    X, y = data(6)
    results = []
    for replay in (True, False):
        torch.manual_seed(0)
        model = Tempered().double()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, replay=replay)
        for _ in range(6):
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            model.temperature = 3.0
            optimizer.step()
            model.temperature = 1.0
        assert not recorded_passes(optimizer)
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


class Breaks(nn.Linear):
    """Fails in its third call; the number of calls is not an attribute of the model."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Count, outside of the model."""
        self.calls.append(1)
        if len(self.calls) == 3:
            raise RuntimeError("it broke")
        return super().forward(x)


def test_a_rehearsal_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The log gives the error as the reason why passes are not replayed. The user's passes continue."""
    X, y = data(6)
    Breaks.calls.clear()
    model = nn.Sequential(Breaks(4, 6), nn.Linear(6, 3)).double()
    optimizer = KFAC(model, LOSS, factors_every=1, audit=False)
    with caplog.at_level("INFO", "kfs.optim"):
        for _ in range(6):
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
    assert caplog.text.count("Passes for factors are not replayed as CUDA graphs: it broke.") == 1
    assert not recorded_passes(optimizer)
    assert len(Breaks.calls) == 7


class Padded(nn.Module):
    """Has an embedding with a padding index, which is optionally tied to the last layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        result: Tensor = self.head(torch.tanh(self.embedding(x)))
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_positions_that_count_depend_on_data(tied: bool, accumulate: int) -> None:
    """The number of tokens that are not padding differs between batches."""
    torch.manual_seed(0)
    tokens = torch.randint(4, (16, 4, 5))
    loss = TokenCrossEntropy()
    results = []
    for replay in (True, False):
        torch.manual_seed(0)
        model = Padded(tied).double()
        optimizer = KFAC(model, loss, fisher="type-2", factors_every=1, inverses_every=1, replay=replay)
        for step in range(8):
            optimizer.zero_grad()
            for one in tokens[step * accumulate : (step + 1) * accumulate]:
                loss(model(one[:, :-1]), one[:, 1:]).backward()
            optimizer.step()
        assert recorded_passes(optimizer) == replay
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


class Skips(nn.Module):
    """Skips a layer at random, with Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Draw."""
        if random.random() < 0.7:
            x = x + self.layer(x)
        result: Tensor = self.head(x)
        return result


@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
def test_random_numbers_of_python() -> None:
    """Such a model is watched, and the optimizer consumes none of the model's random numbers."""
    X, y = data(6)
    states: list[Any] = []
    results = []
    before = random.getstate()
    for replay in (True, False):
        random.seed(3)
        torch.manual_seed(0)
        model = Skips().double()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, audit=False, replay=replay)
        for _ in range(8):
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
        assert not recorded_passes(optimizer)
        states.append(random.getstate())
        results.append(weights(model))
    random.setstate(before)
    assert states[0] == states[1]
    assert torch.equal(*results)


def test_recordings_that_nobody_will_use_are_freed(tapes: list[Tapes]) -> None:
    """Recordings for other trained parameters or other memory are freed, and at most a few shapes are remembered."""
    X, y = data(70)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1, audit=False)

    def steps(sizes: list[int]) -> None:
        for size in sizes:
            optimizer.zero_grad()
            LOSS(model(X[:size]), y[:size]).backward()
            optimizer.step()

    for trained in (True, False, True):
        model[0].requires_grad_(trained)
        steps([6, 6, 6, 5, 5, 5])
        assert recorded_passes(optimizer) == 2
    model[0].weight.data = model[0].weight.data.clone()
    steps([6, 6, 6])
    assert recorded_passes(optimizer) == 1
    # These are still used: for passes, for updates, and for inverses of three sizes.
    assert sum(not tape.freed for one in tapes for tape in one.made) == 5
    steps(list(range(1, cuda_graphs._MOST_KEYS + 4)))
    (kind,) = kinds_of(optimizer)
    assert len(kind.shapes) == cuda_graphs._MOST_KEYS
    assert recorded_passes(optimizer) == 1


def test_modes_of_a_model_are_recorded_or_not_on_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Dropout prevents recordings in training mode for some shapes, but not in evaluation mode."""
    X, y = data(12)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, audit=False)

    def steps(sizes: list[int]) -> None:
        for size in sizes:
            optimizer.zero_grad()
            LOSS(model(X[:size]), y[:size]).backward()
            optimizer.step()

    with caplog.at_level("INFO", "kfs.optim"):
        steps([6, 6, 6])
        assert not recorded_passes(optimizer)
        model.eval()
        steps([6, 6, 6])
        assert recorded_passes(optimizer) == 1
        model.train()
        steps([size for size in range(7, 12) for _ in range(2)])
    assert recorded_passes(optimizer) == 1
    assert caplog.text.count("Passes for factors are not replayed") == 1
    evaluation, training = kinds_of(optimizer)
    assert (evaluation.is_refused, training.is_refused) == (False, True)
    assert len(training.shapes) == 6
    assert all(shape.waits is None for shape in training.shapes.values())  # Other shapes were not tried.
