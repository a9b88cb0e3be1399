"""The optimizer on a GPU with NCCL: ranks agree on flags on the device, and inverses are sent from there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kfs.optim import KFAC
from tests.distributed.sharded_problems import every_layer
from tests.distributed.training import batches, model_of, take_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def _nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def trained(way: str, settings: dict[str, Any]) -> Tensor:
    """Train on a GPU."""
    network = model_of("net").cuda()
    model: nn.Module = DistributedDataParallel(network) if way == "ddp" else network
    if way == "fsdp":
        every_layer(network, mesh=init_device_mesh("cuda", (1,)))
    # Without the group, there is one process, and no exchange.
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=3, inverses_every=4, **settings)
    for x, y in batches():
        optimizer.zero_grad()
        LOSS(model(x.cuda()), y.cuda()).backward()
        take_step(optimizer)
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in network.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in params])


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("settings", [{}, {"eigen": True}, {"replay": False}], ids=str)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_rank_trains_as_without_group(way: str, settings: dict[str, Any]) -> None:
    torch.testing.assert_close(trained(way, settings), trained("", settings), rtol=1e-9, atol=1e-11)
