"""Random vectors to ask an operator with: deterministic given a seed, the same on every device."""

import torch
from torch import Tensor


def rademacher(size: int, num: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return `num` columns of independent signs, `[size, num]`. The global random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (num, size), generator=generator).T
    return (2 * signs - 1).to(device, dtype)


def normal(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a vector of independent standard normal numbers, on the CPU. The global random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)
