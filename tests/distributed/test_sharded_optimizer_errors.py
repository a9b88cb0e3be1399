"""The optimizer on sharded models: states in files, mixed precision, scaled gradients, and unsupported cases."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kfs.errors import DistributedError, ModelError, SolverError
from kfs.optim import KFAC
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import both_ways, every_layer, hybrid, tensor_parallel
from tests.distributed.test_optimizer_errors import rows
from tests.distributed.training import batches, model_of, result, take_step

LOSS = nn.CrossEntropyLoss()
WHOLE = StateDictOptions(full_state_dict=True)


class Saved(NamedTuple):
    """The contents of a file."""

    model: Any
    optimizer: Any


def train(model: Any, optimizer: KFAC, start: int, stop: int) -> None:
    for number, (x, y) in enumerate(batches()):
        if start <= number < stop:
            optimizer.zero_grad()
            LOSS(model(rows(x).to(next(model.parameters()).dtype)), rows(y)).backward()
            take_step(optimizer)


def part_of_training(start: int, stop: int, saved: Saved | None, is_sharded: bool) -> tuple[Tensor, Saved]:
    """Train for some steps, and return the state."""
    model = every_layer(model_of("net")) if is_sharded else model_of("net")
    optimizer = KFAC(model, LOSS, lr=0.3, factors_every=2, inverses_every=5, group=dist.group.WORLD)
    assert optimizer.state_dict()["state"] == {}
    if saved is not None:
        set_model_state_dict(model, dict(saved.model), options=WHOLE)  # this call changes the dictionary
        optimizer.load_state_dict(saved.optimizer)
    train(model, optimizer, start, stop)
    if dist.get_world_size() > 1:
        with pytest.raises(DistributedError, match=r"consolidate_state_dict\(\)"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    averages = [one["average"] for one in optimizer.state.values() if "average" in one]
    assert averages
    assert all(isinstance(t, DTensor) is is_sharded for t in averages)  # They stay as they are.
    assert not any(isinstance(t, DTensor) for one in state["state"].values() for t in one.values())
    saved = Saved(get_model_state_dict(model, options=WHOLE), state)
    return result(model, optimizer).params, pickle.loads(pickle.dumps(saved))


def test_resuming_with_another_number_of_ranks(ranks: Pool) -> None:
    """Seven steps on three ranks, and further ones on one or two, or without shards, equal one training."""
    (expected, _), *_ = ranks(1, part_of_training, 0, 20, None, False)
    (_, saved), *_ = ranks(3, part_of_training, 0, 7, None, True)
    for size, is_sharded in ((1, False), (1, True), (2, True)):
        (params, _), *_ = ranks(size, part_of_training, 7, 20, saved, is_sharded)
        assert (params - expected).norm() / expected.norm() < 1e-12


def part_by_checkpoint(start: int, stop: int, folder: Path, kind: str) -> Tensor:
    """Train for some steps, with a checkpoint of `torch.distributed.checkpoint` before and after."""
    module = model_of("net")
    model = every_layer(module) if kind == "sharded" else DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = KFAC(model, LOSS, lr=0.3, factors_every=2, inverses_every=5)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    if start:
        state: Any = dict(zip("mo", get_state_dict(model, optimizer, options=flat), strict=True))
        load(state, checkpoint_id=folder / "first")
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"], options=flat)
    train(model, optimizer, start, stop)
    state = dict(zip("mo", get_state_dict(model, optimizer, options=flat), strict=True))
    averages = [t for name, t in state["o"].items() if name.endswith(".average")]
    assert averages
    assert all(isinstance(t, DTensor) is (kind == "sharded") for t in averages)
    save(state, checkpoint_id=folder / ("second" if start else "first"))
    return result(model, optimizer).params


def test_checkpoints_of_pytorch(ranks: Pool, tmp_path: Path) -> None:
    """They need no call before, any number of ranks reads them, and training continues as if it had never stopped."""
    (expected, *_) = ranks(1, part_by_checkpoint, 0, 14, tmp_path / "whole", "plain")
    for kinds in ((3, "sharded", 2, "ddp"), (2, "ddp", 3, "sharded"), (2, "sharded", 1, "plain")):
        folder = tmp_path / str(kinds)
        ranks(kinds[0], part_by_checkpoint, 0, 7, folder, kinds[1])
        (params, *_) = ranks(kinds[2], part_by_checkpoint, 7, 14, folder, kinds[3])
        assert (params - expected).norm() / expected.norm() < 1e-12


def load_sharded_state() -> None:
    """A state may have sharded tensors, such as those that `torch.distributed.checkpoint` has read."""
    model = every_layer(model_of("net"))
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, 0, 2)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    before = [dict(one) for one in optimizer.state.values()]
    state["state"] = dict(zip(state["state"], before, strict=True))
    optimizer.load_state_dict(state)
    for one, own in zip(optimizer.state.values(), before, strict=True):
        for name, t in own.items():
            if isinstance(t, DTensor):
                assert one[name].placements == t.placements
                assert torch.equal(one[name].to_local(), t.to_local())
                assert one[name].to_local().data_ptr() != t.to_local().data_ptr() or not t.to_local().numel()


def test_states_with_sharded_tensors(ranks: Pool) -> None:
    ranks(2, load_sharded_state)


def train_mixed(policy: dict[str, Any] | None) -> tuple[Tensor, Any]:
    """Train in half precision by a mixed-precision policy, or in float32 without shards."""
    model = model_of("mlp").float()
    if policy is not None:
        every_layer(model, mp_policy=MixedPrecisionPolicy(**policy))
    # Small damping would amplify the round-off of bfloat16 in directions without curvature.
    optimizer = KFAC(model, LOSS, lr=0.3, damping=0.1, factors_every=2, fisher="type-2", group=dist.group.WORLD)
    train(model, optimizer, 0, 20)
    assert all(p.dtype == torch.float32 for p in optimizer.param_groups[0]["params"])
    return result(model, optimizer).params, optimizer.audit


def test_mixed_precision(ranks: Pool) -> None:
    """Passes in bfloat16 are captured as they are; averages and parameters stay in float32."""
    ((expected, _),) = ranks(1, train_mixed, None)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}
    (found, audit), _ = ranks(2, train_mixed, policy)
    # bfloat16 has three digits. The parameters have moved by much more.
    assert (found - expected).norm() / expected.norm() < 0.05
    assert 1e-6 < max(audit.gradients.values()) < 0.02


def train_scaled(bad: int | None) -> tuple[float, int, Tensor]:
    """Train with scaled losses. One of them is infinite, in one process."""
    model = every_layer(model_of("mlp").float())
    optimizer = KFAC(model, LOSS, lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        value = LOSS(model(rows(x).float()), rows(y))
        broken = number == bad and dist.get_rank() == 1
        scaler.scale(value * torch.inf if broken else value).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), optimizer.steps, result(model, optimizer).params


def test_gradient_scalers(ranks: Pool) -> None:
    """PyTorch checks the gradients of all processes, so all of them skip a step."""
    (scale, steps, expected), _ = ranks(2, train_scaled, None)
    assert (scale, steps) == (1024.0, 6)
    first, second = ranks(2, train_scaled, 3)
    assert first[:2] == second[:2] == (512.0, 5)
    assert (first[2] - expected).norm() > 1e-3


def break_a_gradient(after: bool) -> None:
    """Make a part of a gradient, or of a parameter, not finite in one process."""
    model = every_layer(model_of("mlp"))
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, 0, 2)
    before = result(model, optimizer).params
    weight: Any = model.get_parameter("0.weight")
    (x, y), *_ = batches(1)
    LOSS(model(rows(x)), rows(y)).backward()
    if dist.get_rank() == 1:
        weight.grad.to_local()[0] = torch.nan
        if after:
            with torch.no_grad():
                weight.to_local()[0] = torch.nan
    if after:
        with pytest.raises(SolverError, match=r"parameter '0.weight' is not finite"):
            optimizer.step()
        return
    optimizer.step()
    assert torch.equal(result(model, optimizer).params, before)
    assert optimizer.events.skipped_steps == 1


@pytest.mark.parametrize("after", [False, True])
def test_numbers_that_are_not_finite(ranks: Pool, after: bool) -> None:
    """All ranks skip the step, or raise, although only one of them has the number."""
    ranks(2, break_a_gradient, after)


def offloaded(model: nn.Module) -> nn.Module:
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def over_two_meshes(model: nn.Module) -> nn.Module:
    fully_shard(model.get_submodule("0"), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"])
    fully_shard(model)
    return model


def flat(model: nn.Module) -> nn.Module:
    return nn.Sequential(FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def refuse(shard: Callable[[nn.Module], nn.Module], text: str, settings: dict[str, Any]) -> None:
    model = shard(model_of("two layers"))
    with pytest.raises(ModelError, match=text):
        KFAC(model, LOSS, **settings)


@pytest.mark.parametrize(
    ("size", "shard", "text", "settings"),
    [
        pytest.param(2, tensor_parallel, "'0.weight' is split by tensor", {}, id="tensor-parallel"),
        pytest.param(4, both_ways, "'0.weight' is split by tensor", {}, id="tensor-parallel and sharded"),
        pytest.param(4, over_two_meshes, "different meshes", {}, id="two meshes"),
        pytest.param(2, offloaded, "kept on the CPU", {}, id="offloaded"),
        pytest.param(2, flat, "FullyShardedDataParallel", {}, id="the older FSDP"),
        pytest.param(2, every_layer, "derivatives along a step", {"quadratic_model": True}, id="quadratic model"),
    ],
)
def test_what_is_refused(
    ranks: Pool, size: int, shard: Callable[[nn.Module], nn.Module], text: str, settings: dict[str, Any]
) -> None:
    """Errors give the cause and the way out before training starts."""
    ranks(size, refuse, shard, text, settings)


def refuse_groups() -> None:
    ways = every_layer(model_of("mlp")), hybrid(model_of("mlp"))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for model in ways:
        with pytest.raises(ModelError, match=r"sharded over the processes \[0, 1, 2, 3\], but the group has"):
            KFAC(model, LOSS, group=alone)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It replaces the optimizer that was refused.
            KFAC(model, LOSS, group=dist.group.WORLD)


def test_groups_of_other_processes(ranks: Pool) -> None:
    ranks(4, refuse_groups)


def refuse_other_averages() -> None:
    model: Any = every_layer(model_of("mlp"))
    optimizer = KFAC(model, LOSS)
    model.get_submodule("0").set_gradient_divide_factor(1.0)
    with pytest.raises(ModelError, match=r"divided by 1, not by the number of processes"):
        train(model, optimizer, 0, 1)


def test_gradients_that_are_not_averages(ranks: Pool) -> None:
    ranks(2, refuse_other_averages)


def fail_in_an_audit() -> None:
    """If the model fails in one process during an audit, all processes raise the error."""
    model = nn.Sequential(nn.Linear(6, 3), Fragile())
    fully_shard(model)
    optimizer = KFAC(model, LOSS)
    with pytest.raises(ValueError, match="fragile"):
        model(torch.ones(4, 6))
    optimizer.close()


class Fragile(nn.Module):
    """Fails in one process."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("fragile")
        return x


def test_errors_in_audits(ranks: Pool) -> None:
    ranks(2, fail_in_an_audit)


def shard_too_late() -> None:
    """The parameters are no longer the ones that were given to the optimizer."""
    for settings, text in (({}, r"make the optimizer after fully_shard"), ({"group": dist.group.WORLD}, "has changed")):
        model = model_of("mlp")
        optimizer = KFAC(model, LOSS, **settings)  # type: ignore[arg-type]
        every_layer(model)
        with pytest.raises(ModelError, match=text):
            train(model, optimizer, 0, 1)


def test_models_that_are_sharded_later(ranks: Pool) -> None:
    ranks(2, shard_too_late)
