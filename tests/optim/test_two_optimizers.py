"""Several optimizers for one model, and for one loss module."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import KfsWarning, ModelError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()
X, LABELS = data()
TARGETS = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_the_second_one_takes_the_model_over() -> None:
    """It warns, trains as if it were alone, and the first one cannot step any more."""
    model = mlp()
    first = KFAC(model, LOSS)
    train(model, first, [(X, LABELS)], LOSS)
    alone = mlp()
    alone.load_state_dict(model.state_dict())
    train(alone, KFAC(alone, LOSS), [(X, LABELS)] * 3, LOSS)

    model.zero_grad()
    with pytest.warns(KfsWarning, match=r"takes the model over.*first one's step\(\) raises"):
        second = KFAC(model, LOSS)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    train(model, second, [(X, LABELS)] * 3, LOSS)
    torch.testing.assert_close(weights(model), weights(alone), rtol=0, atol=0)

    before = weights(model)
    with pytest.raises(ModelError, match=r"taken over by another.*Use the new optimizer"):
        train(model, first, [(X, LABELS)], LOSS)
    with pytest.raises(ModelError, match="taken over"):
        first.step()
    assert torch.equal(weights(model), before)
    assert second.steps == 3


def test_a_notebook_cell_that_runs_again() -> None:
    """The variable still refers to the first optimizer while the second one is created."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    for _ in range(2):
        with pytest.warns(KfsWarning, match="takes the model over"):
            optimizer = KFAC(model, LOSS)
        train(model, optimizer, [(X, LABELS)] * 2, LOSS)
    assert optimizer.steps == 2


def test_no_warning_without_reason() -> None:
    """The first optimizer was closed or deleted."""
    model = mlp()
    KFAC(model, LOSS).close()
    first = KFAC(model, LOSS)
    train(model, first, [(X, LABELS)], LOSS)
    del first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, LOSS)
        gc.collect()


def test_a_refused_optimizer_takes_nothing_over() -> None:
    """The first optimizer keeps its model."""
    model = mlp()
    first = KFAC(model, LOSS)
    groups = [{"params": list(model.parameters()), "method": "sgd"}]
    options: list[dict[str, Any]] = [{"lr": -1.0}, {"params": groups}]
    for wrong in options:
        with pytest.raises(ModelError):
            KFAC(model, LOSS, **wrong)
    train(model, first, [(X, LABELS)], LOSS)
    assert first.steps == 1


def test_a_warning_that_is_an_error() -> None:
    """Then the first optimizer keeps its model, and the warning points to the call."""
    model = mlp()
    first = KFAC(model, LOSS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KfsWarning):
            KFAC(model, LOSS)
    train(model, first, [(X, LABELS)], LOSS)
    with pytest.warns(KfsWarning) as caught:
        KFAC(model, LOSS)
    assert caught[0].filename == __file__


def test_shallow_copies() -> None:
    """They have the model's hooks, but are not the model, so their passes are not watched."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    LOSS(copy.copy(model)(X), LABELS).backward()
    with pytest.raises(ModelError, match="No forward and backward pass"):
        optimizer.step()


def test_some_parameters() -> None:
    """Optimizers without common parameters coexist; a group cannot be taken from another optimizer."""
    model = mlp()
    one = KFAC(model, LOSS, model[0].parameters())
    other = KFAC(model, LOSS, model[2].parameters())
    with pytest.raises(ModelError, match=r"Another KFAC.*close\(\)"):
        other.add_param_group({"params": list(model[0].parameters())})
    with pytest.warns(KfsWarning, match="takes the model over"):
        third = KFAC(model, LOSS, model[0].parameters())
    with pytest.raises(ModelError, match="taken over"):
        one.step()
    train(model, other, [(X, LABELS)], LOSS)
    assert third.steps == 0
    with pytest.raises(ModelError, match="taken over"):  # loading a state does not change that
        one.load_state_dict(one.state_dict())


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_two_that_share_a_model(fisher: Any) -> None:
    """Each takes the same steps as alone, for its own layers. An audit of one is not training of the other."""
    moved = []
    for parts in (([0], [2, 4]), ([0],), ([2, 4],)):
        model = mlp()
        options: dict[str, Any] = {"fisher": fisher, "factors_every": 1, "momentum": 0.0}
        optimizers = [KFAC(model, LOSS, [p for i in part for p in model[i].parameters()], **options) for part in parts]
        for optimizer in optimizers:
            optimizer.zero_grad()
        LOSS(model(X), LABELS).backward()
        for optimizer in optimizers:
            optimizer.step()
        moved.append(model)
    together, first, rest = moved
    torch.testing.assert_close(weights(together[0]), weights(first[0]))
    for i in (2, 4):
        torch.testing.assert_close(weights(together[i]), weights(rest[i]))


def test_a_part_of_a_model() -> None:
    """Another model with the same parameters does not replace the first one, so it is refused."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    whole = nn.Sequential(model, nn.Tanh())
    with pytest.raises(ModelError, match=r"Another KFAC optimizer.*close\(\)"):
        KFAC(whole, LOSS)
    train(model, optimizer, [(X, LABELS)], LOSS)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_one_loss_module_for_two_models(fisher: Any) -> None:
    """Each model trains as if the other one did not exist, for any order of passes."""
    loss = nn.MSELoss()
    alone = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).double()
        own = nn.MSELoss()
        train(model, KFAC(model, own, fisher=fisher), [(X, TARGETS * (1 + seed))] * 3, own)
        alone.append(weights(model))

    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nn.Linear(4, 3).double())
    optimizers = [KFAC(model, loss, fisher=fisher) for model in models]
    for _ in range(3):
        f = [model(X) for model in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for i in (1, 0):
            loss(f[i], TARGETS * (1 + i)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, expected in zip(models, alone, strict=True):
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=0)


def test_one_loss_module_for_two_optimizers_of_a_model() -> None:
    """Both see the targets of the passes. The empirical Fisher of a square loss needs them."""
    model, loss = mlp(), nn.MSELoss()
    one = KFAC(model, loss, model[0].parameters(), fisher="empirical")
    other = KFAC(model, loss, [*model[2].parameters(), *model[4].parameters()], fisher="empirical")

    def values() -> Tensor:
        value: Tensor = loss(model(X), TARGETS)
        return value

    before = float(values().detach())
    for _ in range(3):
        one.zero_grad()
        other.zero_grad()
        values().backward()
        one.step()
        other.step()
    assert float(values().detach()) < before


def test_targets_given_twice_are_mixed() -> None:
    """Mixed labels do not belong to the whole loss, even if two optimizers have the loss module."""
    model, loss = mlp(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss)
    bystander = KFAC(nn.Linear(4, 3).double(), loss)
    train(model, optimizer, [(X, LABELS)] * 2, lambda f, y: 0.6 * loss(f, y) + 0.4 * loss(f, y.flip(0)))
    assert optimizer.steps == 2
    assert bystander.steps == 0


def test_targets_of_one_are_not_those_of_the_other() -> None:
    """`targets` reaches the passes of its own optimizer only."""
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    one, other = (KFAC(model, HalfSquaredError(), fisher="empirical") for model in models)
    f = [model(X) for model in models]
    one.targets(TARGETS)
    other.targets(2 * TARGETS)
    HalfSquaredError()(f[0], TARGETS).backward()
    HalfSquaredError()(f[1], 2 * TARGETS).backward()
    one.step()
    other.step()
