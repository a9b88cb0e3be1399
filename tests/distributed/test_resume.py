"""Killed computations resume with any number of processes, and end with the same factors."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kfs
from kfs.errors import LostRankError, StorageError
from kfs.factors.kfac import KFAC
from tests.distributed import soak
from tests.distributed.pool import Pool
from tests.distributed.problems import batches, bits, problem

Operator = KFAC | kfs.EKFAC
PLACEMENTS = ["replicated", "owner"]


class StoppedError(Exception):
    """Ends a rank in the middle of a computation."""


class Batches:
    """Batches of some data. A callback runs before one of them."""

    def __init__(self, data: list[Any], before: dict[int, Any]) -> None:
        self.data = data
        self.before = before
        self.passes = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for place, batch in enumerate(self.data):
            if place in self.before:
                self.before[place](self.passes)
            yield batch


def stop_in(passes: int, number: int) -> None:
    if passes == number:
        raise StoppedError


def own_risk(name: str = "mlp", size: int = 2, before: dict[int, Any] | None = None) -> kfs.EmpiricalRisk:
    """Return the risk of consecutive examples for each rank."""
    model, loss, X, y = problem(name)
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(rank * len(X) // world, (rank + 1) * len(X) // world)
    data = Batches(batches(X[own], y[own], size), before or {})
    return kfs.EmpiricalRisk(model, loss, data, group=dist.group.WORLD)


def interrupted(kind: type[Operator], path: str, settings: dict[str, Any], passes: int) -> list[str]:
    """Stop rank 0 before its third batch; the others write their files before they end."""
    # Examples are counted in the first pass over them.
    before = {2: partial(stop_in, number=passes + 1)} if dist.get_rank() == 0 else {}
    with pytest.raises((StoppedError, RuntimeError)):
        kind(own_risk(before=before), checkpoint=kfs.Checkpoint(path, batches=1), **settings)
    Path(path).parent.joinpath("unrelated").touch()
    dist.barrier()
    return sorted(one.name for one in Path(path).parent.iterdir())


def result(kind: type[Operator], path: str | None, settings: dict[str, Any], size: int = 2) -> tuple[Tensor, int, str]:
    checkpoint = None if path is None else kfs.Checkpoint(path, batches=1)
    risk = own_risk(size=size)
    K = kind(risk, checkpoint=checkpoint, **settings)
    passes = risk._data.passes  # type: ignore[attr-defined]
    assert passes > 0
    return K.to_dense(), K.num_data, bits([K.to_dense()])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("kind", "passes"), [(KFAC, 1), (kfs.EKFAC, 2)])
def test_continued_by_any_number_of_ranks(
    ranks: Pool, kind: type[Operator], passes: int, placement: str, tmp_path: Path
) -> None:
    settings = {"fisher": "mc", "placement": placement}
    (expected, *_), *_ = whole = ranks(4, result, kind, None, settings)
    for size in (4, 1, 2, 3):
        path = tmp_path / str(size) / "run"
        path.parent.mkdir()
        names = ranks(4, interrupted, kind, str(path), settings, passes)[0]
        stage = "run" if kind is KFAC else "run.eigenvalues"
        partial_files = [f"{stage}.rank-{rank}-of-4" for rank in range(4)]
        assert names == sorted([*partial_files, *(["run"] if kind is kfs.EKFAC else []), "unrelated"])
        for found, number, of_bits in ranks(size, result, kind, str(path), settings, 2 if size != 3 else 5):
            assert number == 23
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
            if size == 4:
                assert of_bits == whole[0][2]
        files = ["run"] if kind is KFAC else ["run", "run.eigenvalues"]
        assert sorted(one.name for one in path.parent.iterdir()) == [*files, "unrelated"]


def test_continued_by_one_process_and_back(ranks: Pool, tmp_path: Path) -> None:
    """Resume without a group; resume the file of one process on several ranks, repeatedly, with other batches."""
    settings: dict[str, Any] = {"fisher": "mc"}
    expected = ranks(2, result, KFAC, None, settings)[0][0]
    model, loss, X, y = problem("mlp")
    (tmp_path / "a").mkdir()
    ranks(4, interrupted, KFAC, str(tmp_path / "a" / "run"), settings, 1)
    one = KFAC(kfs.EmpiricalRisk(model, loss, batches(X, y, 5)), checkpoint=tmp_path / "a" / "run", **settings)
    torch.testing.assert_close(one.to_dense(), expected, rtol=1e-13, atol=1e-15)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["run", "unrelated"]

    data = Batches(batches(X, y, 3), {4: partial(stop_in, number=1)})
    checkpoint = kfs.Checkpoint(tmp_path / "run", batches=1)
    with pytest.raises(StoppedError):
        KFAC(kfs.EmpiricalRisk(model, loss, data), checkpoint=checkpoint, **settings)
    for size in (3, 2):
        ranks(size, interrupted, KFAC, str(tmp_path / "run"), settings, 1)
    found = ranks(4, result, KFAC, str(tmp_path / "run"), settings)
    torch.testing.assert_close(found[0][0], expected, rtol=1e-13, atol=1e-15)
    assert [number for _, number, _ in found] == [23] * 4
    assert {of_bits for *_, of_bits in ranks(3, result, KFAC, str(tmp_path / "run"), settings)} == {found[0][2]}


def test_files_that_were_united_are_not_counted_twice(ranks: Pool, tmp_path: Path) -> None:
    """A kill between writing the file of all ranks and deleting the other files."""
    path = tmp_path / "run"
    ranks(3, interrupted, KFAC, str(path), {}, 1)
    others = {file: file.read_bytes() for file in tmp_path.glob("run.rank-*")}
    expected = ranks(3, result, KFAC, str(path), {})
    for file, content in others.items():
        file.write_bytes(content)
    for found, number, of_bits in ranks(2, result, KFAC, str(path), {}):
        assert (number, of_bits) == (23, expected[0][2])
        assert torch.equal(found, expected[0][0])
    assert not list(tmp_path.glob("run.rank-*"))


def killed(path: str) -> str:
    """Kill the last rank in the middle."""
    rank = dist.get_rank()
    before = {2: lambda _: os.kill(os.getpid(), signal.SIGKILL)} if rank == dist.get_world_size() - 1 else {}
    risk = own_risk(before={place: lambda p, f=f: f(p) if p == 2 else None for place, f in before.items()})
    with pytest.raises(LostRankError) as caught:
        KFAC(risk, checkpoint=kfs.Checkpoint(path, batches=1))
    text = str(caught.value)
    assert "A process of the group has ended, or does not respond" in text
    assert text.endswith(f"with any number of processes: it continues from the checkpoint {path}.")
    with pytest.raises(LostRankError, match="restart all processes"):
        KFAC(risk)
    return text


def test_a_killed_rank_ends_the_others(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with closing(Pool()) as others, pytest.raises(RuntimeError, match="The process of rank 2 has ended"):
        others(3, killed, str(path))
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"run.rank-{rank}-of-3" for rank in range(3)]
    expected = ranks(2, result, KFAC, None, {})[0][0]
    found = ranks(2, result, KFAC, str(path), {})[0][0]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def in_several_passes(path: str, memory: int, placement: str) -> str:
    """Stop in the second of several passes, and resume."""
    settings: dict[str, Any] = {"factor_memory": memory, "placement": placement}
    # Before the first pass, examples are counted, and the first batch is audited.
    before = {2: partial(stop_in, number=4)} if dist.get_rank() == 0 else {}
    with pytest.raises((StoppedError, RuntimeError)):
        KFAC(own_risk(before=before), checkpoint=kfs.Checkpoint(path, batches=1), **settings)
    dist.barrier()
    K = KFAC(own_risk(), checkpoint=kfs.Checkpoint(path, batches=1), **settings)
    dist.barrier()
    assert sorted(one.name for one in Path(path).parent.iterdir()) == ["run", "run.factors.2"]
    assert bits([K.to_dense()]) == bits([KFAC(own_risk(), placement=placement).to_dense()])  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="another computation: blocks of a pass differ"):
        KFAC(own_risk(), checkpoint=path)
    return bits([K.to_dense()])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_checkpoints_of_several_passes(ranks: Pool, placement: str, tmp_path: Path) -> None:
    one, other = ranks(2, in_several_passes, str(tmp_path / "run"), 420, placement)
    assert one == other


def with_other_data(path: str, what: str) -> str:
    model, loss, X, y = problem("mlp")
    if what == "values":
        X[1] += 1
    if what == "fewer":
        X, y = X[:9], y[:9]
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    with pytest.raises(StorageError, match="The data differ from those") as caught:
        KFAC(risk, checkpoint=path)
    return str(caught.value)


@pytest.mark.parametrize("what", ["values", "fewer"])
def test_other_data_are_refused(ranks: Pool, what: str, tmp_path: Path) -> None:
    ranks(3, interrupted, KFAC, str(tmp_path / "run"), {}, 1)
    one, other = ranks(2, with_other_data, str(tmp_path / "run"), what)
    assert one == other


def test_batches_without_a_batch_axis(tmp_path: Path) -> None:
    """They cannot be split. With other batches, they are refused."""

    def model(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.reshape(-1, 2), params["w"])

    torch.manual_seed(0)
    X, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    params = {"w": torch.randn(1, 2, dtype=torch.float64)}
    settings: dict[str, Any] = {"checkpoint": tmp_path / "run", "audit": False}
    KFAC(kfs.EmpiricalRisk(model, torch.nn.MSELoss(), [(X[:4].reshape(-1), y[:4])], params), **settings)
    rest = kfs.EmpiricalRisk(model, torch.nn.MSELoss(), [(X.reshape(-1), y)], params)
    with pytest.raises(StorageError, match=r"The data differ.*in the same batches"):
        KFAC(rest, **settings)


def test_experts_of_other_files(ranks: Pool, tmp_path: Path) -> None:
    """Some files have blocks that the resuming process does not have yet, and vice versa."""
    expected = ranks(2, experts, None, 0)[0]
    ranks(4, experts, str(tmp_path / "run"), 1)
    for found in ranks(2, experts, str(tmp_path / "run"), 0):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def experts(path: str | None, stop: int) -> Tensor:
    before = {2: partial(stop_in, number=2)} if stop and dist.get_rank() == 0 else {}
    risk = own_risk("experts", before=before)
    checkpoint = None if path is None else kfs.Checkpoint(path, batches=1)
    if stop:
        with pytest.raises((StoppedError, RuntimeError)):
            KFAC(risk, "forward-only", "reduce", checkpoint=checkpoint)
        return torch.empty(0)
    return KFAC(risk, "forward-only", "reduce", checkpoint=checkpoint).to_dense()


def conflicting(path: str, first: bool) -> None:
    """Use a parameter by rows before the kill, and as a matrix afterwards."""
    torch.manual_seed(3)
    table = torch.randn(5, 5, dtype=torch.float64)

    def model(params: dict[str, Tensor], x: Tensor) -> Tensor:
        table = params["table"]
        return x @ table if x.is_floating_point() else torch.nn.functional.embedding(x, table)

    y = torch.randint(5, (4,))
    inputs: list[Any] = [(torch.randint(5, (4,)), y), (torch.randn(4, 5, dtype=torch.float64), y)]
    risk = kfs.EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), inputs[:1] if first else inputs, {"table": table})
    if first:
        KFAC(risk, checkpoint=path)
        os.rename(path, f"{path}.rank-0-of-2")
        return
    with pytest.raises(kfs.errors.ModelError, match="does not fit together with its other uses"):
        KFAC(risk, checkpoint=path)


def test_uses_that_do_not_fit_together_with_other_files(tmp_path: Path) -> None:
    conflicting(str(tmp_path / "run"), first=True)
    conflicting(str(tmp_path / "run"), first=False)


def both_sides(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["W"] @ params["W"].T if x.sum() > 0 else x @ params["W"]


def other_side(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["W"] if x.sum() > 0 else x @ params["W"].T


@pytest.mark.parametrize("model", [both_sides, other_side])
def test_a_use_on_the_other_side(tmp_path: Path, model: Any) -> None:
    """After the kill, a parameter is multiplied from other sides than before."""
    torch.manual_seed(3)
    W = torch.randn(3, 3, dtype=torch.float64)
    X = torch.rand(8, 3, dtype=torch.float64) * torch.tensor([[1.0]] * 4 + [[-1.0]] * 4, dtype=torch.float64)
    y = torch.randn(8, 3, dtype=torch.float64)
    inputs = [(X[:4], y[:4]), (X[4:], y[4:])]
    first, both = (kfs.EmpiricalRisk(model, torch.nn.MSELoss(), some, {"W": W}) for some in (inputs[:1], inputs))
    path = tmp_path / "run"
    KFAC(first, checkpoint=path)
    path.rename(f"{path}.rank-0-of-2")
    found = KFAC(both, checkpoint=path).to_dense()
    torch.testing.assert_close(found, KFAC(both).to_dense(), rtol=1e-13, atol=1e-15)


def test_soak(tmp_path: Path) -> None:
    """Ranks are killed at random moments, for some seconds."""
    assert soak.run(tmp_path, rounds=1, seed=0, kills=2) >= 1
