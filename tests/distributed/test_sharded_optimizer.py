"""The optimizer on models sharded by `fully_shard`: the same training as that of the plain model in one process.

States, mixed precision and errors are in `test_sharded_optimizer_errors`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kfs.optim import KFAC
from kfs.optim.across_ranks import OwnedInverses
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import every_layer, freed_after_forward
from tests.distributed.sharded_training import train_sharded
from tests.distributed.training import Plan, Run, batches, chunks, in_one_process, model_of, result, take_step

# The order of sums differs between ranks and one process. Twenty steps amplify the round-off.
TOLERANCE = 1e-12
FAST = {"lr": 0.3, "factors_every": 2, "inverses_every": 4}
EVEN = Plan((12, 12))


def train_alone(plan: Plan, settings: dict[str, Any]) -> Run:
    return in_one_process(plan, **settings)


def distance(found: Run, expected: Run) -> float:
    return float((found.params - expected.params).norm() / expected.params.norm())


@pytest.mark.parametrize(
    ("plan", "shard", "settings"),
    [
        pytest.param(Plan((12, 12), net="mlp"), "every layer", {}, id="as it is"),
        pytest.param(Plan((12,), net="mlp"), "every layer", FAST, id="one rank"),
        pytest.param(Plan((4, 4, 4), net="mlp"), "parts", FAST, id="parts of a plain module"),
        pytest.param(Plan((4, 4, 4), net="cnn"), "freed after forward", FAST, id="convolutions"),
        pytest.param(Plan((6, 6), net="cnn"), "kept after forward", FAST | {"fisher": "empirical"}, id="kept"),
        pytest.param(Plan((6, 6), net="transformer"), "blocks", FAST | {"weight_decay": 0.1}, id="transformer"),
        pytest.param(Plan((3, 3, 3), net="transformer"), "blocks", FAST | {"fisher": "empirical"}, id="three ranks"),
        pytest.param(Plan((6, 6), net="reused"), "freed after forward", FAST, id="reused layers"),
        pytest.param(EVEN, "every layer", FAST | {"fisher": "type-2", "kl_clip": 0.01}, id="type-2, clipped"),
        pytest.param(EVEN, "all at once", FAST | {"fisher": "forward-only", "sharing": "reduce"}, id="forward-only"),
        pytest.param(EVEN, "every layer", FAST | {"eigen": True, "audit": False}, id="eigen, no audit"),
        pytest.param(EVEN._replace(net="experts"), "every layer", FAST | {"fisher": "empirical"}, id="experts"),
        pytest.param(EVEN._replace(reduction="sum"), "blocks", FAST, id="sum"),
        pytest.param(Plan((6, 6), passes=2), "every layer", FAST, id="accumulated"),
        pytest.param(Plan((3, 1, 7, 5)), "hybrid", FAST, id="hybrid, uneven"),
        pytest.param(Plan((0, 5, 4), reduction="sum"), "freed after forward", FAST, id="empty batches"),
    ],
)
def test_ranks_train_as_one_process(ranks: Pool, plan: Plan, shard: str, settings: dict[str, Any]) -> None:
    """Twenty steps equal those of the plain model in one process, and each rank keeps its part of the averages."""
    (expected,) = ranks(1, train_alone, plan, settings)
    results: list[Run] = ranks(len(plan.parts), train_sharded, plan, shard, settings)
    assert len({one.bits for one in results}) == 1
    assert distance(results[0], expected) < TOLERANCE
    assert all(one.events == expected.events and one.uncovered == expected.uncovered for one in results)
    replicas = 2 if shard == "hybrid" else 1
    assert sum(one.numbers for one in results) == replicas * expected.numbers
    # Rows are divided as evenly as possible.
    assert max(one.numbers for one in results) < 0.75 * expected.numbers or len(results) == 1


def train_clipped(plan: Plan, clip: float) -> Run:
    """Train in one process, with gradients that are clipped between `backward()` and `step()`."""
    model = model_of(plan.net)
    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, group=dist.group.WORLD, **FAST)  # type: ignore[arg-type]
    for x, y in batches(size=sum(plan.parts)):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        take_step(optimizer)
    return result(model, optimizer)


def test_clipped_gradients(ranks: Pool) -> None:
    """PyTorch's own function clips sharded gradients by their total norm."""
    plan = Plan((4, 4, 4), net="mlp")
    (expected,) = ranks(1, train_clipped, plan, 0.05)
    (unclipped,) = ranks(1, train_alone, plan, FAST)
    results = ranks(3, train_sharded, plan, "every layer", FAST, 0.05)
    # PyTorch 2.8 rounds the norm.
    tolerance = TOLERANCE if torch.__version__ >= "2.9" else 1e-6
    assert distance(results[0], expected) < tolerance
    assert distance(results[0], unclipped) > 1e5 * TOLERANCE


def train_with_evaluations(plan: Plan) -> Run:
    """Evaluate the model between `backward()` and `step()`, which leaves parameters unsharded."""
    model = every_layer(model_of(plan.net))
    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, **FAST)  # type: ignore[arg-type]
    rank = dist.get_rank()
    for x, y in batches(size=sum(plan.parts)):
        model.zero_grad()
        loss(model(chunks(x, plan)[0][rank]), chunks(y, plan)[0][rank]).backward()
        with torch.no_grad():
            model(x)
        take_step(optimizer)
    return result(model, optimizer)


def test_evaluations_between_passes(ranks: Pool) -> None:
    """The next pass uses the parameters of the step."""
    plan = Plan((6, 6))
    (expected,) = ranks(1, train_alone, plan, FAST)
    assert distance(ranks(2, train_with_evaluations, plan)[0], expected) < TOLERANCE


def test_passes_that_do_not_count(ranks: Pool) -> None:
    """If gradients were set to None, the statistics of their passes do not count either."""
    ranks(2, abandon_a_pass)


def abandon_a_pass() -> None:
    loss = nn.CrossEntropyLoss()
    (x, y), *_ = batches(1, 8)
    found = []
    for abandoned in (False, True):
        model = every_layer(model_of("mlp"))
        optimizer = KFAC(model, loss, fisher="type-2")
        if abandoned:
            loss(model(3 * x), y).backward()
            model.zero_grad()
        loss(model(x), y).backward()
        # A backward pass to inputs alone trains no parameter.
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(loss(model(inputs), y), inputs)
        take_step(optimizer)
        found.append(result(model, optimizer))
    assert distance(found[0], found[1]) < TOLERANCE


gathered = OwnedInverses.gathered
scattered = OwnedInverses.scattered


def gathered_from_the_first(self: OwnedInverses, parts: Any) -> Any:
    """Return full tensors that are zero in the parts of other ranks."""
    return gathered(self, {name: part if dist.get_rank() == 0 else 0 * part for name, part in parts.items()})


def scattered_in_reverse(self: OwnedInverses, tensors: Any, parts: Any, flag: Tensor) -> Any:
    """Return parts of tensors whose rows are in the opposite order."""
    return scattered(self, {name: t.flip(0) for name, t in tensors.items()}, parts, flag)


def whole_layers(fisher: Any) -> tuple[bool, bool]:
    """Return whether the first layer is unsharded when the backward pass has left the last layer, and afterwards."""
    model = freed_after_forward(model_of("mlp"))
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher=fisher)
    (x, y), *_ = batches(1, 8)
    found = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: found.append(not isinstance(model.get_parameter("0.weight"), DTensor)))

    model.get_submodule("3").register_forward_hook(look)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return found[-1], not isinstance(model.get_parameter("0.weight"), DTensor)


@pytest.mark.parametrize(("fisher", "expected"), [("mc", True), ("empirical", False)])
def test_parameters_are_whole_if_need_be(ranks: Pool, fisher: str, expected: bool) -> None:
    """Without vectors of the optimizer, layers are unsharded one after the other, as in PyTorch."""
    assert ranks(2, whole_layers, fisher) == 2 * [(expected, False)]


WRONG = {
    "parts of others are missing": ("kfs.optim.across_ranks.OwnedInverses.gathered", gathered_from_the_first),
    "parts are those of others": ("kfs.optim.across_ranks.OwnedInverses.scattered", scattered_in_reverse),
    "own averages are inverted": ("kfs.optim.across_ranks.sum_blocks_at_owners", lambda *_: None),
    "passes use parameters from before the step": ("kfs.optim.options.reshard", lambda _: None),
}


def train_in_a_wrong_way(plan: Plan, variant: str) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*WRONG[variant])
        return train_with_evaluations(plan)


@pytest.mark.parametrize("variant", WRONG)
def test_wrong_variants_are_noticed(ranks: Pool, variant: str) -> None:
    """Wrong variants train as well, but the training is not that of one process."""
    plan = Plan((6, 6))
    (expected,) = ranks(1, train_alone, plan, FAST)
    assert distance(ranks(2, train_in_a_wrong_way, plan, variant)[0], expected) > 1e5 * TOLERANCE
