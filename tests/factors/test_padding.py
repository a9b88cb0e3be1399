"""Positions that do not count, such as padding of token sequences; several images of one example all count."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk
from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import ModelError
from tests.factors.models import Function
from tests.operators.contract import close

SHARING = ("expand", "reduce")
SIZE = 5  # size of the vocabulary


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def predictions(rows: Tensor) -> Tensor:
    """Predict from all positions `[N, S, 3]`, so that gradients also arrive at padding."""
    weights = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64).unsqueeze(1)
    return (rows * weights).tanh().sum(1)


def table(padding: int) -> nn.Module:
    return Function(lambda m, x: predictions(F.embedding(x, m.W, padding_idx=padding)), W=normal(SIZE, 3))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("padding", [0, 3, SIZE - 1, -1, -2])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_one_token_and_padding(times: int, padding: int, sharing: Any) -> None:
    """If one position of one example counts, KFAC is exact, for any padding around it."""
    risk = EmpiricalRisk(table(padding), nn.MSELoss(), (torch.tensor([[2] + times * [padding % SIZE]]), normal(1, 3)))
    exact = GGN(risk).to_dense()
    for make in (KFAC, EKFAC):
        close(make(risk, sharing=sharing).to_dense(), exact)
    assert exact.norm() > 0.1


@pytest.mark.parametrize("padding", [1, -1])
def test_padding_among_many_data(padding: int) -> None:
    """Both factors against loops over examples, vectors and positions that count."""
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


class Words(nn.Module):
    """Sums, averages or maxima of embeddings, written with `nn.Embedding` or with `nn.EmbeddingBag`."""

    def __init__(self, mode: str, padding: int | None, form: str) -> None:
        super().__init__()
        self.mode, self.padding, self.form = mode, padding, form
        self.W, self.scale = nn.Parameter(normal(SIZE, 3)), nn.Parameter(normal(4))
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        scale = self.scale.expand(x.shape) if self.mode == "weighted sum" else None
        if self.form == "rows":
            return self.head(self.combined(x, scale).tanh())  # type: ignore[no-any-return]
        if self.form == "offsets" and offsets is None:
            offsets = torch.arange(len(x)) * x.shape[1]
            x, scale = x.flatten(), None if scale is None else scale.reshape(-1)
        settings: Any = {"padding_idx": self.padding, "per_sample_weights": scale, "mode": self.mode.split()[-1]}
        return self.head(F.embedding_bag(x, self.W, offsets, **settings).tanh())  # type: ignore[no-any-return]

    def combined(self, x: Tensor, scale: Tensor | None) -> Tensor:
        rows = F.embedding(x, self.W, self.padding)
        counts = torch.ones_like(x, dtype=torch.bool) if self.padding is None else x != self.padding % SIZE
        if self.mode == "max":
            largest = rows.masked_fill(~counts.unsqueeze(2), -torch.inf).max(1).values
            return torch.where(counts.any(1, keepdim=True), largest, 0.0)
        rows = rows if scale is None else rows * scale.unsqueeze(2)
        total = (rows * counts.unsqueeze(2)).sum(1)
        return total / counts.sum(1, keepdim=True).clamp(min=1) if self.mode == "mean" else total


@pytest.mark.parametrize("form", ["bags", "offsets"])
@pytest.mark.parametrize("padding", [None, -2])
@pytest.mark.parametrize("mode", ["sum", "weighted sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, padding: int | None, form: str) -> None:
    """They agree with written-out bags: predictions, KFAC, EKFAC, GGN."""
    torch.manual_seed(0)
    X, y = torch.randint(SIZE, (5, 4)), normal(5, 2)
    X[0, :2] = 1  # one word twice
    X[1] = 3  # a bag with padding only
    models = [Words(mode, padding, one) for one in ("rows", form)]
    models[1].load_state_dict(models[0].state_dict())
    plain, bags = (EmpiricalRisk(model, nn.MSELoss(), (X, y)) for model in models)
    close(models[1](X), models[0](X))
    close(GGN(bags).to_dense(), GGN(plain).to_dense())
    for make in (KFAC, EKFAC):
        for sharing in SHARING:
            found, expected = (make(one, sharing=sharing) for one in (bags, plain))  # type: ignore[arg-type]
            # Positions of a copied parameter are separate positions.
            names = [name for name in found.domain.shapes if name != "scale" or form == "bags"]
            close(found.submatrix(names).to_dense(), expected.submatrix(names).to_dense())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_several_lengths(mode: str) -> None:
    """Offsets mark their starts; rows are those of bags that are padded to one length."""
    torch.manual_seed(0)
    tokens, y = torch.tensor([1, 1, 0, 2, 4, 0]), normal(4, 2)
    padded = torch.tensor([[1, 1, 0], [3, 3, 3], [2, 4, 3], [0, 3, 3]])
    ragged, rows = Words(mode, None, "offsets"), Words(mode, 3, "rows")
    ragged.load_state_dict(rows.state_dict())
    data = [((tokens, torch.tensor([0, 3, 3, 5])), y)]
    one = EmpiricalRisk(ragged, nn.MSELoss(), data, params=["W", "head.weight"])
    other = EmpiricalRisk(rows, nn.MSELoss(), (padded, y), params=["W", "head.weight"])
    close(KFAC(one).to_dense(), KFAC(other).to_dense())
    close(EKFAC(one).to_dense(), EKFAC(other).to_dense())
    for wrong in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model = Function(lambda m, x, more=wrong: F.embedding_bag(x, m.W, mode="sum", **more), W=normal(SIZE, 2))
        with pytest.raises(ModelError, match="changes its gradient or its weight"):
            KFAC(EmpiricalRisk(model, nn.MSELoss(), (padded, y)))
    no_offsets = Function(lambda m, x: F.embedding_bag(x.flatten(), m.W).expand(4, 2), W=normal(SIZE, 2))
    with pytest.raises(ValueError, match="offsets"):
        GGN(EmpiricalRisk(no_offsets, nn.MSELoss(), (padded, y))) @ torch.ones(2 * SIZE).double()


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(1, 2, 3), lambda: nn.Conv1d(2, 2, 2, groups=2, stride=2)])
def test_all_images_of_a_datum_count(make: Any) -> None:
    """If all patches are equal, `reduce` is exact for one example: gradients are summed over any number of images."""
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
    else:  # groups of channels are independent
        close(K.to_dense(), torch.where(K.to_dense() != 0, exact, 0.0))
        assert (K.to_dense() != 0).double().mean() > 0.3
