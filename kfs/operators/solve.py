r"""Linear systems with operators: conjugate gradients and Neumann series.

Both need products only. Curvature is rarely positive definite by itself; solve with `A.shift(damping)`. Least squares,
with any operator, are in `least_squares`; operators that solve in every product, in `inverse`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kfs.charts import draw_residuals
from kfs.describing import Described, Description, counted, vector
from kfs.errors import DtypeError, ShapeError, SolverError
from kfs.operators.interface import LinearOperator
from kfs.operators.space import Form, Space
from kfs.precision import at_least_float32
from kfs.progress import show_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As in SciPy.
_ITERATIONS_PER_ROW = 10
Vec = TypeVar("Vec", Tensor, dict[str, Tensor], list[Tensor])


@dataclass(frozen=True, repr=False)
class Solution(Described, Generic[Vec]):
    """An approximate solution and how it was reached.

    Attributes:
        x: The solution, in the form of the right-hand side.
        iterations: How many iterations were needed.
        residuals: Relative residual norm `|b - A x| / |b|` after every iteration, the largest over columns.
        converged: Whether the last one is below the tolerance.
        tolerance: What counts as converged.
        measure: What residuals are norms of: the `"residual"`, or the `"gradient"` of a least-squares problem.
    """

    x: Vec
    iterations: int
    residuals: tuple[float, ...]
    converged: bool
    tolerance: float = 0.0
    measure: Literal["residual", "gradient"] = "residual"

    def describe(self) -> Description:
        """Describe whether it converged, first of all."""
        verdict = "converged" if self.converged else "not converged"
        last = f", {self.measure} {self.residuals[-1]:.1e}" if self.residuals else ""
        how = f"after {counted(self.iterations, 'iteration')}{last} (tolerance {self.tolerance:.0e})"
        return Description(f"Solution: {verdict} {how}", (f"x: {vector(self.x)}",))

    def plot(self, *, label: str | None = None, axes: "Axes | None" = None) -> "Axes":
        """Draw residuals on a log axis, iteration by iteration.

        Args:
            label: What the line is called; by default what is measured.
            axes: Where to draw; by default in a new figure.

        Returns:
            Axes of matplotlib.
        """
        verdict = "converged" if self.converged else "not converged"
        title = f"{verdict} after {counted(self.iterations, 'iteration')}"
        return draw_residuals(self.residuals, self.tolerance, title, self.measure, label, axes)


def solve(
    A: LinearOperator,
    b: Vec,
    *,
    preconditioner: LinearOperator | None = None,
    start: Vec | None = None,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    progress: bool | None = None,
) -> Solution[Vec]:
    """Solve `A x = b` by conjugate gradients, all columns of `b` at once.

    Args:
        A: A symmetric positive definite operator, such as `GGN(risk).shift(1e-3)`.
        b: A vector, or several, in any form that operators take.
        preconditioner: A symmetric positive definite operator that approximates the inverse of `A`.
        start: Where to start, in the form of `b`, such as the solution of a similar system. By default at zero.
        tolerance: Stop when every column's residual is below this fraction of its right-hand side.
        max_iterations: Stop after so many iterations in any case. By default ten times the number of rows of `A`: that
            number would suffice without round-off, which makes directions repeat themselves.
        progress: Whether to show the residual while iterating. By default, if it takes longer than two seconds.

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
        >>> solution  # doctest: +ELLIPSIS
        Solution: converged after ... iterations, residual ... (tolerance 1e-06)
          x: 2 tensors, 8 numbers, float32 on cpu
    """
    with A._ranks.agreed("solve"):
        _check_square(A)
        _check_preconditioner(A, preconditioner)
        B, size, form = scaled_right_hand_side(A.domain, b)
        X = torch.zeros_like(B) if start is None else _start(A, start, B, size, form)
    limit = _ITERATIONS_PER_ROW * A.shape[0] if max_iterations is None else max_iterations
    norm = B.norm(dim=0).clamp(min=torch.finfo(B.dtype).tiny)
    residuals = [float(((B if start is None else B - product(A, X)).norm(dim=0) / norm).amax())]
    with show_progress("conjugate gradients", None, progress, "iteration") as line:
        while residuals[-1] > tolerance and len(residuals) <= limit:
            # The residual that the iteration updates drifts away from the true one, so start again from that.
            before = residuals[-1]
            for better, estimate in _conjugate_gradients(A, B, X, norm, tolerance, preconditioner):
                X = better
                residuals.append(estimate)
                line.advance(
                    note=f"residual {estimate:.1e}", share=share_done(len(residuals), limit, estimate, tolerance)
                )
                if len(residuals) > limit:
                    break
            residuals[-1] = float(((B - product(A, X)).norm(dim=0) / norm).amax())
            if residuals[-1] > 0.5 * before:  # no better than before: this precision has no more to give
                break
    x = A.domain.write(A.domain.unflatten((size * X).to(A.dtype).T), form)
    return Solution(x, len(residuals) - 1, tuple(residuals[1:]), residuals[-1] <= tolerance, tolerance)  # type: ignore[arg-type]


def _conjugate_gradients(
    A: LinearOperator,
    B: Tensor,
    X: Tensor,
    norm: Tensor,
    tolerance: float,
    preconditioner: LinearOperator | None,
) -> Iterator[tuple[Tensor, float]]:
    """Yield better and better solutions, starting from `X`, with estimates of their residuals."""
    R = B - product(A, X)
    Z = R if preconditioner is None else product(preconditioner, R)
    size = Z.abs().amax(0).clamp(min=torch.finfo(Z.dtype).tiny)  # a multiple of the preconditioner is as good
    P = Z = Z / size
    rho, residual, eps = (R * Z).sum(0), torch.inf, torch.finfo(A.dtype).eps
    tolerance = max(tolerance, eps)
    while not residual <= tolerance:  # also if it is not a number
        AP = product(A, P)
        curvature = (P * AP).sum(0)
        length = R.norm(dim=0)
        active = ~(length <= tolerance * norm)
        bad = active & ~((curvature > 0) & (curvature < torch.inf) & (rho > 0))
        # Close to what this precision can resolve, a direction consists of rounding errors and says nothing about `A`.
        if (bad & ~(length <= 10 * eps * norm)).any():
            squared_length = P.square().sum(0).clamp(min=torch.finfo(P.dtype).tiny)
            raise _breakdown((curvature / squared_length)[bad], rho[bad], A.dtype)
        active = active & ~bad
        if not active.any():
            return
        step = torch.where(active, rho / curvature, 0)
        X, R = X + step * P, R - step * AP
        Z = (R if preconditioner is None else product(preconditioner, R)) / size
        rho_before, rho = rho, (R * Z).sum(0)
        P = Z + torch.where(active, rho / rho_before, 0) * P
        residual = float((R.norm(dim=0) / norm).amax())
        yield X, residual


def share_done(iterations: int, limit: int, residual: float, tolerance: float) -> float:
    """Guess how much of the work is done: residuals fall by about the same factor in every iteration."""
    fallen = log(residual) / log(tolerance) if 0 < residual < 1 and 0 < tolerance < 1 else 0.0
    return max(fallen, iterations / limit)


def _breakdown(curvature: Tensor, rho: Tensor, dtype: torch.dtype) -> SolverError:
    """Return the error for directions along which no step can be made, given curvature along vectors of length one."""
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


def _start(A: LinearOperator, start: Vec, B: Tensor, size: Tensor, form: Form) -> Tensor:
    """Return where to start, for right-hand sides that were divided by their sizes."""
    columns, given = A.domain.read(start)
    X = A.domain.flatten(columns).T.to(B.dtype)
    if given != form or X.shape != B.shape:
        raise ShapeError(
            f"start is a {given!r} with {X.shape[1]} columns, but the right-hand side is a {form!r} with {B.shape[1]}.",
            "Pass both in one form.",
        )
    if not X.isfinite().all():
        raise SolverError("start is not finite.", "Look for NaN or infinity in it.")
    # Without a right-hand side, the solution is zero, and sizes are too small to divide by.
    return torch.where(B.abs().amax(0) > 0, X / size, 0.0)


def neumann(
    A: LinearOperator,
    b: Vec,
    *,
    scale: float,
    terms: int = 100,
    tolerance: float = 1e-6,
    preconditioner: LinearOperator | None = None,
    progress: bool | None = None,
) -> Solution[Vec]:
    """Approximate the solution of `A x = b` by a Neumann series, `x = scale * sum_k (I - scale * P A)^k P b`.

    Args:
        A: A symmetric operator.
        b: A vector, or several, in any form that operators take.
        scale: Less than two over the largest eigenvalue of `P A`; the series converges then if `A` and `P` are positive
            definite.
        terms: How many terms to add up.
        tolerance: What counts as converged: the residual as a fraction of the right-hand side.
        preconditioner: `P`, an operator that approximates the inverse of `A`, such as that of KFAC. The series then
            needs fewer terms. By default the identity.
        progress: Whether to show the residual meanwhile. By default, if it takes longer than two seconds.

    Returns:
        The truncated series, with the residual after every term.

    Raises:
        SolverError: If the series diverges.

    Example:
        >>> from kfs import EmpiricalRisk, GGN, KFAC
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> P = KFAC(risk).inverse(damping=0.1)
        >>> G, g = GGN(risk).shift(0.1), risk.gradient()
        >>> neumann(G, g, scale=1.0, terms=150, preconditioner=P).converged
        True
    """
    with A._ranks.agreed("neumann"):
        _check_square(A)
        _check_preconditioner(A, preconditioner)
        B, size, form = scaled_right_hand_side(A.domain, b)
    norm = B.norm(dim=0).clamp(min=torch.finfo(B.dtype).tiny)
    X, R = torch.zeros_like(B), B
    residuals: list[float] = []
    with show_progress("Neumann series", max(terms, 1), progress, "term") as line:
        for _ in range(max(terms, 1)):
            Z = R if preconditioner is None else product(preconditioner, R)
            X = X + scale * Z  # R is the residual b - A x, and Z the next term over the scale
            R = R - scale * product(A, Z)
            residuals.append(float((R.norm(dim=0) / norm).max()))
            if not residuals[-1] < 1e6:
                raise SolverError(
                    f"The Neumann series diverges: the residual is {residuals[-1]:.1e} after {len(residuals)} terms.",
                    "Choose a scale below two over the largest eigenvalue, and a positive definite operator.",
                )
            line.advance(note=f"residual {residuals[-1]:.1e}")
    x = A.domain.write(A.domain.unflatten((size * X).to(A.dtype).T), form)
    return Solution(x, len(residuals), tuple(residuals), residuals[-1] <= tolerance, tolerance)  # type: ignore[arg-type]


def _check_square(A: LinearOperator) -> None:
    if A.domain != A.codomain or not A.symmetric:
        raise ShapeError(
            f"The operator has shape {list(A.shape)} and is not known to be symmetric.",
            "Pass a symmetric one that maps a space to itself.",
        )


def _check_preconditioner(A: LinearOperator, preconditioner: LinearOperator | None) -> None:
    if preconditioner is not None and preconditioner.domain.dtype != A.dtype:
        raise DtypeError(
            f"The preconditioner is {preconditioner.domain.dtype}, but the operator is {A.dtype}.",
            "Build both from models of one dtype.",
        )


def product(A: LinearOperator, V: Tensor) -> Tensor:
    """Multiply in the operator's precision, and return in that of the vectors."""
    return (A @ V.to(A.dtype)).to(V.dtype)


def scaled_right_hand_side(space: Space, b: Vec) -> tuple[Tensor, Tensor, Form]:
    """Return the right-hand side as a matrix of columns of size about one, their sizes, and the form that it came in.

    Squares of small numbers would vanish otherwise; half precision is made float32 for the same reason. Sizes are
    powers of two, such that dividing by them and multiplying with them is exact.
    """
    columns, form = space.read(b)
    B = space.flatten(columns).T
    if B.shape[1] == 0:
        raise ShapeError("The right-hand side has no columns.", "Pass at least one.")
    if not B.isfinite().all():
        raise SolverError("The right-hand side is not finite.", "Look for NaN or infinity in it.")
    B = B.to(at_least_float32(B.dtype))
    size = torch.exp2(torch.frexp(B.abs().amax(0)).exponent.to(B.dtype) - 1).clamp(min=torch.finfo(B.dtype).tiny)
    return B / size, size, form
