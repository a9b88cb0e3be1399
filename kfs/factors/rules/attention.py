"""Attention: `F.multi_head_attention_forward`, rewritten as linear operations, and learned attention biases.

PyTorch's own code is run with its check for overrides disabled, so its products reach the pass one by one. Its axes
are `[sequence, batch, features]`.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.rules.elementwise import broadcast, joined
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Planned, Rewrite

_BODY = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def multi_head_attention(call: Call, *args: Any, **named: Any) -> Planned:
    """Plan multi-head attention, as the operations that it consists of."""
    return Rewrite(_attend)


def _attend(seen: Discovery, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    with seen.rows.with_axis(1 if query.ndim == 3 else None), seen.intercepting():
        return _BODY(query, *args, **kwargs)


def scaled_dot_product(
    call: Call,
    query: Argument,
    key: Argument,
    value: Argument,
    attn_mask: Argument | None = None,
    *args: Any,
    **named: Any,
) -> Planned:
    """Plan attention with learned queries, or with a learned bias (as in T5) that is the same for all data."""
    learned = any(t.tracked for t in (query, key, value))
    if learned or attn_mask is None or not attn_mask.by_rows:
        return joined(call, query, key, value, *(() if attn_mask is None else (attn_mask,)))
    shape = torch.broadcast_shapes(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
    return (broadcast(attn_mask, tuple(shape), "attention bias"),)


RULES = {
    F.multi_head_attention_forward: multi_head_attention,
    F.scaled_dot_product_attention: scaled_dot_product,
}
