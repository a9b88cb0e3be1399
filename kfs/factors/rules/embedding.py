"""Embeddings: linear maps of unit vectors. Outer products of these are diagonal: the input-based factor counts tokens.

A bag of embeddings is a sum, mean or maximum of them, and is rewritten as such, so it has the factors of the embedding.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import OneHot
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Plan, Planned, Rewrite
from kfs.problem.torch_fixes import embedding_bag_written_out, refuse_changing_embedding


def embedding(
    call: Call,
    input: Argument,
    weight: Argument,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Planned:
    """Plan a lookup of rows. The row of the padding index is constant: positions that look it up do not count."""
    refuse_changing_embedding(max_norm, scale_grad_by_freq)
    view = weight.view
    if view is None or view.transposed or weight.ndim != 2:
        return None
    rows = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % rows
    tokens = OneHot(rows, weight.dtype, padding)
    read = None if padding is None else tokens.masked
    return (Plan("embedding", view.matrix_layout(flip=True), tokens, (input,), read=read, follows=not input.data),)


def embedding_bag(call: Call, *args: Any, **named: Any) -> Planned:
    """Plan a lookup of rows that are reduced over each bag."""
    return Rewrite(_written_out)


def _written_out(seen: Discovery, *args: Any, **named: Any) -> Tensor:
    with seen.intercepting():
        return embedding_bag_written_out(*args, **named)


RULES = {F.embedding: embedding, F.embedding_bag: embedding_bag}
