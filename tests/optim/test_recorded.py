"""Code paths of an accelerator, tested on the CPU: recordings, stacks, checks without synchronization.

Tapes stand in for CUDA graphs (see `tests.factors.tape`).
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import ModelError
from kfs.factors import compute
from kfs.factors.settings import Settings
from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC, apply, factor_graphs
from kfs.runtime import cuda_graphs
from tests.factors.tape import Tape, Tapes
from tests.optim.training import data, mlp, recorded_passes, recordings, train, weights

LOSS = nn.CrossEntropyLoss()
pytestmark = pytest.mark.usefixtures("tapes")


class Tokens(nn.Module):
    """Predicts tokens; with a tied embedding, attention and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        result: Tensor = self.head(self.block(self.embedding(x)))
        return result


def problem(name: str) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    """Return a model, a loss and batches."""
    torch.manual_seed(0)
    if name == "tokens":
        tokens = torch.randint(7, (40, 5))
        batches = [(tokens[i : i + 4, :-1], tokens[i : i + 4, 1:]) for i in range(0, 40, 4)]
        return Tokens().double(), TokenCrossEntropy(), batches
    X, y = data(60)
    model: Any = mlp()
    if name == "cnn":
        X = X[:, :4].reshape(-1, 1, 2, 2)
        model = nn.Sequential(nn.Conv2d(1, 4, 2, padding=1, groups=1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2))
        model = nn.Sequential(model, nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
    loss = nn.CrossEntropyLoss(reduction="sum" if name == "sum" else "mean")
    return model, loss, [(X[i : i + 6], y[i : i + 6]) for i in range(0, 60, 6)]


def trained(name: str, steps: int = 16, groups: str = "", accumulate: int = 1, **options: Any) -> tuple[Tensor, KFAC]:
    """Train, and return all weights."""
    model, loss, batches = problem(name)
    params: Any = None
    if groups == "adamw":
        params = [{"params": [p], "method": "adamw" if p.ndim == 1 else "kfac"} for p in model.parameters()]
    if groups == "different":
        params = [{"params": [p], "lr": 0.05 + 0.01 * i, "trust": 0.5 + i} for i, p in enumerate(model.parameters())]
    optimizer = KFAC(model, loss, params, weight_decay=0.1, **{"factors_every": 2, "inverses_every": 3} | options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batches[(step * accumulate + part) % len(batches)]
            loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return weights(model), optimizer


CASES: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp"},
    "tokens": {"name": "tokens"},
    "cnn": {"name": "cnn"},
    "sum": {"name": "sum"},
    "mc": {"name": "mlp", "fisher": "mc"},
    "clipped": {"name": "mlp", "kl_clip": 1e-4},
    "adamw": {"name": "mlp", "groups": "adamw"},
    "groups": {"name": "mlp", "groups": "different"},
    "accumulated": {"name": "mlp", "accumulate": 2},
    "reduce": {"name": "mlp", "sharing": "reduce"},
    "empirical": {"name": "mlp", "fisher": "empirical"},
    "eigen": {"name": "mlp", "eigen": True},
    "exact damping": {"name": "mlp", "damping_method": "exact"},
    "absolute": {"name": "mlp", "damping_unit": "absolute"},
}
NO_PASSES = {"empirical", "eigen"}  # No vectors are sent back, or eigenbases change.


@pytest.mark.parametrize("case", CASES)
def test_recordings_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with recordings equal those without recordings, on an accelerator and on a CPU."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 3} | CASES[case]
    recorded, optimizer = trained(**options)
    assert recorded_passes(optimizer) == (0 if case in NO_PASSES else 1)
    assert recordings(optimizer._updates._replayer) == 1
    plain, _ = trained(**options, replay=False)
    torch.testing.assert_close(recorded, plain, rtol=1e-9, atol=1e-10)
    if case != "mc":  # Draws differ on an accelerator.
        # If inverses are not computed in every step, blocks of one size are inverted together on an accelerator.
        there, _ = trained(**options, inverses_every=1)
        monkeypatch.undo()
        here, _ = trained(**options, inverses_every=1)
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-9)


def test_a_recording_that_forgets_the_learning_rate_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above rejects a graph that keeps the learning rate of the step in which it was recorded."""
    right, _ = trained("mlp", fisher="type-2")
    monkeypatch.setattr(apply, "all_numbers", lambda parts: [0.1, 1.0, 1.0] * len(list(parts)))
    wrong, _ = trained("mlp", fisher="type-2")
    assert (right - wrong).norm() > 1e-3 * right.norm()


class Random(nn.Linear):
    """A custom dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with random numbers."""
        return super().forward(x * torch.rand(len(x), 1, dtype=x.dtype))


class Counts(nn.Linear):
    """Stores the number of its passes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count."""
        self.calls += 1
        return super().forward(x)


class Asks(nn.Linear):
    """Reads a number from the device."""

    def forward(self, x: Tensor) -> Tensor:
        """Branch on the number."""
        return super().forward(x if float(x.detach().sum()) < 1e9 else -x)


@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (nn.Dropout(0.5), "depends on chance"),
        (Random(6, 6), "depends on chance"),
        (nn.BatchNorm1d(6), "keeps something"),
        (Counts(6, 6), "attributes of the model change between its passes (1.calls)"),
        (Asks(6, 6), "waits for the GPU"),
    ],
)
def test_what_cannot_be_recorded_is_watched(middle: nn.Module, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such models are watched in every pass, and the log gives the reason once. Their state is the usual one."""
    X, y = data(6)

    def run(replay: bool) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), copy.deepcopy(middle), nn.Linear(6, 3)).double()
        torch.manual_seed(1)
        optimizer = KFAC(model, LOSS, factors_every=1, replay=replay)
        train(model, optimizer, [(X, y)] * 6, LOSS)
        assert not recorded_passes(optimizer)
        return model, torch.rand(1)

    with caplog.at_level("INFO", "kfs.optim"):
        model, after = run(replay=True)
    assert caplog.text.count("Passes for factors are not replayed") == 1
    assert why in caplog.text
    other, its = run(replay=False)
    assert torch.equal(after, its)  # the random state
    assert torch.equal(weights(model), weights(other))
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    if isinstance(middle, Counts):
        assert model[1].calls == other[1].calls


class Looks(nn.Linear):
    """Reads a number from the device unless it is recorded; the first recorded pass fails."""

    recorded = False
    ready = False

    def forward(self, x: Tensor) -> Tensor:
        """Read a number, or fail once."""
        if not self.recorded:
            assert float(x.detach().sum()) < 1e9
        elif not Looks.ready:
            Looks.ready = True
            raise RuntimeError
        return super().forward(x)


def test_what_waits_unless_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of Hugging Face do this. The branch without synchronization may need an initialization."""
    record = Tapes.record

    def noted(self: Tapes, run: Callable[[], None]) -> Tape:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Looks, "recorded", True)
            return record(self, run)

    monkeypatch.setattr(Tapes, "record", noted)
    monkeypatch.setattr(Looks, "ready", False)
    X, y = data(6)
    found = []
    for replay in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Looks(4, 6), nn.Linear(6, 3)).double()
        optimizer = KFAC(model, LOSS, factors_every=1, replay=replay)
        train(model, optimizer, [(X, y)] * 6, LOSS)
        found.append(weights(model))
    assert Looks.ready
    assert recorded_passes(optimizer)
    torch.testing.assert_close(found[1], found[0])


def test_recordings_that_fail_without_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """The error is the reason in the log, and recording is not tried again."""
    tried: list[int] = []

    def fails(*_: Any) -> None:
        tried.append(1)
        raise ZeroDivisionError("no number")

    X, y = data(6)
    model = mlp()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "kfs.optim"):
        patch.setattr(Tapes, "record", fails)
        train(model, KFAC(model, LOSS, factors_every=1, inverses_every=100), [(X, y)] * 6, LOSS)
    assert len(tried) == 3  # a pass, an update, and inverses
    assert caplog.text.count("Passes for factors are not replayed as CUDA graphs: no number.") == 1


def test_models_with_hooks_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    """A hook is called exactly once for each of the user's passes."""
    X, y = data(6)
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    with caplog.at_level("INFO", "kfs.optim"):
        train(model, KFAC(model, LOSS, factors_every=1, audit=False), [(X, y)] * 6, LOSS)
    assert "the model has hooks" in caplog.text
    assert len(seen) == 6


def test_shapes_and_memory(tapes: list[Tapes]) -> None:
    """A new shape is watched and then recorded; closing the optimizer frees all recordings."""
    X, y = data(12)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [(X[:6], y[:6])] * 3, LOSS)
    assert recorded_passes(optimizer) == 1
    train(model, optimizer, [(X[:5], y[:5])] * 3, LOSS)
    assert recorded_passes(optimizer) == 2
    train(model, optimizer, [(X[:4], y[:4])] * 3, LOSS)
    assert recorded_passes(optimizer) == 2  # not more
    recorded = [tape for one in tapes for tape in one.made]
    optimizer.close()
    assert not recorded_passes(optimizer)
    assert sum(tape.freed for tape in recorded) >= 2


def test_labels_of_another_kind() -> None:
    """If targets become probabilities, the pass runs eagerly."""
    X, y = data(6)
    soft = torch.nn.functional.one_hot(y, 3).double()
    results = []
    for replay in (False, True):
        model = mlp()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, replay=replay)
        train(model, optimizer, [(X, y)] * 4 + [(X, soft)] * 2, LOSS)
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1])


def test_an_update_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """It runs eagerly, and the log says so once."""

    def record(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    X, y = data(6)
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="empirical")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "kfs.optim"):
        patch.setattr(Tapes, "record", record)
        train(model, optimizer, [(X, y)] * 6, LOSS)
    assert caplog.text.count("Updates are not replayed as CUDA graphs: there is not enough memory.") == 1
    other = mlp()
    train(other, KFAC(other, LOSS, fisher="empirical", replay=False), [(X, y)] * 6, LOSS)
    assert torch.equal(weights(model), weights(other))


class Remembers(nn.Linear):
    """Stores a count in an object that the guard does not inspect."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = SimpleNamespace(count=0)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Multiply inputs by the number of calls so far."""
        self.seen.count += 1
        return super().forward(self.seen.count * x)


def test_models_that_remember_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    """A pass of the optimizer's own would have other sums than the user's."""
    X, y = data(6)
    model = nn.Sequential(Remembers(), nn.Linear(4, 3)).double()
    with caplog.at_level("INFO", "kfs.optim"):
        train(model, KFAC(model, LOSS, factors_every=1, audit=False), [(X, y)] * 6, LOSS)
    assert "not a function of its inputs" in caplog.text


def test_recordings_that_would_take_too_much_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder's limit is a share of the free memory; larger recordings are refused. Updates have no limit."""
    shares: list[Any] = []

    class Limited(Tapes):
        def record(self, run: Callable[[], None]) -> Tape:
            super().record(run).reset()
            raise ModelError("Graphs take 1000 bytes, and memory=100.", "Increase memory=.")

    def recorder_for(_: torch.device, memory: int | None, share: float | None) -> Callable[[], Tapes]:
        shares.append((memory, share))
        return Tapes if share is None else Limited

    monkeypatch.setattr(cuda_graphs, "recorder_for", recorder_for)
    X, y = data(6)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1, fisher="type-2")
    with caplog.at_level("INFO", "kfs.optim"):
        train(model, optimizer, [(X, y)] * 6, LOSS)
    assert "Passes for factors are not replayed as CUDA graphs: Graphs take 1000 bytes" in caplog.text
    assert not recorded_passes(optimizer)
    assert recordings(optimizer._updates._replayer) == 1
    assert set(shares) == {(None, None), (None, cuda_graphs.SHARE)}
    other = mlp()
    train(other, KFAC(other, LOSS, factors_every=1, fisher="type-2", replay=False), [(X, y)] * 6, LOSS)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-9, atol=1e-10)


class TakesAnything(nn.Module):
    """Takes an arbitrary object besides its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, _: object) -> Tensor:
        """Ignore the object."""
        result: Tensor = self.layer(x)
        return result


def test_inputs_that_cannot_be_copied() -> None:
    """Passes with objects that may change unnoticed are watched."""
    X, y = data(6)
    model = TakesAnything().double()
    optimizer = KFAC(model, LOSS, factors_every=1)
    for _ in range(4):
        optimizer.zero_grad()
        LOSS(model(X, object()), y).backward()
        optimizer.step()
    replayer = optimizer.preconditioner.watch._graphs._replayer
    assert replayer is not None
    assert not replayer._kinds


def test_what_equal_sums_are() -> None:
    """Sums with other blocks, or other sizes, are not equal."""
    X, y = data(6)
    blocks = []
    for widths in ((4, 3), (4, 3), (4, 2)):
        model = nn.Sequential(nn.Linear(*widths)).double()
        risk = kfs.EmpiricalRisk(model, LOSS, (X, y % 2), params=["0.weight"])
        blocks.append(compute.kfac(risk, Settings())[0].blocks)
    assert factor_graphs._are_equal(blocks[0], blocks[0])
    assert not factor_graphs._are_equal(blocks[0], {})
    resized = dict(zip(blocks[0], blocks[2].values(), strict=True))
    assert not factor_graphs._are_equal(blocks[0], resized)
    for one in blocks[1].values():
        one.sums[0].total *= 2
    assert not factor_graphs._are_equal(blocks[0], blocks[1])


def test_other_parameters_are_another_update(tapes: list[Tapes]) -> None:
    """A recording is freed when a parameter is frozen."""
    X, y = data(6)
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="empirical", factors_every=1)
    train(model, optimizer, [(X, y)] * 6, LOSS)
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    train(model, optimizer, [(X, y)] * 6, LOSS)
    assert torch.equal(model[0].weight, frozen)
    assert any(tape.freed for one in tapes for tape in one.made)


def test_audits_can_be_looked_at() -> None:
    """Replayed passes are not audited again; earlier audits stay in the report."""
    X, y = data(6)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [(X, y)] * 5, LOSS)
    assert optimizer.audit is not None
