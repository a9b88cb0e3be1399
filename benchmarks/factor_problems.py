"""The models of the factor benchmark: an MLP, a ResNet-like CNN and a GPT, with a few batches of data each."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problems import GPT, Block


@dataclass(frozen=True)
class Batches:
    """A model in evaluation mode, cross-entropy, and some batches.

    Attributes:
        name: Its name in tables.
        model: The model.
        data: The batches.
        few_columns: Whether one backpropagated vector per class and position is feasible.
        terms: Number of loss terms per example.
        autocast: The precision of autocast; `None` for the model's own.
        tf32: Whether float32 products may be rounded to TF32.
        large: Whether a batch takes so long that fewer batches and tasks are measured on a GPU.
    """

    name: str
    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    few_columns: bool = True
    terms: int = 1
    autocast: torch.dtype | None = None
    tf32: bool = False
    large: bool = False


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a skip connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.skip = nn.Identity() if stride == 1 else nn.AvgPool2d(2, ceil_mode=True)
        self.more = after - before

    def forward(self, x: Tensor) -> Tensor:
        """Add the input, padded with zeros for new channels."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        skip = nn.functional.pad(self.skip(x), (0, 0, 0, 0, 0, self.more))
        return torch.relu(y + skip)


def cnn() -> nn.Module:
    """Return a network with 11 convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for before, after, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers.append(Residual(before, after, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).eval()


def factor_problems(scale: int = 1, device: str = "cpu") -> list[Batches]:
    """Return all problems on a device; a larger `scale` divides batch sizes, for tests."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    gpt = GPT(vocabulary=1000, width=256, heads=8, depth=4, length=128)

    def batches(count: int, size: int, x: Any, y: Any) -> list[tuple[Tensor, Tensor]]:
        size //= scale
        return [(x(size).to(device), y(size).to(device)) for _ in range(count)]

    def label(n: int) -> Tensor:
        return torch.randint(10, (n,))

    def tokens(n: int) -> Tensor:
        return torch.randint(1000, (n, 128))

    return [
        Batches("MLP", mlp.to(device), batches(4, 512, lambda n: torch.randn(n, 784), label)),
        Batches("CNN", cnn().to(device), batches(2, 128, lambda n: torch.randn(n, 3, 32, 32), label)),
        Batches("GPT", gpt.to(device), batches(2, 8, tokens, tokens), few_columns=False, terms=128),
    ]


class ViT(nn.Module):
    """The encoder of a ViT-B/16 with a linear head on the mean token; it takes embedded tokens `[N, 197, 768]`."""

    def __init__(self, depth: int = 12, width: int = 768, heads: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Encode and classify."""
        result: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return result


def vit(scale: int = 1, device: str = "cuda") -> list[Batches]:
    """Return the encoder with a batch of 64, in three precisions."""
    torch.manual_seed(0)
    size = 64 // scale
    model = (ViT() if scale == 1 else ViT(2, 32, 4, 10)).to(device).eval()
    width = model.norm.normalized_shape[0]
    data = [(torch.randn(size, 197, width, device=device), torch.randint(10, (size,), device=device))]
    return [
        Batches("ViT float32", model, data, few_columns=False, large=True),
        Batches("ViT TF32", model, data, few_columns=False, tf32=True, large=True),
        Batches("ViT bf16 autocast", model, data, few_columns=False, autocast=torch.bfloat16, large=True),
    ]
