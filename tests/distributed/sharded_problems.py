"""Models that are sharded in several ways, with unevenly split data, and the same models and data in one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import kfs
from tests.distributed.problems import CUTS, batches, problem

Shard = Callable[[nn.Module], nn.Module]


class Tied(nn.Module):
    """Has one weight in two places, a direct parameter, and a block that runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
        self.scale = nn.Parameter(torch.rand(5))
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        y: Tensor = self.out(self.scale * hidden)
        return y


def model_and_data(name: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Return model, loss, inputs and targets; the same in every process."""
    if name != "tied":
        return problem(name)
    _, loss, X, y = problem("tokens")
    torch.manual_seed(2)
    return Tied().double(), loss, X, y


def whole_blocks(model: nn.Module, **settings: Any) -> nn.Module:
    """Shard the children that have children, and then the model."""
    for child in model.children():
        if list(child.children()):
            fully_shard(child, **settings)
    fully_shard(model, **settings)
    return model


def every_layer(model: nn.Module, **settings: Any) -> nn.Module:
    """Shard every layer by itself."""
    for child in model.children():
        if list(child.parameters(recurse=False)):
            fully_shard(child, **settings)
    fully_shard(model, **settings)
    return model


def kept_after_forward(model: nn.Module) -> nn.Module:
    return every_layer(model, reshard_after_forward=False)


def freed_after_forward(model: nn.Module) -> nn.Module:
    return every_layer(model, reshard_after_forward=True)


def hybrid(model: nn.Module) -> nn.Module:
    """Shard over two processes, and replicate the shards."""
    return whole_blocks(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Split the first layer of an MLP by rows, and the last one by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def both_ways(model: nn.Module) -> nn.Module:
    """Split an MLP with `tensor_parallel`, and shard the parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return whole_blocks(model, mesh=mesh["data"])


def half_precision(model: nn.Module) -> nn.Module:
    """Compute in bfloat16, and return float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return whole_blocks(model.float(), mp_policy=policy)


def sharded_risk(name: str, shard: Shard, loss: Any = None) -> kfs.EmpiricalRisk:
    """Return the risk of a sharded model whose data are split unevenly."""
    model, usual_loss, X, y = model_and_data(name)
    cuts = CUTS[dist.get_world_size()]
    own = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    data = batches(X[own], y[own], 4)
    return kfs.EmpiricalRisk(shard(model), loss or usual_loss, data, group=dist.group.WORLD)


def plain_risk(name: str, loss: Any = None) -> kfs.EmpiricalRisk:
    """Return the risk of the same model and data in one process."""
    model, usual_loss, X, y = model_and_data(name)
    return kfs.EmpiricalRisk(model, loss or usual_loss, batches(X, y, 5))
