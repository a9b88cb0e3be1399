"""Checkpoints: a process that is killed at any moment, and started again, computes the same to the last bit."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kfs.errors import StorageError
from kfs.kfac import EKFAC, KFAC, Checkpoint, load
from kfs.risk import EmpiricalRisk

NUM_BATCHES = 12
forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, autograd does not run in a forked process"
)


class Batches:
    """Batches of different sizes; somebody may want to do something before each one."""

    def __init__(self, before: Callable[[int], None] = lambda _: None, shift: float = 0.0, number: int = NUM_BATCHES):
        self.before, self.shift, self.number = before, shift, number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for place in range(self.number):
            X, y = (torch.randn(2 + place % 3, size, generator=generator) for size in (130, 2))
            self.before(place)
            yield X + self.shift, y


def model() -> nn.Module:
    """Wide enough for sums that are computed strip by strip; the last layers are uncovered and used twice."""
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Linear(130, 6), nn.Tanh(), shared, nn.Tanh(), shared, nn.BatchNorm1d(6), nn.Unflatten(1, (2, 3)),
        nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(4, 2),
    ).eval()  # fmt: skip


def compute(make: Any, path: Path | None, data: Any, **settings: Any) -> KFAC:
    risk = EmpiricalRisk(model(), nn.MSELoss(), data)
    checkpoint = None if path is None else Checkpoint(path, batches=settings.pop("every", 1))
    K = make(risk, checkpoint=checkpoint, **settings)
    assert isinstance(K, (KFAC, EKFAC))
    return K


def in_child(work: Callable[[], object]) -> int:
    """Run something in another process; return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def finished(process: int, patience: float = 60.0) -> int:
    """Wait for a process; return its exit status, or the negative number of the signal that killed it."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    pytest.fail("the process hangs")


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CASES = [(KFAC, {"sharing": "expand"}), (KFAC, {"sharing": "reduce", "fisher": "mc"}), (EKFAC, {"fisher": "mc"})]


@forks
@pytest.mark.parametrize(("make", "settings"), CASES)
def test_killed_after_every_batch(make: Any, settings: Any, tmp_path: Path) -> None:
    expected = compute(make, None, Batches(), **settings)
    path, deaths = tmp_path / "c", 0
    passed = NUM_BATCHES if make is EKFAC else 0  # the pass for factors is over when eigenvalues come
    for place in range(NUM_BATCHES):
        calls = iter(range(passed + place))

        def before(_: int, calls: Iterator[int] = calls) -> None:
            if next(calls, None) is None:
                kill_me()

        status = finished(in_child(partial(compute, make, path, Batches(before), **settings)))
        deaths += status == -signal.SIGKILL
    assert deaths == NUM_BATCHES
    K = compute(make, path, Batches(), **settings)
    assert torch.equal(K.to_dense(), expected.to_dense())
    assert K.num_data == expected.num_data
    for mine, theirs in zip(K.blocks.values(), expected.blocks.values(), strict=True):
        assert torch.equal(mine.A, theirs.A)
        assert torch.equal(mine.B, theirs.B)
        assert mine.operations == theirs.operations


@forks
@pytest.mark.parametrize(("make", "settings"), CASES)
def test_killed_at_random_moments(make: Any, settings: Any, tmp_path: Path) -> None:
    expected = compute(make, None, Batches(), **settings)
    path, chance, deaths = tmp_path / "c", random.Random(0), 0

    def work() -> None:
        K = compute(make, path, Batches(lambda _: time.sleep(0.01)), every=2, **settings)
        K.save(tmp_path / "result")

    for _ in range(10):  # a pass takes 0.12 s or more
        process = in_child(work)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(process, signal.SIGKILL)
        deaths += finished(process) == -signal.SIGKILL
    assert deaths >= 5
    assert finished(in_child(work)) == 0
    assert torch.equal(load(tmp_path / "result").to_dense(), expected.to_dense())


@forks
@pytest.mark.parametrize("moment", ["save_file", "fsync", "replace", "after replace"])
def test_killed_while_writing(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compute(KFAC, None, Batches())
    path = tmp_path / "c"
    where = {"save_file": "kfs.storage.save_file", "fsync": "os.fsync", "replace": "os.replace"}
    target = where[moment.removeprefix("after ")]
    original = os.replace

    def die(*args: Any) -> None:
        if moment == "after replace":
            original(*args)
        if path.exists():  # not the first time, so that something is there
            kill_me()
        if moment == "replace":
            original(*args)
        elif moment == "save_file":
            save_file(*args)

    with monkeypatch.context() as patch:
        patch.setattr(target, die)
        assert finished(in_child(lambda: compute(KFAC, path, Batches()))) == -signal.SIGKILL
    assert path.exists()
    assert torch.equal(compute(KFAC, path, Batches()).to_dense(), expected.to_dense())


def test_a_finished_computation_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compute(EKFAC, tmp_path / "c", Batches(), every=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.eigenvalues"]

    def never(*_: Any) -> None:
        pytest.fail("a batch was computed again")

    monkeypatch.setattr("kfs.kfac.scaffold.forward", never)
    assert torch.equal(compute(EKFAC, tmp_path / "c", Batches()).to_dense(), first.to_dense())


def test_what_belongs_to_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    compute(KFAC, path, Batches())
    with pytest.raises(StorageError, match="another computation: settings differ"):
        compute(KFAC, path, Batches(), fisher="mc")
    with pytest.raises(StorageError, match="The data differ"):
        compute(KFAC, path, Batches(shift=1e-3))
    with pytest.raises(StorageError, match="The data differ"):
        compute(KFAC, path, Batches(number=5))
    other = model()
    with torch.no_grad():
        other[0].bias += 1  # type: ignore[index]
        other[5].running_mean += 1  # type: ignore[index]
    with pytest.raises(StorageError, match="values of parameters, values of other parameters and buffers differ"):
        KFAC(EmpiricalRisk(other, nn.MSELoss(), Batches()), checkpoint=path)
    with pytest.raises(StorageError, match="loss differ"):
        KFAC(EmpiricalRisk(model(), nn.MSELoss(reduction="sum"), Batches()), checkpoint=path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged"):
        compute(KFAC, path, Batches())


def test_whatever_changes_the_result_is_noticed(tmp_path: Path) -> None:
    X, y = torch.randn(6, 3), torch.randint(2, (6,))

    def net(activation: nn.Module, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2))

    def run(model: nn.Module, loss: nn.Module, data: Any = (X, y), **settings: Any) -> KFAC:
        return KFAC(
            EmpiricalRisk(model, loss, data, params=["2.weight", "2.bias"]), checkpoint=tmp_path / "c", **settings
        )

    run(net(nn.Tanh()), nn.CrossEntropyLoss())
    frozen = net(nn.Tanh())
    with torch.no_grad():
        frozen[0].weight += 1  # type: ignore[index]
    for model, loss, words in (
        (net(nn.ReLU()), nn.CrossEntropyLoss(), "model differ"),
        (frozen, nn.CrossEntropyLoss(), "values of other parameters"),
        (net(nn.Tanh()), nn.CrossEntropyLoss(label_smoothing=0.1), "loss differ"),
        (net(nn.Tanh()), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), "loss differ"),
    ):
        with pytest.raises(StorageError, match=words):
            run(model, loss)
    run(net(nn.Tanh()), nn.CrossEntropyLoss())

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, k: float) -> Tensor:
            result: Tensor = self.layer(k * x)
            return result

    scaled = Scaled()
    for k in (1.0, 1.0, 2.0):
        risk = EmpiricalRisk(scaled, nn.CrossEntropyLoss(), [{"x": X, "k": k, "labels": y}])
        if k == 1.0:
            KFAC(risk, checkpoint=tmp_path / "k")
        else:
            with pytest.raises(StorageError, match="The data differ"):
                KFAC(risk, checkpoint=tmp_path / "k")


def test_eigenvalues_belong_to_their_eigenvectors(tmp_path: Path) -> None:
    compute(EKFAC, tmp_path / "c", Batches(number=7))
    with pytest.raises(StorageError, match="eigenvectors differ"):
        compute(EKFAC, tmp_path / "c", Batches())


def test_more_data_continue_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "c"
    compute(KFAC, path, Batches(number=7))
    longer = compute(KFAC, path, Batches())
    assert torch.equal(longer.to_dense(), compute(KFAC, None, Batches()).to_dense())


def test_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr("kfs.storage.write", lambda *_: written.append(time.monotonic()))
    risk = EmpiricalRisk(model(), nn.MSELoss(), Batches())
    for checkpoint, times in (
        (str(tmp_path / "c"), 1),  # five minutes do not pass, and the end counts
        (Checkpoint(tmp_path / "c", minutes=1e-9), NUM_BATCHES),
        (Checkpoint(tmp_path / "c", batches=5), 3),
        (Checkpoint(tmp_path / "c", batches=4), 3),
        (Checkpoint(tmp_path / "c", batches=100, minutes=100.0), 1),
    ):
        written.clear()
        KFAC(risk, checkpoint=checkpoint)
        assert len(written) == times
    for bad in ({"batches": 0}, {"minutes": -1.0}):
        with pytest.raises(StorageError, match="Use a positive number"):
            Checkpoint("c", **bad)


def test_function_models_and_uncovered_parameters(tmp_path: Path) -> None:
    params = {"W": torch.randn(3, 2), "s": torch.rand(2)}

    def f(p: Any, x: Tensor) -> Tensor:
        result: Tensor = (x @ p["W"]) * p["s"].cumsum(0)
        return result

    data = [(torch.randn(2, 3), torch.randn(2, 2)) for _ in range(3)]
    risk = EmpiricalRisk(f, nn.MSELoss(), data, params=params)
    expected = KFAC(risk, uncovered="skip")
    for _ in range(2):
        again = KFAC(risk, uncovered="skip", checkpoint=tmp_path / "c")
        assert torch.equal(again.to_dense(), expected.to_dense())
