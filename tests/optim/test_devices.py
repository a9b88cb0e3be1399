"""Training on an accelerator: the same as on the CPU, and nothing that is not finite gets into parameters or state."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    "options", [{}, {"eigen": True}, {"damping_method": "exact"}, {"factors_every": 3}, {"kl_clip": 1e-4}]
)
@pytest.mark.parametrize("fisher", ["type-2", "empirical", "forward-only"])
def test_same_training(fisher: Any, options: dict[str, Any]) -> None:
    """Ten steps agree to round-off."""
    if fisher == "forward-only" and "eigen" in options:
        pytest.skip("there are no gradients to correct eigenvalues with")
    X, y = data()
    here = mlp()
    there = copy.deepcopy(here).cuda()
    train(here, KFAC(here, LOSS, fisher=fisher, **options), [(X, y)] * 10, LOSS)
    train(there, KFAC(there, LOSS, fisher=fisher, **options), [(X.cuda(), y.cuda())] * 10, LOSS)
    torch.testing.assert_close(weights(there).cpu(), weights(here), atol=1e-7, rtol=1e-6)


def test_bad_batches_without_asking_the_device() -> None:
    """In steps without new factors, the host does not know that gradients are bad; nothing changes all the same."""
    X, y = (t.cuda() for t in data())
    model = mlp().cuda()
    optimizer = KFAC(model, LOSS, factors_every=10)
    train(model, optimizer, [(X, y)] * 2, LOSS)
    before = weights(model)
    averages = [s["average"].clone() for s in optimizer.state.values()]
    train(model, optimizer, [(X * torch.nan, y)], LOSS)
    assert torch.equal(weights(model), before)
    assert all(torch.equal(s["average"], a) for s, a in zip(optimizer.state.values(), averages, strict=True))
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.equal(weights(model), before)
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_mixed_precision(fisher: Any) -> None:
    """Training with float16 autocast and a scaler goes as without."""
    X, y = (t.cuda() for t in data(64, torch.float32))
    losses = []
    for enabled in (False, True):
        model = mlp(torch.float32).cuda()
        optimizer, scaler = KFAC(model, LOSS, fisher=fisher), torch.amp.GradScaler("cuda", enabled=enabled)
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=enabled):
                value = LOSS(model(X), y)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(value.detach()))
        assert optimizer.events.refused_statistics == 0
    assert losses[1] < 0.5
    assert losses[1] == pytest.approx(losses[0], rel=0.3)  # float16 has three digits, in each of 30 steps


def test_state_moves_to_the_models_device() -> None:
    """A state from the CPU continues on the accelerator."""
    X, y = data()
    here = mlp()
    first = KFAC(here, LOSS, fisher="type-2")
    train(here, first, [(X, y)] * 3, LOSS)
    there = copy.deepcopy(here).cuda()
    second = KFAC(there, LOSS, fisher="type-2")
    second.load_state_dict(first.state_dict())
    train(here, first, [(X, y)] * 3, LOSS)
    train(there, second, [(X.cuda(), y.cuda())] * 3, LOSS)
    torch.testing.assert_close(weights(there).cpu(), weights(here), atol=1e-7, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}, {"eigen": True}])
def test_steps_without_new_factors_do_not_wait_for_the_device(options: dict[str, Any]) -> None:
    """Trust region, KL clip and the look at gradients are computed where the gradients are."""
    X, y = (t.cuda() for t in data())
    model = mlp().cuda()
    optimizer = KFAC(model, LOSS, factors_every=50, inverses_every=1, **options)
    train(model, optimizer, [(X, y)] * 3, LOSS)
    before = weights(model)
    optimizer.zero_grad()
    LOSS(model(X), y).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(weights(model), before)
