"""Draws from normal distributions whose covariances are blocks."""

import hashlib

import torch
from torch import Tensor

from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.stack import Stack
from kfs.kfac.structures.structure import Structure


def noise_for(stack: Stack, num_samples: int, seed: int) -> Tensor:
    """Draw standard normal numbers for all blocks of a stack, `[stack, num_samples, d_B, d_A]`.

    Those of a block depend on the seed and its name alone, so that it does not matter which other blocks are in the
    stack. Numbers are drawn on the CPU, so that they are the same for every device.
    """
    like = stack.structure.like
    sizes = num_samples, stack.structure.rows, stack.structure.columns
    parts = []
    for layout in stack.layouts:
        digest = hashlib.blake2b(f"{seed} {layout.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        parts.append(torch.randn(layout.groups, *sizes, dtype=like.dtype, generator=generator))
    return torch.cat(parts).to(like.device)


def colored(root: Structure, noise: Tensor) -> Tensor:
    """Turn noise into draws from normal distributions with the squares of blocks as covariances, of the same shape."""
    if isinstance(root, Eigenbasis):
        # Noise looks the same in every basis, so that there is no need to go to that of the block.
        return root.rotated(root.values.unsqueeze(1) * noise, back=True)
    return root.multiply(noise)
