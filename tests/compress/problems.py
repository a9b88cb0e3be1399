"""Small models with curvature in float64, and dense reference results."""

from typing import Any

import torch
from torch import Tensor, nn

import kfs
from kfs import EmpiricalRisk
from kfs.factors import BlockDiagonal


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)).double().eval()


def mlp_risk(model: nn.Module | None = None) -> EmpiricalRisk:
    """A risk whose factors all have full rank."""
    model = mlp() if model is None else model
    data = torch.randn(60, 6, dtype=torch.float64), torch.randn(60, 7, dtype=torch.float64)
    return EmpiricalRisk(model, nn.MSELoss(), data)


def cnn(**settings: Any) -> nn.Module:
    """Two convolutions and a linear layer; the arguments are settings of the second convolution."""
    return (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, **settings),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        )
        .double()
        .eval()
    )


def image_risk(model: nn.Module) -> EmpiricalRisk:
    images, labels = torch.randn(20, 2, 7, 6, dtype=torch.float64), torch.randint(3, (20,))
    params = [name for name, p in model.named_parameters() if p.ndim > 1 or name.split(".")[0] != "1"]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), (images, labels), params=params)


def flat(model: nn.Module, names: Any) -> Tensor:
    """Concatenate some parameters."""
    params = dict(model.named_parameters())
    return torch.cat([params[name].detach().flatten() for name in names])


def constrained_minimum(C: Tensor, w: Tensor, removed: Tensor) -> Tensor:
    """Minimize `(v - w)^T C (v - w)` with removed entries at zero, by one dense system with Lagrange multipliers."""
    size = len(w)
    P = torch.eye(size, dtype=w.dtype)[removed]
    zeros = torch.zeros(len(P), len(P), dtype=w.dtype)
    system = torch.cat([torch.cat([C, P.T], dim=1), torch.cat([P, zeros], dim=1)])
    right = torch.cat([C @ w, torch.zeros(len(P), dtype=w.dtype)])
    result: Tensor = torch.linalg.solve(system, right)[:size]
    return result


def damped(K: BlockDiagonal, damping: float | kfs.Relative) -> Tensor:
    """Return the dense curvature with damping, block by block."""
    C = K.to_dense()
    if not isinstance(damping, kfs.Relative):
        return C + damping * torch.eye(len(C), dtype=C.dtype)
    places = K.domain.unflatten(torch.arange(len(C)).unsqueeze(0))
    for stack in K.stacks:
        for layout in stack.layouts:
            index = torch.cat([places[name].flatten() for name in layout.params])
            C[index, index] += damping.fraction * C[index, index].mean()
    return C


def cost(C: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the increase of the quadratic model."""
    return 0.5 * (after - before) @ C @ (after - before)
