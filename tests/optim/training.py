"""Small problems and plain training loops for the optimizer's tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kfs.optim import KFAC
from kfs.runtime.cuda_graphs import Replayer


class Layers(nn.Sequential):
    """A sequence of layers; the layers that tests access are linear ones."""

    def __getitem__(self, place: Any) -> Any:
        """Return a layer."""
        return super().__getitem__(place)


def mlp(dtype: torch.dtype = torch.float64, classes: int = 3) -> Layers:
    """Return a small network, the same in every call."""
    torch.manual_seed(0)
    return Layers(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes)).to(dtype)


def data(num_data: int = 12, dtype: torch.dtype = torch.float64, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Return inputs and labels that can be learned, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(num_data, 4, generator=generator, dtype=torch.float64).to(dtype)
    W = torch.randn(4, classes, generator=generator, dtype=torch.float64)
    return X, (X.double() @ W).argmax(1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Any, Tensor]],
    loss: Callable[[Any, Tensor], Tensor],
) -> list[float]:
    """Take one step per batch, and return all losses."""
    values = []
    for X, y in batches:
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    return values


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def one_step(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Return parameters after one step."""
    optimizer = KFAC(model, loss, **options)
    train(model, optimizer, [(X, y)], loss)
    optimizer.close()
    return weights(model)


def recordings(replayer: Replayer | None) -> int:
    """Return the number of recordings."""
    return 0 if replayer is None else sum(len(kind.recorded) for kind in replayer._kinds.values())


def recorded_passes(optimizer: Any) -> int:
    """Return how many recordings of passes for factors an optimizer has."""
    return recordings(optimizer.preconditioner.watch._graphs._replayer)
