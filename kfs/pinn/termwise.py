r"""KFAC of physics-informed networks with one Kronecker product per term: Dangel, Müller & Zeinhofer (2024).

The curvature of a sum of terms is a sum of curvatures, so a layer has the block
$B_\Omega \otimes A_\Omega + B_{\partial\Omega} \otimes A_{\partial\Omega}$, with one Kronecker product for the interior
and one for the boundary. Damping is added to each factor, and the inverse of the sum has a closed form. The factors are
those of shared weights: value and derivatives of a point, which `kfs.pinn.taylor` sends forward, are positions that
share the weight.
"""

from typing import Any, cast

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.factors import KFAC, BlockDiagonal
from kfs.factors.blocks import Factor, Kronecker, stacked_with_zeros
from kfs.pinn.optimizer import Params, ProblemOptimizer, Rows
from kfs.pinn.problem import Problem

# The averages of both factors of each block, `[groups, d, d]`, by name.
Averages = dict[str, tuple[Tensor, Tensor]]


class TermwiseKFAC(ProblemOptimizer):
    """KFAC with one Kronecker product for the first term, and one for all other terms, as in the paper on PINNs.

    `kfs.optim.KFAC(problem.residuals, problem.loss, fisher="ggn")` has one Kronecker product for all terms.

    Args:
        problem: The problem, which it owns: `step()` needs no closure. Its first term is the differential equation.
        lr: Factor of each step. `None` for a line search on powers of two.
        damping: Added to the diagonal of each factor.
        momentum: Fraction of the last direction that is kept.
        decay: Fraction of the moving averages of factors that is kept when new factors are added.

    Attributes:
        problem: The problem.
        steps: Number of steps.

    Raises:
        ModelError: If a setting is out of range.

    Example:
        >>> from torch import nn
        >>> from kfs.pinn import Term, taylor
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.linspace(0, 3, 30, dtype=torch.float64).unsqueeze(1)
        >>> inside = Term(lambda u, x: taylor(u, x).gradient[:, 0] + u(x), x)
        >>> start = Term(lambda u, x: u(x) - 1, torch.zeros(1, 1, dtype=torch.float64))
        >>> optimizer = TermwiseKFAC(Problem(net, [inside, start]))
        >>> losses = [optimizer.step() for _ in range(40)]
        >>> losses[-1] < 1e-2 * losses[0]
        True
    """

    def __init__(
        self,
        problem: Problem,
        *,
        lr: float | None = None,
        damping: float = 3e-5,
        momentum: float = 0.0,
        decay: float = 0.95,
    ) -> None:
        super().__init__(problem, lr, damping, momentum, None, 0)
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ModelError(f"decay is {decay!r}.", "Pass a number from 0 up to, but not including, 1.")
        self.decay = decay
        self._averages: list[Averages] = []

    def direction(self, rows: list[Rows], params: Params, r: Tensor, last: Params) -> Params:
        """Return the inverse of the sum of Kronecker products times the gradient, plus momentum."""
        terms = range(len(self.problem.terms))
        parts = self.problem.parts(*[group for group in ((0,), tuple(terms[1:])) if group])
        risks = [part.risk for part in parts]
        factors = [KFAC(risk, fisher="ggn", audit=False) for risk in risks]
        old = self._averages or [{} for _ in factors]
        self._averages = [self._averaged(K, averages) for K, averages in zip(factors, old, strict=True)]
        operators = [_operator(K, averages) for K, averages in zip(factors, self._averages, strict=True)]
        total = operators[0] if len(operators) == 1 else cast("BlockDiagonal", operators[0] + operators[1])
        gradients = [risk.gradient() for risk in risks]
        gradient = {name: torch.stack([g[name] for g in gradients]).sum(0) for name in gradients[0]}
        step = total.inverse(self.damping, method="per-factor") @ gradient
        return {name: step[f"model.{name}"] + last[name] for name in params}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the moving averages of factors."""
        averages = [{name: (A.clone(), B.clone()) for name, (A, B) in some.items()} for some in self._averages]
        return super().state_dict() | {"averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        super().load_state_dict(state)
        self._averages = [{name: (A.clone(), B.clone()) for name, (A, B) in some.items()} for some in state["averages"]]

    def _averaged(self, K: KFAC, old: Averages) -> Averages:
        """Return the moving averages of factors with new ones added."""
        new = {}
        for name, block in K.blocks.items():
            A, B = (t if t.ndim == 3 else t.unsqueeze(0) for t in (block.A, block.B))
            if name in old and self.decay:
                A, B = old[name][0].lerp(A, 1 - self.decay), old[name][1].lerp(B, 1 - self.decay)
            new[name] = A, B
        return new


def _operator(K: KFAC, averages: Averages) -> BlockDiagonal:
    """Return an operator with the blocks of `K`, and averages as their factors."""
    parts = [(K.blocks[name].layout, Kronecker(Factor.dense(A), Factor.dense(B))) for name, (A, B) in averages.items()]
    return BlockDiagonal(K.domain, stacked_with_zeros(parts, K.domain))
