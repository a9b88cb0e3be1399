"""Unsupported sharded models raise an error in all processes at once."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

import kfs
from kfs.errors import DataError, DistributedError, ModelError
from kfs.problem import whole_parameters
from tests.distributed import sharded_problems as problems
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import model_and_data, plain_risk


def without_group() -> None:
    model, loss, X, y = model_and_data("mlp")
    fully_shard(model)
    same = kfs.EmpiricalRisk(model, loss, (X, y))  # every process has all data
    torch.testing.assert_close(same.gradient(), plain_risk("mlp").gradient(), rtol=1e-12, atol=1e-14)
    assert kfs.EmpiricalRisk(model, loss, []).params.keys() == same.params.keys()
    own = slice(dist.get_rank() * 10, dist.get_rank() * 10 + 10)
    with pytest.raises(DistributedError, match=r"sharded over \d processes, which have different data.*kfs.shard"):
        kfs.EmpiricalRisk(model, loss, (X[own], y[own]))


def without_group_on_two_axes() -> None:
    """The data of one process differ from those of the other three."""
    model, loss, X, y = model_and_data("mlp")
    problems.hybrid(model)
    y[0] = dist.get_rank() == 3
    with pytest.raises(DistributedError, match="which have different data"):
        kfs.EmpiricalRisk(model, loss, (X, y))


def test_no_group(ranks: Pool) -> None:
    ranks(2, without_group)
    ranks(4, without_group_on_two_axes)


def with_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(DistributedError, match=r"2 axes.*group\.WORLD"):
        kfs.shard(torch.rand(3, 2), mesh)


def test_mesh_with_two_axes(ranks: Pool) -> None:
    ranks(4, with_two_axes)


def bad_datum() -> None:
    """One example of the last process is not finite; other processes have no such example, and no batch left."""
    model, loss, X, y = model_and_data("mlp")
    X[20] = float("nan")
    problems.every_layer(model)
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    before = [type(p) for p in model.parameters()]
    for compute in (risk.value, risk.gradient, lambda: kfs.KFAC(risk)):
        with pytest.raises(DataError, match="example 20"):
            compute()
    assert [type(p) for p in model.parameters()] == before
    assert [len(module._forward_pre_hooks) for module in model.modules()] == [1, 1, 0, 1]


def error_before_gathering() -> None:
    """If a process fails before it gathers parameters, the others do not wait for it."""
    model, loss, X, y = model_and_data("mlp")
    problems.every_layer(model)
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    if dist.get_rank() == 1:
        model.append(nn.Dropout())  # type: ignore[operator]
    with pytest.raises(ModelError, match="training mode"):
        risk.gradient()


def bad_index() -> None:
    """The process that has the example evaluates its data again."""
    model, loss, X, y = model_and_data("tokens")
    X[20, 1] = 99
    problems.every_layer(model)
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    K = kfs.KFAC(kfs.EmpiricalRisk(model, loss, kfs.shard((X[:20], y[:20]), dist.group.WORLD)))
    with pytest.raises(DataError, match=r"index 99 of example 20.*'embedding.weight'"):
        kfs.Influence(K).self_scores(risk)


def other_model() -> None:
    """Processes with different parameters cannot gather them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)) if dist.get_rank() == 0 else nn.Linear(4, 3)
    for module in model if isinstance(model, nn.Sequential) else [model]:
        fully_shard(module)
    data = torch.rand(4, 4), torch.randint(3, (4,))
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), data, group=dist.group.WORLD)
    with pytest.raises(DistributedError, match="Names or shapes of parameters differ"):
        risk.value()


@pytest.mark.parametrize("fails", [bad_datum, error_before_gathering, bad_index, other_model])
def test_errors_of_one_process(ranks: Pool, fails: Any) -> None:
    ranks(2, fails)


def flat_parameters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has deprecated it
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(ModelError, match=r"Module '0' is a FullyShardedDataParallel.*fully_shard"):
        kfs.EmpiricalRisk(model, nn.MSELoss(), (torch.rand(4, 3), torch.rand(4, 2)))


def own_distribution() -> None:
    """For a function of the user, kfs cannot know how it distributes its argument."""
    model, loss, X, y = model_and_data("mlp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def doubled(module: nn.Module, inputs: Any, mesh: Any) -> Any:  # noqa: ARG001
        return (2 * inputs[0],)

    distribute_module(model[0], mesh, input_fn=doubled)  # type: ignore[index]
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    with pytest.raises(ModelError, match=r"distributed with the function .*doubled.*ColwiseParallel"):
        risk.value()


def several_precisions() -> None:
    model, loss, X, y = model_and_data("mlp")
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)  # type: ignore[index]
    fully_shard(model)
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X.float(), y), dist.group.WORLD))
    gradient = risk.gradient()
    assert {g.dtype for g in gradient.values()} == {torch.float32}
    some = ["2.weight", "2.bias"]
    part = kfs.EmpiricalRisk(model, loss, kfs.shard((X.float(), y), dist.group.WORLD), params=some).gradient()
    assert all(torch.equal(gradient[name], part[name]) for name in some)
    assert all(bool(t.isfinite().all()) for t in (kfs.KFAC(risk).inverse(kfs.Relative(0.1)) @ gradient).values())


def new_parameters() -> None:
    """Functions that create parameters take plain modules, with the curvature of sharded ones."""
    models = [problems.every_layer(model_and_data("mlp")[0]) for _ in range(2)]
    _, loss, X, y = model_and_data("mlp")
    K = kfs.KFAC(kfs.EmpiricalRisk(models[0], loss, kfs.shard((X, y), dist.group.WORLD)))
    with pytest.raises(ModelError, match=r"models\[0\].*'0.weight' is sharded.*full_state_dict"):
        kfs.merge(models, [K, K], damping=0.1)
    with pytest.raises(ModelError, match=r"'0.weight' is sharded.*full_state_dict"):
        kfs.compress.prune(models[0], K, keep=0.9)
    plain = model_and_data("mlp")[0]
    whole = get_model_state_dict(models[0], options=StateDictOptions(full_state_dict=True))
    plain.load_state_dict(whole)
    report = kfs.compress.prune(plain, K, keep=0.9).report
    assert report.loss_data == len(X)  # damping is chosen by the data of all ranks


@pytest.mark.parametrize("refuses", [flat_parameters, own_distribution, several_precisions, new_parameters])
def test_what_is_refused(ranks: Pool, refuses: Any) -> None:
    ranks(2, refuses)


class Scaled(nn.Module):
    """Takes a mapping, and has a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[places] * self.scale
        return y


def compare_keyword_arguments() -> None:
    """Arguments and buffers may be sharded, too."""
    torch.manual_seed(0)
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    everywhere: Any = {"x": Replicate(), "places": None}
    inputs = PrepareModuleInput(input_kwarg_layouts=everywhere, desired_input_kwarg_layouts=everywhere)
    parallelize_module(model, mesh, inputs)
    parallelize_module(model, mesh, {"layer": ColwiseParallel()})
    model.scale = distribute_tensor(model.scale, mesh)
    X = {"x": torch.randn(6, 4), "places": torch.arange(6)}
    y = torch.randint(3, (6,))
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    one = kfs.EmpiricalRisk(plain, nn.CrossEntropyLoss(), (X, y))
    torch.testing.assert_close(risk.gradient(), one.gradient(), rtol=1e-5, atol=1e-7)
    assert isinstance(model.scale, DTensor)


def test_keyword_arguments(ranks: Pool) -> None:
    ranks(2, compare_keyword_arguments)


def shard_twice() -> None:
    """If PyTorch may gather wrong values, sharded parameters are gathered and compared."""
    p: Any = problems.every_layer(nn.Linear(3, 2)).weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_parameters, "_DIVIDES_TWICE", "9")
        found: Any = whole_parameters.sharded_like(torch.ones(2, 3), p)
        assert torch.equal(found.full_tensor(), torch.ones(2, 3))
        patch.setattr(whole_parameters, "whole", lambda t: torch.zeros(t.shape))
        with pytest.raises(ModelError, match=r"wrong order. Use PyTorch 9 or newer"):
            whole_parameters.sharded_like(torch.ones(2, 3), p)


def test_versions_that_shard_in_the_wrong_order(ranks: Pool) -> None:
    ranks(2, shard_twice)
