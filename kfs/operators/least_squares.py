r"""Least squares with any operator: LSMR (Fong & Saunders, 2011).

It minimizes $\|A x - b\|^2 + \delta \|x\|^2$ for operators of any shape, from products with $A$ and $A^\top$. On the
normal equations $(A^\top A + \delta I)\, x = A^\top b$ it does what MINRES does, but without squaring the condition
number. So it also solves symmetric systems that are indefinite, such as those with a Hessian, where conjugate
gradients break down.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.operators.interface import LinearOperator
from kfs.operators.solve import Solution, Vec, product, scaled_right_hand_side, share_done
from kfs.progress import show_progress

_ITERATIONS_PER_ROW = 10


def lsmr(
    A: LinearOperator,
    b: Vec,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    progress: bool | None = None,
) -> Solution[Vec]:
    r"""Minimize `|A x - b|^2 + damping |x|^2` by LSMR, all columns of `b` at once.

    Args:
        A: Any operator, such as a `Jacobian`, or a `Hessian` that is not positive definite.
        b: A vector of the space that `A` maps to, or several, in any form that operators take.
        damping: Added to the curvature of the least-squares problem: `A.T @ A + damping * I`. (SciPy's `damp` is its
            square root.)
        tolerance: Stop when the gradient of every column, `A.T @ (b - A x) - damping x`, is below this fraction of what
            it was at zero.
        max_iterations: Stop after so many iterations in any case. By default ten times the smaller side of `A`.
        progress: Whether to show the gradient while iterating. By default, if it takes longer than two seconds.

    Returns:
        The solution, of least norm if there are several. Its residuals are norms of that gradient as fractions of the
        first one.

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
    """Where LSMR is, for all columns: names as in the paper, section 2.

    Golub-Kahan bidiagonalization makes `u` and `v`. Two rotations per step keep the factors of the bidiagonal matrix
    triangular, of which `zeta_bar` is what remains of the gradient.
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
        """Improve `x`."""
        self.u, beta = _normalized(product(self.A, self.v) - self.alpha * self.u)
        self.v, self.alpha = _normalized(product(self.A.T, self.u) - beta * self.v)
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
        # Columns that have converged have numbers of zero here, and stay as they are.
        self.h_bar = self.h - _ratio(theta_bar * self.rho, rho_before * rho_bar_before) * self.h_bar
        self.x = self.x + _ratio(zeta, self.rho * self.rho_bar) * self.h_bar
        self.h = self.v - _ratio(theta, self.rho) * self.h

    def relative_gradient(self) -> Tensor:
        """Return the gradient's norm as a fraction of the first one, `[columns]`."""
        return _ratio(self.zeta_bar.abs(), self.first)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Divide, with zero where the denominator is zero."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def _normalized(V: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns of length one (or zero), and their lengths."""
    lengths = V.norm(dim=0)
    return _ratio(V, lengths), lengths
