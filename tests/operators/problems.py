"""Small models, losses and data for operators: networks of every common kind, frozen and tied parameters, functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfs.operators import GGN, Fisher, Hessian
from kfs.problem.risk import EmpiricalRisk


@dataclass(frozen=True)
class Problem:
    """A model, a loss and data.

    Attributes:
        name: For the test's id.
        make_model: Makes the model.
        loss: A PyTorch loss module, so that `kfs.basics` can serve as oracle.
        make_data: Makes inputs and targets.
        params: The parameters to consider; all trainable ones by default.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss: nn.Module
    make_data: Callable[[], tuple[Tensor, Tensor]]
    params: tuple[str, ...] | None = None

    def make(self, batch_sizes: tuple[int, ...] = ()) -> tuple[EmpiricalRisk, nn.Module, Tensor, Tensor]:
        """Return risk, model and all data; the risk sees the data in batches of the given sizes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = self.make_model().double()
            X, y = self.make_data()
        data: Any = (
            list(zip(X.split(list(batch_sizes)), y.split(list(batch_sizes)), strict=True)) if batch_sizes else (X, y)
        )
        return EmpiricalRisk(model, self.loss, data, params=self.params), model, X, y

    def __str__(self) -> str:
        return self.name


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def frozen_mlp() -> nn.Module:
    model = mlp()
    model.get_parameter("0.weight").requires_grad_(False)
    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).eval()


class Recurrent(nn.Module):
    """A recurrent network that predicts from its last state."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        result: Tensor = self.head(states[:, -1])
        return result


class Transformer(nn.Module):
    """A transformer layer that predicts a label per position, from tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(self.embedding(tokens))).transpose(1, 2)
        return result


class Tied(nn.Module):
    """A network with two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


class Padded(nn.Module):
    """An embedding whose padding row has no gradient, with a second use in which the row has one."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2, padding_idx=padding)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.embedding(tokens)) @ self.embedding.weight.T


def labels(*shape: int) -> Tensor:
    return torch.randint(3, shape)


PROBLEMS = [
    Problem("mlp-mse", mlp, nn.MSELoss(), lambda: (normal(5, 3), normal(5, 3))),
    Problem("mlp-ce", mlp, nn.CrossEntropyLoss(), lambda: (normal(5, 3), labels(5))),
    Problem("mlp-ce-sum", mlp, nn.CrossEntropyLoss(reduction="sum"), lambda: (normal(5, 3), labels(5))),
    Problem("mlp-subset", mlp, nn.CrossEntropyLoss(), lambda: (normal(5, 3), labels(5)), params=("2.weight", "0.bias")),
    Problem("mlp-frozen", frozen_mlp, nn.CrossEntropyLoss(), lambda: (normal(5, 3), labels(5))),
    Problem("tied", Tied, nn.CrossEntropyLoss(), lambda: (normal(5, 3), labels(5))),
    Problem("cnn", cnn, nn.CrossEntropyLoss(), lambda: (normal(4, 1, 4, 4), labels(4))),
    Problem("rnn", lambda: Recurrent(nn.RNN), nn.MSELoss(), lambda: (normal(4, 3, 2), normal(4, 2))),
    Problem("lstm", lambda: Recurrent(nn.LSTM), nn.MSELoss(), lambda: (normal(4, 3, 2), normal(4, 2))),
    Problem("gru", lambda: Recurrent(nn.GRU), nn.MSELoss(), lambda: (normal(4, 3, 2), normal(4, 2))),
    Problem("padding", lambda: Padded(0), nn.MSELoss(), lambda: (torch.randint(3, (4, 3)), normal(4, 3, 3))),
    Problem("padding-last", lambda: Padded(-1), nn.MSELoss(), lambda: (torch.randint(3, (4, 3)), normal(4, 3, 3))),
    Problem("transformer", Transformer, nn.CrossEntropyLoss(), lambda: (torch.randint(5, (4, 3)), labels(4, 3))),
]

OPERATORS: dict[str, Callable[..., Any]] = {
    "hessian": Hessian,
    "ggn": GGN,
    "type-2": lambda risk, **kw: Fisher(risk, "type-2", **kw),
    "empirical": lambda risk, **kw: Fisher(risk, "empirical", **kw),
}
