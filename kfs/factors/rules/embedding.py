"""Embeddings: linear maps of unit vectors. Outer products of these are diagonal: the input-based factor counts tokens.

A bag of embeddings is a sum, mean or maximum of them, and is rewritten as such, so it has the factors of the embedding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import OTHERS, OneHot
from kfs.factors.trace.derived import on_device
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Plan, Planned, Rewrite
from kfs.factors.trace.tracking import Tracked
from kfs.problem.torch_fixes import embedding_bag_written_out, refuse_changing_embedding
from kfs.runtime import sync


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
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    view = weight.view
    if weight.rows and input.data:
        return (_some_rows(input, weight, padding),)
    if view is None or weight.ndim != 2:
        return None
    tokens = OneHot(weight.shape[0], weight.dtype, padding)
    read = None if padding is None else tokens.masked
    return (Plan("embedding", view.matrix_layout(flip=True), tokens, (input,), read=read, follows=not input.data),)


def _some_rows(input: Argument, weight: Argument, padding: int | None) -> Plan:
    """Plan a lookup in a table in which a parameter has replaced some rows. Positions with other rows do not count."""
    layout = weight.layout_of_rows().turned()
    tokens = OneHot(len(weight.rows), weight.dtype, OTHERS)
    rows = torch.tensor([OTHERS if row == padding else row for row in weight.rows])

    def prepare(index: Tensor) -> Tensor:
        found = index.unsqueeze(-1) == on_device(rows, index.device)
        return torch.where(found.any(-1), found.int().argmax(-1), OTHERS)

    return Plan("embedding", layout, tokens, (input,), prepare, tokens.masked)


def index_copy(call: Call, input: Argument, dim: Any, index: Argument, source: Argument) -> Planned:
    """Plan to replace rows of a constant table by a parameter, which is tracked in its new place."""
    view = source.view
    whole = view is not None and view.is_whole and not view.transposed and source.ndim == 2
    if dim != 0 or not whole or input.tracked or input.data or index.data:
        return None
    return Rewrite(_rows_replaced)


def _rows_replaced(seen: Discovery, input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    result = input.index_copy(dim, index, source)
    with sync.allow_sync():
        rows = tuple(index.tolist())
    p = seen.tracker.get(source)
    seen.tracker.add(Tracked(p.name, result, ("rows", p.token, rows, result.shape), rows=rows))
    return result


def embedding_bag(call: Call, *args: Any, **named: Any) -> Planned:
    """Plan a lookup of rows that are reduced over each bag."""
    return Rewrite(_written_out)


def _written_out(seen: Discovery, *args: Any, **named: Any) -> Tensor:
    with seen.intercepting():
        return embedding_bag_written_out(*args, **named)


RULES: dict[Any, Callable[..., Planned]] = {
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.index_copy: index_copy,
    Tensor.index_copy: index_copy,
}
