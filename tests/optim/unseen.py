"""Checks of decisions on an accelerator without the host; `test_unseen` and `test_devices` run them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kfs.factors.blocks import Kronecker
from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()


def check_bad_gradients(device: str, steps: int) -> None:
    """In steps without new factors, the host does not check gradients; nothing changes if they are not finite."""
    X, y = (t.to(device) for t in data())
    model = mlp().to(device)
    params = [{"params": [p], "method": "adamw" if p.ndim == 1 else "kfac"} for p in model.parameters()]
    optimizer = KFAC(model, LOSS, params, factors_every=100)
    train(model, optimizer, [(X, y)] * steps, LOSS)
    before = weights(model)
    state = copy.deepcopy(averages_of(optimizer))
    train(model, optimizer, [(X * torch.nan, y)] * 2, LOSS)
    assert torch.equal(weights(model), before)
    assert all(map(torch.equal, averages_of(optimizer), state))
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.equal(weights(model), before)
    assert weights(model).isfinite().all()


def averages_of(optimizer: KFAC) -> list[Tensor]:
    """Return all averages of gradients and of their squares."""
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]


def check_failures(device: str) -> None:
    """The last inverse stays, the event is counted with the next factors, and the block is inverted again."""
    X, y = (t.to(device) for t in data())
    model = mlp().to(device)
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=10, inverses_every=1)
    train(model, optimizer, [(X, y)] * 11, LOSS)
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    assert average.inverse is not None
    kept = average.inverse.to_dense().clone()
    good = average.factors.A.values.clone()
    average.factors.A.values.neg_()
    average.changed = True
    train(model, optimizer, [(X, y)], LOSS)
    assert torch.equal(average.inverse.to_dense(), kept)
    average.factors.A.values.copy_(good)
    assert optimizer.preconditioner.curvature.damping.events.failed_inverses == 0  # `optimizer.events` would look
    train(model, optimizer, [(X, y)] * 9, LOSS)
    assert optimizer.events.failed_inverses == 1
    assert not average.failed
    assert not torch.equal(average.inverse.to_dense(), kept)
    assert weights(model).isfinite().all()


def check_overflow(device: str, replay: bool, **options: Any) -> None:
    """If products with inverses are not finite, nothing changes, the event is counted, and damping rises."""
    X, y = (t.to(device) for t in data())
    model = mlp().to(device)
    params = [{"params": [p], "method": "adamw" if p.ndim == 1 else "kfac"} for p in model.parameters()]
    optimizer = KFAC(model, LOSS, params, factors_every=100, weight_decay=0.1, replay=replay, **options)
    train(model, optimizer, [(X, y)] * 6, LOSS)
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    assert isinstance(average.inverse, Kronecker)
    good = average.inverse.A.values.clone()
    average.inverse.A.values.fill_(torch.inf)
    average.changed = False
    before = weights(model)
    state = copy.deepcopy(averages_of(optimizer))
    train(model, optimizer, [(X, y)] * 2, LOSS)
    assert torch.equal(weights(model), before)
    assert all(map(torch.equal, averages_of(optimizer), state))
    average.inverse.A.values.copy_(good)
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.equal(weights(model), before)
    assert weights(model).isfinite().all()
    assert optimizer.events.skipped_steps == 2
    assert {int(one["age"]) for one in optimizer.state.values()} == {7}


def check_skipped_steps(device: str, replay: bool) -> None:
    """Skipped steps are counted, and do not increase the ages of parameters, as on a CPU."""
    X, y = (t.to(device) for t in data())
    model = mlp().to(device)
    params = [{"params": [p], "method": "adamw" if p.ndim == 1 else "kfac"} for p in model.parameters()]
    optimizer = KFAC(model, LOSS, params, fisher="type-2", factors_every=4, replay=replay)
    for i in range(14):
        optimizer.zero_grad()
        LOSS(model(X), y).backward()
        if i in {3, 6, 8}:  # The last step has new factors.
            assert model[2].weight.grad is not None
            model[2].weight.grad[0, 0] = torch.inf
        optimizer.step()
    assert optimizer.events.skipped_steps == 3
    assert {int(one["age"]) for one in optimizer.state.values()} == {11}
    assert optimizer.steps == 14
