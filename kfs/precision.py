"""Which precision numbers are computed in."""

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the precision for sums and decompositions of numbers that are stored in some precision.

    Half precision would lose all but the first few hundred terms of a sum, and has no decompositions.

    Args:
        dtype: How numbers are stored.

    Example:
        >>> at_least_float32(torch.bfloat16), at_least_float32(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)
