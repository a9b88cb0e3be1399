"""Positions that do not count: padding of token sequences, and several images of one datum that all count."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk
from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.reduction_factors import reduction_factor
from tests.kfac.models import Function
from tests.operators.contract import close

SHARING = ("expand", "reduce")
SIZE = 5  # of the vocabulary


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def predictions(rows: Tensor) -> Tensor:
    """Predict from all positions `[N, S, 3]`, so that gradients also arrive at those that are padding."""
    weights = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64).unsqueeze(1)
    return (rows * weights).tanh().sum(1)


def table(padding: int) -> nn.Module:
    return Function(lambda m, x: predictions(F.embedding(x, m.W, padding_idx=padding)), W=normal(SIZE, 3))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("padding", [0, 3, SIZE - 1, -1, -2])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_one_token_and_padding(times: int, padding: int, sharing: Any) -> None:
    """If one position of one datum counts, KFAC is exact, whatever stands around it."""
    risk = EmpiricalRisk(table(padding), nn.MSELoss(), (torch.tensor([[2] + times * [padding % SIZE]]), normal(1, 3)))
    exact = GGN(risk).to_dense()
    for make in (KFAC, EKFAC):
        close(make(risk, sharing=sharing).to_dense(), exact)
    assert exact.norm() > 0.1


@pytest.mark.parametrize("padding", [1, -1])
def test_padding_among_many_data(padding: int) -> None:
    """Both factors against loops over data, vectors and positions that count."""
    X, y, loss = torch.randint(SIZE, (6, 4)), normal(6, 3), nn.MSELoss()
    model = table(padding)
    counts = X.ne(padding % SIZE)
    assert 0 < counts.sum() < counts.numel()
    A, B = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for n in range(len(X)):
        rows = model.get_parameter("W").detach()[X[n : n + 1]].requires_grad_()
        f = predictions(rows)[0]
        for s in range(4):
            if not counts[n, s]:
                continue
            A[X[n, s]] += reduction_factor(loss, y)
            for v in hessian_factor(loss, f.detach(), y[n]).T:
                (g,) = torch.autograd.grad(f @ v, rows, retain_graph=True)
                B += torch.outer(g[0, s], g[0, s]) / counts.sum()
    block = KFAC(EmpiricalRisk(model, loss, (X, y))).blocks["W"]
    close(block.A, A)
    close(block.B, B)


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(1, 2, 3), lambda: nn.Conv1d(2, 2, 2, groups=2, stride=2)])
def test_all_images_of_a_datum_count(make: Any) -> None:
    """With equal patches everywhere, `reduce` is exact for one datum: gradients are summed, whatever their number."""
    layer = make()
    channels, num_images = layer.in_channels, 3
    X = torch.arange(1.0, 1 + channels).reshape(1, channels, 1).expand(1, channels, 6 * num_images).double()

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            features = num_images * layer(X[:, :, :6].float()).numel()
            self.head = nn.Linear(features, 2).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            images = x.unflatten(2, (num_images, 6)).transpose(1, 2).flatten(0, 1)
            result: Tensor = self.head(self.layer(images).tanh().reshape(len(x), -1))
            return result

    risk = EmpiricalRisk(Images().double(), nn.MSELoss(), (X, normal(1, 2)))
    K = KFAC(risk, sharing="reduce")
    exact = GGN(risk).to_dense()
    if layer.groups == 1:
        close(K.to_dense(), exact)
    else:  # groups of channels do not see each other
        close(K.to_dense(), torch.where(K.to_dense() != 0, exact, 0.0))
        assert (K.to_dense() != 0).double().mean() > 0.3
