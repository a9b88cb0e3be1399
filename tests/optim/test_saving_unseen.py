"""Saving, reporting and closing while flags are still on an accelerator; tapes stand in for CUDA graphs."""

import copy
from typing import Any

import pytest
import torch

from kfs.optim import KFAC
from tests.optim.test_pending_checks import GOOD, LOSS, are_same, everything, step
from tests.optim.training import mlp, train, weights

pytestmark = pytest.mark.usefixtures("tapes")


@pytest.mark.parametrize("bad", ["gradient", "factors"])
@pytest.mark.parametrize("wait", [1, 2])
def test_saving_between_flag_and_reading(bad: str, wait: int) -> None:
    """The saved state is right, and a resumed training equals the other one, to the bit."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 4, "inverses_every": 2, "patience": 1}
    model = mlp()
    optimizer = KFAC(model, LOSS, **options)
    for _ in range(8):
        step(model, optimizer)
    step(model, optimizer, bad)
    for _ in range(wait):
        step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    name = {"gradient": "skipped_steps", "factors": "refused_statistics"}[bad]
    assert saved["kfac"]["curvature"]["events"][name] == 1
    assert saved["kfac"]["curvature"]["damping_scale"] == 10
    assert {int(state["age"]) for state in saved["state"].values()} == {8 + wait + (bad == "factors")}
    other = copy.deepcopy(model)
    for hooks in (other._forward_hooks, other._forward_pre_hooks):
        hooks.clear()
    resumed = KFAC(other, LOSS, **options)
    for earlier in ("", "", "gradient"):  # Its earlier steps have no effect.
        step(other, resumed, earlier)
    resumed.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    for _ in range(8):
        step(model, optimizer)
        step(other, resumed)
    assert torch.equal(weights(model), weights(other))
    assert are_same(everything(optimizer), everything(resumed))


def test_unseen_failures_are_saved() -> None:
    """After loading, a block whose inverse has failed is inverted again in higher precision."""
    X, y = GOOD
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=10, inverses_every=1)
    train(model, optimizer, [(X, y)] * 11, LOSS)
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    average.factors.A.values.neg_()
    average.changed = True
    train(model, optimizer, [(X, y)], LOSS)
    average.factors.A.values.neg_()
    (saved,) = [
        a for a in optimizer.state_dict()["kfac"]["curvature"]["averages"] if a["layout"]["weight"] == "2.weight"
    ]
    assert saved["failed"]
    assert saved["changed"]
    state = optimizer.state_dict()
    resumed = KFAC(mlp(), LOSS, fisher="type-2", factors_every=10, inverses_every=1)
    resumed.load_state_dict(state)
    assert resumed.events.failed_inverses == 1
    assert resumed.preconditioner.curvature.averages["2.weight", (0, 5)].failed


def test_reports_and_closing_look() -> None:
    """Both read the pending flags; `repr` does not synchronize."""
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=100, replay=False)
    for bad in ("", "", "gradient"):
        step(model, optimizer, bad)
    assert "events: none" in repr(optimizer)
    assert optimizer.report().events.skipped_steps == 1
    step(model, optimizer, "gradient")
    optimizer.close()
    assert not optimizer.preconditioner.pending._steps
    assert optimizer.preconditioner.curvature.damping.events.skipped_steps == 2
