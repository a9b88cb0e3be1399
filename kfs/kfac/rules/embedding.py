"""Embeddings: linear maps of unit vectors, whose outer products are diagonal. The input-based factor counts tokens."""

from torch.nn import functional as F  # noqa: N812

from kfs.exact_derivatives import refuse_changing_embedding
from kfs.kfac.capture.plan import Argument, Call, Plan, Planned
from kfs.kfac.sums.inputs import OneHot


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
    """Look rows up. The row of the padding index is constant: positions that look it up do not count."""
    refuse_changing_embedding(max_norm, scale_grad_by_freq)
    view = weight.view
    if view is None or view.transposed or weight.ndim != 2:
        return None
    rows = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % rows
    tokens = OneHot(rows, weight.dtype, padding)
    read = None if padding is None else tokens.masked
    return (Plan("embedding", view.matrix_layout(flip=True), tokens, (input,), read=read, follows=not input.data),)


RULES = {F.embedding: embedding}
