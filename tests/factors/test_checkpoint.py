"""Checkpoints: a process that is killed at any moment and restarted computes the same result to the last bit."""

import gc
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
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import files
from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import ModelError, StorageError
from kfs.factors import EKFAC, KFAC, Checkpoint, load
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition, fresh_fisher
from tests.factors.models import Function
from tests.operators.contract import close

NUM_BATCHES = 12
forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, autograd does not run in a forked process"
)


class Batches:
    """Batches of different sizes, with a callback before each one."""

    def __init__(self, before: Callable[[int], None] = lambda _: None, shift: float = 0.0, number: int = NUM_BATCHES):
        self.before, self.shift, self.number = before, shift, number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for place in range(self.number):
            sizes = (2 + place % 3, 130), (2 + place % 3, 2)
            X, y = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
            self.before(place)
            yield X + self.shift, y


def model() -> nn.Module:
    """Wide enough for sums in strips; the last layers are uncovered and used twice."""
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Linear(130, 6), nn.Tanh(), shared, nn.Tanh(), shared, nn.BatchNorm1d(6), nn.Unflatten(1, (2, 3)),
        nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(4, 2),
    ).double().eval()  # fmt: skip


def compute(make: Any, path: Path | None, data: Any, net: nn.Module | None = None, **settings: Any) -> KFAC | EKFAC:
    risk = EmpiricalRisk(model() if net is None else net, nn.MSELoss(), data)
    checkpoint = None if path is None else Checkpoint(path, batches=settings.pop("every", 1))
    K = make(risk, checkpoint=checkpoint, **settings)
    assert isinstance(K, (KFAC, EKFAC))
    return K


def in_child(work: Callable[[], object]) -> int:
    """Run a function in another process; return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        gc.freeze()  # Garbage of other tests may wait for threads that do not exist in the child process.
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
POSITIONS = {"0": 1, "2": 2, "7": 2, "9": 1}  # per layer: the third one is called twice, the kernel fits in twice


def check_against_exact_curvature(K: KFAC | EKFAC, sharing: str = "expand", fisher: str = "type-2") -> None:
    """Compare an object, possibly interrupted several times, with loops over the data and with exact operators."""
    net, loss = model(), nn.MSELoss()
    X, y = (torch.cat(parts) for parts in zip(*Batches(), strict=True))
    risk = EmpiricalRisk(net, loss, (X, y))
    drawn = fresh_fisher(risk) if isinstance(K, EKFAC) else Fisher(risk, "type-1")
    exact = GGN(risk) if fisher == "type-2" else drawn
    if isinstance(K, EKFAC):
        diagonals = [Fisher(risk, "type-1", mc_samples=m).diagonal() for m in (1, 2)]
        drawn_trace = (2 * diagonals[1] - diagonals[0]).sum()
        close(K.trace(), GGN(risk).diagonal().sum() if fisher == "type-2" else drawn_trace)
        vectors = KFAC(risk, fisher, sharing).eigh()[1]  # type: ignore[arg-type]
    R = reduction_factor(loss, y)
    for name, positions in POSITIONS.items():
        if isinstance(K, EKFAC) and name != "0":  # the error of the approximation, which is large
            params = [f"{name}.weight", f"{name}.bias"]
            C, Q = exact.submatrix(params).to_dense(), vectors.submatrix(params).to_dense()
            close(K.submatrix(params).to_dense(), Q @ (Q.T @ C @ Q).diagonal().diag() @ Q.T)
        A, B = definition(net, loss, X, y, net.get_submodule(name), sharing, R)
        close(K.blocks[name].A, A[0])
        if sharing == "reduce":  # a bias' gradient is the sum over positions, so that this is the exact block of a bias
            bias = exact.submatrix(f"{name}.bias").to_dense()
            close(K.blocks[name].B, bias / (R * len(X) * positions**2))
        elif fisher == "type-2":
            close(K.blocks[name].B, B[0])


@forks
@pytest.mark.parametrize(("make", "settings"), CASES)
def test_killed_after_every_batch(make: Any, settings: Any, tmp_path: Path) -> None:
    expected = compute(make, None, Batches(), **settings)
    path, deaths = tmp_path / "c", 0
    passed = NUM_BATCHES if make is EKFAC else 0  # the pass for factors has ended when eigenvalues start
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
    check_against_exact_curvature(K, **settings)
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

    for _ in range(10):  # a pass takes at least 0.12 s
        process = in_child(work)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(process, signal.SIGKILL)
        deaths += finished(process) == -signal.SIGKILL
    assert deaths >= 5
    assert finished(in_child(work)) == 0
    K = load(tmp_path / "result")
    assert isinstance(K, KFAC | EKFAC)
    assert torch.equal(K.to_dense(), expected.to_dense())
    check_against_exact_curvature(K, **settings)


@forks
@pytest.mark.parametrize("moment", ["_write_tensors", "fsync", "replace", "after replace"])
def test_killed_while_writing(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compute(KFAC, None, Batches())
    path = tmp_path / "c"
    target = moment.removeprefix("after ")
    original, written = os.replace, files._write_tensors

    def die(*args: Any) -> None:
        if moment == "after replace":
            original(*args)
        if path.exists():  # not the first time, so that a file exists
            kill_me()
        if moment == "replace":
            original(*args)
        elif moment == "_write_tensors":
            written(*args)

    with monkeypatch.context() as patch:
        patch.setattr(files if target == "_write_tensors" else os, target, die)
        assert finished(in_child(lambda: compute(KFAC, path, Batches()))) == -signal.SIGKILL
    assert path.exists()
    K = compute(KFAC, path, Batches())
    assert torch.equal(K.to_dense(), expected.to_dense())
    check_against_exact_curvature(K)


def test_a_finished_computation_is_not_repeated(tmp_path: Path) -> None:
    first = compute(EKFAC, tmp_path / "c", Batches(), every=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.eigenvalues"]

    def never(*_: Any) -> None:
        pytest.fail("a batch was computed again")

    net = model()
    net.register_forward_pre_hook(never)
    assert torch.equal(compute(EKFAC, tmp_path / "c", Batches(), net).to_dense(), first.to_dense())


def test_more_data_continue_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "c"
    compute(KFAC, path, Batches(number=7))
    longer = compute(KFAC, path, Batches())
    assert torch.equal(longer.to_dense(), compute(KFAC, None, Batches()).to_dense())


@pytest.mark.parametrize(
    ("when", "seconds", "expected"),
    [
        ({}, 60, [5, 10]),  # the default is every five minutes
        ({}, 59, [6]),
        ({}, 301, range(1, NUM_BATCHES)),
        ({"minutes": 3.0}, 60, [3, 6, 9]),
        ({"minutes": 0.5}, 29, [2, 4, 6, 8, 10]),
        ({"minutes": 100.0}, 60, []),
        ({"batches": 5}, 10_000, [5, 10]),
        ({"batches": 4}, 0, [4, 8]),
        ({"batches": 100, "minutes": 100.0}, 60, []),
        ({"batches": 4, "minutes": 3.0}, 60, [3, 4, 7, 8, 11]),  # three minutes after the last file was written
    ],
)
def test_how_often(when: Any, seconds: int, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by some seconds per batch: after how many batches a file appears."""
    path, written, now = tmp_path / "c", [], [1000.0]

    def look(place: int) -> None:
        """Before each batch, note whether there is a file, and remove it. Then advance the clock."""
        if path.exists():
            written.append(place)
            path.unlink()
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    checkpoint = Checkpoint(path, **when) if when else str(path)
    KFAC(EmpiricalRisk(model(), nn.MSELoss(), Batches(look)), checkpoint=checkpoint)
    assert written == list(expected)
    assert path.exists()  # the end counts, too


def test_bad_intervals() -> None:
    for bad in ({"batches": 0}, {"minutes": -1.0}, {"minutes": float("nan")}):
        with pytest.raises(StorageError, match="Use a positive number"):
            Checkpoint("c", **bad)


def test_a_conflict_is_remembered(tmp_path: Path) -> None:
    """Conflicting uses stay in conflict after a restart that sees neither of them again."""
    rows = Function(lambda m, x: F.linear(x, m.W[:3]) + F.linear(x, m.W[2:]), W=torch.randn(5, 3))
    net = nn.Sequential(rows, nn.Tanh(), nn.Linear(3, 2)).double()
    data = [(torch.randn(2, 3).double(), torch.randn(2, 2).double()) for _ in range(3)]
    risk = EmpiricalRisk(net, nn.MSELoss(), data)
    for _ in range(2):
        K = KFAC(risk, uncovered="diagonal", checkpoint=tmp_path / "c")
        close(K.submatrix("0.W").to_dense(), GGN(risk).submatrix("0.W").to_dense().diagonal().diag())
        with pytest.raises(ModelError, match=r"'0\.W': its use by 'linear' does not fit together"):
            KFAC(risk, checkpoint=tmp_path / "e")


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
