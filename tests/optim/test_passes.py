"""Statistics from the passes of a training, and gradients that belong to another loss."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import KfsWarning, LossError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from tests.optim.training import data, mlp, weights


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double()


def off_by(model: nn.Module, optimizer: KFAC, X: Tensor, y: Tensor, share: float) -> None:
    """Differentiate half the square loss plus a term with an orthogonal gradient.

    Args:
        model: The model.
        optimizer: Gets the targets.
        X: Inputs.
        y: Targets.
        share: The length of that term's gradient, relative to the sum of both.
    """
    f = model(X)
    optimizer.targets(y)
    residual = (f - y).detach()
    other = torch.randn_like(residual)
    other -= (other * residual).sum() / residual.square().sum() * residual
    other *= residual.norm() / other.norm() * share / (1 - share**2) ** 0.5
    (0.5 * (f - y).square().sum() + (f * other).sum()).div(len(X)).backward()


X, LABELS = data()
TARGETS = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("share", [0.0, 0.045])
def test_gradients_of_nearly_the_same_loss(share: float) -> None:
    """A difference of up to one twentieth is accepted without a warning."""
    model = linear()
    optimizer = KFAC(model, HalfSquaredError())
    off_by(model, optimizer, X, TARGETS, share)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("share", [0.055, 0.45])
def test_gradients_with_an_additional_term(share: float) -> None:
    """A difference of up to one half is accepted with a warning that gives its size."""
    model = linear()
    optimizer = KFAC(model, HalfSquaredError())
    off_by(model, optimizer, X, TARGETS, share)
    with pytest.warns(KfsWarning, match=f"differs by {share:.0%}"):
        optimizer.step()


@pytest.mark.parametrize("share", [0.55, 0.9])
def test_gradients_of_another_loss(share: float) -> None:
    """A larger difference is another loss, and no state changes."""
    model = linear()
    before = weights(model)
    optimizer = KFAC(model, HalfSquaredError())
    off_by(model, optimizer, X, TARGETS, share)
    with pytest.raises(LossError, match=f"differs by {share:.0%}"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert optimizer.steps == 0


@pytest.mark.parametrize("shares", [(0.0, 0.7), (0.7, 0.0)])
def test_one_pass_of_another_loss_is_enough(shares: tuple[float, float]) -> None:
    """Of several passes, the one with the largest difference counts, in any order."""
    model = linear()
    optimizer = KFAC(model, HalfSquaredError())
    for share, rows in zip(shares, (slice(0, 6), slice(6, 12)), strict=True):
        off_by(model, optimizer, X[rows], TARGETS[rows], share)
    with pytest.raises(LossError, match="differs by 70%"):
        optimizer.step()


@pytest.mark.parametrize(("share", "known"), [(0.04, True), (0.06, False)])
def test_targets_that_gradients_do_not_show(share: float, known: bool) -> None:
    """Labels are read off the gradient of a cross-entropy if they explain it up to one twentieth.

    The added term has an orthogonal gradient whose entries sum to zero, as those of a cross-entropy do. So only the
    remaining difference reveals the term.
    """
    model = linear()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher="empirical")
    f = model(X)
    g = f.detach().softmax(1) - nn.functional.one_hot(LABELS, 3)
    other = torch.stack([g[:, 1] - g[:, 2], g[:, 2] - g[:, 0], g[:, 0] - g[:, 1]], 1)
    other *= g.norm() / other.norm() * share / (1 - share**2) ** 0.5
    value = (f * (g + other)).sum() / len(X)  # its gradient is the sum of both
    if known:
        value.backward()
        optimizer.step()
        return
    with pytest.raises(LossError, match="scale of the gradient is not known"):
        value.backward()


@pytest.mark.parametrize("options", [{"fisher": "type-2"}, {"fisher": "mc"}, {"fisher": "empirical"}])
def test_two_backward_passes_through_one_graph(options: dict[str, Any]) -> None:
    """Gradients add up, but statistics are those of one pass: examples count once."""
    loss, moved = nn.CrossEntropyLoss(), []
    options = {"trust": None, "momentum": 0.0, "factors_every": 1} | options
    for twice in (False, True):
        model = mlp()
        optimizer = KFAC(model, loss, lr=0.1 if twice else 0.2, **options)
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model(X), LABELS)
            value.backward(retain_graph=twice)
            if twice:
                value.backward()
            optimizer.step()
        moved.append(weights(model))
    torch.testing.assert_close(moved[0], moved[1])
