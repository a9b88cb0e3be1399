"""How operators show themselves: what they are made of, of what model and loss, their size, settings and cost.

Example:
    >>> import torch
    >>> from kfs import GGN, EmpiricalRisk, Fisher, Hessian, Jacobian
    >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
    >>> risk
    EmpiricalRisk of Linear with MSELoss (mean)
      2 parameters, 8 numbers, float32 on cpu
      1 batch, not counted yet
    >>> Hessian(risk)
    Hessian of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      block_diagonal=False, chunk_size=16
      cost: one pass over the data for a product with up to 16 vectors
    >>> GGN(risk, block_diagonal="layer", reuse=True)
    GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      block_diagonal='layer', chunk_size=16, reuse=True
      cost: one pass over the data for a product with up to 16 vectors
    >>> Fisher(risk, "type-1", mc_samples=2)
    Fisher of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      kind='type-1', mc_samples=2, seed=0, block_diagonal=False, chunk_size=16, reuse=False
      cost: one pass over the data for a product with up to 16 vectors
    >>> Jacobian(risk)
    Jacobian of Linear with MSELoss (mean): 20 x 8, float32 on cpu
      1 batch, 10 data
      chunk_size=16
      cost: one pass over the data for a product with up to 16 vectors
    >>> Jacobian(risk).T
    Jacobian.T: 8 x 20, float32 on cpu
      Jacobian of Linear with MSELoss (mean): 20 x 8, float32 on cpu
    >>> 2 * (GGN(risk).shift(0.1) @ Hessian(risk))
    2 * ((GGN + 0.1 * Identity) @ Hessian): 8 x 8, float32 on cpu
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      Identity: 8 x 8, float32 on cpu, symmetric
      Hessian of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
    >>> GGN(risk).submatrix(["bias"])
    GGN['bias'; 'bias']: 2 x 2, float32 on cpu, symmetric
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
    >>> GGN(risk).submatrix([0, 3, 5], slice(4))
    GGN[rows; columns]: 3 x 4, float32 on cpu
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kfs.describing import Described, Description, kind, number, times, vector
from kfs.errors import UnknownAttributeError

# What operators that only multiply do not have, and what has it.
_ELSEWHERE = {
    "diagonal": "kfs.operators.diagonal(A)",
    "eigenvalues": "kfs.operators.eigenvalues(A, k)",
    "frobenius_norm": "kfs.operators.squared_frobenius_norm(A).value.sqrt()",
    "inverse": "kfs.operators.Inverse(A.shift(damping))",
    "logdet": "A.to_dense().logdet()",
    "solve": "kfs.operators.solve(A.shift(damping), b)",
    "trace": "kfs.operators.trace(A)",
}


class DescribedOperator(Described):
    """Describes an operator by its class and its attributes.

    Attributes:
        template: How it is made of its attributes, such as `"{one} + {other}"`. Empty for what has just a name.
        shown: Names of attributes that are settings.
    """

    template: ClassVar[str] = ""
    shown: ClassVar[tuple[str, ...]] = ()
    symmetric: bool
    shape: Any
    dtype: Any
    device: Any

    # A type checker would believe that there is any attribute.
    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name: str) -> object:
            """Say where to find what block-diagonal operators have, and this one does not."""
            if name not in _ELSEWHERE:
                return super().__getattribute__(name)  # the usual error
            raise UnknownAttributeError(
                f"{self.formula} has no {name!r}: it is not made of blocks with a known structure.",
                f"Use {_ELSEWHERE[name]}.",
            )

    @property
    def formula(self) -> str:
        """What it is made of, such as `"GGN + 0.1 * Identity"`."""
        is_sum = " + " in self.template
        values = {}
        for name, value in vars(self).items():
            has_brackets = f"({{{name}}})" in self.template
            values[name] = _part(value, is_sum or has_brackets)
        return self.template.format(**values) or type(self).__name__

    @property
    def of(self) -> str:
        """What it is made of directly, in a few words, such as model and loss. Empty if there is nothing to say."""
        risk = getattr(self, "risk", None)
        return "" if risk is None else str(risk.about)

    @property
    def about(self) -> str:
        """Formula, model and loss, size, dtype and device in one line."""
        of = f" of {self.of}" if self.of else ""
        symmetric = ", symmetric" if self.symmetric else ""
        return f"{self.formula}{of}: {times(self.shape)}, {kind(self.dtype, self.device)}{symmetric}"

    def describe(self) -> Description:
        """Describe it, and its parts."""
        risk = getattr(self, "risk", None)
        facts = [part.about for part in self._leaves() if part is not self]
        if risk is not None:
            facts.append(risk.about_data)
            facts.append(", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown))
            facts.append(f"cost: one pass over the data for {self.columns_at_once}")
        return Description(self.about, tuple(dict.fromkeys(facts)))

    @property
    def columns_at_once(self) -> str:
        """How many vectors are multiplied at once, in words."""
        chunk_size: int = getattr(self, "chunk_size", 1)
        return f"a product with {f'up to {chunk_size} vectors' if chunk_size > 1 else 'one vector'}"

    def _leaves(self) -> "list[DescribedOperator]":
        """Return the operators that it is made of, in the end: itself, if it is not made of others."""
        parts = [value for value in vars(self).values() if isinstance(value, DescribedOperator)]
        return [leaf for part in parts for leaf in part._leaves()] if self.template else [self]


def _part(value: object, bare: bool) -> Any:
    """Return a value for a template: formulas of operators in brackets, unless they stand for themselves there."""
    if not isinstance(value, DescribedOperator):
        return value
    return value.formula if bare else bracketed(value)


def bracketed(A: DescribedOperator) -> str:
    """Return a formula that can be a part of a product."""
    return f"({A.formula})" if " " in A.formula else A.formula


def listed(settings: Mapping[str, object]) -> str:
    """Return settings in a line: operators by their formulas, vectors by their sizes.

    Example:
        >>> import torch
        >>> listed({"tolerance": 1e-5, "start": {"W": torch.ones(2, 3)}})
        'tolerance=1e-05, start=(1 tensor, 6 numbers, float32 on cpu)'
    """
    return ", ".join(f"{name}={_setting(value)}" for name, value in settings.items())


def _setting(value: object) -> str:
    if isinstance(value, DescribedOperator):
        return value.formula
    return f"({vector(value)})" if isinstance(value, (Tensor, dict, list)) else number(value)
