r"""Energy natural gradients: exact Gauss-Newton steps for the residuals of a differential equation.

With the Jacobian $J$ of the residuals $r$ (scaled such that the loss is $\frac12 \lVert r \rVert^2$), damping $\lambda$
and the last direction $\varphi$ times momentum $\mu$, the direction is

$$
d = \arg\min_d \lVert J d - r \rVert^2 + \lambda \lVert d - \mu \varphi \rVert^2
= \mu \varphi + J^\top (J J^\top + \lambda I)^{-1} (r - \mu J \varphi) .
$$

Without momentum, it is the natural gradient in the energy inner product (Müller & Zeinhofer, 2023). The form with
$J J^\top$, which has one row per residual, and momentum are those of SPRING (Goldshlager et al., 2024). There are three
ways to compute it. With fewer parameters than residuals, a QR decomposition of $J$ with the damping below it: it does
not square the condition number. With fewer residuals, a Cholesky decomposition of $J J^\top + \lambda I$. If both are
many, conjugate gradients, with products that need no matrix.
"""

from itertools import pairwise
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from kfs.display.suggestions import suggest
from kfs.errors import ModelError, SolverError
from kfs.pinn.optimizer import Params, ProblemOptimizer, Rows
from kfs.pinn.problem import Problem
from kfs.problem.torch_fixes import call_with

Solver = Literal["auto", "parameters", "residuals", "iterative"]
_SOLVERS = ("auto", "parameters", "residuals", "iterative")
# The smaller side of the Jacobian, and its number of entries, up to which it is formed.
_SIDE, _ENTRIES = 6000, 2**28
# Number of points that are differentiated at a time, and of attempts to decompose a matrix with more damping each.
_CHUNK, _TRIES = 1024, 10


class EnergyNaturalGradient(ProblemOptimizer):
    """Gauss-Newton steps in the space of residuals, with a line search and the momentum of SPRING.

    Args:
        problem: The problem, which it owns: `step()` needs no closure.
        lr: Factor of each step. `None` for a line search on powers of two.
        damping: Relative to the trace of `J J^T` in the first step. It is raised if no step reduces the loss.
        momentum: Fraction of the last direction that is kept, as in SPRING. It pays off with random points.
        points_per_step: Number of points of all terms, drawn at random in each step. By default, all points. With
            fewer points, steps are cheaper by up to the square of their number.
        solver: `"parameters"` (QR), `"residuals"` (Cholesky), `"iterative"` (conjugate gradients), or `"auto"`: the
            smaller side of the Jacobian, or no matrix if both are above 6,000.
        max_iterations: Largest number of iterations of conjugate gradients.
        seed: Seed for drawing points.

    Attributes:
        problem: The problem.
        steps: Number of steps.
        lr: As above; may be set, for schedules.
        damping: The present damping.
        trace: The trace of `J J^T` in the first step, the unit of damping; `None` before.

    Raises:
        ModelError: If a setting is out of range.

    Example:
        >>> from torch import nn
        >>> from kfs.pinn import Term
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> optimizer = EnergyNaturalGradient(Problem(net, [Term(lambda u, x: u(x) - x**2, x)]))
        >>> losses = [optimizer.step() for _ in range(20)]
        >>> losses[-1] < 1e-6 * losses[0]
        True
        >>> optimizer  # doctest: +ELLIPSIS
        EnergyNaturalGradient of Sequential after 20 steps
          line search, damping=..., momentum=0
    """

    def __init__(
        self,
        problem: Problem,
        *,
        lr: float | None = None,
        damping: float = 1e-9,
        momentum: float = 0.0,
        points_per_step: int | None = None,
        solver: Solver = "auto",
        max_iterations: int = 200,
        seed: int = 0,
    ) -> None:
        super().__init__(problem, lr, damping, momentum, points_per_step, seed)
        if solver not in _SOLVERS:
            raise ModelError(f"solver is {solver!r}.", suggest([solver], _SOLVERS))
        if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
            raise ModelError(f"max_iterations is {max_iterations!r}.", "Pass an integer from 1.")
        self.solver, self.max_iterations = solver, max_iterations
        self.trace: float | None = None

    def direction(self, rows: list[Rows], params: Params, r: Tensor, last: Params) -> Params:
        """Return the damped Gauss-Newton direction."""
        size = sum(p.numel() for p in params.values())
        if self._chosen(len(r), size) == "iterative":
            return self._by_conjugate_gradients(rows, params, r, last)
        J = jacobian(rows, params, len(r))
        start = torch.cat([last[name].flatten() for name in params])
        rest = r - J @ start if self.momentum else r
        damping = self._absolute(float(J.square().sum()), r.dtype)
        found = by_qr if self._chosen(len(r), size) == "parameters" else by_cholesky
        d = start + found(J, rest, damping)
        pieces = d.split([p.numel() for p in params.values()])
        return {name: part.view_as(p) for (name, p), part in zip(params.items(), pieces, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the unit of damping."""
        return super().state_dict() | {"trace": self.trace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        super().load_state_dict(state)
        self.trace = state["trace"]

    def _chosen(self, residuals: int, parameters: int) -> str:
        if self.solver != "auto":
            return self.solver
        if min(residuals, parameters) > _SIDE or residuals * parameters > _ENTRIES:
            return "iterative"
        return "parameters" if parameters <= residuals else "residuals"

    def _absolute(self, trace: float, dtype: torch.dtype) -> float:
        """Return the damping as a number, at least round-off, given the present trace."""
        if self.trace is None:
            self.trace = trace
        precision = torch.finfo(dtype)
        return max(self.damping * self.trace, precision.eps * trace, sqrt(precision.tiny))

    def _by_conjugate_gradients(self, rows: list[Rows], params: Params, r: Tensor, last: Params) -> Params:
        """Solve the damped least-squares problem by conjugate gradients on its normal equation (CGLS).

        Every iterate is a direction of descent.
        """

        def residuals(p: Params) -> Tensor:
            return torch.cat([row.residuals(p) for row in rows])

        back = vjp(residuals, params)[1]

        def forward(v: Params) -> Tensor:
            product: Tensor = jvp(residuals, (params,), (v,))[1]
            return product

        # An estimate of the trace with one random vector of signs.
        signs = torch.randint(2, r.shape, generator=self._generator).to(r) * 2 - 1
        image = back(signs)[0]
        if any(t.requires_grad for t in image.values()):
            raise _foreign_parameters("A residual")
        damping = self._absolute(_inner(image, image), r.dtype)
        rest = r - forward(last) if self.momentum else r
        x = {name: torch.zeros_like(p) for name, p in params.items()}
        s = back(rest)[0]
        p, gamma = s, _inner(s, s)
        smallest = 1e-12 * gamma if r.dtype == torch.float64 else 1e-8 * gamma
        for _ in range(self.max_iterations):
            if gamma <= smallest:
                break
            q = forward(p)
            alpha = gamma / (float(q.square().sum()) + damping * _inner(p, p))
            x = {name: x[name] + alpha * p[name] for name in x}
            rest = rest - alpha * q
            sent = back(rest)[0]
            s = {name: sent[name] - damping * x[name] for name in x}
            new = _inner(s, s)
            p = {name: s[name] + new / gamma * p[name] for name in x}
            gamma = new
        return {name: last[name] + x[name] for name in x}


def jacobian(rows: list[Rows], params: Params, count: int) -> Tensor:
    """Return the Jacobian of scaled residuals, `[rows, parameters]`: the derivatives of every point by `vmap`."""
    size = sum(p.numel() for p in params.values())
    some = next(iter(params.values()))
    J = some.new_empty(count, size)
    place = 0
    for row in rows:

        def of_point(p: Params, *point: Tensor, row: Rows = row) -> Tensor:
            named = {f"model.{name}": t for name, t in p.items()}
            points = tuple(t.unsqueeze(0) for t in point)
            found: Tensor = call_with(row.module, named, points)[0]
            return found

        with torch.no_grad():
            width = of_point(params, *(t[0] for t in row.points)).numel()
        derivative = grad(lambda p, *t, f=of_point: f(p, *t).sum()) if width == 1 else jacrev(of_point)
        batched = vmap(derivative, in_dims=(None, *[0] * len(row.points)), randomness="same")
        for start in range(0, len(row.points[0]), _CHUNK):
            points = [t[start : start + _CHUNK] for t in row.points]
            found = batched(params, *points)
            if any(t.requires_grad for t in found.values()):
                raise _foreign_parameters(f"The residual of {row.name}")
            part = J[place : place + len(points[0]) * width].view(len(points[0]), width, size)
            column = 0
            for name, p in params.items():
                values = found[name].reshape(len(points[0]), width, p.numel())
                torch.mul(values, row.scale, out=part[:, :, column : column + p.numel()])
                column += p.numel()
            place += len(points[0]) * width
    return J


def _foreign_parameters(what: str) -> ModelError:
    """Return the error for derivatives that depend on parameters of others."""
    return ModelError(
        f"{what} depends on parameters that the model of the problem does not have.",
        "Make them parameters of the model, or call requires_grad_(False) on them.",
    )


def by_qr(J: Tensor, r: Tensor, damping: float) -> Tensor:
    """Return the minimizer of `|J d - r|^2 + damping |d|^2`, by a QR decomposition."""
    size = J.shape[1]
    below = damping**0.5 * torch.eye(size, dtype=J.dtype, device=J.device)
    Q, R = torch.linalg.qr(torch.cat([J, below]))
    right = Q[: len(J)].T @ r
    found: Tensor = torch.linalg.solve_triangular(R, right.unsqueeze(1), upper=True).squeeze(1)
    return found


def by_cholesky(J: Tensor, r: Tensor, damping: float) -> Tensor:
    """Return `J^T (J J^T + damping I)^-1 r`, with more damping if round-off makes the matrix indefinite.

    Raises:
        SolverError: If the matrix has NaN or infinity.
    """
    K = kernel(J).double()
    trace = float(K.trace())
    for _ in range(_TRIES):
        L, info = torch.linalg.cholesky_ex(K + damping * torch.eye(len(K), dtype=K.dtype, device=K.device))
        if not int(info):
            found: Tensor = torch.cholesky_solve(r.double().unsqueeze(1), L).squeeze(1)
            return J.T @ found.to(J.dtype)
        damping = max(10 * damping, torch.finfo(J.dtype).eps * trace)
    raise SolverError(
        "The matrix of inner products of residual gradients has no Cholesky decomposition.",
        "Check residuals and parameters for NaN, or pass a larger damping=.",
    )


def kernel(J: Tensor) -> Tensor:
    """Return the lower triangle of `J J^T`, and some of the upper one, as `torch.linalg.cholesky` needs it."""
    count = len(J)
    edges = [count * i // 4 for i in range(5)] if count >= 4 * 64 else [0, count]
    K = J.new_zeros(count, count)
    for start, stop in pairwise(edges):
        torch.mm(J[start:stop], J[:stop].T, out=K[start:stop, :stop])
    return K


def _inner(a: Params, b: Params) -> float:
    return float(torch.stack([(a[name] * b[name]).sum() for name in a]).sum())
