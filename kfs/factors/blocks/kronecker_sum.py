r"""Sums of Kronecker products: $\sum_i B_i \otimes A_i$, and their inverses.

Products, trace, diagonal and Frobenius norm have closed forms for any number of terms:
$\|\sum_i B_i \otimes A_i\|_F^2 = \sum_{i,j} \langle B_i, B_j \rangle \langle A_i, A_j \rangle$. The inverse and the
determinant of two terms have closed forms, too; see `congruence`. The inverse of more terms is applied using conjugate
gradients, with an approximate common basis as preconditioner. Damping is one more term,
$\delta\, I \otimes I$, unless it can be added to a factor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kfs.errors import SolverError
from kfs.factors.blocks import decompositions
from kfs.factors.blocks.congruence import Congruence, diagonalized, inverse_in_common_basis, small_dense
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.structure import Structure
from kfs.operators.linear_operator import LinearOperator
from kfs.operators.solve import solve
from kfs.operators.space import Columns, Space


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerSum(Structure):
    """Blocks that are sums of Kronecker products.

    Attributes:
        terms: The terms, at least two.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2).double()
        >>> X, y = torch.rand(2, 9, 3).double(), torch.rand(2, 9, 2).double()
        >>> K1, K2 = (KFAC(EmpiricalRisk(model, torch.nn.MSELoss(), data)) for data in zip(X, y))
        >>> K = K1 + K2
        >>> dense = K1.to_dense() + K2.to_dense()
        >>> torch.allclose(K.inverse().to_dense(), torch.linalg.inv(dense)), torch.allclose(K.logdet(), dense.logdet())
        (True, True)
    """

    terms: tuple[Kronecker, ...]
    field_shapes: ClassVar = {}

    def __len__(self) -> int:
        return len(self.terms[0])

    @classmethod
    def from_state(cls, state: Any, count: int, rows: int, columns: int) -> Self:
        """Undo `state`."""
        return cls(tuple(Kronecker.from_state(part, count, rows, columns) for part in state["terms"]))

    def state(self) -> dict[str, Any]:
        """Return the terms as the content of a file."""
        return {"terms": [term.state() for term in self.terms]}

    @property
    def rows(self) -> int:  # type: ignore[override]
        """`d_B`."""
        return self.terms[0].rows

    @property
    def columns(self) -> int:  # type: ignore[override]
        """`d_A`."""
        return self.terms[0].columns

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all terms are symmetric."""
        return all(term.symmetric for term in self.terms)

    @property
    def like(self) -> Tensor:
        """The scales of the first term."""
        return self.terms[0].like

    def _map(self, function: Callable[[Kronecker], Kronecker]) -> "KroneckerSum":
        return KroneckerSum(tuple(map(function, self.terms)))

    def _sum(self, function: Callable[[Kronecker], Tensor]) -> Tensor:
        return torch.stack([function(term) for term in self.terms]).sum(0)

    def multiply(self, M: Tensor) -> Tensor:
        """Return the sum of the products with all terms."""
        result = self.terms[0].multiply(M)
        for term in self.terms[1:]:
            result = result + term.multiply(M)
        return result

    def transposed(self) -> "KroneckerSum":
        """Transpose all terms."""
        return self._map(Kronecker.transposed)

    def scaled(self, factor: float) -> "KroneckerSum":
        """Scale all terms."""
        return self._map(lambda term: term.scaled(factor))

    def to_dense(self) -> Tensor:
        """Return the blocks as matrices."""
        return self._sum(Kronecker.to_dense)

    def diagonal(self) -> Tensor:
        """Return the sum of the terms' diagonals."""
        return self._sum(Kronecker.diagonal)

    def trace(self) -> Tensor:
        """Return the sum of the terms' traces."""
        return self._sum(Kronecker.trace)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries: inner products of all pairs of terms."""
        total = torch.zeros_like(self.like)
        for one in self.terms:
            for other in self.terms:
                total = total + _inner(one.A, other.A) * _inner(one.B, other.B)
        return total

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, in a common basis. More than two terms are formed densely."""
        if len(self.terms) > 2 or not self.symmetric:
            return small_dense(self).slogdet()
        diagonal, singular = diagonalized(self.terms)
        # The sum is `T^-T diag(values) T^-1`.
        sign, log = diagonal.values.flatten(1).sign().prod(1), diagonal.values.abs().log().flatten(1).sum(1)
        volume = self.rows * diagonal.T_A.slogdet()[1] + self.columns * diagonal.T_B.slogdet()[1]
        return torch.where(singular, 0.0, sign), torch.where(singular, -torch.inf, log - 2 * volume)

    def eigenbasis(self) -> Dense:
        """Form dense matrices: eigenvalues have no closed form."""
        return small_dense(self)

    def inverse(self) -> Structure:
        """Return inverses: in closed form for two symmetric terms, else applied using conjugate gradients."""
        if not self.symmetric:
            return small_dense(self).inverse()
        near = inverse_in_common_basis(self.terms)
        return near if len(self.terms) == 2 else IterativeInverse(self, near, torch.ones_like(self.like))

    def power(self, exponent: float, damping: Tensor | None = None) -> Structure:
        """Return powers of the damped blocks: inverses as in `inverse`, other powers using dense matrices."""
        if exponent != -1:
            return super().power(exponent, damping)
        damped = self if damping is None else self.shift(damping)
        return damped.inverse()

    def product(self, other: Structure) -> Structure | None:
        """Return products, term by term."""
        if isinstance(other, Dense):
            return replace(other, matrix=self.to_dense() @ other.matrix, symmetric=False)
        return _product_of_terms(self, other)

    def plus(self, other: Structure) -> Structure | None:
        """Return sums: the terms of both."""
        return other.plus(self) if isinstance(other, Dense) else _sum_of_terms(self, other)

    def shift(self, delta: float | Tensor) -> Structure:
        """Add a multiple of the identity: one more term, unless it can be added to a factor."""
        scale = torch.as_tensor(delta, dtype=self.like.dtype, device=self.like.device).expand(len(self))
        ones = torch.ones_like(scale)
        identity = Kronecker(Factor.identity(self.columns, scale), Factor.identity(self.rows, ones))
        return _simplified((*self.terms, identity)) if bool((scale != 0).any()) else self


@dataclass(frozen=True, eq=False, repr=False)
class IterativeInverse(Structure):
    """Inverses of sums, applied using conjugate gradients.

    Attributes:
        total: The sums, which are symmetric and positive definite.
        near: Approximate inverses, used as preconditioners.
        scale: Factors of the inverses, `[stack]`.
    """

    total: KroneckerSum
    near: Congruence
    scale: Tensor
    field_shapes: ClassVar = {}

    @property
    def rows(self) -> int:  # type: ignore[override]
        """`d_B`."""
        return self.total.rows

    @property
    def columns(self) -> int:  # type: ignore[override]
        """`d_A`."""
        return self.total.columns

    @property
    def like(self) -> Tensor:
        """A tensor of the sum."""
        return self.total.like

    def multiply(self, M: Tensor) -> Tensor:
        """Solve a linear system for every block.

        Raises:
            SolverError: If the iteration does not converge.
        """
        solutions = torch.stack([self._solve(place, columns) for place, columns in enumerate(M)])
        return solutions * self.scale.reshape(-1, 1, 1, 1)

    def _solve(self, place: int, M: Tensor) -> Tensor:
        """Solve for right-hand sides `[columns, d_B, d_A]` with one block."""
        block = slice(place, place + 1)
        # This tolerance is somewhat above round-off; a smaller one would not be reached reliably.
        eps = torch.finfo(M.dtype).eps
        near = _Block(self.near[block])
        solution = solve(_Block(self.total[block]), M.flatten(1).T, preconditioner=near, tolerance=eps**0.85)
        if solution.residuals and not solution.residuals[-1] <= eps**0.5:
            raise SolverError(
                f"A sum of {len(self.total.terms)} Kronecker products is too close to singular: conjugate gradients "
                f"end with a residual of {solution.residuals[-1]:.1e} of the right-hand side.",
                "Use more damping, method='factored', or float64.",
            )
        return solution.x.T.reshape(M.shape)

    def scaled(self, factor: float) -> "IterativeInverse":
        """Return inverses multiplied by a number."""
        return replace(self, scale=factor * self.scale)

    def to_dense(self) -> Tensor:
        """Return the inverses of the dense sums."""
        inverses: Tensor = torch.linalg.inv(self.total.to_dense())
        return self.scale.reshape(-1, 1, 1) * inverses

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, from those of the sums."""
        sign, log = self.total.slogdet()
        size = self.rows * self.columns
        return sign * self.scale.sign() ** size, size * self.scale.abs().log() - log

    def eigenbasis(self) -> Dense:
        """Form dense matrices: eigenvalues have no closed form."""
        return small_dense(self)

    def inverse(self) -> KroneckerSum:
        """Return the sums, divided by the scales."""
        decompositions.check_each(self.scale != 0, "is singular: its scale is zero")
        return KroneckerSum(tuple(Kronecker(term.A.scaled(1 / self.scale), term.B) for term in self.total.terms))

    def shift(self, delta: float | Tensor) -> Dense:
        """Add a multiple of the identity, as dense matrices."""
        return small_dense(self).shift(delta)


class _Block(LinearOperator):
    """One symmetric block as a linear operator, for `solve`."""

    symmetric = True

    def __init__(self, structure: Structure) -> None:
        space = Space({"M": (structure.rows, structure.columns)}, structure.like.dtype, structure.like.device)
        super().__init__(space, space)
        self.structure = structure

    def multiply(self, columns: Columns) -> Columns:
        return {"M": self.structure.multiply(columns["M"].unsqueeze(0)).squeeze(0)}

    multiply_transposed = multiply  # blocks are symmetric


def plus(one: Structure, other: Structure) -> Structure | None:
    """Return sums, block by block; `None` if no structure can store them."""
    return one.plus(other) or _sum_of_terms(one, other)


def product(one: Structure, other: Structure) -> Structure | None:
    """Return products, block by block; `None` if no structure can store them."""
    return one.product(other) or _product_of_terms(one, other)


def _sum_of_terms(one: Structure, other: Structure) -> Structure | None:
    mine, theirs = _terms(one), _terms(other)
    return _simplified((*mine, *theirs)) if mine and theirs else None


def _product_of_terms(one: Structure, other: Structure) -> KroneckerSum | None:
    pairs = [Kronecker(a.A.compose(b.A), a.B.compose(b.B)) for a in _terms(one) for b in _terms(other)]
    return KroneckerSum(tuple(pairs)) if pairs else None


def _terms(structure: Structure) -> tuple[Kronecker, ...]:
    """Return the terms of a sum of Kronecker products; an empty tuple for other structures."""
    if isinstance(structure, KroneckerSum):
        return structure.terms
    return (structure,) if isinstance(structure, Kronecker) else ()


def _simplified(terms: tuple[Kronecker, ...]) -> Structure:
    """Return a sum of terms, merging terms that share a factor."""
    distinct: list[Kronecker] = []
    for term in terms:
        for place, before in enumerate(distinct):
            both = before.plus(term)
            if isinstance(both, Kronecker):
                distinct[place] = both
                break
        else:
            distinct.append(term)
    return distinct[0] if len(distinct) == 1 else KroneckerSum(tuple(distinct))


def _inner(one: Factor, other: Factor) -> Tensor:
    """Return the inner products, `[stack]`."""
    if one.kind == other.kind == "dense":
        return (one.values * other.values).flatten(1).sum(1) * one.scale * other.scale
    # One of both is diagonal, so only diagonal entries contribute.
    return (one.entries() * other.entries()).sum(1)
