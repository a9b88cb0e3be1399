"""Cholesky factors and eigendecompositions of factors that should be positive semi-definite.

A decomposition that fails in float32 is tried in float64, then with a small multiple of the identity added, and a
warning. A matrix with NaN, or with eigenvalues that are negative beyond round-off, is an error. To find out means to
wait for an accelerator; who cannot wait does all of this in `checking_later`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kfs.errors import KfsWarning
from kfs.runtime.precision import tf32

# Up to this size, a GPU decomposes in float64 as fast as in float32, or faster: `benchmarks/decompositions.py`.
_SMALL = 512
_HALF = {torch.float16, torch.bfloat16}
# What is left of a diagonal entry of a singular factor is round-off, which was found to be up to so many times the
# precision and the size: of last layers of classifiers with 2 to 500 classes, in both precisions.
_ROUND_OFF = 4.0
# Where checks are collected; `None` where they raise errors.
_later: ContextVar[list[Tensor] | None] = ContextVar("later", default=None)


class BlockError(Exception):
    """One block of a stack is not what it should be. `Stack.apply` replaces its index by its name.

    Attributes:
        index: Place of the block in the stack.
        cause: What is wrong with it.
    """

    def __init__(self, index: int, cause: str) -> None:
        super().__init__(index, cause)
        self.index = index
        self.cause = cause


@contextmanager
def checking_later() -> Iterator[list[Tensor]]:
    """Collect what would be checked: tensors `[stack]` that say which blocks are good.

    Results for blocks that are not good mean nothing. Nothing is tried again in better precision, and no accelerator is
    waited for, except by eigendecompositions, for which PyTorch waits.

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
    """Whether dampings are all zero. Where nobody looks at numbers now, they are not."""
    return _later.get() is None and not damping.any()


def computable(t: Tensor) -> Tensor:
    """Return a tensor in a precision in which matrices can be decomposed."""
    return t.float() if t.dtype in _HALF else t


def check_each(good: Tensor, cause: str) -> None:
    """Raise a `BlockError` for the first block that is not good, of `[stack]` booleans."""
    later = _later.get()
    if later is not None:
        later.append(good)
    elif not good.all():
        raise BlockError(int((~good).nonzero()[0]), cause)


def check_finite(matrices: Tensor) -> None:
    """Refuse NaN and infinity in any of `[stack, ...]`."""
    check_each(matrices.isfinite().flatten(1).all(1), "has NaN or infinity in it")


def check_definite(values: Tensor, noise: Tensor) -> None:
    """Refuse eigenvalues `[stack, ...]` that are negative beyond noise: `[stack]`, or a level for each of them.

    Errors of sums grow with the number of examples. So the root of the precision counts as noise, too.

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
    """Return what round-off leaves of a feature's square that is a linear combination of other features."""
    return _ROUND_OFF * size * eps


def slogdet(matrices: Tensor, symmetric: bool, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Return signs and logarithms of determinants of `[stack, d, d]`: zero and minus infinity if they are singular.

    Symmetric matrices are singular up to round-off if Cholesky factors say so, in which the square of a diagonal entry
    is what the features before do not explain of that of a feature.

    Args:
        matrices: What to decompose.
        symmetric: Whether they equal their transposes.
        eps: Their precision; by default that of their dtype.
    """
    matrices = computable(matrices)
    sign, log = torch.linalg.slogdet(matrices)
    if not symmetric:
        return sign, log
    eps = eps or torch.finfo(matrices.dtype).eps
    L, failed = torch.linalg.cholesky_ex(matrices)
    left = L.diagonal(dim1=-2, dim2=-1).square() / matrices.diagonal(dim1=-2, dim2=-1)
    singular = (failed == 0) & (left <= unexplained_noise(matrices.shape[-1], eps)).any(1)
    # Those without Cholesky factors have negative eigenvalues, if only by round-off, or NaN.
    unclear = (failed > 0) & matrices.isfinite().flatten(1).all(1)
    if unclear.any():
        values = torch.linalg.eigvalsh(matrices[unclear].double())
        singular[unclear] = values.min(1).values >= -round_off(values, eps)
    return torch.where(singular, 0.0, sign), torch.where(singular, -torch.inf, log)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices.

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
        values, vectors = torch.linalg.eigh(matrices)
        if values.isfinite().all():
            return values, vectors.contiguous()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # NaN, or a float32 algorithm that did not converge
    check_finite(matrices)
    return eigh_in_double(matrices)


def eigh_in_double(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose in float64, and round."""
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
    # Round-off has made eigenvalues of zero negative, at worst by as much as the lowest one.
    jitter = 2 * torch.maximum(noise, -values.min(1).values) + torch.finfo(matrices.dtype).tiny
    text = (
        f"{int(singular.sum())} of {len(matrices)} factors are singular; up to {float(jitter[singular].max()):.1e} "
        "times the identity was added to them. Pass damping to decide yourself."
    )
    warnings.warn(text, KfsWarning, stacklevel=3)
    shifts = torch.where(singular, jitter, 0.0).unsqueeze(1).expand(-1, matrices.shape[-1])
    return precise + torch.diag_embed(shifts)


def inverse(matrices: Tensor) -> Tensor:
    """Invert positive definite matrices `[stack, d, d]`.

    Results are contiguous, as matrices from files are, so that products with both are equal to the last bit.
    """
    if matrices.is_cuda:
        return _inverse_on_gpu(computable(matrices))  # pragma: no cover (tested on a GPU)
    # LAPACK's results are stored by columns. They are symmetric to the last bit, so that transposing copies nothing.
    return torch.cholesky_inverse(cholesky(matrices)).mT.contiguous()


def _inverse_on_gpu(matrices: Tensor) -> Tensor:  # pragma: no cover (tested on a GPU)
    """Invert by halves, or by Cholesky factors in better precision if that fails."""
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
    r"""Invert positive definite matrices by products of stacks, which a GPU is much faster at than at decompositions.

    `python -m benchmarks.algebra cuda` measures both.

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
    r"""Write inverses of Cholesky factors to zeros `W`, and return which of them could be computed, `[stack]`.

    With halves $P, Q, R$ of a matrix, its Cholesky factor and the inverse of that are

    $$
    \begin{pmatrix} P & Q^\top \\ Q & R \end{pmatrix}
    = \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix} \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix}^\top,
    \quad
    \begin{pmatrix} L_1 & 0 \\ X & L_2 \end{pmatrix}^{-1}
    = \begin{pmatrix} W_1 & 0 \\ - W_2 X W_1 & W_2 \end{pmatrix},
    $$

    where $X = Q W_1^\top$ and $L_2 L_2^\top = R - X X^\top$. The same with $P^{-1}$ instead of $W_1$ would take fewer
    products, but the square of the condition number would multiply round-off. What is above the diagonal of `M` is not
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
    """Write `W^T W` for lower triangular matrices; what is above the diagonal is correct after `_mirror`."""
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
    """Copy halves from below the diagonal to above it, in place; matrices of the smallest size are complete."""
    size = M.shape[-1]
    if size > smallest:
        half = _first_half(size)
        M[:, :half, half:] = M[:, half:, :half].mT
        _mirror(M[:, :half, :half], smallest)
        _mirror(M[:, half:, half:], smallest)


def _multiply(L: Tensor, Y: Tensor, result: Tensor, smallest: int) -> None:
    """Write `L Y` for lower triangular matrices. Half of the zeros are left out, which saves a quarter."""
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
    """Return rows and columns of what is computed of a symmetric matrix: all, or three quarters with the diagonal."""
    if size <= smallest:
        return [(slice(size), slice(size))]
    half = _first_half(size)
    return [(slice(half), slice(half)), (slice(half, size), slice(size))]


def _first_half(size: int) -> int:
    """Return the size of the first half of a matrix. Products of aligned sizes are faster."""
    half = -(-size // 2)
    return half + -half % min(64, half)


def _inverse_of_triangular(L: Tensor) -> Tensor:
    """Invert Cholesky factors. TF32 would spoil them: PyTorch solves triangular systems in it, too."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    with tf32(False):
        inverse: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
        return inverse


def general_inverse(matrices: Tensor, eps: float | None = None) -> Tensor:
    """Invert matrices `[stack, d, d]` with a precision of `eps` that need not be symmetric, such as products."""
    matrices = computable(matrices)
    check_finite(matrices)
    inverses: Tensor = torch.linalg.inv_ex(matrices).inverse
    # The product of both norms is the condition number. If it is close to one over the precision, or if the inverse
    # could not be computed, then a matrix that differs by round-off is singular.
    condition = torch.linalg.matrix_norm(matrices, 1) * torch.linalg.matrix_norm(inverses, 1)
    largest = 1 / (matrices.shape[-1] * (eps or torch.finfo(matrices.dtype).eps))
    check_each(condition < largest, "is singular, up to round-off")
    return inverses
