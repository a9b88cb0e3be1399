"""The optimizer on sharded models: owners of blocks keep averages and inverses, and multiply gradients of others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from kfs.factors.blocks import BlockError
from kfs.optim import KFAC, averages, inverses
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import every_layer
from tests.distributed.sharded_training import train_sharded
from tests.distributed.test_optimizer_errors import rows
from tests.distributed.test_sharded_optimizer import FAST, TOLERANCE, distance
from tests.distributed.test_sharded_optimizer_errors import LOSS, train
from tests.distributed.training import (
    Plan,
    Run,
    accelerators,
    batches,
    in_one_process,
    model_of,
    result,
    take_step,
)


def inverses_here() -> tuple[dict[str, bool], dict[str, int], list[int]]:
    """Return which inverses this rank has, who owns them, and the bytes of blocks, after a state was loaded, too."""
    model = every_layer(model_of("mlp"))
    optimizer = KFAC(model, LOSS)
    for _ in range(2):
        train(model, optimizer, 0, 2)
        blocks = optimizer.preconditioner.curvature.averages.values()
        here = {a.layout.weight: a.inverse is not None and not a.inverse.like.is_meta for a in blocks}
        told = optimizer.preconditioner.curvature.owners
        assert all(a.damping is not None and float(a.damping.mean()) > 0 for a in blocks)
        factors = [factor for a in blocks for factor in (a.factors.A, a.factors.B)]
        stored = sum(factor.values.untyped_storage().nbytes() for factor in factors)
        nbytes = [sum(row.nbytes for row in optimizer.report().blocks), stored]
        optimizer.consolidate_state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        loaded = optimizer.preconditioner.curvature.averages.values()
        assert here == {a.layout.weight: a.inverse is not None and not a.inverse.like.is_meta for a in loaded}
    return here, told, nbytes


def test_inverses_are_at_their_owners(ranks: Pool) -> None:
    """Each inverse is in one process alone, and all know which one that is."""
    results = ranks(3, inverses_here)
    _, known, _ = results[0]
    assert {known[name] for name in results[0][0]} == {0, 1, 2}  # three layers
    for rank, (here, told, nbytes) in enumerate(results):
        assert told == known
        assert here == {name: known[name] == rank for name in here}
        assert min(nbytes) > 0
    ((all_here, _, all_bytes),) = ranks(1, inverses_here)
    assert all(all_here.values())
    # Averages and inverses are stored once. A factor that is elsewhere takes a single number.
    for kind, nbytes in enumerate(all_bytes):
        assert nbytes <= sum(one[kind] for _, _, one in results) <= nbytes + 3 * 2 * 2 * 8


def train_with_late_blocks(plan: Plan, is_sharded: bool) -> tuple[Tensor, list[dict[str, int]]]:
    """Train, and freeze a layer in the first steps; return the owners after each step."""
    model = model_of(plan.net)
    frozen = model.get_submodule("2")
    frozen.requires_grad_(False)
    if is_sharded:
        every_layer(model)
    optimizer = KFAC(model, LOSS, **FAST, group=dist.group.WORLD)  # type: ignore[arg-type]
    owners = []
    for step, (x, y) in enumerate(batches(12)):
        if step == 5:
            frozen.requires_grad_(True)
        optimizer.zero_grad()
        LOSS(model(rows(x)), rows(y)).backward()
        take_step(optimizer)
        owners.append(optimizer.preconditioner.curvature.owners)
    return result(model, optimizer).params, owners


def test_owners_stay_when_blocks_are_new(ranks: Pool) -> None:
    """A block keeps its owner, which has its averages."""
    ((expected, _),) = ranks(1, train_with_late_blocks, Plan((24,), net="mlp"), False)
    for params, owners in ranks(3, train_with_late_blocks, Plan((8, 8, 8), net="mlp"), True):
        assert owners[0].keys() < owners[-1].keys()
        assert owners[0].items() <= owners[-1].items()
        assert (params - expected).norm() / expected.norm() < TOLERANCE


def train_with_failing_inverse(is_sharded: bool) -> tuple[Any, Tensor]:
    """Let the inverse of one block fail once."""
    model = every_layer(model_of("mlp")) if is_sharded else model_of("mlp")
    optimizer = KFAC(model, LOSS, fisher="type-2", inverses_every=2, factors_every=1, group=dist.group.WORLD)
    compute = averages.inverted
    failed: list[int] = []

    def fail(some: Any, *rest: Any) -> Any:
        if optimizer.steps == 3 and some[0].layout.weight == "2.weight" and not failed:
            failed.append(1)
            raise BlockError(0, "has bad luck")
        return compute(some, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inverses, "inverted", fail)
        train(model, optimizer, 0, 6)
    return optimizer.events, result(model, optimizer).params


def test_inverse_that_fails_at_its_owner(ranks: Pool) -> None:
    """The last inverse is kept, as in one process."""
    ((events, expected),) = ranks(1, train_with_failing_inverse, False)
    results = ranks(2, train_with_failing_inverse, True)
    assert events.failed_inverses == 1
    assert all(found == events for found, _ in results)
    assert (results[0][1] - expected).norm() / expected.norm() < TOLERANCE


def train_with_accelerators(plan: Plan, settings: dict[str, Any], is_sharded: bool) -> Run:
    with accelerators():
        return train_sharded(plan, "every layer", settings) if is_sharded else in_one_process(plan, **settings)


@pytest.mark.parametrize("settings", [FAST, FAST | {"kl_clip": 0.01, "eigen": True}], ids=["owners", "eigen"])
def test_accelerators(ranks: Pool, settings: dict[str, Any]) -> None:
    """On asynchronous devices, owners agree on flags there, without synchronization."""
    plan = Plan((6, 6), net="mlp")
    (expected,) = ranks(1, train_with_accelerators, plan, settings, False)
    results = ranks(2, train_with_accelerators, plan, settings, True)
    assert distance(results[0], expected) < TOLERANCE
    assert all(one.events == expected.events for one in results)


def overflow_at_an_owner(accelerated: bool) -> None:
    """If products of one owner are not finite, no rank takes the step."""
    with pytest.MonkeyPatch.context() as patch:
        model = every_layer(model_of("mlp"))
        optimizer = KFAC(model, LOSS, inverses_every=100, factors_every=100)
        train(model, optimizer, 0, 1)
        before = result(model, optimizer).params
        if dist.get_rank() == 1:
            for average in optimizer.preconditioner.curvature.averages.values():
                if average.has_inverse:
                    inverse: Any = average.inverse
                    inverse.A.values.fill_(torch.inf)
        if accelerated:
            patch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
        (x, y), *_ = batches(1)
        optimizer.zero_grad()
        LOSS(model(rows(x)), rows(y)).backward()
        take_step(optimizer)
        assert torch.equal(result(model, optimizer).params, before)
        assert optimizer.events.skipped_steps == 1


@pytest.mark.parametrize("accelerated", [False, True])
def test_products_that_are_not_finite(ranks: Pool, accelerated: bool) -> None:
    ranks(2, overflow_at_an_owner, accelerated)


def train_with_a_plain_layer(is_sharded: bool) -> Tensor:
    """Leave the parameters of one layer unsharded, and average their gradients by hand."""
    model = model_of("mlp")
    own = list(model.get_submodule("2").parameters())
    if is_sharded:
        fully_shard(model, ignored_params=set(own))
    optimizer = KFAC(model, LOSS, lr=0.3, fisher="type-2", group=dist.group.WORLD)
    for x, y in batches(10):
        optimizer.zero_grad()
        LOSS(model(rows(x)), rows(y)).backward()
        for p in own:
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())
        take_step(optimizer)
    return result(model, optimizer).params


def test_parameters_that_are_not_sharded(ranks: Pool) -> None:
    (expected,) = ranks(1, train_with_a_plain_layer, False)
    first, second = ranks(2, train_with_a_plain_layer, True)
    assert torch.equal(first, second)
    assert (first - expected).norm() / expected.norm() < TOLERANCE
