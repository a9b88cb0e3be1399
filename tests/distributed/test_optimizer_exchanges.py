"""Exchanges of the optimizer: how many there are in a step, and inverses that owners compute before they are due."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed import simulated
from kfs.distributed import Ranks, largest
from kfs.distributed.collectives import add_up_at_owners, start_copies
from kfs.factors.blocks import Factor, Kronecker
from kfs.factors.layout import Layout
from kfs.optim import KFAC, across_ranks
from kfs.optim.across_ranks import balanced_owners, owners_of
from kfs.optim.averages import Average
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import every_layer
from tests.distributed.test_optimizer_errors import rows
from tests.distributed.training import accelerators, batches, model_of, result, take_step

LOSS = nn.CrossEntropyLoss()
TOLERANCE = 1e-12
FACTORS_EVERY = 4
SETTINGS: dict[str, Any] = {"lr": 0.3, "factors_every": FACTORS_EVERY, "inverses_every": 6}


def wrapped(model: nn.Module, way: str) -> nn.Module:
    """Return a model that is trained by several processes."""
    return every_layer(model) if way == "sharded" else DistributedDataParallel(model)


@contextmanager
def counted(counts: dict[str, int]) -> Iterator[None]:
    """Count messages between hosts, and exchanges of tensors, without those of PyTorch itself."""
    names = ("all_gather_object", "all_reduce", "reduce", "broadcast", "all_to_all_single")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            function = getattr(dist, name)

            def run(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return function(*args, **kwargs)

            patch.setattr(dist, name, run)
        yield


def exchanges(way: str) -> list[dict[str, int]]:
    """Return the numbers of exchanges in each step, without those of the backward pass."""
    model = wrapped(model_of("mlp"), way)
    optimizer = KFAC(model, LOSS, **SETTINGS)
    found: list[dict[str, int]] = []
    for x, y in batches(17):
        optimizer.zero_grad()
        LOSS(model(rows(x)), rows(y)).backward()
        found.append({})
        with counted(found[-1]):
            take_step(optimizer)
    return found


@pytest.mark.parametrize(
    ("way", "tensors"),
    # Gradients go to owners and back, and their size is that of all parts.
    [("DDP", {}), ("sharded", {"all_to_all_single": 2, "all_reduce": 1})],
)
def test_messages_of_a_step(ranks: Pool, way: str, tensors: dict[str, int]) -> None:
    """A step without factors has one message; others also have two about inverses or sums, and one at the end."""
    first, second = ranks(2, exchanges, way)
    assert first == second
    for step, counts in list(enumerate(first))[1:]:
        if step % FACTORS_EVERY == 0:
            assert counts["all_gather_object"] == 4
            assert counts["reduce"] == 2  # one for each rank
        else:
            assert counts == {"all_gather_object": 1} | tensors


def trained(way: str, changes: tuple[int, ...], accelerated: bool, settings: dict[str, Any]) -> tuple[Tensor, int]:
    """Train; in some steps, damping changes. Return parameters, and how often owners inverted."""
    model = model_of("mlp")
    calls = [0]
    invert = across_ranks.invert

    def count(*args: Any) -> Any:
        calls[0] += 1
        return invert(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(across_ranks, "invert", count)
        several = dist.get_world_size() > 1
        used = wrapped(model, way) if several else model
        optimizer = KFAC(used, LOSS, **SETTINGS | settings)
        for step, (x, y) in enumerate(batches(20)):
            if step in changes:
                optimizer.param_groups[0]["damping"] *= 5
            optimizer.zero_grad()
            LOSS(used(rows(x)), rows(y)).backward()
            if accelerated:
                with accelerators():
                    take_step(optimizer)
            else:
                take_step(optimizer)
    return result(used, optimizer).params, calls[0]


@pytest.mark.parametrize(
    ("way", "size", "changes", "accelerated", "settings"),
    [
        pytest.param("DDP", 3, (9, 14, 15), False, {}, id="DDP"),
        pytest.param("DDP", 2, (), False, {"eigen": True}, id="eigen"),
        pytest.param("DDP", 2, (9, 14, 15), True, {"replay": False}, id="accelerators"),
        pytest.param("sharded", 2, (9, 14, 15), False, {}, id="sharded"),
    ],
)
def test_inverses_ahead(
    ranks: Pool, way: str, size: int, changes: tuple[int, ...], accelerated: bool, settings: dict[str, Any]
) -> None:
    """Inverses are used when they are due, as in one process. If damping has changed since, they are computed again."""
    ((expected, _),) = ranks(1, trained, way, changes, accelerated, settings)
    for params, calls in ranks(size, trained, way, changes, accelerated, settings):
        assert (params - expected).norm() / expected.norm() < TOLERANCE
        # There are five steps with factors. Each change takes at most one further exchange in each step until the next.
        assert 5 <= calls <= 5 + 3 * len(changes)
        assert bool(changes) == (calls > 5)


def average(weight: str, rows: tuple[int, int], size: int) -> Average:
    """Return the average of a block of some rows of a weight."""
    A, B = (Factor.dense(torch.eye(width).unsqueeze(0)) for width in (size, rows[1] - rows[0]))
    zero = torch.zeros((), dtype=torch.float64)
    return Average(Layout(weight, (20, size), rows, (0, 1), 1), Kronecker(A, B), zero, zero)


def test_work_is_balanced() -> None:
    """The longest work comes first, in any order of blocks."""
    blocks = [average(weight, (0, 2), size) for weight, size in {"a": 10, "b": 10, "c": 13}.items()]
    for some in (blocks, blocks[::-1]):
        assert [weight for (weight, _), owner in balanced_owners(some, 2).items() if owner == 0] == ["c"]
    assert set(balanced_owners(blocks, 9).values()) == {0, 1, 2}


def test_new_blocks_of_a_weight() -> None:
    """They have the owner of its other blocks: their steps are one tensor."""
    first, second = average("a", (0, 2), 10), average("a", (2, 20), 10)
    for owner in (0, 1):
        first.owner = owner
        assert set(owners_of([second, first], False, 2).values()) == {owner}


def test_many_ranks() -> None:
    """By simulation: without inverses ahead of time, the longest path of ViT-B on 256 ranks is 173 times the mean."""
    found = {row.ranks: row for row in simulated((8, 256))}
    assert found[8].ratio < 1.2
    assert found[256].ratio < 18
    assert found[256].busy > 24


def sizes_and_copies() -> None:
    """Compare sizes of which one is not finite, and copy a tensor in the background."""
    ranks = Ranks(dist.group.WORLD)
    own = torch.tensor([1.0, 2.0, torch.nan]) if ranks.rank else torch.tensor([3.0, 0.0, 1.0])
    assert largest(ranks, own).tolist() == [3.0, 2.0, torch.inf]
    with accelerators():
        assert largest(ranks, own).tolist() == [3.0, 2.0, torch.inf]
    t = torch.full((2, 3), float(ranks.rank))
    copies = start_copies(ranks, 1, [t[:, 1:]])
    assert t[:, 1:].eq(ranks.rank).all()
    copies.wait()
    t[:, 1:] += 1
    copies.wait()
    assert t.tolist() == 2 * [[ranks.rank, 2, 2]]
    add_up_at_owners(ranks, {0: [t[:, 0]], 1: [t[:, 2]]})
    assert t.tolist() == 2 * [[0, 2, 4] if ranks.rank else [1, 2, 0]]


def test_sizes_and_copies(ranks: Pool) -> None:
    ranks(2, sizes_and_copies)
