"""Lifetimes of tensors that outlive a pass."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kfs import EKFAC, KFAC, EmpiricalRisk


class Keeps(nn.Module):
    """Keeps its predictions, as some models do for later use, and therefore also their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
        self.memory: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        self.memory.append(StorageWeakRef(hidden.untyped_storage()))
        f: Tensor = self.two(hidden)
        self.kept = f
        return f


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_activations_are_freed_when_they_have_been_used(make: Any, fisher: str) -> None:
    """A graph that still exists after the last backward pass holds no activations any more."""
    model = Keeps()
    make(EmpiricalRisk(model, nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 2))), fisher)
    assert model.kept.grad_fn is not None
    assert model.memory
    assert all(storage.expired() for storage in model.memory)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "forward-only"])
def test_sums_are_freed_with_the_factors(fisher: Any, sharing: Any) -> None:
    """Sums are as large as factors, and are freed after every step of an optimizer without a garbage collection."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 2)))
    gc.disable()
    try:
        K = KFAC(risk, fisher, sharing)
        memory = [StorageWeakRef(s.total.untyped_storage()) for block in K.blocks.values() for s in block.sums.sums]
        assert not any(storage.expired() for storage in memory)
        del K
        assert all(storage.expired() for storage in memory)
    finally:
        gc.enable()
