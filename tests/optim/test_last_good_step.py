"""A run that has diverged raises one error with the last good step, and events are logged less and less often."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from kfs.errors import SolverError
from kfs.optim import KFAC
from kfs.optim.safety import Events
from tests.optim.training import data, mlp, train

LOSS = nn.CrossEntropyLoss()
GOOD = data()
BAD = (GOOD[0] * torch.nan, GOOD[1])


@pytest.mark.parametrize("both", [False, True])
def test_parameters_that_are_not_finite(both: bool) -> None:
    """The first step with such parameters raises, and names the last good step."""
    model = mlp()
    optimizer = KFAC(model, LOSS, lr=0.05)
    train(model, optimizer, [GOOD] * 3, LOSS)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
        if both:
            model[2].bias[0] = torch.nan
    named = r"'0\.weight' and 1 more is" if both else r"'0\.weight' is"
    with pytest.raises(
        SolverError, match=rf"diverged: parameter {named} not finite\. Step 2 was fine \(lr 0\.05, damp"
    ):
        train(model, optimizer, [BAD], LOSS)
    assert optimizer.damping_scale == 1
    # Loading a checkpoint repairs it.
    with torch.no_grad():
        for p in model.parameters():
            p.nan_to_num_(0.0, 0.0, 0.0)
    train(model, optimizer, [GOOD], LOSS)
    assert optimizer.steps == 4


def test_damping_of_the_last_fine_step() -> None:
    """The reported damping was used in that step; skipped steps have raised it since."""
    model = mlp()
    optimizer = KFAC(model, LOSS, patience=1)
    train(model, optimizer, [GOOD, *[BAD] * 3, GOOD], LOSS)
    (used,) = set(optimizer.report().damping)
    assert used > optimizer.param_groups[0]["damping"]
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(SolverError, match=re.escape(f"damping {used:.3g}).")):
        train(model, optimizer, [BAD], LOSS)


@pytest.mark.parametrize("patience", [1, 3])
def test_many_skipped_steps(patience: int) -> None:
    """The limit is ten times the patience in a row; a good step resets the count. Damping has an upper limit."""
    model = mlp()
    optimizer = KFAC(model, LOSS, patience=patience)
    most = 10 * patience
    train(model, optimizer, [*[BAD] * (most - 1), GOOD, *[BAD] * (most - 1)], LOSS)
    for _ in range(2):
        with pytest.raises(SolverError, match="steps in a row"):
            train(model, optimizer, [BAD], LOSS)
    assert optimizer.damping_scale <= 1e10


def test_no_step_was_fine() -> None:
    """Then the error asks to check the data."""
    model = mlp()
    torch.nn.init.constant_(model[0].weight, torch.nan)
    optimizer = KFAC(model, LOSS)
    with pytest.raises(SolverError, match="No step was fine before"):
        train(model, optimizer, [GOOD], LOSS)


@pytest.mark.parametrize(("kind", "shown"), [(float, True), (torch.as_tensor, True), (str, False)])
def test_last_loss(kind: Any, shown: bool) -> None:
    """The return value of a closure is part of the error if it is a number."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    values = []

    def closure() -> Any:
        optimizer.zero_grad()
        value = LOSS(model(GOOD[0]), GOOD[1])
        value.backward()
        values.append(float(value.detach()))
        return kind(value.detach())

    optimizer.step(closure)
    torch.nn.init.constant_(model[0].weight, torch.nan)
    with pytest.raises(SolverError) as error:
        optimizer.step(closure)
    assert (f"loss {values[0]:.4g}" in str(error.value)) == shown


def test_events_are_logged_in_decreasing_frequency(caplog: pytest.LogCaptureFixture) -> None:
    """The first, second, fourth, eighth event, and so on, is logged, with the count."""
    events = Events()
    with caplog.at_level(logging.WARNING, logger="kfs.optim"):
        for _ in range(100):
            events.note("skipped_steps", "something is wrong")
    assert events.skipped_steps == 100
    assert caplog.messages[0] == "kfs.optim: something is wrong."
    assert caplog.messages[-1] == "kfs.optim: something is wrong (64 times so far)."
    assert len(caplog.messages) == 7
