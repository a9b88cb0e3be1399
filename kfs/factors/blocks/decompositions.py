"""Cholesky factors and eigendecompositions of factors that should be positive semi-definite.

A decomposition that fails in float32 is repeated in float64, then after adding a small multiple of the identity, with
a warning. A matrix with NaN, or with eigenvalues that are negative beyond round-off, raises an error. These checks
synchronize with an accelerator. Within `checking_later`, they are deferred instead.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kfs.errors import KfsWarning
from kfs.runtime.precision import tf32

# Matrices of at least this size are decomposed one after the other: workspace for all of them takes too much memory.
_LARGE = 1024
# Up to this size, float64 decompositions on a GPU are at least as fast as float32: `benchmarks/decompositions.py`.
_SMALL = 512
_HALF = {torch.float16, torch.bfloat16}
# The Cholesky pivots of a singular factor are round-off. Relative to the diagonal, they were found to be up to this
# many times precision times size: in last layers of classifiers with 2 to 500 classes, in both precisions.
_ROUND_OFF = 4.0
# The list that collects deferred checks; `None` if checks raise errors.
_later: ContextVar[list[Tensor] | None] = ContextVar("later", default=None)


class BlockError(Exception):
    """One block of a stack is invalid. `Stack.apply` turns it into an error with the block's name.

    Attributes:
        index: Index of the block in the stack.
        cause: Description of the problem.
    """

    def __init__(self, index: int, cause: str) -> None:
        super().__init__(index, cause)
        self.index = index
        self.cause = cause


@contextmanager
def checking_later() -> Iterator[list[Tensor]]:
    """Context that collects checks instead of raising errors: boolean tensors `[stack]`, true for valid blocks.

    Results for invalid blocks are undefined. Failed decompositions are not repeated in higher precision. Nothing
    synchronizes with an accelerator, except for eigendecompositions, in which PyTorch synchronizes.

    Example:
        >>> with checking_later() as checks:
        ...     _ = inverse(torch.stack([torch.eye(2), -torch.eye(2)]))
        >>> torch.stack(checks).all(0)
        tensor([ True, False])
    """
    checks: list[Tensor] = []
    token = _later.set(checks)
    try:
        yield checks
    finally:
        _later.reset(token)


def is_zero(damping: Tensor) -> bool:
    """Whether all dampings are zero. Conservatively false in `checking_later`, where values are not read."""
    return _later.get() is None and not damping.any()


def computable(t: Tensor) -> Tensor:
    """Return a tensor in a precision in which matrices can be decomposed: half precision becomes float32."""
    return t.float() if t.dtype in _HALF else t


def check_each(good: Tensor, cause: str) -> None:
    """Raise a `BlockError` for the first block that is false in `good`, `[stack]`."""
    later = _later.get()
    if later is not None:
        later.append(good)
    elif not good.all():
        raise BlockError(int((~good).nonzero()[0]), cause)


def check_finite(matrices: Tensor) -> None:
    """Raise a `BlockError` if one of the matrices `[stack, ...]` contains NaN or infinity."""
    check_each(matrices.isfinite().flatten(1).all(1), "contains NaN or infinity")


def check_definite(values: Tensor, noise: Tensor) -> None:
    """Raise a `BlockError` for eigenvalues `[stack, ...]` that are negative beyond noise, per block or per eigenvalue.

    Errors of sums grow with the number of examples. Therefore, the root of the precision counts as noise, too.

    Example:
        >>> with checking_later() as checks:
        ...     check_definite(torch.tensor([[1.0, 0.0], [1.0, -0.1]]), noise=torch.zeros(2))
        >>> checks
        [tensor([ True, False])]
    """
    flat = values.flatten(1)
    accumulated = torch.finfo(values.dtype).eps ** 0.5 * flat.abs().max(1, keepdim=True).values
    bad = (flat < -torch.maximum(noise.reshape(len(flat), -1), accumulated)).any(1)
    later = _later.get()
    if later is not None:
        later.append(~bad)
    elif bad.any():
        index = int(bad.nonzero()[0])
        cause = f"has a negative eigenvalue, {float(flat[index].min()):.1e}, beyond round-off"
        raise BlockError(index, cause)


def round_off(values: Tensor, eps: float | None = None) -> Tensor:
    """Return a bound `[stack]` on the round-off in eigenvalues `[stack, d]` of matrices with a precision of `eps`."""
    eps = eps or torch.finfo(values.dtype).eps
    return values.shape[-1] * eps * values.abs().max(-1).values


def unexplained_noise(size: int, eps: float) -> float:
    """Return the share of a feature's square that can be round-off if it is a linear combination of other features."""
    return _ROUND_OFF * size * eps


def slogdet(matrices: Tensor, symmetric: bool, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Return signs and logarithms of determinants of `[stack, d, d]`: zero and minus infinity for singular matrices.

    A symmetric matrix is singular up to round-off if a pivot of its Cholesky factor is. The pivot of a feature is the
    part of its square that is not a linear combination of the features before it.

    Args:
        matrices: The matrices.
        symmetric: Whether they equal their transposes.
        eps: Their precision; by default, the precision of their dtype.
    """
    matrices = computable(matrices)
    sign, log = torch.linalg.slogdet(matrices)
    if not symmetric:
        return sign, log
    eps = eps or torch.finfo(matrices.dtype).eps
    L, failed = torch.linalg.cholesky_ex(matrices)
    left = L.diagonal(dim1=-2, dim2=-1).square() / matrices.diagonal(dim1=-2, dim2=-1)
    singular = (failed == 0) & (left <= unexplained_noise(matrices.shape[-1], eps)).any(1)
    # Matrices without a Cholesky factor contain NaN, or have negative eigenvalues, possibly because of round-off.
    unclear = (failed > 0) & matrices.isfinite().flatten(1).all(1)
    if unclear.any():
        values = torch.linalg.eigvalsh(matrices[unclear].double())
        singular[unclear] = values.min(1).values >= -round_off(values, eps)
    return torch.where(singular, 0.0, sign), torch.where(singular, -torch.inf, log)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of symmetric matrices.

    Args:
        matrices: `[stack, d, d]`.

    Returns:
        Eigenvalues in ascending order, `[stack, d]`, and eigenvectors, the columns of `[stack, d, d]`.
    """
    matrices = computable(matrices)
    if matrices.is_cuda and matrices.shape[-1] <= _SMALL:  # pragma: no cover (tested on a GPU)
        values, vectors = eigh_in_double(matrices)
        if values.isfinite().all():
            return values, vectors
    try:
        values, vectors = _eigh(matrices)
        if values.isfinite().all():
            return values, vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # NaN, or a float32 algorithm that did not converge
    check_finite(matrices)
    return eigh_in_double(matrices)


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors in the precision of the matrices, without checks."""
    if len(matrices) == 1 or matrices.shape[-1] < _LARGE:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors.contiguous()
    values, vectors = matrices.new_empty(matrices.shape[:2]), matrices.new_empty(matrices.shape)
    for place, matrix in enumerate(matrices):
        values[place], vectors[place] = torch.linalg.eigh(matrix)
    return values, vectors


def eigh_in_double(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, computed in float64 and rounded."""
    values, vectors = torch.linalg.eigh(matrices.double())
    return values.to(matrices), vectors.to(matrices).contiguous()


def cholesky(matrices: Tensor) -> Tensor:
    """Return lower triangular factors `L` of `[stack, d, d]`, with `L L^T` equal to the matrices."""
    matrices = computable(matrices)
    L: Tensor
    L, failed = torch.linalg.cholesky_ex(matrices)
    later = _later.get()
    if later is not None:
        later.append(failed == 0)
        return L
    if not failed.any():
        return L
    check_finite(matrices)
    L, failed = torch.linalg.cholesky_ex(matrices.double())
    if failed.any():
        L = torch.linalg.cholesky(_with_jitter(matrices, failed > 0))
    return L.to(matrices.dtype)


def _with_jitter(matrices: Tensor, singular: Tensor) -> Tensor:
    """Add a multiple of the identity to the singular matrices, in float64, with a warning."""
    precise = matrices.double()
    values = torch.linalg.eigvalsh(precise)
    noise = round_off(values.to(matrices.dtype)).double()
    check_definite(values, noise)
    # Round-off has made zero eigenvalues negative, by at most the absolute value of the lowest one.
    jitter = 2 * torch.maximum(noise, -values.min(1).values) + torch.finfo(matrices.dtype).tiny
    text = (
        f"{int(singular.sum())} of {len(matrices)} factors are singular; up to {float(jitter[singular].max()):.1e} "
        "times the identity was added to them. Pass damping to decide yourself."
    )
    warnings.warn(text, KfsWarning, stacklevel=3)
    shifts = torch.where(singular, jitter, 0.0).unsqueeze(1).expand(-1, matrices.shape[-1])
    return precise + torch.diag_embed(shifts)


def inverse(matrices: Tensor) -> Tensor:
    """Return inverses of positive definite matrices `[stack, d, d]`.

    They are contiguous, like matrices from files, so that products with both are equal to the last bit.
    """
    if matrices.is_cuda:
        return _inverse_on_gpu(computable(matrices))  # pragma: no cover (tested on a GPU)
    # LAPACK stores results by columns. They are symmetric to the last bit, so transposing avoids a copy.
    return torch.cholesky_inverse(cholesky(matrices)).mT.contiguous()


def _inverse_on_gpu(matrices: Tensor) -> Tensor:  # pragma: no cover (tested on a GPU)
    """Return inverses using `inverse_by_halves`, or `cholesky` with its higher precision if that fails."""
    with tf32(False):
        result, good = inverse_by_halves(matrices)
        later = _later.get()
        if later is not None:
            later.append(good)
            return result
        if good.all():
            return result
        W = _inverse_of_triangular(cholesky(matrices))
        return W.mT @ W


def inverse_by_halves(M: Tensor, smallest: int = _SMALL) -> tuple[Tensor, Tensor]:
    r"""Return inverses of positive definite matrices, computed mostly by matrix products.

    A GPU is much faster at products than at decompositions; `python -m benchmarks.algebra cuda` measures both.

    With the Cholesky factor $L$ of a matrix and $W = L^{-1}$, the inverse is $W^\top W$.

    Args:
        M: `[stack, d, d]`.
        smallest: Matrices up to this size are decomposed as a whole.

    Returns:
        The inverses, and which of the matrices, `[stack]`, are positive definite up to round-off.
    """
    W = torch.zeros_like(M, memory_format=torch.contiguous_format)
    good = _inverse_cholesky(M, W, smallest)
    result = torch.empty_like(W)
    _gram_of_triangular(W, result, smallest)
    _mirror(result, smallest)
    return result, good


def _inverse_cholesky(M: Tensor, W: Tensor, smallest: int) -> Tensor:
    r"""Write inverses of Cholesky factors to `W`, which is zero before; return which could be computed, `[stack]`.

    With halves $P, Q, R$ of a matrix, its Cholesky factor and the inverse of that are

    $$
    \begin{pmatrix} P & Q^\top \\ Q & R \end{pmatrix}
    = \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix} \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix}^\top,
    \quad
    \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix}^{-1}
    = \begin{pmatrix} W_1 & 0 \\ - W_2 X W_1 & W_2 \end{pmatrix},
    $$

    where $X = Q W_1^\top$ and $L_2 L_2^\top = R - X X^\top$. The same with $P^{-1}$ instead of $W_1$ would take fewer
    products, but multiply round-off by the square of the condition number. Entries above the diagonal of `M` are not
    read.
    """
    size = M.shape[-1]
    if size <= smallest:
        L, failed = torch.linalg.cholesky_ex(M)
        W.copy_(_inverse_of_triangular(L))
        is_good: Tensor = (failed == 0) & W.diagonal(dim1=1, dim2=2).sum(1).isfinite()
        return is_good
    half = _first_half(size)
    W1, W2 = W[:, :half, :half], W[:, half:, half:]
    Q, R = M[:, half:, :half], M[:, half:, half:]
    good = _inverse_cholesky(M[:, :half, :half], W1, smallest)
    X = torch.empty_like(Q, memory_format=torch.contiguous_format)
    _multiply(W1, Q.mT, X.mT, smallest)
    S = torch.empty_like(R, memory_format=torch.contiguous_format)
    for rows, columns in _lower_parts(size - half, smallest):
        torch.baddbmm(R[:, rows, columns], X[:, rows], X[:, columns].mT, alpha=-1, out=S[:, rows, columns])
    also_good = _inverse_cholesky(S, W2, smallest)
    XW1 = torch.empty_like(X)
    _multiply_transposed(W1, X.mT, XW1.mT, smallest)
    _multiply(W2, XW1.neg_(), W[:, half:, :half], smallest)
    return good & also_good


def _gram_of_triangular(W: Tensor, result: Tensor, smallest: int) -> None:
    """Write `W^T W` for lower triangular matrices. Entries above the diagonal are valid only after `_mirror`."""
    size = W.shape[-1]
    if size <= smallest:
        torch.bmm(W.mT, W, out=result)
        return
    half = _first_half(size)
    lower, last = W[:, half:, :half], W[:, half:, half:]
    _gram_of_triangular(W[:, :half, :half], result[:, :half, :half], smallest)
    for rows, columns in _lower_parts(half, smallest):
        result[:, rows, columns].baddbmm_(lower[:, :, rows].mT, lower[:, :, columns])
    _multiply_transposed(last, lower, result[:, half:, :half], smallest)
    _gram_of_triangular(last, result[:, half:, half:], smallest)


def _mirror(M: Tensor, smallest: int) -> None:
    """Copy entries below the diagonal to above it, in place; matrices of the smallest size are complete already."""
    size = M.shape[-1]
    if size > smallest:
        half = _first_half(size)
        M[:, :half, half:] = M[:, half:, :half].mT
        _mirror(M[:, :half, :half], smallest)
        _mirror(M[:, half:, half:], smallest)


def _multiply(L: Tensor, Y: Tensor, result: Tensor, smallest: int) -> None:
    """Write `L Y` for lower triangular matrices. Skipping half of the zeros saves a quarter of the operations."""
    half = _first_half(L.shape[-1]) if L.shape[-1] > smallest else 0
    if half:
        torch.bmm(L[:, :half, :half], Y[:, :half], out=result[:, :half])
    torch.bmm(L[:, half:], Y, out=result[:, half:])


def _multiply_transposed(L: Tensor, Y: Tensor, result: Tensor, smallest: int) -> None:
    """Write `L^T Y` for lower triangular matrices, like `_multiply`."""
    half = _first_half(L.shape[-1]) if L.shape[-1] > smallest else 0
    if half:
        torch.bmm(L[:, :, :half].mT, Y, out=result[:, :half])
    torch.bmm(L[:, half:, half:].mT, Y[:, half:], out=result[:, half:])


def _lower_parts(size: int, smallest: int) -> list[tuple[slice, slice]]:
    """Return the parts of a symmetric matrix to compute: rows and columns that cover the diagonal and all below it."""
    if size <= smallest:
        return [(slice(size), slice(size))]
    half = _first_half(size)
    return [(slice(half), slice(half)), (slice(half, size), slice(size))]


def _first_half(size: int) -> int:
    """Return the size of the first half of a matrix, aligned to make products faster."""
    half = -(-size // 2)
    return half + -half % min(64, half)


def _inverse_of_triangular(L: Tensor) -> Tensor:
    """Return inverses of Cholesky factors, without TF32, which PyTorch would use for triangular systems, too."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    with tf32(False):
        inverse: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
        return inverse


def general_inverse(matrices: Tensor, eps: float | None = None) -> Tensor:
    """Return inverses of matrices `[stack, d, d]` with a precision of `eps`, which need not be symmetric."""
    matrices = computable(matrices)
    check_finite(matrices)
    inverses: Tensor = torch.linalg.inv_ex(matrices).inverse
    # The product of both norms is the condition number. If it is close to one over the precision, or if the inverse
    # could not be computed, then a matrix that differs by round-off is singular.
    condition = torch.linalg.matrix_norm(matrices, 1) * torch.linalg.matrix_norm(inverses, 1)
    largest = 1 / (matrices.shape[-1] * (eps or torch.finfo(matrices.dtype).eps))
    check_each(condition < largest, "is singular, up to round-off")
    return inverses
