"""Half precision: inputs and gradients have the precision of the model; sums over them are computed in float32.

Oracles are float64 sums over the same half-precision numbers, so that only the summation is tested.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, KFAC, EmpiricalRisk, load
from tests.factors.models import Function

HALF = [torch.bfloat16, torch.float16]
# Sums of some hundred positive numbers in float32: a hundred times its eps of 1.2e-7. Half precision is off by 4e-4
# (float16) or 4e-3 (bfloat16) as soon as one number is rounded.
FLOAT32 = 1e-5


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert (actual.double() - expected).norm() < FLOAT32 * expected.norm()


@pytest.mark.parametrize("dtype", HALF)
def test_sums_over_positions(dtype: torch.dtype) -> None:
    """`reduce` adds up inputs and gradients of 100 positions, and then takes outer products of the sums."""
    X, y = torch.rand(6, 100, 3).to(dtype), torch.randn(6, 2).to(dtype)
    model = nn.Linear(3, 2).to(dtype)
    risk = EmpiricalRisk(nn.Sequential(model, Mean()), nn.MSELoss(reduction="sum"), (X, y))
    block = KFAC(risk, sharing="reduce").blocks["0"]
    sums = torch.cat([X.double().sum(1), torch.full((6, 1), 100.0, dtype=torch.float64)], 1)
    close(block.A, 2 * sums.T @ sums)  # the loss is twice the criterion
    # For the mean of all positions, gradients are 1 / 100 in the model's precision, for each of two outputs.
    each = float(torch.tensor(1.0).to(dtype).div(100))
    close(block.B, each**2 * torch.eye(2, dtype=torch.float64))


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@pytest.mark.filterwarnings("ignore:Factors wider")
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e-3])
@pytest.mark.parametrize("dtype", HALF)
def test_squares(dtype: torch.dtype, scale: float) -> None:
    """Diagonals are sums of squares, which overflow or underflow in float16 if numbers are large or small."""
    X, y = (scale * torch.randn(50, 4)).to(dtype), torch.randn(50, 2).to(dtype)
    risk = EmpiricalRisk(nn.Linear(4, 2, bias=False).to(dtype), nn.MSELoss(reduction="sum"), (X, y))
    block = KFAC(risk, max_dim=1).blocks["weight"]
    close(block.A, 2 * X.double().square().sum(0))
    close(block.B, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["linear", "wide", "convolution", "groups"])
def test_outer_products(kind: str, dtype: torch.dtype) -> None:
    """Dense factors of inputs `[N, ...]`, also by strips, by shifts of images, and in groups of channels."""
    X, layer, expected = cases(kind, dtype)
    model = nn.Sequential(layer, nn.Flatten()).to(dtype)
    y = torch.zeros_like(model(X))
    close(
        KFAC(EmpiricalRisk(model, nn.MSELoss(reduction="sum"), (X, y)), "forward-only").blocks["0.weight"].A, expected
    )


def cases(kind: str, dtype: torch.dtype) -> tuple[Tensor, nn.Module, Tensor]:
    """Return inputs, a layer without bias, and twice the sum of outer products in float64."""
    if kind in {"linear", "wide"}:
        size = 5 if kind == "linear" else 140
        X = torch.rand(40, size).to(dtype)
        return X, nn.Linear(size, 2, bias=False), 2 * X.double().T @ X.double()
    groups = 2 if kind == "groups" else 1
    X = torch.rand(8, 2, 6, 6).to(dtype)
    patches = F.unfold(X.double(), 3).unflatten(1, (groups, -1))  # [N, G, D, P]
    A = 2 * torch.einsum("ngip,ngjp->gij", patches, patches)
    return X, nn.Conv2d(2, 2, 3, bias=False, groups=groups), A if groups > 1 else A[0]


def test_autocast_sees_what_is_multiplied() -> None:
    """Under autocast, a linear layer multiplies inputs in bfloat16, and its factor has the rounded inputs."""
    X, y = torch.randn(64, 3), torch.randn(64, 2)
    risk = EmpiricalRisk(nn.Linear(3, 2, bias=False), nn.MSELoss(reduction="sum"), (X, y))
    with torch.autocast("cpu", torch.bfloat16):
        A = KFAC(risk).blocks["weight"].A
    rounded = X.bfloat16().double()
    close(A, 2 * rounded.T @ rounded)
    exact = 2 * X.double().T @ X.double()
    assert (A.double() - exact).norm() > 10 * FLOAT32 * exact.norm()


def test_autocast_multiplies_vectors_in_half_precision() -> None:
    """The same for inner products with a parameter."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w).unsqueeze(1)

    X, y = torch.rand(5, 3), torch.rand(5, 1)
    with torch.autocast("cpu", torch.bfloat16):
        K = KFAC(EmpiricalRisk(Products(), nn.MSELoss(), (X, y)))
    seen = X.bfloat16().float()
    torch.testing.assert_close(K.blocks["w"].A, 2 * seen.T @ seen / 5)


def test_autocast_and_gradients_in_float32() -> None:
    """An embedding's output stays in float32 under autocast; its gradients are added in the precision of products."""
    X, y = torch.randint(5, (30, 1)), torch.randn(30, 3)
    scale = torch.randn(30, 3)  # predictions are the embeddings times it, example by example
    model = Function(lambda m, x: F.embedding(x[:, 0], m.W) * scale, W=torch.randn(5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        B: Any = KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y))).blocks["W"].B
    g = scale.bfloat16().double()  # one of three vectors sees one coordinate each
    close(B, torch.diag(g.square().sum(0)) / 30)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("how", ["update", "merge"])
def test_factors_that_are_stored_in_half_precision_and_added(dtype: torch.dtype, how: str) -> None:
    """Each part is rounded once and their sum once more: three roundings of half an eps each."""
    X, y = torch.rand(40, 4), torch.randn(40, 2)
    model, loss = nn.Linear(4, 2, bias=False), nn.MSELoss(reduction="sum")
    one, other = (EmpiricalRisk(model, loss, (X[part], y[part])) for part in (slice(0, 30), slice(30, 40)))
    K = KFAC(one, factor_dtype=dtype)
    K = K.update(other) if how == "update" else K.merge(KFAC(other, factor_dtype=dtype))
    exact = 2 * X.double().T @ X.double()
    error = (K.blocks["weight"].A.double() - exact).abs() / exact
    assert error.max() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALF)
def test_more_data_for_factors_that_were_rounded(dtype: torch.dtype) -> None:
    """Terms are in float32, and are not rounded before they are added: only the sum is."""
    X, y = torch.rand(40, 30), torch.randn(40, 2)
    model, loss = nn.Linear(30, 2, bias=False), nn.MSELoss(reduction="sum")
    K, more = (KFAC(EmpiricalRisk(model, loss, (X[part], y[part]))) for part in (slice(0, 20), slice(20, 40)))
    rounded = K.blocks["weight"].A.to(dtype)
    expected = (rounded.double() + more.blocks["weight"].A.double()).to(dtype)
    K.to(dtype=dtype).update(EmpiricalRisk(model, loss, (X[20:], y[20:])))
    actual = K.blocks["weight"].A
    assert actual.dtype == dtype
    # A sum in float32 may fall on the other side of a tie; rounded twice, one of ten or so would differ.
    assert (actual != expected).sum() < 0.01 * actual.numel()


@pytest.mark.parametrize("dtype", HALF)
def test_sums_beside_a_bias(dtype: torch.dtype) -> None:
    """The bias' column of the input-based factor is the sum of all inputs."""
    X, y = torch.rand(300, 3).to(dtype), torch.randn(300, 2).to(dtype)
    risk = EmpiricalRisk(nn.Linear(3, 2).to(dtype), nn.MSELoss(reduction="sum"), (X, y))
    close(KFAC(risk).blocks["weight"].A[-1], 2 * torch.cat([X.double().sum(0), torch.tensor([300.0])]))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_one_datum_over_positions(dtype: torch.dtype) -> None:
    """EKFAC adds up the gradients of a shift's 100 positions, and squares the sums afterwards."""
    X, y = torch.rand(6, 100, 3).to(dtype), torch.randn(6, 3).to(dtype)
    model = Function(lambda m, x: (x + m.p).mean(1), p=torch.randn(3).to(dtype))
    found = EKFAC(EmpiricalRisk(model, nn.MSELoss(reduction="sum"), (X, y))).trace()
    each = float(torch.tensor(1.0).to(dtype).div(100))
    expected = 2 * 6 * 3 * (100 * each) ** 2  # the loss is twice the criterion; six data, three outputs
    assert abs(float(found) - expected) < FLOAT32 * expected


@pytest.mark.parametrize("dtype", HALF)
def test_sums_of_patches_beside_a_bias(dtype: torch.dtype) -> None:
    """Patches of one pixel: their sum is that of the image."""
    X, y = torch.rand(6, 3, 100).to(dtype), torch.randn(6, 2, 100).to(dtype)
    risk = EmpiricalRisk(nn.Conv1d(3, 2, 1).to(dtype), nn.MSELoss(reduction="sum"), (X, y))
    close(KFAC(risk).blocks["weight"].A[-1], 2 * torch.cat([X.double().sum((0, 2)), torch.tensor([600.0])]))


def test_rounded_factors_stay_rounded(tmp_path: Path) -> None:
    """In a better precision they are singular up to the round-off that they have, also in sums and from files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 10))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randn(12, 40), torch.randint(10, (12,))))
    K = KFAC(risk).to(dtype=torch.float64)
    K.save(tmp_path / "factors.safetensors")
    again = load(tmp_path / "factors.safetensors")
    assert isinstance(again, KFAC)
    for one in (K, again, KFAC(risk).to(dtype=torch.float64).merge(K.shared())):
        assert one.blocks["0"].structure().A.eps == torch.finfo(torch.float32).eps
        assert one.inverse(damping=1e-8).logdet().isfinite()
