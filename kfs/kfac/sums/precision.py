"""In which precision outer products are multiplied, if somebody asks for another one than that of their vectors.

The names are those of `kfs.KFAC`, which documents them. Sums are in float32 or better in any case.
"""

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.settings import Products
from kfs.tf32 import tf32

HALF = {torch.float16, torch.bfloat16}
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


def multiplying(products: Products) -> tf32:
    """Switch TF32 on or off in a context, if products want that."""
    return tf32(_USES_TF32.get(products))
