"""Settings of PyTorch that decide which operations run, and how precisely: a recording has those of its time."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kfs.tf32 import uses_tf32

# PyTorch 2.9 has a new name for the switch of convolutions; see `kfs.tf32`.
_convolutions: Any = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
_SWITCH = "fp32_precision" if hasattr(_convolutions, "fp32_precision") else "allow_tf32"


def surroundings(device: torch.device) -> Hashable:
    """Return all settings for computations on a device; they can be compared with those of another time."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        uses_tf32(),
        getattr(_convolutions, _SWITCH),
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def is_watched() -> bool:
    """Whether somebody looks at every operation, as PyTorch's counter of operations does: a graph shows it none."""
    return _get_current_dispatch_mode() is not None
