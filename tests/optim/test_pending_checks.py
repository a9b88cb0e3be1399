"""Flags that are still on an accelerator, tested on the CPU: good steps do not change, and problems are found later.

Tapes stand in for CUDA graphs (see `tests.factors.tape`). `test_devices` runs the checks of `tests.optim.unseen` on
a GPU.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import SolverError
from kfs.optim import KFAC, Preconditioner, safety
from kfs.optim.curvature import Curvature
from kfs.optim.safety import Events
from kfs.runtime.sync import Message
from tests.factors.test_no_waiting import NoWaiting
from tests.optim.test_recorded import CASES, trained
from tests.optim.training import data, mlp, train, weights
from tests.optim.unseen import averages_of, check_overflow, check_skipped_steps

LOSS = nn.CrossEntropyLoss()
GOOD = data()
pytestmark = pytest.mark.usefixtures("tapes")


def wait_always(patch: pytest.MonkeyPatch) -> None:
    """Let every step wait for the device, as the first ones do."""
    patch.setattr(Preconditioner, "_is_steady", lambda *_: False)


def everything(optimizer: KFAC) -> list[Any]:
    """Return all numbers of a state, except for the age of drawn labels."""
    state = optimizer.state_dict()
    del state["kfac"]["first_datum"]
    leaves: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                collect(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                collect(one)
        else:
            leaves.append(value)

    collect(state)
    return leaves


def are_same(first: list[Any], second: list[Any]) -> bool:
    """Whether two states are the same, to the bit."""
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


MORE: dict[str, dict[str, Any]] = {
    "forward-only": {"name": "cnn", "fisher": "forward-only"},
    "forward-only, reduce": {"name": "cnn", "fisher": "forward-only", "sharing": "reduce"},
    "every step": {"name": "mlp", "factors_every": 1, "inverses_every": 1},
}


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_nothing_changes_if_all_is_well(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps equal those of an optimizer that synchronizes, to the bit, with all averages, ages and counts."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 5, "replay": case == "mlp"} | (CASES | MORE)[case]
    there, optimizer = trained(**options)
    assert len(optimizer.preconditioner.pending._steps) > 0
    mine = everything(optimizer)
    wait_always(monkeypatch)
    here, waiting = trained(**options)
    assert torch.equal(there, here)
    assert are_same(mine, everything(waiting))
    assert optimizer.preconditioner.watch.first_datum == waiting.preconditioner.watch.first_datum


def test_batches_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of inputs per example differ between steps, and the device selects one of two."""

    def run() -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(6, 3))
        model = model.double()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, inverses_every=1, replay=False)
        batches = [(torch.randn(5, 2, 4 + i % 3, dtype=torch.float64), torch.arange(5) % 3) for i in range(10)]
        train(model, optimizer, batches, LOSS)
        return weights(model), everything(optimizer)

    there, mine = run()
    wait_always(monkeypatch)
    here, other = run()
    assert torch.equal(there, here)
    assert are_same(mine, other)


def test_steps_with_new_factors_do_not_wait() -> None:
    """Once all blocks have inverses, the step itself does not synchronize."""
    X, y = GOOD
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=2, inverses_every=3, replay=False)
    train(model, optimizer, [(X, y)] * 12, LOSS)
    first = optimizer.preconditioner.watch.first_datum
    for _ in range(6):
        optimizer.zero_grad()
        LOSS(model(X), y).backward()
        with NoWaiting():
            optimizer.step()
    assert optimizer.preconditioner.watch.first_datum == first + 3 * len(X)


def step(model: nn.Module, optimizer: KFAC, bad: str = "") -> None:
    """Take a step, optionally with a gradient, factors, or a batch that is not finite."""
    X, y = GOOD
    if bad == "batch":
        X = X * torch.nan
    if bad == "factors":  # Activations are one or minus one, and their gradients are zero.
        X = 1e200 * X.sign()
    optimizer.zero_grad()
    LOSS(model(X), y).backward()
    if bad == "spike":
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 1e6
    if bad == "gradient":
        grad = next(model.parameters()).grad
        assert grad is not None
        grad.view(-1)[0] = torch.inf
    optimizer.step()


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    ("at", "bad"), [*((at, "gradient") for at in range(8)), *((at, "spike") for at in (1, 2, 3, 6))]
)
def test_bad_gradients_at_every_place(at: int, bad: str, replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a gradient that is not finite, or far too large, has the same effect as no step.

    Every third step has new factors. Without momentum, the age of averages, which is read later, has no effect.
    """
    options: dict[str, Any] = {"fisher": "type-2", "momentum": 0.0, "weight_decay": 0.1, "replay": replay}
    options |= {"factors_every": 3, "inverses_every": 1}

    def run(left_out: bool) -> tuple[Tensor, KFAC]:
        model = mlp()
        optimizer = KFAC(model, LOSS, **options)
        for i in range(12):
            if i == at and left_out:
                optimizer.steps += bool(i)  # In the first step, the host synchronizes, and does not count the event.
            else:
                step(model, optimizer, bad if i == at else "")
        return weights(model), optimizer

    there, optimizer = run(left_out=False)
    mine = optimizer.state_dict()["kfac"]["curvature"]["averages"]
    assert optimizer.events == (Events(refused_gradients=1) if bad == "spike" else Events(skipped_steps=1))
    assert {int(state["age"]) for state in optimizer.state.values()} == {11}
    wait_always(monkeypatch)
    here, other = run(left_out=True)
    assert torch.equal(there, here)
    for a, b in zip(mine, other.state_dict()["kfac"]["curvature"]["averages"], strict=True):
        assert a["weight"] == b["weight"]
        assert a["uses"] == b["uses"]


@pytest.mark.parametrize("at", [4, 5])
def test_bad_gradients_of_batches_of_several_sizes(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average number of inputs per example, which limits steps, does not change."""

    def run(left_out: bool) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(6, 3))
        model = model.double()
        options: dict[str, Any] = {"momentum": 0.0, "factors_every": 2, "inverses_every": 1, "replay": False}
        optimizer = KFAC(model, LOSS, fisher="type-2", **options)
        batches = [(torch.randn(5, 2, 4 + i, dtype=torch.float64), torch.arange(5) % 3) for i in range(10)]
        for i, batch in enumerate(batches):
            if i == at and left_out:
                optimizer.steps += 1
                continue
            optimizer.zero_grad()
            LOSS(model(batch[0]), batch[1]).backward()
            if i == at:
                grad = next(model.parameters()).grad
                assert grad is not None
                grad.fill_(torch.nan)
            optimizer.step()
        optimizer.state_dict()  # reads all flags
        return weights(model), [float(average.uses) for average in optimizer.preconditioner.curvature.averages.values()]

    there, uses = run(left_out=False)
    wait_always(monkeypatch)
    here, others = run(left_out=True)
    assert torch.equal(there, here)
    assert uses == others


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_bad_gradients_have_no_length(value: float) -> None:
    """The limit of the whole step does not make them finite."""
    X, y = GOOD
    model = mlp()
    optimizer = KFAC(model, LOSS, kl_clip=1e-4, factors_every=2, replay=False)
    train(model, optimizer, [(X, y)] * 4, LOSS)
    for _ in range(2):  # with new factors and without
        before = weights(model)
        optimizer.zero_grad()
        LOSS(model(X), y).backward()
        model[0].weight.grad.fill_(value)
        optimizer.step()
        assert torch.equal(weights(model), before)


def test_messages() -> None:
    """Flags have the values of the moment in which they were sent."""
    flags = torch.tensor([True, False])
    message = Message(flags)
    flags.logical_not_()
    assert message.read() == [True, False]


@pytest.mark.parametrize(("fisher", "eigen"), [("type-2", False), ("type-2", True), ("forward-only", False)])
def test_bad_factors(fisher: Any, eigen: bool) -> None:
    """Averages do not change, the step uses the last curvature, and the event is counted."""
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher=fisher, eigen=eigen, factors_every=2, inverses_every=1, replay=False)
    for _ in range(4):
        step(model, optimizer)
    optimizer.state_dict()  # reads all flags
    averages = list(optimizer.preconditioner.curvature.averages.values())
    before = copy.deepcopy([(a.factors, a.eigen, a.weight, a.uses) for a in averages])
    inverses = [a.inverse.to_dense() for a in averages if a.inverse is not None]
    moved = weights(model)
    step(model, optimizer, "factors")
    assert not torch.equal(weights(model), moved)
    step(model, optimizer)
    assert optimizer.preconditioner.curvature.damping.events.refused_statistics == 0
    assert optimizer.events == Events(refused_statistics=1)
    for average, (factors, corrected, weight, uses) in zip(averages, before, strict=True):
        assert torch.equal(average.factors.A.values, factors.A.values)
        assert torch.equal(average.factors.B.scale, factors.B.scale)
        if average.eigen is not None and corrected is not None:
            torch.testing.assert_close(average.eigen.values, corrected.values)
        assert (average.weight, average.uses) == (weight, uses)
    # New inverses were computed in between, from the same averages, with the same weight.
    for a, b in zip([a.inverse.to_dense() for a in averages if a.inverse is not None], inverses, strict=True):
        torch.testing.assert_close(a, b)
    for _ in range(3):
        step(model, optimizer)
    assert optimizer.events == Events(refused_statistics=1)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_bad_batches_at_every_place(at: int) -> None:
    """If predictions are not finite, nothing changes, and events are counted as on a CPU."""
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=3, inverses_every=1, replay=False)
    for i in range(6):
        before = weights(model)
        step(model, optimizer, "batch" if i == at else "")
        assert torch.equal(weights(model), before) == (i == at)
    assert optimizer.events == Events(skipped_steps=1)
    assert {int(state["age"]) for state in optimizer.state.values()} == {5}


def test_damping_rises_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events in a row are counted in order, between two steps with factors."""
    scales = []
    for _ in range(2):
        model = mlp()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=100, patience=2, replay=False)
        for i in range(9):
            step(model, optimizer, "gradient" if i in {2, 3, 5, 7, 8} else "")
        assert optimizer.events.skipped_steps == 5
        scales.append((optimizer.damping_scale, optimizer.events.raised_damping))
        monkeypatch.undo()
    assert scales[0] == scales[1]
    assert scales[0][1] == 2


def test_runs_that_diverge() -> None:
    """After many bad gradients in a row, the step with the next factors raises; reading `events` does not."""
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=4, patience=1, replay=False)
    for _ in range(4):
        step(model, optimizer)
    for _ in range(12):
        step(model, optimizer, "gradient")
    assert optimizer.events.skipped_steps >= 10
    with pytest.raises(SolverError, match=r"12 steps in a row.*Step 3 was fine"):
        step(model, optimizer)
    step(model, optimizer)  # The error is raised only once.
    # Parameters that are not finite are found in the step with the next factors.
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    for _ in range(3):
        step(model, optimizer)
    with pytest.raises(SolverError, match=r"'0\.weight' is not finite"):
        step(model, optimizer)


def test_long_runs_without_new_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags do not pile up, and the latest ones are not waited for."""
    monkeypatch.setattr(safety, "_MOST", 8)
    monkeypatch.setattr(safety, "_LEFT", 3)
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1000, replay=False)
    counts = []
    for i in range(20):
        step(model, optimizer, "gradient" if i == 2 else "")
        counts.append(len(optimizer.preconditioner.pending._steps))
    assert max(counts) == 7
    assert min(counts[8:]) == 3
    assert optimizer.preconditioner.curvature.damping.events.skipped_steps == 1


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}])
def test_products_that_overflow(options: dict[str, Any], replay: bool) -> None:
    """If steps are not finite, nothing changes, even if gradients are finite; AdamW skips its update, too."""
    check_overflow("cpu", replay, **options)


@pytest.mark.parametrize("replay", [False, True])
def test_ages_of_skipped_steps(replay: bool) -> None:
    """Ages equal those on a CPU once the flags are read."""
    check_skipped_steps("cpu", replay)


def test_what_is_known() -> None:
    """The optimizer synchronizes for blocks that are new, have no inverse, or have another layout."""
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, replay=False)
    seen: list[bool] = []
    knows = Curvature.knows

    def noted(self: Curvature, sums: Any) -> bool:
        seen.append(knows(self, sums))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Curvature, "knows", noted)
        step(model, optimizer)
        step(model, optimizer)
        average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
        average.inverse = None
        optimizer.preconditioner.curvature.inverses.forget()
        step(model, optimizer)
        step(model, optimizer)
    assert seen == [False, True, False, True]
    assert averages_of(optimizer)[0].isfinite().all()
