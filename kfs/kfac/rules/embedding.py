"""Embeddings: linear maps of unit vectors, whose outer products are diagonal. The input-based factor counts tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.exact_derivatives import refuse_changing_embedding
from kfs.kfac.capture.mode import Capture, Read, Receiver
from kfs.kfac.capture.uses import Use
from kfs.kfac.layout import Layout
from kfs.kfac.sums.inputs import OneHot


def embedding(
    capture: Capture,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look rows up. The row of the padding index is constant: positions that look it up do not count."""
    refuse_changing_embedding(max_norm, scale_grad_by_freq)
    view = capture.sources.view(weight)
    if view is None or view.transposed or weight.ndim != 2:
        return NotImplemented
    out = func(input, weight, padding_idx)
    layout = Layout(view.source.name, tuple(view.source.tensor.shape), view.rows, (1, 0), 1)

    def record(with_batch: bool) -> Receiver:
        index = input if with_batch else input.expand(capture.num_data, *input.shape)
        counts = None if padding_idx is None else index != padding_idx % len(weight)
        tokens = OneHot(index, len(weight), counts, torch.promote_types(weight.dtype, torch.float32))
        where, side = capture.uses.place(layout)
        use = Use(capture.batch, "embedding", where, tokens, _masked(counts), out, False, side)
        return capture.uses.record(use)

    return (
        capture.tap(out, record(True)) if capture.is_data(input) else capture.record_virtual(out, layout.weight, record)
    )


def _masked(counts: Tensor | None) -> Read:
    """Read gradients as they are, and zero where a position does not count."""
    return lambda g: g if counts is None else g * counts.unsqueeze(-1)


RULES = {F.embedding: embedding}
