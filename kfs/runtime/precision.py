"""Numerical precision: dtypes of sums, tolerances for comparisons, and switches of TF32 and `autocast`."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kfs.runtime.nested import tensors_in

# Largest relative difference between results that count as equal. Rounding depends on the batch size, and rounding
# errors grow from layer to layer. A few times the square root of the machine precision allows them half of all digits.
# The error of a wrong rule or a missed use of a parameter is far larger.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
# An accelerator may round the inputs of products to TF32, which has a precision of 1e-3: allow ten rounding errors.
_ON_ACCELERATOR = 1e-2
# The precision of bfloat16 is 8e-3: allow six rounding errors. A larger tolerance would miss most errors.
IN_HALF_PRECISION = 5e-2


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and decompositions of tensors of a given dtype: at least float32.

    Sums in half precision lose all but the first few hundred terms, and PyTorch has no decompositions in it.

    Args:
        dtype: Dtype of the tensors.

    Example:
        >>> at_least_float32(torch.bfloat16), at_least_float32(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative difference at which results of a dtype on a device count as equal."""
    if torch.is_autocast_enabled(device.type):
        return IN_HALF_PRECISION
    if dtype == torch.float32 and device.type != "cpu":
        return _ON_ACCELERATOR
    return _TOLERANCE.get(dtype, IN_HALF_PRECISION)


class Precisions(TorchFunctionMode):
    """A mode that collects the floating-point dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.found |= {t.dtype for t in tensors_in(result) if t.is_floating_point()}
        return result

    def tolerance(self, dtype: torch.dtype, device: torch.device) -> float:
        """Return the tolerance for the lowest precision among `dtype` and all results."""
        return max(tolerance_for(one, device) for one in self.found | {dtype})


_matmul: Any = torch.backends.cuda.matmul
# PyTorch 2.9 has a new name for the switch. The old name raises an error after the new one was used.
_SWITCH = "fp32_precision" if hasattr(_matmul, "fp32_precision") else "allow_tf32"
_VALUES = {True: "tf32", False: "ieee"} if _SWITCH == "fp32_precision" else {True: True, False: False}


def uses_tf32() -> bool:
    """Return whether float32 matrix products currently use TF32 on a GPU."""
    return bool(getattr(_matmul, _SWITCH) == _VALUES[True])


class tf32:  # noqa: N801 (used like a function)
    """Switch TF32 on or off in this context; `None` leaves it as it is."""

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted

    def __enter__(self) -> None:
        # Do not touch the switch if it has the wanted value already.
        self.changes = self.wanted is not None and uses_tf32() != self.wanted
        if self.changes:
            self.before = getattr(_matmul, _SWITCH)
            setattr(_matmul, _SWITCH, _VALUES[bool(self.wanted)])

    def __exit__(self, *_: object) -> None:
        if self.changes:
            setattr(_matmul, _SWITCH, self.before)


class full_precision:  # noqa: N801 (used like a function; a generator would take several times as long)
    """Context that disables gradients and `autocast`, so that sums are computed in the precision of their storage."""

    def __init__(self, kind: str) -> None:
        # There is no `autocast` on `meta`.
        self.kind = "cpu" if kind == "meta" else kind

    def __enter__(self) -> None:
        self.autocast = torch.is_autocast_enabled(self.kind)
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        if self.autocast:
            torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        if self.autocast:
            torch.set_autocast_enabled(self.kind, True)
