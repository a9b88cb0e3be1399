"""Computations in chunks: patches and gradients of a few examples at a time, wide products by strips."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk
from kfs.basics.reduction_factors import reduction_factor
from kfs.factors import exact_blocks
from tests.factors.definition import definition
from tests.operators.contract import close

SHARING = ("expand", "reduce")
N = 5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Tied(nn.Module):
    """Logits from the table that embeds tokens: two uses of one parameter, one of them by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.table(tokens)).mean(1))
        return nn.functional.linear(x, self.table.weight)[:, :2]


def images(layer: nn.Module, features: int, *shape: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape), layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2))


# By name: a model, and the size of its inputs (empty for tokens).
MODELS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "tokens": (lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 2)), None),
    "tied tokens": (Tied, None),
    "many positions": (
        lambda: nn.Sequential(nn.Unflatten(1, (6, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)),
        12,
    ),
    "more channels than pixels": (lambda: images(nn.Conv1d(2, 6, 2, stride=2), 18, 2, 6), 12),
    "more pixels than channels": (lambda: images(nn.Conv1d(2, 2, 2), 10, 2, 6), 12),
    "groups of channels": (lambda: images(nn.Conv1d(2, 4, 2, groups=2), 20, 2, 6), 12),
    "transposed, more channels than pixels": (lambda: images(nn.ConvTranspose1d(2, 6, 2), 24, 2, 3), 6),
    "transposed, more pixels than channels": (lambda: images(nn.ConvTranspose1d(2, 2, 2), 8, 2, 3), 6),
}


def risk_of(name: str) -> EmpiricalRisk:
    torch.manual_seed(0)
    make, size = MODELS[name]
    X = torch.randint(7, (N, 4)) if size is None else normal(N, size)
    return EmpiricalRisk(make().double(), nn.MSELoss(), (X, normal(N, 2)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_few_data_at_a_time(name: str) -> None:
    """Exact blocks equal those of the GGN, and eigenvalues are the GGN's entries along KFAC's eigenvectors."""
    risk = risk_of(name)
    C, blocks = GGN(risk), exact_blocks(risk)
    for block in KFAC(risk).blocks.values():
        params = block.layout.params
        close(blocks.submatrix(params).to_dense(), C.submatrix(params).to_dense())
    Q = KFAC(risk).eigh()[1].to_dense()
    along = (Q.T @ C.to_dense() @ Q).diagonal()
    close(EKFAC(risk).to_dense(), Q @ along.diag() @ Q.T)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
        lambda: nn.Conv2d(2, 4, 2, groups=2),
        lambda: nn.Conv2d(2, 3, 1, bias=False),
    ],
    ids=["strided", "groups", "pixels"],
)
def test_patches_of_a_few_data_at_a_time(make: Any, sharing: str) -> None:
    torch.manual_seed(0)
    layer = make().double()
    X, y, loss = normal(N, 2, 4, 5), torch.randint(2, (N,)), nn.CrossEntropyLoss()
    features = layer(X).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2)).double()
    check_definition(model, layer, "0" if layer.bias is not None else "0.weight", X, y, loss, sharing)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [130, 200, 300])
def test_wide_factors(size: int, bias: bool, sharing: str) -> None:
    """On a CPU, products of more than 128 columns are computed in strips of 96: two, three and four of them."""
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=bias)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(size, 1), nn.Flatten(), nn.Linear(2, 2)).double()
    X, y = normal(3, 2, size), torch.randint(2, (3,))
    check_definition(model, layer, "0" if bias else "0.weight", X, y, nn.CrossEntropyLoss(), sharing)


def check_definition(
    model: nn.Module, layer: nn.Module, name: str, X: Tensor, y: Tensor, loss: Any, sharing: Any
) -> None:
    """Compare a layer's factors with literal loops over data, positions and vectors."""
    A, B = definition(model, loss, X, y, layer, sharing, reduction_factor(loss, y))
    block = KFAC(EmpiricalRisk(model, loss, (X, y)), sharing=sharing).blocks[name]
    close(block.A.reshape(A.shape), A)
    close(block.B.reshape(B.shape), B)
