"""Precision: the dtype in which sums are taken, tolerances that follow from it, and TF32."""

from typing import Any

import torch

# Up to which relative difference two results count as the same. Batches of different size are rounded differently, and
# rounding errors grow from layer to layer: a few times the root of the precision leaves them half of all digits. What a
# wrong rule or a missed use does is larger by far.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
# An accelerator may round what it multiplies to TF32, which has a precision of 1e-3: ten roundings.
_ON_ACCELERATOR = 1e-2
# The precision of bfloat16 is 8e-3: six roundings. With more, one would not notice much.
IN_HALF_PRECISION = 5e-2


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


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return up to which relative difference results in some precision count as the same."""
    if torch.is_autocast_enabled(device.type):
        return IN_HALF_PRECISION
    if dtype == torch.float32 and device.type != "cpu":
        return _ON_ACCELERATOR
    return _TOLERANCE.get(dtype, IN_HALF_PRECISION)


_matmul: Any = torch.backends.cuda.matmul
# PyTorch 2.9 has a new name for the switch. Its old name is an error after somebody has used the new one.
_SWITCH = "fp32_precision" if hasattr(_matmul, "fp32_precision") else "allow_tf32"
_VALUES = {True: "tf32", False: "ieee"} if _SWITCH == "fp32_precision" else {True: True, False: False}


def uses_tf32() -> bool:
    """Whether a GPU multiplies float32 in TF32 now."""
    return bool(getattr(_matmul, _SWITCH) == _VALUES[True])


class tf32:  # noqa: N801 (used like a function)
    """Switch TF32 on or off in this context; `None` leaves it as it is."""

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted

    def __enter__(self) -> None:
        """Switch only if that changes something."""
        self.changes = self.wanted is not None and uses_tf32() != self.wanted
        if self.changes:
            self.before = getattr(_matmul, _SWITCH)
            setattr(_matmul, _SWITCH, _VALUES[bool(self.wanted)])

    def __exit__(self, *_: object) -> None:
        if self.changes:
            setattr(_matmul, _SWITCH, self.before)
