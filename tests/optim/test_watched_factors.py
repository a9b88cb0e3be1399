"""Factors from passes of the training loop: which passes are used, and which are ignored."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import KfsWarning, LossError
from kfs.factors.block import Block
from kfs.optim import KFAC
from tests.factors.models import Function
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()


class Interrupted(nn.Module):
    """Raises a given error once."""

    def __init__(self) -> None:
        """Start without an error."""
        super().__init__()
        self.errors: list[BaseException] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        if self.errors:
            raise self.errors.pop()
        return x


@pytest.mark.parametrize("audit", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_interrupts(closed: bool, audit: bool) -> None:
    """After a keyboard interrupt, the next call or step cleans up."""
    X, y = data()
    layer = Interrupted()
    model = nn.Sequential(mlp(), layer)
    optimizer = KFAC(model, LOSS, audit=audit)
    layer.errors = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        model(X)
    if closed:
        optimizer.close()
        assert not torch.overrides._get_current_function_mode_stack()
        return
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.overrides._get_current_function_mode_stack()
    layer.errors = [KeyboardInterrupt()]
    optimizer.preconditioner._factors_every = 100
    with pytest.raises(KeyboardInterrupt):
        model(X)
    train(model, optimizer, [(X, y)], LOSS)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        """Make a layer."""
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        """Apply the layer some times."""
        result: Tensor = self(self.linear(x), depth - 1) if depth else x
        return result


def test_models_that_call_themselves() -> None:
    """Only the outermost call is a pass."""
    X, y = data()
    recursive, model = Recursive(), Recursive()
    model.load_state_dict(recursive.state_dict())
    optimizer = KFAC(recursive, LOSS, fisher="type-2")
    train(recursive, optimizer, [(X[:, :3], y)], LOSS)
    assert optimizer.preconditioner.watch.first_datum == len(X)
    plain = nn.Sequential(*[model.linear] * 3)
    train(plain, KFAC(plain, LOSS, fisher="type-2"), [(X[:, :3], y)], LOSS)
    torch.testing.assert_close(weights(recursive), weights(plain))


class Keeps(nn.Module):
    """Keeps its prediction, and returns an output without graph."""

    def __init__(self) -> None:
        """Make a network."""
        super().__init__()
        self.net, self.kept = mlp(), torch.zeros(())

    def forward(self, x: Tensor, detach: bool = False) -> Tensor:
        """Predict."""
        self.kept = self.net(x)
        return self.kept.detach() if detach else self.kept


def test_predictions_that_take_another_way() -> None:
    """A kept prediction is not watched; for an output without graph, there is no backward pass to wait for."""
    X, y = data()
    model = Keeps()
    optimizer = KFAC(model, LOSS)
    assert not model(X, detach=True).requires_grad
    model(X)
    LOSS(model.kept, y).backward()
    assert optimizer.preconditioner.watch.collect() is None
    optimizer.targets(y)  # of a pass that is gone
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.steps == 1


class Sometimes(nn.Module):
    """Uses a parameter by an operation without rule, and another one optionally."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.linear, self.more = nn.Linear(4, 3), nn.Linear(3, 3)
        self.odd = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, more: bool) -> Tensor:
        """Use the parameters."""
        h = torch.atan2(self.linear(x), self.odd)
        return self.more(h) if more else h


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_passes_that_use_different_parameters(order: tuple[bool, bool]) -> None:
    """A parameter that one part of a batch does not use is covered; one that is used without rule is not."""
    X, y = data(dtype=torch.float32)
    model = Sometimes()
    optimizer = KFAC(model, LOSS)
    for more in order:
        LOSS(model(X, more), y).backward()
    with pytest.warns(KfsWarning, match="'odd'"):
        optimizer.step()
    assert set(optimizer.uncovered) == {"odd"}
    assert {name for name, _ in optimizer.preconditioner.curvature.averages} == {"linear.weight", "more.weight"}


def test_branches_that_are_used_later() -> None:
    """Their curvature is computed in the next step, even between two updates of factors."""
    X, y = data(dtype=torch.float32)
    model = Sometimes()
    model.odd.requires_grad_(False)
    optimizer = KFAC(model, LOSS, factors_every=100)
    before = model.more.weight.detach().clone()
    for more in (False, True, True):
        optimizer.zero_grad()
        LOSS(model(X, more), y).backward()
        optimizer.step()
    assert not torch.equal(model.more.weight, before)


@pytest.mark.parametrize("told", [True, False])
def test_labels_that_are_none(told: bool) -> None:
    """An argument called `labels` may have another meaning; targets that were passed explicitly may not."""
    X, y = data()

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, labels: Any = None) -> Any:
            return self.net(x)

    model = Labelled()
    optimizer = KFAC(model, LOSS, factors_every=1)
    for labels in (torch.zeros(5), y.flip(0), "text"):
        optimizer.zero_grad()
        value = LOSS.forward(model(X, labels=labels), y)
        if told:
            optimizer.targets(torch.zeros(5))
            with pytest.raises(ValueError, match="targets must have shape"):
                value.backward()
        else:
            value.backward()
            optimizer.step()


def test_wide_factors_are_declared() -> None:
    """They keep only their diagonal, and there is one warning."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, max_dim=5, factors_every=1)
    with pytest.warns(KfsWarning, match=r"max_dim=5.*0\.B \(6\)") as caught:
        train(model, optimizer, [(X, y)] * 3, LOSS)
    assert len(caught) == 1


def test_damping_falls_again() -> None:
    """After many good updates, damping has its initial value."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1, patience=1)
    train(model, optimizer, [(X, y), (X * torch.nan, y)], LOSS)
    assert optimizer.damping_scale == 10.0
    train(model, optimizer, [(X, y)] * 20, LOSS)
    assert optimizer.damping_scale == pytest.approx(1.0)


def test_quadratic_model_without_targets_that_count() -> None:
    """There is nothing to minimize, and parameters do not change."""
    X, y = data()
    model, loss = mlp(), nn.CrossEntropyLoss(reduction="sum")
    optimizer = KFAC(model, loss, quadratic_model=True)
    targets = [y, torch.full_like(y, -100)]

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model(X), targets[0])
        value.backward()
        return value

    optimizer.step(closure)
    before, targets[0] = weights(model), targets[1]
    optimizer.step(closure)
    assert torch.equal(weights(model), before)


def test_empirical_fisher_of_a_vanishing_gradient() -> None:
    """It has no scale, and is not used; there is no event."""
    X, _ = data()
    model = mlp()
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss, fisher="empirical")
    train(model, optimizer, [(X, model(X).detach())] * 4, loss)
    assert optimizer.damping_scale == 1.0
    with pytest.raises(LossError, match="scale"):
        nn.functional.mse_loss(model(X), torch.ones(12, 3).double()).backward()


@pytest.mark.filterwarnings("ignore")  # the function is deprecated
def test_traced_models() -> None:
    """Tracing does not count as training."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    traced = torch.jit.trace(model, X)
    torch.testing.assert_close(traced(X), model(X))
    train(model, optimizer, [(X, y)], LOSS)


def test_objects_without_tensors() -> None:
    """A model may return any objects, as long as training does not use them."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return 3

    model = Odd()
    optimizer = KFAC(model, LOSS)
    assert model(torch.ones(2, 4)) == 3
    assert optimizer.steps == 0


def test_empirical_fisher_of_functions_of_parameters() -> None:
    """The user's backward pass adds gradients to their factors."""
    X, y = data()
    p, W = torch.randn(4, dtype=X.dtype), torch.randn(4, 3, dtype=X.dtype)
    model = Function(lambda m, x: (x * torch.sigmoid(m.p)) @ m.W, p=p, W=W)
    expected = kfs.KFAC(kfs.EmpiricalRisk(model, LOSS, (X, y)), "empirical")
    optimizer = KFAC(model, LOSS, fisher="empirical", factors_every=1)
    LOSS(model(X), y).backward()
    sums = optimizer.preconditioner.watch.collect()
    assert sums is not None
    for block in sums.blocks.values():
        torch.testing.assert_close(Block(block).B, expected.blocks[block.layout.name].B)


def test_labels_of_a_second_pass_are_drawn_anew() -> None:
    """Two passes with the same data before one step: draws continue, so two samples differ from one."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="mc", factors_every=1)

    def gradient_factor(passes: int) -> Tensor:
        optimizer.zero_grad()
        for _ in range(passes):
            LOSS(model(X), y).backward()
        sums = optimizer.preconditioner.watch.collect()
        assert sums is not None
        return next(Block(block).B for block in sums.blocks.values())

    one, two = gradient_factor(1), gradient_factor(2)
    torch.testing.assert_close(one, gradient_factor(1))  # there was no step in between, so these are the same draws
    assert (one - two).norm() > 1e-3 * one.norm()


def test_batch_axis_of_sequences() -> None:
    """With as many times as examples, the batch axis has to be given; it matters if positions are summed."""
    W, X, y = torch.randn(2, 3), torch.randn(4, 4, 3), torch.randint(2, (4,))
    first = Function(lambda m, x: nn.functional.linear(x, m.W).tanh().mean(1), W=W.clone())
    second = Function(lambda m, x: nn.functional.linear(x, m.W).tanh().mean(0), W=W.clone())
    train(first, KFAC(first, LOSS, sharing="reduce"), [(X, y)], LOSS)
    train(second, KFAC(second, LOSS, sharing="reduce", batch_axis=1), [(X.transpose(0, 1), y)], LOSS)
    torch.testing.assert_close(weights(first), weights(second))
