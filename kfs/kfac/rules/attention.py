"""Attention: `F.multi_head_attention_forward` as the linear operations that it consists of, and learned biases.

PyTorch's own code is run, except that it does not ask for overrides again: its products then reach the capture one by
one. It works on `[sequence, batch, features]`.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.kfac.capture.mode import Capture
from kfs.kfac.rules.elementwise import is_followable, meet_batch

_BODY = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def multi_head_attention(capture: Capture, func: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    """Attend."""
    with capture.with_batch_axis(1 if query.ndim == 3 else None), capture:
        return _BODY(query, *args, **kwargs)


def scaled_dot_product(
    capture: Capture,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend with a learned bias, such as T5's, that is the same for all data."""
    learned = [t for t in (query, key, value) if capture.sources.find(t) is not None]
    if learned or not is_followable(capture, attn_mask):
        return NotImplemented
    shape = torch.broadcast_shapes(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
    tapped = meet_batch(capture, attn_mask, shape, "attention bias")
    return NotImplemented if tapped is None else func(query, key, value, tapped, *args, **kwargs)


RULES = {
    F.multi_head_attention_forward: multi_head_attention,
    F.scaled_dot_product_attention: scaled_dot_product,
}
