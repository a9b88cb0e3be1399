"""Functions that an index was made with: functions with different results are told apart, and equal ones are not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import StorageError
from tests.factors.test_gradient_streams import data, mlp
from tests.influence.test_index_files import curvature, make

scale = 1.0


def closure(number: float) -> Any:
    return lambda f, _: number * f[0]


def default(number: float) -> Any:
    def scaled(f: Tensor, _: Tensor, factor: float = number) -> Tensor:
        return factor * f[0]

    return scaled


def times(f: Tensor, _: Tensor, number: float) -> Tensor:
    return number * f[0]


def argument(number: float) -> Any:
    return partial(times, number=number)


def list_of_tensors(number: float) -> Any:
    numbers = [torch.tensor([number, 1.0], dtype=torch.float64)]
    return lambda f, _: f[:2] @ numbers[0]


def inner_function(number: float) -> Any:
    """Return a function that calls a recursive inner function."""

    def power(f: Tensor, exponent: int) -> Tensor:
        return f[0] if exponent == 1 else number * f[0] * power(f, exponent - 1)

    return lambda f, _: power(f, 2)


def module(number: float) -> Any:
    layer = nn.Linear(3, 1).double()
    nn.init.constant_(layer.weight, number)
    nn.init.zeros_(layer.bias)
    return lambda f, _: layer(f).sum()


class Scaled:
    """A function that is an object."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, f: Tensor, _: Tensor) -> Tensor:
        return self.number * f[0]

    def method(self, f: Tensor, _: Tensor) -> Tensor:
        return self.number * f[1]


FUNCTIONS: list[Callable[[float], Any]] = [
    *(closure, default, argument, list_of_tensors, inner_function, module, Scaled),
    lambda number: Scaled(number).method,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_with_other_values(function: Callable[[float], Any], tmp_path: Path) -> None:
    K = curvature()
    first = make(tmp_path, K=K, of_train=function(1.0))
    again = make(tmp_path, K=K, of_train=function(1.0))
    assert torch.equal(again.self_scores(), first.self_scores())
    with pytest.raises(StorageError, match=r"something else: of_train"):
        make(tmp_path, K=K, of_train=function(2.0))


def test_global_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K = curvature()

    def scaled(f: Tensor, _: Tensor) -> Tensor:
        return scale * torch.sum(f)

    make(tmp_path, K=K, of_train=scaled)
    monkeypatch.setitem(globals(), "scale", 2.0)
    with pytest.raises(StorageError, match=r"something else: of_train"):
        make(tmp_path, K=K, of_train=scaled)


def test_losses_that_are_functions(tmp_path: Path) -> None:
    def train(number: float) -> kfs.EmpiricalRisk:
        loss = kfs.losses.Custom(lambda f, y: number * (f - y).square().sum())
        return kfs.EmpiricalRisk(mlp(), loss, data(10))

    K = curvature()
    make(tmp_path, train(1.0), K)
    make(tmp_path, train(1.0), K)
    with pytest.raises(StorageError, match=r"something else: loss differ"):
        make(tmp_path, train(2.0), K)
