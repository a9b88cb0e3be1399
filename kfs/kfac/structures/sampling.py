"""Draws from normal distributions whose covariances are blocks."""

import torch
from torch import Tensor

from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.structure import Structure


def colored(root: Structure, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw from normal distributions with the squares of blocks as covariances, `[stack, num_samples, d_B, d_A]`.

    Numbers are drawn on the CPU, so that they are the same for every device.
    """
    shape = (len(root), num_samples, root.rows, root.columns)
    noise = torch.randn(shape, dtype=root.like.dtype, generator=generator).to(root.like.device)
    if isinstance(root, Eigenbasis):
        # Noise looks the same in every basis, so that there is no need to go to that of the block.
        return root.rotated(root.values.unsqueeze(1) * noise, back=True)
    return root.multiply(noise)
