"""Random vectors to ask an operator with: deterministic given a seed, the same on every device."""

from typing import Literal

import torch
from torch import Tensor

from kfs.errors import ShapeError

Probes = Literal["rademacher", "normal"]


def rademacher(size: int, num: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return `num` columns of independent signs, `[size, num]`. The global random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (num, size), generator=generator).T
    return (2 * signs - 1).to(device, dtype)


def normal(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a vector of independent standard normal numbers, on the CPU. The global random state is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)


def random_columns(probes: Probes, size: int, num: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return `num` columns of independent numbers with mean zero and variance one, `[size, num]`.

    Args:
        probes: `"rademacher"` for signs, `"normal"` for standard normal numbers.
        size: Rows.
        num: Columns.
        dtype: Dtype of the result.
        device: Device of the result.
        seed: Equal seeds give equal columns.

    Raises:
        ShapeError: If there are no such probes.
    """
    if probes == "rademacher":
        return rademacher(size, num, dtype, device, seed)
    if probes == "normal":
        return normal(num * size, dtype, seed).reshape(num, size).T.to(device)
    raise ShapeError(f"probes is {probes!r}.", "Choose 'rademacher' or 'normal'.")
