"""Cholesky factors and eigendecompositions of factors that are positive semi-definite, if all went well.

A decomposition that fails in float32 is tried in float64, then with a small multiple of the identity added, which is
announced. A matrix with NaN, or with eigenvalues that are negative beyond round-off, is an error.
"""

import warnings

import torch
from torch import Tensor

from kfs.errors import KfsWarning

_HALF = {torch.float16, torch.bfloat16}


class UnitError(Exception):
    """One of many matrices is not what it should be; whoever knows their names turns this into a helpful message.

    Attributes:
        unit: Which one.
        cause: What is wrong with it.
    """

    def __init__(self, unit: int, cause: str) -> None:
        """Store both."""
        super().__init__(unit, cause)
        self.unit, self.cause = unit, cause


def computable(t: Tensor) -> Tensor:
    """Return a tensor in a precision in which matrices can be decomposed."""
    return t.float() if t.dtype in _HALF else t


def check_finite(matrices: Tensor) -> None:
    """Refuse NaN and infinity in any of `[U, ...]`."""
    finite = matrices.isfinite().flatten(1).all(1)
    if not finite.all():
        raise UnitError(int((~finite).nonzero()[0]), "has NaN or infinity in it")


def check_definite(values: Tensor, noise: Tensor) -> None:
    """Refuse eigenvalues `[U, ...]` that are negative by more than some noise level `[U]`.

    Sums over many data have errors that grow with their number, so that the root of the precision counts as noise, too.
    """
    flat = values.flatten(1)
    lowest = flat.min(1).values
    accumulated = torch.finfo(values.dtype).eps ** 0.5 * flat.abs().max(1).values
    bad = lowest < -torch.maximum(noise, accumulated)
    if bad.any():
        unit = int(bad.nonzero()[0])
        raise UnitError(unit, f"has a negative eigenvalue, {float(lowest[unit]):.1e}, beyond round-off")


def round_off(values: Tensor, eps: float | None = None) -> Tensor:
    """Return how wrong eigenvalues `[U, d]` of matrices may be, that are stored in some precision (their own)."""
    return values.shape[-1] * (eps or torch.finfo(values.dtype).eps) * values.abs().max(-1).values


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices.

    Args:
        matrices: `[U, d, d]`.

    Returns:
        Eigenvalues in ascending order, `[U, d]`, and eigenvectors, the columns of `[U, d, d]`.
    """
    matrices = computable(matrices)
    try:
        values, vectors = torch.linalg.eigh(matrices)
        if values.isfinite().all():
            return values, vectors.contiguous()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # NaN, or a float32 algorithm that did not converge
    check_finite(matrices)
    values, vectors = torch.linalg.eigh(matrices.double())
    return values.to(matrices), vectors.to(matrices).contiguous()


def cholesky(matrices: Tensor) -> Tensor:
    """Return lower triangular factors `L` of `[U, d, d]`, with `L L^T` equal to the matrices."""
    matrices = computable(matrices)
    L: Tensor
    wide: Tensor
    L, failed = torch.linalg.cholesky_ex(matrices)
    if not failed.any():
        return L
    check_finite(matrices)
    wide, failed = torch.linalg.cholesky_ex(matrices.double())
    if failed.any():
        values = torch.linalg.eigvalsh(matrices.double())
        noise = round_off(values.to(matrices.dtype)).double()
        check_definite(values, noise)
        jitter = 2 * torch.maximum(noise, -values.min(1).values) + torch.finfo(matrices.dtype).tiny
        units = failed.nonzero().flatten().tolist()
        text = (
            f"{len(units)} of {len(matrices)} factors are singular; up to {float(jitter[units].max()):.1e} times the "
            "identity was added to them. Pass damping to decide yourself."
        )
        warnings.warn(text, KfsWarning, stacklevel=2)
        shift = torch.where(failed > 0, jitter, 0.0)
        wide = torch.linalg.cholesky(
            matrices.double() + torch.diag_embed(shift.unsqueeze(-1).expand(-1, matrices.shape[-1]))
        )
    return wide.to(matrices.dtype)


def inverse(matrices: Tensor) -> Tensor:
    """Invert positive definite matrices `[U, d, d]`; rows come first in memory, as in those from files."""
    return torch.cholesky_inverse(cholesky(matrices)).contiguous()
