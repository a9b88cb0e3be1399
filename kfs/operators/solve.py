r"""Solvers for linear systems: conjugate gradients, Neumann series, LSMR, and the inverse as an operator.

Inverses in closed form, of operators with blocks, live in `kfs.factors.blocks`.

`solve` (conjugate gradients) and `neumann` (Neumann series) use only products with a symmetric operator. Curvature
itself is rarely positive definite; solve with `A.shift(damping)`.

`lsmr` (Fong & Saunders, 2011) solves least-squares problems. It minimizes $\|A x - b\|^2 + \delta \|x\|^2$ for
operators of any shape, from products with $A$ and $A^\top$. It is equivalent to MINRES on the normal equations
$(A^\top A + \delta I)\, x = A^\top b$, but does not square the condition number. So it also solves symmetric indefinite
systems, such as those with a Hessian, where conjugate gradients break down.

`Inverse` is an operator that solves a linear system in every product.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor

from kfs.display.charts import draw_residuals
from kfs.display.describe import Described, Description, counted, vector
from kfs.display.progress import show_progress
from kfs.errors import DtypeError, ModelError, ShapeError, SolverError
from kfs.operators.linear_operator import LinearOperator, listed
from kfs.operators.space import Columns, Form, Space
from kfs.runtime.precision import at_least_float32

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Default limit of iterations per row, as in SciPy.
_ITERATIONS_PER_ROW = 10
Vec = TypeVar("Vec", Tensor, dict[str, Tensor], list[Tensor])


@dataclass(frozen=True, repr=False)
class Solution(Described, Generic[Vec]):
    """An approximate solution of a linear system, with the history of residuals.

    Attributes:
        x: The solution, in the form of the right-hand side.
        iterations: Number of iterations.
        residuals: Relative residual norm `|b - A x| / |b|` after every iteration, the largest over columns.
        converged: Whether the last residual norm is below the tolerance.
        tolerance: The tolerance for convergence.
        measure: The quantity that `residuals` measures: `"residual"`, or `"gradient"` for least-squares problems.
    """

    x: Vec
    iterations: int
    residuals: tuple[float, ...]
    converged: bool
    tolerance: float = 0.0
    measure: Literal["residual", "gradient"] = "residual"

    def describe(self) -> Description:
        """Describe convergence, iterations and the size of the solution."""
        verdict = "converged" if self.converged else "not converged"
        last = f", {self.measure} {self.residuals[-1]:.1e}" if self.residuals else ""
        how = f"after {counted(self.iterations, 'iteration')}{last} (tolerance {self.tolerance:.0e})"
        return Description(f"Solution: {verdict} {how}", (f"x: {vector(self.x)}",))

    def plot(self, *, label: str | None = None, axes: "Axes | None" = None) -> "Axes":
        """Draw residuals over iterations on a log axis.

        Args:
            label: Label of the line. The default is `measure`.
            axes: Matplotlib axes to draw into. If not given, a new figure is created.

        Returns:
            The matplotlib axes.
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
    """Solve `A x = b` by conjugate gradients, for all columns of `b` at once.

    Args:
        A: A symmetric positive definite operator, such as `GGN(risk).shift(1e-3)`.
        b: One or several vectors, in any form that operators accept.
        preconditioner: A symmetric positive definite operator that approximates the inverse of `A`.
        start: Initial solution in the form of `b`, such as the solution of a similar system. By default zero.
        tolerance: Stop when the residual norm of every column is below this fraction of the norm of its right-hand
            side.
        max_iterations: Largest number of iterations. The default is ten times the number of rows of `A`. Without
            round-off, the number of rows would suffice.
        progress: Whether to show the residual. If not given, it is shown after two seconds.

    Returns:
        The solution with an iteration report. Check `converged`.

    Raises:
        SolverError: If `A` or the preconditioner is not positive definite.

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
            # The residual that the recursion updates drifts away from the true one, so restart with the true residual.
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
            if residuals[-1] > 0.5 * before:  # little progress since the last restart: round-off dominates
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
    """Run conjugate gradients from `X`, and yield the solution and its estimated residual after each iteration."""
    R = B - product(A, X)
    Z = R if preconditioner is None else product(preconditioner, R)
    # Normalize columns. A multiple of the preconditioner gives the same iterates.
    size = Z.abs().amax(0).clamp(min=torch.finfo(Z.dtype).tiny)
    P = Z = Z / size
    rho, residual, eps = (R * Z).sum(0), torch.inf, torch.finfo(A.dtype).eps
    tolerance = max(tolerance, eps)
    while not residual <= tolerance:  # `not <=` rather than `>`, so that NaN does not end the loop
        AP = product(A, P)
        curvature = (P * AP).sum(0)
        length = R.norm(dim=0)
        active = ~(length <= tolerance * norm)
        bad = active & ~((curvature > 0) & (curvature < torch.inf) & (rho > 0))
        # Near the limit of the precision, a direction consists of round-off, and its curvature is not that of `A`.
        if (bad & ~(length <= 10 * eps * norm)).any():
            squared_length = P.square().sum(0).clamp(min=torch.finfo(P.dtype).tiny)
            raise _breakdown((curvature / squared_length)[bad], rho[bad], A.dtype)
        active = active & ~bad
        if not active.any():
            return
        # Columns that have converged stay unchanged.
        step = torch.where(active, rho / curvature, 0)
        X, R = X + step * P, R - step * AP
        Z = (R if preconditioner is None else product(preconditioner, R)) / size
        rho_before, rho = rho, (R * Z).sum(0)
        P = Z + torch.where(active, rho / rho_before, 0) * P
        residual = float((R.norm(dim=0) / norm).amax())
        yield X, residual


def share_done(iterations: int, limit: int, residual: float, tolerance: float) -> float:
    """Estimate the share of iterations done, assuming that residuals fall by a constant factor per iteration."""
    fallen = log(residual) / log(tolerance) if 0 < residual < 1 and 0 < tolerance < 1 else 0.0
    return max(fallen, iterations / limit)


def _breakdown(curvature: Tensor, rho: Tensor, dtype: torch.dtype) -> SolverError:
    """Return the error for directions without a valid step, given their curvature for vectors of length one."""
    if not (curvature.isfinite().all() and rho.isfinite().all()):
        return SolverError(
            f"The iteration left the range of {dtype}: a direction has curvature {curvature[0].item():.2e}.",
            "Scale the operator closer to one, or use a wider dtype.",
        )
    if (rho <= 0).any():
        return SolverError(
            f"The preconditioner is not positive definite: a residual has squared length {rho.min().item():.2e} in its "
            "inner product.",
            "Pass a positive definite one, or none.",
        )
    return SolverError(
        f"The operator is not positive definite: a direction has curvature {curvature.min().item():.2e}.",
        "Use a larger damping, A.shift(damping), or use the GGN or the Fisher instead of the Hessian.",
    )


def _start(A: LinearOperator, start: Vec, B: Tensor, size: Tensor, form: Form) -> Tensor:
    """Return the initial solution for right-hand sides that were divided by `size`."""
    columns, given = A.domain.read(start)
    X = A.domain.flatten(columns).T.to(B.dtype)
    if given != form or X.shape != B.shape:
        raise ShapeError(
            f"start is a {given!r} with {X.shape[1]} columns, but the right-hand side is a {form!r} with {B.shape[1]}.",
            "Pass both in one form.",
        )
    if not X.isfinite().all():
        raise SolverError("start is not finite.", "Look for NaN or infinity in it.")
    # If a right-hand side is zero, the solution is zero, and its size is too small to divide by.
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
        b: One or several vectors, in any form that operators accept.
        scale: A number less than two over the largest eigenvalue of `P A`. Then the series converges if `A` and `P` are
            positive definite.
        terms: Number of terms.
        tolerance: Tolerance for convergence: the residual norm as a fraction of the norm of the right-hand side.
        preconditioner: `P`, an operator that approximates the inverse of `A`, such as the inverse of KFAC, so that the
            series needs fewer terms. By default the identity.
        progress: Whether to show the residual. If not given, it is shown after two seconds.

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
            X = X + scale * Z  # R is the residual b - A x, and Z is the next term divided by the scale
            R = R - scale * product(A, Z)
            residuals.append(float((R.norm(dim=0) / norm).max()))
            if not residuals[-1] < 1e6:
                raise SolverError(
                    f"The Neumann series diverges: the residual is {residuals[-1]:.1e} after {len(residuals)} terms.",
                    "Choose a scale less than two over the largest eigenvalue, and a positive definite operator.",
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
    """Multiply vectors in the operator's dtype, and return the result in the dtype of the vectors."""
    return (A @ V.to(A.dtype)).to(V.dtype)


def scaled_right_hand_side(space: Space, b: Vec) -> tuple[Tensor, Tensor, Form]:
    """Return the right-hand side as a matrix of columns of size about one, the sizes, and the form of `b`.

    Without scaling, squares of small numbers would underflow. Half precision is converted to float32 for the same
    reason. Sizes are powers of two, so that division and multiplication by them are exact.
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


def lsmr(
    A: LinearOperator,
    b: Vec,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    progress: bool | None = None,
) -> Solution[Vec]:
    r"""Minimize `|A x - b|^2 + damping |x|^2` by LSMR, for all columns of `b` at once.

    Args:
        A: Any operator, such as a `Jacobian`, or a `Hessian` that is not positive definite.
        b: One or several vectors in the codomain of `A`, in any form that operators accept.
        damping: Number added to the diagonal of the least-squares problem: `A.T @ A + damping * I`. (SciPy's `damp` is
            its square root.)
        tolerance: Stop when the norm of the gradient of every column, `A.T @ (b - A x) - damping x`, is below this
            fraction of its norm at zero.
        max_iterations: Largest number of iterations. The default is ten times the smaller side of `A`.
        progress: Whether to show the gradient norm. If not given, it is shown after two seconds.

    Returns:
        The solution with the least norm. Its residuals are gradient norms, relative to the gradient norm at zero.

    Raises:
        ModelError: If the damping is negative.

    Example:
        >>> from kfs import EmpiricalRisk, Jacobian
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> J = Jacobian(risk)
        >>> solution = lsmr(J, torch.ones(20))
        >>> solution.converged, bool((J @ solution.x - 1).norm() < 1e-4)  # biases of one predict ones
        (True, True)
        >>> solution  # doctest: +ELLIPSIS
        Solution: converged after ... iterations, gradient ... (tolerance 1e-06)
          x: 8, float32 on cpu
    """
    with A._ranks.agreed("lsmr"):
        if not 0 <= damping < float("inf"):
            raise ModelError(f"damping is {damping!r}.", "Use a finite number that is not negative.")
        B, size, form = scaled_right_hand_side(A.codomain, b)
    limit = _ITERATIONS_PER_ROW * min(A.shape) if max_iterations is None else max_iterations
    tolerance_of_estimate = max(tolerance, torch.finfo(B.dtype).eps)
    with show_progress("LSMR", None, progress, "iteration") as line:
        state = _State(A, B, damping**0.5)
        residuals = [1.0 if bool((state.first > 0).any()) else 0.0]
        while residuals[-1] > tolerance_of_estimate and len(residuals) <= limit:
            state.step()
            residuals.append(float(state.relative_gradient().amax()))
            share = share_done(len(residuals), limit, residuals[-1], tolerance_of_estimate)
            line.advance(note=f"gradient {residuals[-1]:.1e}", share=share)
        # The recursion only estimates the gradient. Compute the true one for the report.
        gradient = product(A.T, B - product(A, state.x)) - damping * state.x
    true = float(torch.where(state.first > 0, gradient.norm(dim=0) / state.first, 0.0).amax())
    if len(residuals) > 1:
        residuals[-1] = true
    x = A.domain.write(A.domain.unflatten((size * state.x).to(A.dtype).T), form)
    return Solution(x, len(residuals) - 1, tuple(residuals[1:]), true <= tolerance, tolerance, "gradient")  # type: ignore[arg-type]


@dataclass
class _Rotation:
    """A plane rotation for each column that maps `(a, b)` to `(r, 0)`."""

    c: Tensor
    s: Tensor
    r: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "_Rotation":
        r = torch.hypot(a, b)
        safe = torch.where(r > 0, r, 1.0)
        return cls(torch.where(r > 0, a / safe, 1.0), b / safe, r)


class _State:
    """State of the LSMR iteration for all columns, with the names of section 2 of the LSMR paper.

    Golub-Kahan bidiagonalization computes `u` and `v`. Two rotations per step keep the factors of the bidiagonal matrix
    triangular. The absolute value of `zeta_bar` is the norm of the current gradient.
    """

    def __init__(self, A: LinearOperator, B: Tensor, damp: float) -> None:
        self.A, self.damp = A, damp
        self.u, beta = _normalized(B)
        self.v, self.alpha = _normalized(product(A.T, self.u))
        self.first = self.alpha * beta  # norm of the gradient at zero
        self.zeta_bar = self.first
        self.alpha_bar = self.alpha
        one = torch.ones_like(beta)
        self.rho = one
        self.rho_bar = one
        self.c_bar = one
        self.s_bar = torch.zeros_like(beta)
        self.h = self.v
        self.h_bar = torch.zeros_like(self.v)
        self.x = torch.zeros_like(self.v)

    def step(self) -> None:
        """Run one iteration, which updates `x`."""
        self.u, beta = _normalized(product(self.A, self.v) - self.alpha * self.u)
        self.v, self.alpha = _normalized(product(self.A.T, self.u) - beta * self.v)
        # Eliminate the damping, and then the subdiagonal of the bidiagonal matrix.
        damped = _Rotation.of(self.alpha_bar, torch.full_like(self.alpha_bar, self.damp))
        rho_before = self.rho
        first = _Rotation.of(damped.r, beta)
        self.rho = first.r
        theta = first.s * self.alpha
        self.alpha_bar = first.c * self.alpha
        rho_bar_before = self.rho_bar
        theta_bar = self.s_bar * self.rho
        second = _Rotation.of(self.c_bar * self.rho, theta)
        self.c_bar = second.c
        self.s_bar = second.s
        self.rho_bar = second.r
        zeta = self.c_bar * self.zeta_bar
        self.zeta_bar = -self.s_bar * self.zeta_bar
        # For columns that have converged, these coefficients are zero, and the columns stay unchanged.
        self.h_bar = self.h - _ratio(theta_bar * self.rho, rho_before * rho_bar_before) * self.h_bar
        self.x = self.x + _ratio(zeta, self.rho * self.rho_bar) * self.h_bar
        self.h = self.v - _ratio(theta, self.rho) * self.h

    def relative_gradient(self) -> Tensor:
        """Return the estimated gradient norm of each column, relative to the gradient norm at zero."""
        return _ratio(self.zeta_bar.abs(), self.first)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b`, with zero where `b` is zero."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def _normalized(V: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize columns to length one, and return them with their lengths. Zero columns stay zero."""
    lengths = V.norm(dim=0)
    return _ratio(V, lengths), lengths


Solver = Literal["cg", "lsmr", "neumann"]
SOLVERS: dict[str, Callable[..., Solution[Any]]] = {"cg": solve, "lsmr": lsmr, "neumann": neumann}


class Inverse(LinearOperator):
    """The inverse of an operator, or its pseudo-inverse by least squares.

    Args:
        base: The operator.
        solver: `"cg"` (`solve`, for symmetric positive definite operators), `"lsmr"` (for any operator), `"neumann"`,
            or a function with the same arguments that returns a `Solution`.
        check: Whether a product raises an error if the solver has not converged. If `False`, the last iterate is
            returned, for example if a Neumann series is truncated on purpose.
        **settings: Keyword arguments for the solver, such as `tolerance`, `max_iterations`, `preconditioner`,
            `damping` or `scale`.

    Raises:
        ModelError: If the solver is unknown.
        SolverError: In products, if the solver has not converged.

    Example:
        >>> import torch
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> inverse = Inverse(GGN(risk).shift(0.1), tolerance=1e-5)
        >>> inverse
        Inverse(GGN + 0.1 * Identity): 8 x 8, float32 on cpu, symmetric
          GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
          Identity: 8 x 8, float32 on cpu, symmetric
          solver=solve, check=True, tolerance=1e-05
          cost: one linear system for a product with up to 16 vectors
        >>> (inverse @ risk.gradient())["bias"].shape
        torch.Size([2])
    """

    template = "Inverse({base})"

    def __init__(
        self,
        base: LinearOperator,
        solver: Solver | Callable[..., Solution[Any]] = "cg",
        *,
        check: bool = True,
        **settings: Any,
    ) -> None:
        if not callable(solver) and solver not in SOLVERS:
            raise ModelError(f"solver is {solver!r}.", f"Choose from {list(SOLVERS)}, or pass a function.")
        super().__init__(base.codomain, base.domain, base)
        self.base = base
        self.check = check
        self.settings = settings
        self.solver = solver if callable(solver) else SOLVERS[solver]
        self.symmetric, self.chunk_size = base.symmetric, base.chunk_size

    def describe(self) -> Description:
        """Describe the inverted operator, the solver and its settings."""
        solver = getattr(self.solver, "__name__", type(self.solver).__name__)
        settings = {"solver": solver, "check": self.check} | self.settings
        cost = f"cost: one linear system for {self.columns_at_once}"
        inherited = super().describe()
        return replace(inherited, facts=(*inherited.facts, listed(settings), cost))

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the inverse: solve the linear systems of all columns together."""
        return self._solve(self.base, columns)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the transposed inverse: solve linear systems with the transposed operator."""
        return self._solve(self.base.T, columns)

    def _solve(self, A: LinearOperator, columns: Columns) -> Columns:
        solution = self.solver(A, columns, **self.settings)
        if self.check and not solution.converged:
            residual = solution.residuals[-1] if solution.residuals else float("nan")
            raise SolverError(
                f"A product with an inverse has not converged: after {solution.iterations} iterations, the residual is "
                f"{residual:.1e} of the right-hand side.",
                "Add damping with A.shift(damping), allow more iterations or a larger tolerance, or pass check=False "
                "to use the last iterate.",
            )
        return cast("Columns", solution.x)
