"""Shards: consecutive examples, each of them in one shard, with their indices among all data."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import kfs
from kfs.errors import DataError, DistributedError
from kfs.problem.data_shards import Shard
from tests.distributed.pool import Pool
from tests.distributed.problems import NUM_DATA, batches, problem

X = torch.arange(2.0 * NUM_DATA, dtype=torch.float64).reshape(NUM_DATA, 2)
Y = torch.arange(NUM_DATA)


class Stream(IterableDataset[Any]):
    """Yields examples in order."""

    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Batches(Dataset[Any]):
    """A data set of batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        if place >= 5:
            raise IndexError
        return X[5 * place : 5 * place + 5], Y[5 * place : 5 * place + 5]


class OwnLoader(DataLoader[Any]):
    """A loader that does not return the examples of its data set."""

    def __iter__(self) -> Any:
        return ((2 * x, y) for x, y in super().__iter__())


def make(kind: str) -> Any:
    """Return data of one kind, the same in every process."""
    dataset = TensorDataset(X, Y)
    kinds: dict[str, Any] = {
        "pair": lambda: (X, Y),
        "mapping": lambda: {"x": X, "mask": torch.ones(3), "labels": Y},
        "arguments": lambda: ((X, X.T), Y),
        "list": lambda: batches(X, Y, 3),
        "list of mappings": lambda: [{"x": x, "labels": y} for x, y in batches(X, Y, 7)],
        "one large batch": lambda: [(X[:1], Y[:1]), (X[1:], Y[1:])],
        "empty batches": lambda: [(X[:0], Y[:0]), *batches(X, Y, 8), (X[:0], Y[:0])],
        "loader": lambda: DataLoader(dataset, batch_size=5),
        "shuffled": lambda: DataLoader(dataset, batch_size=4, shuffle=True),
        "generator": lambda: DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(7)),
        "incomplete batch left out": lambda: DataLoader(dataset, batch_size=5, drop_last=True),
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "batches as data": lambda: DataLoader(Batches(), batch_size=None),
        "own loader": lambda: OwnLoader(dataset, batch_size=4),
    }
    return kinds[kind]()


KINDS = (
    "pair",
    "mapping",
    "arguments",
    "list",
    "list of mappings",
    "one large batch",
    "empty batches",
    "loader",
    "shuffled",
    "generator",
    "incomplete batch left out",
    "stream",
    "batches as data",
    "own loader",
)


def targets_in(data: Any) -> list[int]:
    """Return all targets, in the order of the risk's batches."""
    risk = kfs.EmpiricalRisk(nn.Linear(2, 2), nn.CrossEntropyLoss(), data)
    return [target for batch in risk.batches() for target in batch.y.tolist()]


def own_targets(kinds: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        state = torch.get_rng_state()
        part = kfs.shard(make(kind), dist.group.WORLD)
        assert torch.equal(torch.get_rng_state(), state)
        targets = targets_in(part)
        assert len(targets) == part.stop - part.start
        found[kind] = part.start, part.stop, part.num_data, targets, len(list(part)), repr(part)
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_datum_belongs_to_one_rank(ranks: Pool, size: int) -> None:
    found = ranks(size, own_targets, KINDS)
    for kind in KINDS:
        expected = targets_in(make(kind))
        edges = [one[kind][0] for one in found] + [found[-1][kind][1]]
        assert edges[0] == 0
        assert edges[1:] == [one[kind][1] for one in found], kind
        assert [target for one in found for target in one[kind][3]] == expected, kind
        assert {one[kind][2] for one in found} == {len(expected)}
    for kind in ("pair", "mapping", "arguments", "loader", "shuffled", "generator"):
        sizes = [len(one[kind][3]) for one in found]
        assert max(sizes) - min(sizes) <= 1, kind
    assert found[0]["pair"][5] == f"Shard of rank 0 of {size}: examples 0 to {NUM_DATA // size - 1} of 23"


def few() -> tuple[int, str]:
    part = kfs.shard((X[:2], Y[:2]), dist.group.WORLD)
    return len(list(part)), repr(part)


def test_more_ranks_than_data(ranks: Pool) -> None:
    found = ranks(3, few)
    assert [number for number, _ in found] == [0, 1, 1]
    assert found[0][1] == "Shard of rank 0 of 3: no examples of 2"


def sizes() -> list[int]:
    loader = kfs.shard(DataLoader(TensorDataset(X, Y), batch_size=5), dist.group.WORLD)
    return [len(y) for _, y in loader]


def test_a_loader_loads_its_own_data_only(ranks: Pool) -> None:
    assert ranks(2, sizes) == [[5, 5, 1], [4, 5, 3]]


def compare_draws(kind: str) -> None:
    """Compare Monte Carlo factors of shuffled data with those of one process."""
    model, loss, inputs, targets = problem("mlp")
    data: Any = inputs, targets
    if kind != "pair":
        data = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, kfs.shard(data, dist.group.WORLD)), fisher="mc")
    one = kfs.KFAC(kfs.EmpiricalRisk(model, loss, data), fisher="mc")
    torch.testing.assert_close(K.to_dense(), one.to_dense(), rtol=1e-12, atol=1e-14)
    # Indices matter: the same data with the draws of other indices have another matrix.
    other = kfs.KFAC(kfs.EmpiricalRisk(model, loss, data), fisher="mc", first_datum=1)
    assert not torch.allclose(other.to_dense(), one.to_dense(), rtol=1e-3)


@pytest.mark.parametrize("kind", ["pair", "shuffled"])
def test_draws_depend_on_indices_among_all_data(ranks: Pool, kind: str) -> None:
    ranks(3, compare_draws, kind)


def refused(what: str) -> str:
    dataset = TensorDataset(X, Y)
    group = dist.group.WORLD
    model = nn.Linear(2, 2)
    second = dist.get_rank() == 1
    by_rank = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))

    def risk_of(data: object, **settings: Any) -> kfs.EmpiricalRisk:
        return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **settings)

    def twice(part: Shard) -> Shard:
        return Shard([*part, *part], part.ranks, part.start, part.stop, part.num_data)

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    calls: dict[str, Callable[[], object]] = {
        "DistributedSampler": lambda: kfs.shard(by_rank, group),
        "DistributedSampler of a risk": lambda: risk_of(by_rank, group=group),
        "other data": lambda: kfs.shard((X + second, Y), group),
        "other batches": lambda: kfs.shard(batches(X, Y, 3 + second), group),
        "another order": lambda: kfs.shard(DataLoader(dataset, 4 + second), group),
        "an error of one": lambda: kfs.shard((X, None if second else Y), group),
        "a shard": lambda: kfs.shard(kfs.shard((X, Y), group), group),
        "another group": lambda: risk_of(kfs.shard((X, Y), group), group=alone),
        "other numbers": lambda: risk_of(twice(kfs.shard((X, Y), group))).num_data,
    }
    with pytest.raises((DataError, DistributedError)) as caught:
        calls[what]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("DistributedSampler", "repeats data until"),
        ("DistributedSampler of a risk", "repeats data until"),
        ("other data", "The data differ between processes"),
        ("other batches", "The data differ between processes"),
        ("another order", "The data differ between processes"),
        ("an error of one", "A batch is a Tensor, expected a pair"),
        ("a shard", "already a shard"),
        ("another group", "for a different group of processes"),
        ("other numbers", "its shard starts at example 11"),
    ],
)
def test_what_is_refused(ranks: Pool, what: str, text: str) -> None:
    one, other = ranks(2, refused, what)
    assert text in one
    assert one == other


def test_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    part = kfs.shard((X, Y), None)
    assert targets_in(part) == Y.tolist()
    with pytest.raises(DataError, match="axis of length 23"):
        kfs.shard((X[:5], Y), None)
    with pytest.raises(DataError, match="only once"):
        kfs.shard(iter([(X, Y)]), None)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(DistributedError, match=r"2 processes, but torch\.distributed was not initialized"):
        kfs.shard((X, Y), None)


def test_a_batch_is_split_as_the_user_says() -> None:
    part = kfs.shard({"inputs": X, "y": Y}, None, unpack=lambda batch: (batch["inputs"], batch["y"]))
    assert part.num_data == NUM_DATA
    with pytest.raises(DataError, match="'labels'"):
        kfs.shard({"inputs": X, "y": Y}, None)
