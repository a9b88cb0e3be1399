"""The preconditioner in several processes, and on sharded models: the same training as in one process."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfs.distributed import checksum
from kfs.errors import DistributedError, ModelError
from kfs.optim import KFAC, Preconditioner
from kfs.problem.whole_parameters import whole
from tests.distributed.pool import Pool
from tests.distributed.sharded_problems import every_layer
from tests.distributed.training import accelerators, average_gradients, batches, model_of

TOLERANCE = 1e-12
SIZE = 12
OPTIONS: dict[str, Any] = {"factors_every": 2, "inverses_every": 3}


def trained(net: str, how: str, on_accelerator: bool, options: dict[str, Any]) -> tuple[Tensor, int]:
    """Train with SGD, and return parameters and their checksum."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "KFAC does not cover")
        if on_accelerator:
            with accelerators():
                return _trained(net, how, options)
        return _trained(net, how, options)


def _trained(net: str, how: str, options: dict[str, Any]) -> tuple[Tensor, int]:
    module, loss = model_of(net), nn.CrossEntropyLoss()
    model: Any = module
    group = None
    if how == "ddp":
        model = DistributedDataParallel(module)
    elif how == "fsdp":
        model = every_layer(module)
    elif how == "own averages":
        group = dist.group.WORLD
    preconditioner = Preconditioner(model, loss, group=group, **OPTIONS, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    rank, size = (0, 1) if how == "alone" else (dist.get_rank(), dist.get_world_size())
    for x, y in batches(size=SIZE):
        optimizer.zero_grad()
        loss(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        if how == "own averages":
            average_gradients(module)
        preconditioner.step()
        optimizer.step()
    assert preconditioner.steps > 0
    preconditioner.consolidate_state_dict()
    assert preconditioner.state_dict()["steps"] == preconditioner.steps
    params = torch.cat([whole(p.detach()).reshape(-1) for p in module.parameters()])
    return params, checksum(params)


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize(
    ("net", "how", "options"),
    [
        ("net", "ddp", {}),
        ("net", "own averages", {"fisher": "empirical", "kl_clip": 0.01}),
        ("tied", "ddp", {"eigen": True}),
        ("mlp", "fsdp", {}),
        ("cnn", "fsdp", {"fisher": "type-2", "kl_clip": 0.01}),
    ],
)
def test_ranks_train_as_one_process(
    ranks: Pool, net: str, how: str, options: dict[str, Any], on_accelerator: bool
) -> None:
    ((expected, _),) = ranks(1, trained, net, "alone", on_accelerator, options)
    results = ranks(2, trained, net, how, on_accelerator, options)
    assert len({bits for _, bits in results}) == 1
    assert (results[0][0] - expected).norm() / expected.norm() < TOLERANCE


def errors() -> list[str]:
    """Return the messages of errors that only one rank causes."""
    messages = []
    loss = nn.CrossEntropyLoss()
    rank = dist.get_rank()
    makes: list[Callable[[nn.Module], object]] = [
        lambda model: Preconditioner(model, loss, damping=0.1 + rank),
        lambda model: Preconditioner(model, loss, decay=1.5 * rank),
        lambda model: KFAC(model, loss, rest="sgd" if rank else None),  # type: ignore[arg-type]
    ]
    for make in makes:
        with pytest.raises((ModelError, DistributedError)) as caught:
            make(DistributedDataParallel(model_of("mlp")))
        messages.append(str(caught.value))
    model = DistributedDataParallel(model_of("mlp"))
    preconditioner = Preconditioner(model, loss)
    (x, y) = next(iter(batches(size=SIZE)))
    loss(model(x), y).backward()
    preconditioner.step()
    for p in model.parameters() if rank else ():
        p.grad = None
    with pytest.raises((ModelError, DistributedError)) as caught:
        preconditioner.step()
    messages.append(str(caught.value))
    return messages


def test_errors_of_one_rank_are_raised_on_all(ranks: Pool) -> None:
    first, second = ranks(2, errors)
    assert first == second
    assert "damping" in first[0]
    assert "decay is 1.5" in first[1]
    assert "rest is a str" in first[2]
    assert "natural gradient already" in first[3]
