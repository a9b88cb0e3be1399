"""In which precision outer products are multiplied, if somebody asks for another one than that of their vectors.

The names are those of `kfs.KFAC`, which documents them. Sums are in float32 or better in any case.
"""

from typing import Any

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.settings import Products

HALF = {torch.float16, torch.bfloat16}
_matmul: Any = torch.backends.cuda.matmul
# PyTorch 2.9 has a new name for the switch. Its old name is an error after somebody has used the new one.
_SWITCH = "fp32_precision" if hasattr(_matmul, "fp32_precision") else "allow_tf32"
_VALUES = {True: "tf32", False: "ieee"} if _SWITCH == "fp32_precision" else {True: True, False: False}
_USES_TF32 = {"float32": False, "tf32": True}


def check_products(products: Products, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Refuse a precision that there is no use for.

    Args:
        products: The precision.
        dtype: That of the sums.
        device: Where products are computed.
        name: The block's name.

    Raises:
        ModelError: If sums are in float64, or a device has no TF32.
    """
    if products != "auto" and dtype == torch.float64:
        raise ModelError(
            f"products is {products!r}, but the factors of block {name!r} are summed in float64.",
            "Use products='auto', which multiplies in float64, or a model and factor_dtype of lower precision.",
        )
    if products == "tf32" and device.type not in {"cuda", "meta"}:
        raise ModelError(
            f"products is 'tf32', but block {name!r} is computed on the device {str(device)!r}, which has no TF32.",
            "Use products='auto', or move the model to a GPU.",
        )


def rounded(x: Tensor, products: Products) -> Tensor:
    """Return vectors in the precision in which they are multiplied."""
    if products == "float32" and x.dtype in HALF:
        return x.float()
    if products == "bf16" and x.dtype == torch.float32:
        # Elsewhere products of bfloat16 are slow, or rounded: numbers with few digits are multiplied in float32.
        return x.bfloat16() if x.is_cuda else x.bfloat16().float()
    return x


def uses_tf32() -> bool:
    """Whether a GPU multiplies float32 in TF32 now."""
    return bool(getattr(_matmul, _SWITCH) == _VALUES[True])


class multiplying:  # noqa: N801 (used like a function)
    """Switch TF32 on or off in this context, if products want that."""

    def __init__(self, products: Products) -> None:
        """Look up what is wanted."""
        self.wanted = _USES_TF32.get(products)

    def __enter__(self) -> None:
        """Switch only if that changes something."""
        self.changes = self.wanted is not None and uses_tf32() != self.wanted
        if self.changes:
            self.before = getattr(_matmul, _SWITCH)
            setattr(_matmul, _SWITCH, _VALUES[bool(self.wanted)])

    def __exit__(self, *_: object) -> None:
        """Leave the switch as it was."""
        if self.changes:
            setattr(_matmul, _SWITCH, self.before)
