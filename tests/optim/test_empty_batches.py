"""Batches without examples: no curvature, and gradients of zero, on a CPU and on an accelerator."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.optim import KFAC
from kfs.optim.safety import Events
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()
X, Y = data()
EMPTY = (X[:0], Y[:0])


@pytest.fixture(params=["cpu", "accelerator"])
def _device(request: pytest.FixtureRequest) -> None:
    """Treat the CPU as an accelerator, or not."""
    if request.param == "accelerator":
        request.getfixturevalue("tapes")


pytestmark = pytest.mark.usefixtures("_device")


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical", "forward-only"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_empty_batch_changes_no_curvature(at: int, reduction: str, fisher: Any) -> None:
    """There is no error, with or without new factors, and training continues."""
    model = mlp()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    optimizer = KFAC(model, loss, fisher=fisher, factors_every=2, momentum=0.0, lr=0.1)
    train(model, optimizer, [(X, Y)] * at, loss)
    before = weights(model)
    counted = optimizer.preconditioner.watch.first_datum
    averages = [a.weight for a in optimizer.preconditioner.curvature.averages.values()]
    train(model, optimizer, [EMPTY], loss)
    assert torch.equal(weights(model), before)  # Without momentum and decay, a gradient of zero moves nothing.
    assert [a.weight for a in optimizer.preconditioner.curvature.averages.values()] == averages
    assert optimizer.preconditioner.watch.first_datum == counted
    values = train(model, optimizer, [(X, Y)] * 8, loss)
    assert values[-1] < values[0]
    assert optimizer.events == Events()
    assert optimizer.steps == at + 9


def test_an_empty_batch_among_others() -> None:
    """Accumulated gradients and factors are those of the other batches, also while scales of losses are compared."""
    results: list[Tensor] = []
    for batches in ([(X, Y)], [EMPTY, (X, Y)], [(X, Y), EMPTY]):
        model = mlp()
        optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, replay=False)
        for _ in range(4):
            optimizer.zero_grad()
            for x, y in batches:
                LOSS(model(x), y).backward()
            optimizer.step()
        results.append(weights(model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_empty_batch_with_a_quadratic_model() -> None:
    """The loss of an empty batch is NaN, so the step is skipped."""
    model = mlp()
    optimizer = KFAC(model, nn.MSELoss(), quadratic_model=True)
    target = torch.zeros(12, 3, dtype=torch.float64)

    def closure_of(rows: slice) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value: Tensor = nn.MSELoss()(model(X[rows]), target[rows])
            value.backward()
            return value

        return closure

    optimizer.step(closure_of(slice(0)))
    assert optimizer.events.skipped_steps == 1
    optimizer.step(closure_of(slice(12)))
    assert optimizer.steps == 1
