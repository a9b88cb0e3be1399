"""Training on an accelerator: the same as on the CPU, and parameters and state stay finite."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kfs.factors.blocks.decompositions import inverse
from kfs.optim import KFAC, Preconditioner
from kfs.optim.safety import Events
from kfs.optim.update_rule import limited
from kfs.runtime.precision import tf32
from kfs.runtime.sync import Message
from tests.optim.training import data, mlp, recorded_passes, recordings, train, weights
from tests.optim.unseen import check_bad_gradients, check_failures, check_overflow, check_skipped_steps

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


@pytest.mark.parametrize("rows", [300, 700])
def test_limit_of_gradients_in_half_precision(rows: int) -> None:
    """The limit is accurate to 25 % for any singular values, and short steps change by at most 3 %."""
    torch.manual_seed(0)
    long, short, decaying = torch.full((3, 300), 0.01)
    long[0] = 25.0
    decaying.copy_(28 / torch.arange(1, 301))
    one = torch.ones(3, 1, 1, 1, device="cuda")
    bases = [torch.linalg.qr(torch.randn(3, n, 300, dtype=torch.float64))[0] for n in (rows, 300)]
    sizes = torch.stack([long, short, decaying]).double() * max(1.0, rows / 300) ** 0.5
    D = (bases[0] * sizes.unsqueeze(1)) @ bases[1].mT
    limits = sizes / (1 + (sizes / max(1.0, rows / 300) ** 0.5).square()).sqrt()
    expected = (bases[0] * limits.unsqueeze(1)) @ bases[1].mT
    half = limited(D.float().cuda().unsqueeze(1), 1.0, one, by_column=False, half=True)
    difference = half.squeeze(1).cpu().double() - expected
    errors = torch.linalg.matrix_norm(difference, 2) / torch.linalg.matrix_norm(expected, 2)
    assert (errors < torch.tensor([0.25, 0.03, 0.25], dtype=torch.float64)).all()


@pytest.mark.parametrize("steps", [2, 8])
def test_bad_batches_without_asking_the_device(steps: int) -> None:
    """The host does not know that gradients are bad, both before and after updates are recorded."""
    check_bad_gradients("cuda", steps)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_mixed_precision(fisher: Any) -> None:
    """Training with float16 autocast and a scaler equals plain training."""
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
    assert losses[1] < 0.7
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a warning that it is a prototype
@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}, {"eigen": True}])
def test_steps_without_new_factors_do_not_wait_for_the_device(options: dict[str, Any]) -> None:
    """Trust region, KL clip and the check of gradients are computed on the device of the gradients."""
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


@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}, {"factors_every": 2, "inverses_every": 3}, {"eigen": True}])
@pytest.mark.parametrize("name", ["mlp", "cnn", "sum", "adamw", "groups", "frozen"])
def test_recorded_updates(name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Recorded updates equal eager ones, with schedules, groups, and parameters that come and go."""
    results = []
    for replay in (False, True):
        torch.manual_seed(0)
        model: Any = mlp().cuda()
        X, y = (t.cuda() for t in data(24))
        if name == "cnn":
            model = nn.Sequential(nn.Conv2d(1, 3, 2, groups=1), nn.Flatten(), nn.LayerNorm(3), nn.Linear(3, 3))
            model, X = model.double().cuda(), X[:, :4].reshape(-1, 1, 2, 2)
        loss = nn.CrossEntropyLoss(reduction="sum" if name == "sum" else "mean")
        params: Any = None
        if name == "adamw":
            params = [{"params": [p], "method": "adamw" if p.ndim == 1 else "kfac"} for p in model.parameters()]
        if name == "groups":
            params = [
                {"params": [p], "lr": 0.05 + 0.01 * i, "trust": 0.5 + i} for i, p in enumerate(model.parameters())
            ]
        optimizer = KFAC(model, loss, params, fisher="type-2", weight_decay=0.1, replay=replay, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with caplog.at_level("INFO", "kfs.optim"):
            for step in range(24):
                part = slice(step % 3, 20 + step % 3)
                if name == "frozen":
                    model[0].weight.requires_grad_(step % 8 < 5)
                optimizer.zero_grad()
                loss(model(X[part]), y[part]).backward()
                optimizer.step()
                schedule.step()
        results.append(weights(model))
        assert bool(recordings(optimizer._updates._replayer)) == replay
        if name != "frozen":  # Then recordings are freed when other parameters are trained.
            assert bool(recorded_passes(optimizer)) == (replay and "eigen" not in options)
    assert "not replayed" not in caplog.text
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_autograd_notices_recorded_updates() -> None:
    """A backward pass through parameters that were updated since then is an error, as without a recording."""
    X, y = (t.cuda() for t in data())
    model = mlp().cuda()
    optimizer = KFAC(model, LOSS, factors_every=100)
    train(model, optimizer, [(X, y)] * 8, LOSS)
    value = LOSS(model(X), y)
    train(model, optimizer, [(X, y)], LOSS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_steps_do_not_wait() -> None:
    """Steps without new factors never synchronize, with or without new inverses."""
    X, y = (t.cuda() for t in data())
    model = mlp().cuda()
    optimizer = KFAC(model, LOSS, factors_every=10, inverses_every=3)
    train(model, optimizer, [(X, y)] * 11, LOSS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}])
def test_products_that_overflow(options: dict[str, Any], replay: bool) -> None:
    """If steps are not finite, parameters do not change, even if gradients are finite."""
    check_overflow("cuda", replay, **options)


@pytest.mark.parametrize("replay", [False, True])
def test_skipped_steps_are_counted_later(replay: bool) -> None:
    """`step()` does not synchronize for flags, but they are read eventually."""
    check_skipped_steps("cuda", replay)


@pytest.mark.parametrize("replay", [False, True])
def test_steps_with_new_factors_do_not_wait(replay: bool) -> None:
    """Once all blocks have inverses, `step()` never synchronizes: flags are read when they are on the host."""
    X, y = (t.cuda() for t in data())
    model = mlp().cuda()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=2, inverses_every=3, replay=replay)
    train(model, optimizer, [(X, y)] * 12, LOSS)
    first = optimizer.preconditioner.watch.first_datum
    for _ in range(6):
        optimizer.zero_grad()
        LOSS(model(X), y).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.preconditioner.watch.first_datum == first + 3 * len(X)


@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-4}, {"eigen": True}, {"fisher": "mc"}])
def test_flags_that_are_read_later_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps equal those of an optimizer that synchronizes."""
    X, y = (t.cuda() for t in data(48))
    results = []
    for _ in range(2):
        model = mlp().cuda()
        settings: dict[str, Any] = {"fisher": "type-2", "factors_every": 2, "inverses_every": 3} | options
        optimizer = KFAC(model, LOSS, **settings)
        train(model, optimizer, [(X[i : i + 12], y[i : i + 12]) for i in range(24)], LOSS)
        assert optimizer.events == Events()
        results.append(weights(model))
        monkeypatch.setattr(Preconditioner, "_is_steady", lambda *_: False)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_messages() -> None:
    """Flags have the values of the moment in which they were sent, even if the device changes them later."""
    flags = torch.tensor([True, False]).cuda()
    message = Message(flags)
    flags.logical_not_()
    assert message.read() == [True, False]
    assert Message(flags).read() == [False, True]


def test_inverses_that_fail_unseen_are_reported_later() -> None:
    """An inverse that cannot be computed does not replace the previous one."""
    check_failures("cuda")


@pytest.mark.parametrize("size", [40, 700, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounded", [False, True])
def test_inverses_by_halves(size: int, dtype: torch.dtype, rounded: bool) -> None:
    """Large matrices are inverted by products of their halves, as accurately as by Cholesky factors, even with TF32."""
    torch.manual_seed(0)
    x = torch.randn(3, 2 * size, size, dtype=torch.float64, device="cuda") * torch.logspace(0, -2, size).double().cuda()
    M = x.mT @ x + 1e-3 * torch.eye(size, device="cuda")
    expected = torch.linalg.inv(M)
    with tf32(rounded):
        result = inverse(M.to(dtype)).double()
    error = (result - expected).norm() / expected.norm()
    condition = torch.linalg.cond(M).max()
    assert error < 10 * torch.finfo(dtype).eps * condition
