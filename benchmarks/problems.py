"""The models that benchmarks measure: an MLP, a CNN and a small GPT, in float32, with the data of one batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """A model in evaluation mode, cross-entropy, and one batch."""

    name: str
    model: nn.Module
    X: Tensor
    y: Tensor


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform every position."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, d))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """A small language model; logits have their class axis second."""

    def __init__(self, vocabulary: int = 64, width: int = 64, heads: int = 4, depth: int = 2, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token at every position."""
        result: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))
        return result.transpose(1, 2)


def problems(scale: int = 1, device: str = "cpu") -> list[Problem]:
    """Return all problems on a device; a larger `scale` divides batch sizes, for tests."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    conv = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    conv += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    cnn = nn.Sequential(*conv, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))
    made = [
        Problem("MLP", mlp, torch.randn(256 // scale, 784), torch.randint(10, (256 // scale,))),
        Problem("CNN", cnn, torch.randn(64 // scale, 3, 32, 32), torch.randint(10, (64 // scale,))),
        Problem("GPT", GPT(), torch.randint(64, (16 // scale, 32)), torch.randint(64, (16 // scale, 32))),
    ]
    return [Problem(p.name, p.model.to(device), p.X.to(device), p.y.to(device)) for p in made]
