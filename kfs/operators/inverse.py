"""The inverse of an operator as an operator: every product solves a linear system."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

from kfs.describing import Description
from kfs.errors import ModelError, SolverError
from kfs.operators.formulas import listed
from kfs.operators.interface import LinearOperator
from kfs.operators.least_squares import lsmr
from kfs.operators.solve import Solution, neumann, solve
from kfs.operators.space import Columns

Solver = Literal["cg", "lsmr", "neumann"]
SOLVERS: dict[str, Callable[..., Solution[Any]]] = {"cg": solve, "lsmr": lsmr, "neumann": neumann}


class Inverse(LinearOperator):
    """The inverse of an operator, or its pseudo-inverse by least squares.

    Args:
        base: The operator.
        solver: `"cg"` (`solve`, for symmetric positive definite operators), `"lsmr"` (any operator), `"neumann"`, or a
            function with the same arguments and a `Solution` as result.
        check: Whether a product that has not converged is an error. Without, it is as good as it got: for a Neumann
            series that is cut off on purpose.
        **settings: For the solver, such as `tolerance`, `max_iterations`, `preconditioner`, `damping` or `scale`.

    Raises:
        ModelError: If the solver is unknown.
        SolverError: In products, if one has not converged.

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
        """Store everything; nothing is solved yet."""
        if not callable(solver) and solver not in SOLVERS:
            raise ModelError(f"solver is {solver!r}.", f"Choose from {list(SOLVERS)}, or pass a function.")
        super().__init__(base.codomain, base.domain, base)
        self.base = base
        self.check = check
        self.settings = settings
        self.solver = solver if callable(solver) else SOLVERS[solver]
        self.symmetric, self.chunk_size = base.symmetric, base.chunk_size

    def describe(self) -> Description:
        """Describe the operator that is inverted, and how."""
        solver = getattr(self.solver, "__name__", type(self.solver).__name__)
        settings = {"solver": solver, "check": self.check} | self.settings
        cost = f"cost: one linear system for {self.columns_at_once}"
        inherited = super().describe()
        return replace(inherited, facts=(*inherited.facts, listed(settings), cost))

    def multiply(self, columns: Columns) -> Columns:
        """Solve for all columns together."""
        return self._solve(self.base, columns)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Solve with the transpose."""
        return self._solve(self.base.T, columns)

    def _solve(self, A: LinearOperator, columns: Columns) -> Columns:
        solution = self.solver(A, columns, **self.settings)
        if self.check and not solution.converged:
            residual = solution.residuals[-1] if solution.residuals else float("nan")
            raise SolverError(
                f"A product with an inverse has not converged: after {solution.iterations} iterations, the residual is "
                f"{residual:.1e} of the right-hand side.",
                "Add damping with A.shift(damping), allow more iterations or a larger tolerance, or pass check=False "
                "to use what was reached.",
            )
        return cast("Columns", solution.x)
