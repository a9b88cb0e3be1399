"""Calls in the style of other optimizers raise an error that shows the right call."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from kfs import Relative
from kfs.errors import LossError, ModelError
from kfs.optim import KFAC
from tests.optim.training import mlp

NOT_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "tuple": lambda net: tuple(net.parameters()),
    "groups": lambda net: [{"params": net.parameters(), "lr": 0.1}],
    "group": lambda net: {"params": list(net.parameters())},
    "names": lambda net: net.named_parameters(),
    "one": lambda net: next(net.parameters()),
    "nothing": lambda _: [],
}


@pytest.mark.parametrize("given", NOT_MODELS)
def test_parameters_instead_of_a_model(given: str) -> None:
    """The message says what was passed, why a model is needed, and how to call it."""
    net = mlp()
    with pytest.raises(ModelError, match=r"needs the model.*KFAC\(model, nn\.CrossEntropyLoss\(\), lr=1\.0\)"):
        KFAC(NOT_MODELS[given](net), lr=0.1)
    with pytest.raises(ModelError, match=r"params="):
        KFAC(NOT_MODELS[given](net), nn.CrossEntropyLoss())
    assert not net._forward_hooks


def test_no_loss() -> None:
    """The message says why a loss is needed, and how to pass it."""
    net = mlp()
    with pytest.raises(LossError, match=r"[Cc]urvature.*KFAC\(model, nn\.CrossEntropyLoss\(\)\)"):
        KFAC(net)
    with pytest.raises(LossError, match=r"[Cc]urvature"):
        KFAC(net, None)
    with pytest.raises(LossError, match=r"[Cc]urvature"):
        KFAC(net, params=net.parameters())
    assert not net._forward_hooks


@pytest.mark.parametrize("given", NOT_MODELS)
def test_parameters_instead_of_a_loss(given: str) -> None:
    """Parameters are the third argument."""
    net = mlp()
    with pytest.raises(LossError, match=r"second.*KFAC\(model, nn\.CrossEntropyLoss\(\), model\.parameters\(\)\)"):
        KFAC(net, NOT_MODELS[given](net))


def test_a_number_instead_of_a_loss() -> None:
    """`KFAC(model, 0.1)` is a learning rate in the wrong place."""
    with pytest.raises(LossError, match=r"second.*lr=0\.1"):
        KFAC(mlp(), 0.1)


def test_a_class_instead_of_a_loss() -> None:
    """`nn.CrossEntropyLoss` lacks its parentheses. It is callable, but not a function of a prediction and a target."""
    with pytest.raises(LossError, match=r"class.*nn\.CrossEntropyLoss\(\)"):
        KFAC(mlp(), nn.CrossEntropyLoss)


def test_a_class_instead_of_a_model() -> None:
    """A model's class lacks its parentheses, too."""
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        KFAC(nn.Linear, nn.CrossEntropyLoss())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("fisher", "type-2", r"sets fisher, which must be the same for all.*Pass fisher= to KFAC itself"),
        ("decay", 0.5, "sets decay"),
        ("lr", -1.0, r"lr is -1\.0"),
        ("damping", Relative(0.1), r"damping is Relative\(0\.1\)\. Use a number"),
    ],
)
def test_options_in_groups(option: str, value: Any, match: str) -> None:
    """Unknown entries of a group raise an error, except entries that schedulers and trainers write."""
    net = mlp()
    first = [{"params": net[0].parameters(), option: value}]
    with pytest.raises(ModelError, match=match):
        KFAC(net, nn.CrossEntropyLoss(), first)
    optimizer = KFAC(net, nn.CrossEntropyLoss(), [{"params": net[0].parameters(), "initial_lr": 0.1, "trust": None}])
    with pytest.raises(ModelError, match=match):
        optimizer.add_param_group({"params": list(net[2].parameters()), option: value})
    assert len(optimizer.param_groups) == 1
