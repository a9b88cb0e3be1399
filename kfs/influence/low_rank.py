"""Gradients by their leading singular vectors: few rows in place of many, or of a matrix."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.sums import PlainVectors, RowProducts, at_a_time


@dataclass(frozen=True)
class Truncated:
    """Gradients of low rank.

    Attributes:
        kept: The best approximation of that rank, by rows.
        left_out: The Frobenius norm of what was left out, for every datum, `[n]`: the root of the sum of squares of
            its other singular values.
    """

    kept: BlockGradients
    left_out: Tensor


def truncated(gradients: BlockGradients, rank: int) -> Truncated:
    """Keep the leading singular vectors of every datum's matrix (of every group's).

    Gradients that have no more rows than that are left as they are. If there are fewer rows than coordinates, the
    matrices are not formed: with QR decompositions of the rows on both sides, the rest is a small matrix.
    """
    nothing = torch.zeros(gradients.num_data, dtype=gradients.dtype, device=gradients.device)
    if gradients.whole is None and gradients.shared <= rank:
        return Truncated(gradients, nothing)
    groups, d_B, d_A = gradients.layout.matrix_shape
    by_rows = gradients.whole is None and gradients.shared < min(d_A, d_B)
    step = at_a_time(nothing, 3 * groups * (gradients.shared * (d_A + d_B) if by_rows else d_A * d_B))
    found = []
    for start in range(0, gradients.num_data, step):
        some = gradients if step >= gradients.num_data else gradients.some(slice(start, start + step))
        found.append(_by_rows(some) if by_rows else torch.linalg.svd(some.dense().transpose(0, 1), full_matrices=False))
    U, s, Vh = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    g = (U * s.unsqueeze(-2))[..., :rank].transpose(2, 3)
    rows = RowProducts(PlainVectors(Vh[..., :rank, :].contiguous()), PlainVectors(g.contiguous()))
    left_out = s[..., rank:].square().sum((0, 2)).sqrt()
    return Truncated(replace(gradients, uses=(rows,), whole=None), left_out)


def _by_rows(gradients: BlockGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose `G = g^T x` without forming it, `[groups, n, ...]`."""
    x = torch.cat([part.x.dense() for part in gradients.parts], 2)
    g = torch.cat([part.g.dense() for part in gradients.parts], 2)
    Q_x, R_x = torch.linalg.qr(x.transpose(2, 3))
    Q_g, R_g = torch.linalg.qr(g.transpose(2, 3))
    U, s, Vh = torch.linalg.svd(R_g @ R_x.transpose(2, 3), full_matrices=False)
    return Q_g @ U, s, Vh @ Q_x.transpose(2, 3)
