"""Training of models that `fully_shard` has sharded over ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kfs.optim import KFAC
from tests.distributed.sharded_problems import (
    every_layer,
    freed_after_forward,
    hybrid,
    kept_after_forward,
    whole_blocks,
)
from tests.distributed.training import Plan, Run, batches, chunks, model_of, result, take_step


def parts_of_a_plain_module(model: nn.Module) -> nn.Module:
    """Shard each layer, but not the model: there are several roots."""
    for child in model.children():
        if list(child.parameters()):
            fully_shard(child)
    return model


def all_at_once(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


SHARDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "every layer": every_layer,
    "blocks": whole_blocks,
    "all at once": all_at_once,
    "parts": parts_of_a_plain_module,
    "kept after forward": kept_after_forward,
    "freed after forward": freed_after_forward,
    "hybrid": hybrid,
}


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
            if plan.passes > 1:
                model.set_requires_gradient_sync(number == plan.passes - 1)
            (loss(model(xs[rank]), ys[rank]) * weight).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        take_step(optimizer)
    return result(model, optimizer)
