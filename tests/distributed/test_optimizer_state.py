"""The optimizer's state in several processes, owners of blocks, and traffic."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed import Traffic
from kfs.errors import DistributedError
from kfs.optim import KFAC
from kfs.optim.across_ranks import owners_of
from tests.distributed.pool import Pool
from tests.distributed.test_optimizer_errors import rows
from tests.distributed.training import batches, model_of, take_step

LOSS = nn.CrossEntropyLoss()


class Saved(NamedTuple):
    """The contents of a file."""

    model: Any
    optimizer: Any


def part_of_training(start: int, stop: int, saved: Saved | None, settings: dict[str, Any]) -> tuple[Tensor, Any]:
    """Train for some steps, and save on rank 0."""
    model = model_of("net")
    wrapped = DistributedDataParallel(model)
    optimizer = KFAC(wrapped, LOSS, lr=0.3, factors_every=2, inverses_every=5, **settings)
    if saved is not None:
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer)
    for number, (x, y) in enumerate(batches()):
        if start <= number < stop:
            optimizer.zero_grad()
            LOSS(wrapped(rows(x)), rows(y)).backward()
            take_step(optimizer)
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if dist.get_world_size() > 1:
        with pytest.raises(DistributedError, match=r"consolidate_state_dict\(\)"):
            optimizer.state_dict()
    optimizer.consolidate_state_dict()
    if dist.get_rank():
        return params, None
    # No other process is needed here.
    return params, pickle.loads(pickle.dumps(Saved(model.state_dict(), optimizer.state_dict())))


@pytest.mark.parametrize("settings", [{}, {"eigen": True}], ids=str)
def test_resuming_with_another_number_of_ranks(ranks: Pool, settings: dict[str, Any]) -> None:
    """Seven steps on four ranks, and further ones on one, two or three, equal a training without interruption."""
    whole, *_ = ranks(2, part_of_training, 0, 20, None, settings)
    (_, saved), *_ = ranks(4, part_of_training, 0, 7, None, settings)
    for size in (3,) if settings else (1, 3):
        results = ranks(size, part_of_training, 7, 20, saved, settings)
        assert all(torch.equal(results[0][0], params) for params, _ in results)
        assert (results[0][0] - whole[0]).norm() / whole[0].norm() < 1e-12


def test_state_is_that_of_one_process(ranks: Pool) -> None:
    """Averages in a file are over all data, for any number of ranks."""
    (_, one), *_ = ranks(1, part_of_training, 0, 8, None, {})
    (_, four), *_ = ranks(4, part_of_training, 0, 8, None, {})
    averages = [saved.optimizer["kfac"]["curvature"]["averages"] for saved in (one, four)]
    for mine, theirs in zip(*averages, strict=True):
        for side in ("A", "B"):
            expected, found = (state["factors"]["blocks"][side]["values"] for state in (mine, theirs))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert mine["layout"] == theirs["layout"]


def saved_by_nobody() -> None:
    """A state without averages needs no other process, and the state of an earlier step is refused."""
    model = DistributedDataParallel(model_of("net"))
    optimizer = KFAC(model, LOSS)
    assert optimizer.state_dict()["kfac"]["steps"] == 0
    for x, y in batches(2):
        optimizer.zero_grad()
        LOSS(model(rows(x)), rows(y)).backward()
        take_step(optimizer)
        with pytest.raises(DistributedError, match="a part of the optimizer's state"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict()
        optimizer.state_dict()


def test_states_are_of_now(ranks: Pool) -> None:
    """A state that was consolidated before a step is not saved after it."""
    ranks(2, saved_by_nobody)


WIDTH = 160


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def traffic(first: int, last: int, settings: dict[str, Any]) -> tuple[float, float]:
    """Return bytes per update of factors in some steps, and bytes of all factors."""
    model = wide()
    wrapped = DistributedDataParallel(model)
    optimizer = KFAC(wrapped, LOSS, **settings)
    updates = 0
    count = Traffic()
    before = 0.0
    for number, (x, y) in enumerate(batches(last)):
        seen = optimizer.preconditioner.watch.first_datum
        if number == first:
            before = count.sent
        optimizer.zero_grad()
        with count.counted():
            LOSS(wrapped(rows(x.float())), rows(y)).backward()
            optimizer.step()
        updates += number >= first and optimizer.preconditioner.watch.first_datum > seen
    averages = optimizer.preconditioner.curvature.averages.values()
    factors = sum(f.values.nbytes for a in averages for f in (a.factors.A, a.factors.B))
    return (count.sent - before) / updates, factors


@pytest.mark.parametrize(
    ("size", "first", "last", "settings"),
    [
        pytest.param(4, 0, 12, {}, id="at first"),
        pytest.param(2, 40, 60, {"factors_every": 10}, id="later"),
        pytest.param(4, 40, 60, {"factors_every": 10}, id="later, four ranks"),
    ],
)
def test_traffic(ranks: Pool, size: int, first: int, last: int, settings: dict[str, Any]) -> None:
    """An update of factors sends less than a quarter of the bytes of all factors and all inverses."""
    results = ranks(size, traffic, first, last, settings)
    sent = sum(one for one, _ in results) / size
    factors = results[0][1]
    both = 2 * factors  # inverses are as large
    assert sent < both / 4
    assert sent > factors / 10  # the traffic is counted, and not zero


def balance() -> list[float]:
    model = wide()
    optimizer = KFAC(DistributedDataParallel(model), LOSS)
    (batch,) = batches(1)
    LOSS(model(rows(batch[0]).float()), rows(batch[1])).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    averages = optimizer.preconditioner.curvature.averages
    owners = owners_of(averages.values(), False, dist.get_world_size())
    return [sum(a.cost for key, a in averages.items() if owners[key] == rank) for rank in range(dist.get_world_size())]


def test_work_is_split(ranks: Pool) -> None:
    """Of two large blocks, each rank inverts one."""
    first, second = ranks(2, balance)
    assert first == second
    assert max(first) < 0.6 * sum(first)
