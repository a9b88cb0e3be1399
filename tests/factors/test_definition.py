"""Factors against their literal definition, with many examples and many shared positions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.basics.reduction_factors import reduction_factor
from kfs.factors import KFAC
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition
from tests.operators.contract import close

SHARING = ("expand", "reduce")


class Twice(nn.Module):
    """A layer that is called twice, with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        x = torch.cat([x, self.layer(x[:, :1])], dim=1)
        result: Tensor = self.head(x.tanh()).sum(1)
        return result


CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "3x3": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 7, 6)),
    "3x3-valid": (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 6, 7)),
    "3x3-same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 6, 6)),
    "even-kernel-same": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 6, 6)),
    "much-padding": (lambda: nn.Conv2d(2, 3, 3, padding=(3, 2)), (2, 5, 6)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 6)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 6)),
    "strided": (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=(2, 1)), (2, 6, 5)),
    "stride-two": (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2), (2, 5, 6)),
    "dilated": (lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2), (2, 8, 8)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 4, 4)),
    "depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3, bias=False), (3, 4, 4)),
    "1x1": (lambda: nn.Conv2d(3, 2, 1), (3, 4, 4)),
    "1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 9)),
    "1d-wide": (lambda: nn.Conv1d(2, 3, 5, padding=1), (2, 16)),
    "3d": (lambda: nn.Conv3d(1, 2, 3, padding=1), (1, 4, 4, 4)),
    "tiny-image": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 2)),
    "kernel-wider-than-image": (lambda: nn.Conv2d(2, 3, 5, padding=2), (2, 3, 9)),
}


def check(model: nn.Module, layer: nn.Module, name: str, X: Tensor, y: Tensor, loss: Any, sharing: Any) -> None:
    """Compare factors from uneven batches with the definition."""
    A, B = definition(model, loss, X, y, layer, sharing, reduction_factor(loss, y))
    sizes = [2, len(X) - 2]
    data = list(zip(X.split(sizes), y.split(sizes), strict=True))
    for batches in (data, (X, y)):
        K = KFAC(EmpiricalRisk(model, loss, batches), sharing=sharing)
        close(K.blocks[name].A.reshape(A.shape), A)
        close(K.blocks[name].B.reshape(B.shape), B)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, sharing: str) -> None:
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer = make().double()
    X = torch.randn(5, *shape, dtype=torch.float64)
    features = layer(X).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2)).double()
    check(
        model,
        layer,
        "0" if layer.bias is not None else "0.weight",
        X,
        torch.randint(2, (5,)),
        nn.CrossEntropyLoss(),
        sharing,
    )


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss()], ids=str)
def test_sequences(loss: nn.Module, sharing: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4), nn.Flatten(), nn.Linear(20, 2)).double()
    X = torch.randn(6, 5, 3, dtype=torch.float64)
    y = torch.randint(2, (6,)) if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(6, 2, dtype=torch.float64)
    check(model, layer, "0", X, y, loss, sharing)


@pytest.mark.parametrize("sharing", SHARING)
def test_calls_are_further_positions(sharing: str) -> None:
    torch.manual_seed(0)
    model = Twice().double()
    X, y = torch.randn(5, 4, 3, dtype=torch.float64), torch.randint(2, (5,))
    check(model, model.layer, "layer", X, y, nn.CrossEntropyLoss(), sharing)


@pytest.mark.parametrize("sharing", SHARING)
def test_one_transposed_convolution_is_a_convolution(sharing: Any) -> None:
    """With stride one, the kernel is mirrored; other strides put zeros between pixels."""
    torch.manual_seed(0)
    X, y = torch.randn(4, 4, 5, 6, dtype=torch.float64), torch.randn(4, 6, 5, 6, dtype=torch.float64)
    for groups in (1, 2):
        straight = nn.Conv2d(4, 6, 3, padding=1, groups=groups).double()
        mirrored = nn.ConvTranspose2d(4, 6, 3, padding=1, groups=groups).double()
        with torch.no_grad():
            W = straight.weight.flip(2, 3).unflatten(0, (groups, -1)).transpose(1, 2)
            mirrored.weight.copy_(W.flatten(0, 1))
            mirrored.get_parameter("bias").copy_(straight.get_parameter("bias"))
        close(mirrored(X), straight(X))
        one, other = (KFAC(EmpiricalRisk(m, nn.MSELoss(), (X, y)), "mc", sharing) for m in (straight, mirrored))
        order = torch.arange(4 // groups * 9).reshape(-1, 3, 3).flip(1, 2).flatten()
        order = torch.cat([order, torch.tensor([len(order)])])
        close(other.blocks["weight"].A, one.blocks["weight"].A[..., order, :][..., order])
        close(other.blocks["weight"].B, one.blocks["weight"].B)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("dims", [1, 2])
def test_strided_transposed_convolutions(dims: int, sharing: Any) -> None:
    """They equal a convolution of an image with zeros between pixels."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2}
    layer = (nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d)(2, 3, 3, **settings).double()
    X = torch.randn(4, 2, *[4] * dims, dtype=torch.float64)
    y = torch.randn_like(layer(X))
    sparse = X.new_zeros(4, 2, *[7] * dims)
    pixels: tuple[Any, ...] = (..., *[slice(None, None, 2)] * dims)
    sparse[pixels] = X
    sparse = nn.functional.pad(sparse, [3, 4] * dims)
    straight = (nn.Conv1d if dims == 1 else nn.Conv2d)(2, 3, 3, dilation=2).double()
    with torch.no_grad():
        straight.weight.copy_(layer.weight.transpose(0, 1).flip(*range(2, 2 + dims)))
        straight.get_parameter("bias").copy_(layer.get_parameter("bias"))
    close(straight(sparse), layer(X))
    K = KFAC(EmpiricalRisk(layer, nn.MSELoss(), (X, y)), sharing=sharing)
    L = KFAC(EmpiricalRisk(straight, nn.MSELoss(), (sparse, y)), sharing=sharing)
    order = torch.cat(
        [
            torch.arange(2 * 3**dims).reshape(2, *[3] * dims).flip(*range(1, 1 + dims)).flatten(),
            torch.tensor([2 * 3**dims]),
        ]
    )
    close(K.blocks["weight"].A, L.blocks["weight"].A[order][:, order])
    close(K.blocks["weight"].B, L.blocks["weight"].B)
