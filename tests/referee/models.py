"""Small models and data of the referee, with the same numbers on every machine.

All numbers are uniform and drawn in float64, since PyTorch's normal numbers depend on instructions of the processor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import kfs

TOKENS = 6
IGNORED = -100


class Transformer(nn.Module):
    """A transformer layer, averaged over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, positions, 4]` to `[batch, 3]`."""
        y: Tensor = self.head(self.layer(x).mean(1))
        return y


class Recurrent(nn.Module):
    """An LSTM and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, times, 3]` to `[batch, 2]`."""
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


class Tokens(nn.Module):
    """An embedding, a normalization and a linear layer at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, positions]` to `[batch, positions, TOKENS]`."""
        y: Tensor = self.head(torch.tanh(self.norm(self.embedding(x))))
        return y


class Tied(nn.Module):
    """A language model whose embedding is also its last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, positions]` to `[batch, positions, TOKENS]`."""
        return F.linear(torch.tanh(self.hidden(self.embedding(x))), self.embedding.weight)


class Padded(nn.Module):
    """Attention over the positions in `attention_mask`, with one prediction per position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, TOKENS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map `[batch, positions]` to `[batch, positions, TOKENS]`."""
        h = self.embedding(input_ids)
        h = h + self.attention(h, h, h, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        y: Tensor = self.head(h)
        return y


class PartlyCovered(nn.Module):
    """A model with a matrix exponential of a parameter, which KFAC does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.turn = nn.Parameter(torch.zeros(3, 3))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, 3]` to `[batch, 3]`."""
        y: Tensor = self.out(torch.tanh(self.first(x))) @ torch.linalg.matrix_exp(self.turn - self.turn.T)
        return y


def mlp(outputs: int = 3) -> nn.Module:
    """Return two linear layers with a tanh between them."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def cnn() -> nn.Module:
    """Return two convolutions, the second with groups and a stride, and a linear layer."""
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 2, stride=2, groups=2)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))


_device = [torch.device("cpu")]  # device of all models and data


def run_on(device: str) -> None:
    """Make all models and data on a device from now on; random numbers are drawn on the CPU."""
    _device[0] = torch.device(device)


def used_device() -> torch.device:
    """Return the device of all models and data."""
    return _device[0]


def uniform(*shape: int, seed: int) -> Tensor:
    """Return float64 numbers between -1 and 1."""
    drawn = torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1).to(_device[0])


def labels(classes: int, *shape: int, seed: int) -> Tensor:
    """Return labels from 0 to `classes - 1`."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed)).to(_device[0])


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return the model in float64, with all parameters drawn by `uniform`; norm scales stay near one."""
    model = model.double().to(_device[0])
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            width = p[0].numel() if p.ndim > 1 else 9
            center = 1.0 if bool((p == 1).all()) else 0.0
            p.copy_(center + 1.5 / width**0.5 * uniform(*p.shape, seed=100 * seed + place))
    return model


def split(X: Tensor, y: Tensor, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return batches of data."""
    return list(zip(X.split(size), y.split(size), strict=True))


def mlp_risk(num_data: int = 7, seed: int = 0, model: nn.Module | None = None) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of an MLP."""
    X, y = uniform(num_data, 3, seed=seed + 1), labels(3, num_data, seed=seed + 2)
    return kfs.EmpiricalRisk(filled(mlp(), seed) if model is None else model, nn.CrossEntropyLoss(), split(X, y))


def cnn_risk(num_data: int = 6) -> kfs.EmpiricalRisk:
    """Return the square loss of a CNN."""
    X, y = uniform(num_data, 2, 4, 4, seed=1), uniform(num_data, 2, seed=2)
    return kfs.EmpiricalRisk(filled(cnn()), nn.MSELoss(), split(X, y))


def transformer_risk(num_data: int = 6) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of a transformer layer."""
    X, y = uniform(num_data, 3, 4, seed=1), labels(3, num_data, seed=2)
    return kfs.EmpiricalRisk(filled(Transformer()), nn.CrossEntropyLoss(), split(X, y))


def recurrent_risk(num_data: int = 6) -> kfs.EmpiricalRisk:
    """Return the square loss of an LSTM."""
    X, y = uniform(num_data, 4, 3, seed=1), uniform(num_data, 2, seed=2)
    return kfs.EmpiricalRisk(filled(Recurrent()), nn.MSELoss(reduction="sum"), split(X, y))


def token_data(num_data: int = 6) -> tuple[Tensor, Tensor]:
    """Return tokens, and labels, some of which are ignored."""
    X, y = labels(TOKENS, num_data, 4, seed=1), labels(TOKENS, num_data, 4, seed=2)
    y[::2, 0] = IGNORED
    return X, y


def tokens_risk(num_data: int = 6) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of a model with embedding and LayerNorm."""
    return kfs.EmpiricalRisk(filled(Tokens()), kfs.losses.TokenCrossEntropy(), split(*token_data(num_data)))


def tied_risk(num_data: int = 6) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of a model with tied weights, which predicts next tokens."""
    X, _ = token_data(num_data)
    return kfs.EmpiricalRisk(filled(Tied()), kfs.losses.TokenCrossEntropy(shift=True), split(X, X))


def padded_risk(num_data: int = 5) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of sequences of different lengths, padded and masked."""
    X, y = labels(TOKENS, num_data, 4, seed=1), labels(TOKENS, num_data, 4, seed=2)
    lengths = torch.tensor([4, 2, 3, 1, 4], device=_device[0]).repeat(num_data)[:num_data]
    mask = (torch.arange(4, device=_device[0]) < lengths.unsqueeze(1)).long()
    y = torch.where(mask > 0, y, IGNORED)
    names = "input_ids", "attention_mask", "labels"
    batches = [dict(zip(names, some, strict=True)) for some in zip(X.split(3), mask.split(3), y.split(3), strict=True)]
    return kfs.EmpiricalRisk(filled(Padded()), kfs.losses.TokenCrossEntropy(), batches)


RISKS: Mapping[str, Callable[..., kfs.EmpiricalRisk]] = {
    "mlp": mlp_risk,
    "cnn": cnn_risk,
    "transformer": transformer_risk,
    "lstm": recurrent_risk,
    "tokens": tokens_risk,
    "tied": tied_risk,
    "padded": padded_risk,
}


def risk_with_loss(loss: Any, model: nn.Module, y: Tensor) -> kfs.EmpiricalRisk:
    """Return the risk of a model with three inputs, for as many examples as there are targets."""
    return kfs.EmpiricalRisk(model, loss, split(uniform(len(y), 3, seed=1), y))
