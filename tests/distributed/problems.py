"""Models and data that are split unevenly over ranks, and the same data in one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kfs
from kfs.factors.checkpoint import digest
from kfs.losses import TokenCrossEntropy

NUM_DATA = 23
# Half-open ranges of data, by number of ranks: uneven, and rank 2 of 4 has none.
CUTS = {1: [0, 23], 2: [0, 15, 23], 3: [0, 0, 9, 23], 4: [0, 3, 14, 14, 23]}


class Tokens(nn.Module):
    """Has shared positions, an embedding (a diagonal factor) and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(torch.tanh(self.hidden(self.embedding(x)))))
        return y


class Experts(nn.Module):
    """Sends each example to one of two experts, by its first feature; an expert without examples is not called."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(features, 5) for _ in range(2))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        hidden = x.new_zeros(len(x), 5)
        for place, expert in enumerate(self.experts):
            mine = (chosen == place).nonzero().flatten()
            if len(mine):
                hidden = hidden.index_add(0, mine, expert(x[mine]))
        y: Tensor = self.out(torch.tanh(hidden))
        return y


def problem(name: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Return model, loss, inputs and targets; the same in every process."""
    torch.manual_seed(1)
    model: nn.Module
    loss: Any = nn.CrossEntropyLoss()
    X = torch.randn(NUM_DATA, 4, dtype=torch.float64)
    y = torch.randint(3, (NUM_DATA,))
    if name == "mlp":
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    elif name == "experts":
        model = Experts()
        X[:, 0] = torch.linspace(-1, 1, NUM_DATA, dtype=torch.float64)  # the first examples use only the first expert
    elif name == "convolution":
        layers = nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
        model = nn.Sequential(*layers)
        loss = nn.MSELoss()
        X = torch.randn(NUM_DATA, 2, 3, 3, dtype=torch.float64)
        y = torch.randn(NUM_DATA, 2, dtype=torch.float64)
    else:
        assert name == "tokens"
        model = Tokens()
        loss = TokenCrossEntropy(shift=True)
        X = torch.randint(7, (NUM_DATA, 4))
        y = torch.randint(7, (NUM_DATA, 4))
        y[torch.rand(NUM_DATA, 4) < 0.4] = -100
        y[9:14] = -100  # on some ranks, all targets are ignored
    return model.double(), loss, X, y


def batches(X: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return [(X[n : n + size], y[n : n + size]) for n in range(0, len(X), size)]


def risk_of_all(name: str) -> kfs.EmpiricalRisk:
    """Return the risk of one process that has all data."""
    model, loss, X, y = problem(name)
    return kfs.EmpiricalRisk(model, loss, batches(X, y, 5))


def risk_of_own(name: str) -> kfs.EmpiricalRisk:
    """Return the risk of this process, which has a part of the data."""
    model, loss, X, y = problem(name)
    cuts = CUTS[dist.get_world_size()]
    own = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    return kfs.EmpiricalRisk(model, loss, batches(X[own], y[own], 4), group=dist.group.WORLD)


def is_first() -> bool:
    """Whether this process makes the comparison with one process: all ranks are equal bit by bit."""
    return dist.get_rank() == 0


def bits(tensors: Any) -> str:
    """Return a fingerprint of tensors, exact to the last bit."""
    return digest([t.contiguous() for t in tensors])
