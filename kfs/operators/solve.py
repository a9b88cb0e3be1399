r"""Linear systems with operators: conjugate gradients and Neumann series.

Both need products only. Curvature is rarely positive definite by itself; solve with `A.shift(damping)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from rich.progress import Progress
from torch import Tensor

from kfs.errors import DtypeError, ShapeError, SolverError
from kfs.operators.interface import LinearOperator
from kfs.operators.space import Form

# As in SciPy.
_ITERATIONS_PER_ROW = 10
Vec = TypeVar("Vec", Tensor, dict[str, Tensor])


@dataclass(frozen=True)
class Solution(Generic[Vec]):
    """An approximate solution and how it was reached.

    Attributes:
        x: The solution, in the form of the right-hand side.
        iterations: How many iterations were needed.
        residuals: Relative residual norm `|b - A x| / |b|` after every iteration, the largest over columns.
        converged: Whether the last one is below the tolerance.
    """

    x: Vec
    iterations: int
    residuals: tuple[float, ...]
    converged: bool


def solve(
    A: LinearOperator,
    b: Vec,
    *,
    preconditioner: LinearOperator | None = None,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    progress: bool = False,
) -> Solution[Vec]:
    """Solve `A x = b` by conjugate gradients, all columns of `b` at once.

    Args:
        A: A symmetric positive definite operator, such as `GGN(risk).shift(1e-3)`.
        b: A flat vector, a matrix of columns, or a dictionary like the risk's params.
        preconditioner: A symmetric positive definite operator that approximates the inverse of `A`.
        tolerance: Stop when every column's residual is below this fraction of its right-hand side.
        max_iterations: Stop after so many iterations in any case. By default ten times the number of rows of `A`: that
            number would suffice without round-off, which makes directions repeat themselves.
        progress: Whether to show the residual while iterating.

    Returns:
        The solution with an iteration report. Look at `converged`.

    Raises:
        SolverError: If `A` turns out not to be positive definite.

    Example:
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> solution = solve(GGN(risk).shift(0.1), risk.gradient())
        >>> solution.converged, solution.x["bias"].shape
        (True, torch.Size([2]))
    """
    _check_square(A)
    if preconditioner is not None and preconditioner.domain.dtype != A.dtype:
        raise DtypeError(
            f"The preconditioner is {preconditioner.domain.dtype}, but the operator is {A.dtype}.",
            "Build both from models of one dtype.",
        )
    B, size, form = _right_hand_side(A, b)
    limit = _ITERATIONS_PER_ROW * A.shape[0] if max_iterations is None else max_iterations
    norm = B.norm(dim=0).clamp(min=torch.finfo(B.dtype).tiny)
    X, residuals = torch.zeros_like(B), [float((B.norm(dim=0) / norm).amax())]
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("conjugate gradients", total=limit)
        while residuals[-1] > tolerance and len(residuals) <= limit:
            # The residual that the iteration updates drifts away from the true one, so start again from that.
            before = residuals[-1]
            for better, estimate in _conjugate_gradients(A, B, X, norm, tolerance, preconditioner):
                X = better
                residuals.append(estimate)
                bar.update(task, advance=1, description=f"residual {estimate:.1e}")
                if len(residuals) > limit:
                    break
            residuals[-1] = float(((B - _product(A, X)).norm(dim=0) / norm).amax())
            if residuals[-1] > 0.5 * before:  # no better than before: this precision has no more to give
                break
    x = A.domain.write(A.domain.unflatten((size * X).to(A.dtype).T), form)
    return Solution(x, len(residuals) - 1, tuple(residuals[1:]), residuals[-1] <= tolerance)  # type: ignore[arg-type]


def _conjugate_gradients(
    A: LinearOperator,
    B: Tensor,
    X: Tensor,
    norm: Tensor,
    tolerance: float,
    preconditioner: LinearOperator | None,
) -> Iterator[tuple[Tensor, float]]:
    """Yield better and better solutions, starting from `X`, with estimates of their residuals."""
    R = B - _product(A, X)
    Z = R if preconditioner is None else _product(preconditioner, R)
    size = Z.abs().amax(0).clamp(min=torch.finfo(Z.dtype).tiny)  # a multiple of the preconditioner is as good
    P = Z = Z / size
    rho, residual, eps = (R * Z).sum(0), torch.inf, torch.finfo(A.dtype).eps
    tolerance = max(tolerance, eps)
    while not residual <= tolerance:  # also if it is not a number
        AP = _product(A, P)
        curvature = (P * AP).sum(0)
        length = R.norm(dim=0)
        active = ~(length <= tolerance * norm)
        bad = active & ~((curvature > 0) & (curvature < torch.inf) & (rho > 0))
        # Close to what this precision can resolve, a direction consists of rounding errors and says nothing about `A`.
        if (bad & ~(length <= 10 * eps * norm)).any():
            raise _breakdown(curvature[bad], rho[bad], A.dtype)
        active = active & ~bad
        if not active.any():
            return
        step = torch.where(active, rho / curvature, 0)
        X, R = X + step * P, R - step * AP
        Z = (R if preconditioner is None else _product(preconditioner, R)) / size
        rho_before, rho = rho, (R * Z).sum(0)
        P = Z + torch.where(active, rho / rho_before, 0) * P
        residual = float((R.norm(dim=0) / norm).amax())
        yield X, residual


def _breakdown(curvature: Tensor, rho: Tensor, dtype: torch.dtype) -> SolverError:
    """Return the error for directions along which no step can be made."""
    if not (curvature.isfinite().all() and rho.isfinite().all()):
        return SolverError(
            f"The iteration left the range of {dtype}: a direction has curvature {curvature[0].item():.2e}.",
            "Scale the operator closer to one, or use a wider dtype.",
        )
    if (rho <= 0).any():
        return SolverError(
            f"The preconditioner is not positive definite: a residual has squared length {rho.min().item():.2e} in it.",
            "Pass one that is, or none.",
        )
    return SolverError(
        f"The operator is not positive definite: a direction has curvature {curvature.min().item():.2e}.",
        "Shift it by a larger damping: A.shift(damping), or use the GGN or the Fisher, not the Hessian.",
    )


def neumann(A: LinearOperator, b: Vec, *, scale: float, terms: int = 100, tolerance: float = 1e-6) -> Solution[Vec]:
    """Approximate the solution of `A x = b` by a Neumann series, `x = scale * sum_k (I - scale * A)^k b`.

    Args:
        A: A symmetric operator.
        b: A flat vector, a matrix of columns, or a dictionary like the risk's params.
        scale: Less than two over the largest eigenvalue; the series converges then if `A` is positive definite.
        terms: How many terms to add up.
        tolerance: What counts as converged: the residual as a fraction of the right-hand side.

    Returns:
        The truncated series, with the residual after every term.

    Raises:
        SolverError: If the series diverges.
    """
    _check_square(A)
    B, size, form = _right_hand_side(A, b)
    norm = B.norm(dim=0).clamp(min=torch.finfo(B.dtype).tiny)
    X, R = torch.zeros_like(B), B
    residuals: list[float] = []
    for _ in range(max(terms, 1)):
        X = X + scale * R  # R is the residual b - A x, and also the next term over the scale
        R = R - scale * _product(A, R)
        residuals.append(float((R.norm(dim=0) / norm).max()))
        if not residuals[-1] < 1e6:
            raise SolverError(
                f"The Neumann series diverges: the residual is {residuals[-1]:.1e} after {len(residuals)} terms.",
                "Choose a scale below two over the largest eigenvalue, and a positive definite operator.",
            )
    x = A.domain.write(A.domain.unflatten((size * X).to(A.dtype).T), form)
    return Solution(x, len(residuals), tuple(residuals), residuals[-1] <= tolerance)  # type: ignore[arg-type]


def _check_square(A: LinearOperator) -> None:
    if A.domain != A.codomain or not A.symmetric:
        raise ShapeError(
            f"The operator has shape {list(A.shape)} and is not known to be symmetric.",
            "Pass a symmetric one that maps a space to itself.",
        )


def _product(A: LinearOperator, V: Tensor) -> Tensor:
    """Multiply in the operator's precision, and return in that of the vectors."""
    return (A @ V.to(A.dtype)).to(V.dtype)


def _right_hand_side(A: LinearOperator, b: Vec) -> tuple[Tensor, Tensor, Form]:
    """Return the right-hand side as a matrix of columns of size about one, their sizes, and the form that it came in.

    Squares of small numbers would vanish otherwise; half precision is made float32 for the same reason. Sizes are
    powers of two, such that dividing by them and multiplying with them is exact.
    """
    columns, form = A.domain.read(b)
    B = A.domain.flatten(columns).T
    if B.shape[1] == 0:
        raise ShapeError("The right-hand side has no columns.", "Pass at least one.")
    if not B.isfinite().all():
        raise SolverError("The right-hand side is not finite.", "Look for NaN or infinity in it.")
    B = B.to(torch.promote_types(B.dtype, torch.float32))
    size = torch.exp2(torch.frexp(B.abs().amax(0)).exponent.to(B.dtype) - 1).clamp(min=torch.finfo(B.dtype).tiny)
    return B / size, size, form
