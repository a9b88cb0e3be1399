"""Small models for every parametric operation. Each takes vectors (or tokens) and has one position per example."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Function(nn.Module):
    """A module from parameters and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **params: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, p in params.items():
            setattr(self, name, nn.Parameter(p))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Apply(nn.Module):
    """A module from a function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(middle: nn.Module, inner: int = 4, outer: int = 4) -> nn.Module:
    """Put a module between two layers that are not tracked."""
    return nn.Sequential(Frozen(nn.Linear(3, inner)), nn.Tanh(), middle, nn.Tanh(), Frozen(nn.Linear(outer, 2)))


class Frozen(nn.Module):
    """A layer that does not require gradients."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


def image(*shape: int) -> nn.Module:
    return Apply(lambda x: x.reshape(len(x), *shape))


def conv(layer: nn.Module, *shape: int) -> nn.Module:
    """Put a convolution with one output position between two layers."""
    size = prod(shape)
    channels = layer.out_channels
    middle = nn.Sequential(image(*shape), layer, nn.Flatten())
    return between(middle, size, channels)  # type: ignore[arg-type]


class PackedAttention(nn.Module):
    """Attention of one token to itself, with weights equal to one: only value and output projections matter."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.attention(x, x, x)[0].squeeze(1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model in which every parameter is used at one position per example, so that KFAC is exact for one example."""

    name: str
    make: Callable[[], nn.Module]
    tokens: bool = False
    reduce_only: bool = False

    def __str__(self) -> str:
        return self.name


ONE_POSITION = [
    Case("linear", lambda: between(nn.Linear(4, 4))),
    Case("linear-no-bias", lambda: between(nn.Linear(4, 4, bias=False))),
    Case("addmm", lambda: between(Function(lambda m, x: torch.addmm(m.b, x, m.W), W=r(4, 4), b=r(4)))),
    Case("matmul", lambda: between(Function(lambda m, x: x @ m.W, W=r(4, 4)))),
    Case("matmul-transposed", lambda: between(Function(lambda m, x: torch.matmul(x, m.W.T), W=r(4, 4)))),
    Case("matmul-left", lambda: between(Function(lambda m, x: (m.W @ x.T).T, W=r(4, 4)))),
    Case("matmul-columns", lambda: between(Function(lambda m, x: (m.W @ x.unsqueeze(2)).squeeze(2), W=r(4, 4)))),
    Case("einsum", lambda: between(Function(lambda m, x: torch.einsum("ni,io->no", x, m.W), W=r(4, 4)))),
    Case("einsum-transposed", lambda: between(Function(lambda m, x: torch.einsum("oi,ni->no", m.W, x), W=r(4, 4)))),
    Case(
        "einsum-heads",
        lambda: between(Function(lambda m, x: torch.einsum("ni,ihk->nhk", x, m.W).flatten(1), W=r(4, 2, 2))),
    ),
    Case("matmul-vector", lambda: between(Function(lambda m, x: (x @ m.w).unsqueeze(1) * x.detach(), w=r(4)))),
    Case(
        "einsum-vector",
        lambda: between(Function(lambda m, x: torch.einsum("ni,i->n", x, m.w).unsqueeze(1) * x.detach(), w=r(4))),
    ),
    Case("matmul-bias", lambda: between(Function(lambda m, x: x @ m.W + m.b, W=r(4, 4), b=r(4)))),
    Case("scale", lambda: between(Function(lambda m, x: m.s * x, s=r(4)))),
    Case("scale-in-place", lambda: between(Function(lambda m, x: (x + 0).mul_(m.s), s=r(4)))),
    Case("scalar", lambda: between(Function(lambda m, x: x * m.s, s=r())), reduce_only=True),
    Case("shift", lambda: between(Function(lambda m, x: x - m.b, b=r(1, 4)))),
    Case("divide", lambda: between(Function(lambda m, x: x / m.s, s=r(4)))),
    Case("where", lambda: between(Function(lambda m, x: torch.where(x > 0, m.s, x), s=r(4)))),
    Case("class-token", lambda: between(Function(_class_token, t=r(1, 1, 4)))),
    Case("class-token-repeated", lambda: between(Function(_repeated_token, t=r(1, 1, 4)))),
    Case("prelu", lambda: between(nn.PReLU(4))),
    Case("prelu-one-slope", lambda: between(nn.PReLU()), reduce_only=True),
    Case("bilinear", lambda: between(Function(lambda m, x: F.bilinear(x, x.tanh(), m.W, m.b), W=r(4, 4, 4), b=r(4)))),
    Case("layer-norm", lambda: between(nn.LayerNorm(4))),
    Case("rms-norm", lambda: between(nn.RMSNorm(4))),
    Case("group-norm", lambda: between(nn.GroupNorm(2, 4))),
    Case("batch-norm", lambda: between(nn.BatchNorm1d(4)).eval()),
    Case("conv1d", lambda: conv(nn.Conv1d(2, 4, 3), 2, 3)),
    Case("conv2d", lambda: conv(nn.Conv2d(2, 4, 2), 2, 2, 2)),
    Case("conv3d", lambda: conv(nn.Conv3d(2, 4, 2, bias=False), 2, 2, 2, 2)),
    Case("conv2d-padded", lambda: conv(nn.Conv2d(2, 4, 3, padding=1, stride=2), 2, 2, 2)),
    Case("conv-transpose1d", lambda: conv(nn.ConvTranspose1d(2, 4, 3, padding=1), 2, 1)),
    Case("conv-transpose2d", lambda: conv(nn.ConvTranspose2d(2, 4, 3, padding=1), 2, 1, 1)),
    Case("conv-transpose3d", lambda: conv(nn.ConvTranspose3d(2, 4, 1), 2, 1, 1, 1)),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), Frozen(nn.Linear(4, 2))), tokens=True),
    Case("embedding-bag", lambda: nn.Sequential(nn.EmbeddingBag(5, 4), Frozen(nn.Linear(4, 2))), tokens=True),
    Case("functional", lambda: between(Function(lambda m, x: F.linear(x, m.W, m.b), W=r(4, 4), b=r(4)))),
    Case("rows", lambda: between(Function(lambda m, x: torch.cat([x @ m.W[:2].T, x @ m.W[2:].T], 1), W=r(4, 4)))),
]


def _class_token(m: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([m.t.expand(len(x), -1, -1), x.unsqueeze(1)], dim=1)
    return tokens.tanh().prod(1)


def _repeated_token(m: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([m.t.repeat(len(x), 1, 1), x.unsqueeze(1)], dim=1)
    return tokens.tanh().prod(1)
