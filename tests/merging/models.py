"""Small models to merge, with their risks, and the merge as a dense system, which is the oracle."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

import kfs
from kfs.operators import LinearOperator

Make = Callable[[], nn.Module]
NUM_DATA = 24


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    """Has a normalization with statistics, and a convolution with groups of channels."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Tied(nn.Module):
    """Reads tokens and predicts one, with the same weight in the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.hidden = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embedding(x)).tanh())
        return logits


INPUTS: dict[Make, Callable[[], Tensor]] = {
    mlp: lambda: torch.randn(NUM_DATA, 4, dtype=torch.float64),
    cnn: lambda: torch.randn(NUM_DATA, 1, 4, 4, dtype=torch.float64),
    Tied: lambda: torch.randint(5, (NUM_DATA,)),
}


def family(make: Make, count: int) -> list[nn.Module]:
    """Return models with a common ancestor, in evaluation mode, with different buffers."""
    ancestor = make().double().eval()
    models = [deepcopy(ancestor) for _ in range(count)]
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
            for b in model.buffers():
                b.add_(torch.rand_like(b) if b.is_floating_point() else torch.randint(1, 9, b.shape))
    return models


def risks_of(models: Sequence[nn.Module], make: Make = mlp) -> list[kfs.EmpiricalRisk]:
    """Return a risk for each model, on data of its own."""
    classes = 5 if make is Tied else 3
    data = [(INPUTS[make](), torch.randint(classes, (NUM_DATA,))) for _ in models]
    return [
        kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), pair, progress=False)
        for model, pair in zip(models, data, strict=True)
    ]


def flat(values: dict[str, Tensor], C: LinearOperator) -> Tensor:
    """Return the parameters that a curvature covers as one vector."""
    return torch.cat([values[name].detach().flatten() for name in C.domain.shapes])


def dense_merge(
    models: Sequence[nn.Module], damped: Sequence[Tensor], C: LinearOperator, weights: Sequence[float]
) -> Tensor:
    """Minimize the sum of quadratic functions with dense matrices.

    Args:
        models: Their parameters.
        damped: A damped curvature matrix for each.
        C: A curvature with the same parameters.
        weights: One for each model.
    """
    matrix = torch.zeros_like(damped[0])
    vector = torch.zeros_like(damped[0][0])
    for model, D, weight in zip(models, damped, weights, strict=True):
        matrix += weight * D
        vector += weight * D @ flat(dict(model.named_parameters()), C)
    solution: Tensor = torch.linalg.solve(matrix, vector)
    return solution
