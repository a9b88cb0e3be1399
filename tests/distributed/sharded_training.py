"""Training of models that `fully_shard` has sharded over ranks."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from kfs.optim import KFAC
from tests.distributed.sharded_problems import every_layer, freed_after_forward, hybrid, kept_after_forward, whole_blocks
from tests.distributed.training import Plan, Run, batches, chunks, model_of, result, take_step

SHARDS = {
    "layers": every_layer,
    "blocks": whole_blocks,
    "kept": kept_after_forward,
    "freed": freed_after_forward,
    "hybrid": hybrid,
    "whole": fully_shard,
}


class ShardedRun(NamedTuple):
    """What came out of a training."""

    run: Run
    shapes: dict[str, list[tuple[int, ...]]]  # of the own parts of averages, by name of the parameter


def train_sharded(plan: Plan, shard: str, settings: dict[str, Any], clip: float | None = None) -> Run:
    """Train a sharded model, each rank with its part of every batch."""
    model: Any = SHARDS[shard](model_of(plan.net))
    loss = nn.CrossEntropyLoss(reduction=plan.reduction)
    optimizer = KFAC(model, loss, **settings)
    rank = dist.get_rank()
    weight = 1 / plan.passes if plan.reduction == "mean" else 1.0
    for x, y in batches(size=sum(plan.parts) * plan.passes):
        optimizer.zero_grad()
        pairs = zip(chunks(x, plan), chunks(y, plan), strict=True)
        for number, (xs, ys) in enumerate(pairs):
            model.set_requires_gradient_sync(number == plan.passes - 1)
            (loss(model(xs[rank]), ys[rank]) * weight).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        take_step(optimizer)
    return result(model, optimizer)
