r"""Inverses of sums of two Kronecker products, in closed form.

Two symmetric matrices, of which some combination is positive definite, are diagonal in one common basis. So there is a
matrix $T_A$ such that $T_A^\top A_1 T_A$ and $T_A^\top A_2 T_A$ are diagonal, and a $T_B$ for $B_1$ and $B_2$. Each
takes a generalized symmetric eigenvalue problem. Bases are not orthogonal, but

$$
(T_B \otimes T_A)^\top (B_1 \otimes A_1 + B_2 \otimes A_2) (T_B \otimes T_A) = \mathrm{diag}(\mathrm{vec}\, V)
\quad\Rightarrow\quad
(B_1 \otimes A_1 + B_2 \otimes A_2)^{-1}
= (T_B \otimes T_A)\, \mathrm{diag}(\mathrm{vec}\, V)^{-1} (T_B \otimes T_A)^\top .
$$

More than two matrices have no common basis. The basis of a pair, with the diagonal of the whole sum in it, still makes
a positive definite approximation of the inverse, which is a good preconditioner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kfs.errors import SolverError
from kfs.factors.blocks import decompositions
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.eigenbasis import InBasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.structure import Structure

# Blocks of at most this many rows are formed as dense matrices if there is no closed form.
_LARGEST_DENSE = 4096
_SINGULAR = "is singular, up to round-off"


@dataclass(frozen=True, eq=False, repr=False)
class Congruence(InBasis):
    """Blocks `T diag(values) T^T`, where `T` is a Kronecker product of matrices that need not be orthogonal.

    Attributes:
        T_A: Basis on the input side, with scales of one.
        T_B: Basis on the gradient side, with scales of one.
        values: `[stack, d_B, d_A]`.
    """

    T_A: Factor
    T_B: Factor
    values: Tensor
    field_shapes: ClassVar = {"T_A": ("columns",), "T_B": ("rows",), "values": ("rows", "columns")}

    @property
    def bases(self) -> tuple[Factor, Factor]:
        """The common bases of both sides."""
        return self.T_A, self.T_B

    def scaled(self, factor: float) -> "Congruence":
        """Return blocks with scaled values."""
        return replace(self, values=factor * self.values)

    def squared_norm(self) -> Tensor:
        """Return the sums of squared entries, from values and inner products of basis vectors."""
        G_A, G_B = (Factor.dense(T.T.compose(T).to_dense().square()) for T in (self.T_A, self.T_B))
        weighted = G_B.left(G_A.right(self.values.unsqueeze(1))).squeeze(1)
        return (self.values * weighted).flatten(1).sum(1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, from values and the determinant of the basis."""
        flat = self.values.flatten(1)
        volume = self.rows * self.T_A.slogdet()[1] + self.columns * self.T_B.slogdet()[1]
        return flat.sign().prod(1), flat.abs().log().sum(1) + 2 * volume

    def eigenbasis(self) -> Dense:
        """Form dense matrices: eigenvalues have no closed form."""
        return small_dense(self)

    def inverse(self) -> "Congruence":
        """Return the inverses, by inverting the basis and the values."""
        return Congruence(self.T_A.inverse().T, self.T_B.inverse().T, 1 / self.values)

    def shift(self, delta: float | Tensor) -> Dense:
        """Add a multiple of the identity, as dense matrices."""
        return small_dense(self).shift(delta)


def can_be_dense(structure: Structure) -> bool:
    """Whether blocks are small enough to form dense matrices."""
    return structure.rows * structure.columns <= _LARGEST_DENSE


def small_dense(structure: Structure) -> Dense:
    """Return small blocks as dense matrices.

    Raises:
        SolverError: If the blocks are too large.
    """
    size = structure.rows * structure.columns
    if not can_be_dense(structure):
        raise SolverError(
            f"A block of {size} rows is a sum of Kronecker products, or an inverse of one. This operation has no "
            f"closed form for it, and dense matrices are formed only up to {_LARGEST_DENSE} rows.",
            "Use products and inverses, which do not need dense matrices; for determinants, spectra and samples, use a "
            "sum of two terms without damping, or kfs.operators.spectral_density.",
        )
    return Dense(structure.to_dense(), structure.rows, structure.columns, structure.symmetric)


def inverse_in_common_basis(terms: Sequence[Kronecker]) -> Congruence:
    """Return inverses of sums of symmetric Kronecker products: exact for two terms, approximate for more.

    Raises:
        BlockError: If a sum is not positive definite, up to round-off.
    """
    diagonal, singular = diagonalized(terms)
    values = diagonal.values.flatten(1)
    decompositions.check_finite(values)
    # As for the eigenvalues of a Kronecker product, each side contributes its round-off.
    eps = _eps(terms) or torch.finfo(values.dtype).eps
    noise = (diagonal.rows + diagonal.columns) * eps * values.abs().amax(1)
    if len(terms) == 2:
        # Check this first: in directions that are in no factor's range, values are quotients of rounding errors.
        decompositions.check_each(~singular, _SINGULAR)
    else:
        # A small term, such as damping, may be the only one in a direction, and is not noise. Conjugate gradients
        # report if the sum is too close to singular.
        noise = torch.zeros_like(noise)
    decompositions.check_definite(values, noise)
    decompositions.check_each((values > noise.unsqueeze(1)).all(1), _SINGULAR)
    return replace(diagonal, values=1 / diagonal.values)


def diagonalized(terms: Sequence[Kronecker]) -> tuple[Congruence, Tensor]:
    """Return the common basis of a sum with the sum's diagonal in it, and which sums are singular, `[stack]`."""
    T_A, singular_A = _common_basis([term.A for term in terms], terms)
    T_B, singular_B = _common_basis([term.B for term in terms], terms)
    values = torch.zeros((), dtype=T_A.scale.dtype, device=T_A.scale.device)
    for term in terms:
        values = values + _diagonal_in(T_B, term.B).unsqueeze(2) * _diagonal_in(T_A, term.A).unsqueeze(1)
    return Congruence(T_A, T_B, values), singular_A | singular_B


def _common_basis(factors: Sequence[Factor], terms: Sequence[Kronecker]) -> tuple[Factor, Tensor]:
    """Return a matrix `T` such that `T^T F T` is diagonal for two factors `F`, and which stacks are singular.

    First, a positive definite combination of the factors is whitened by its eigenvectors. In that basis, the
    eigenvectors of the largest term's factor diagonalize both.
    """
    size = factors[0].size
    no = torch.zeros(len(factors[0]), dtype=torch.bool, device=factors[0].scale.device)
    if all(factor.kind != "dense" for factor in factors):
        return Factor.identity(size, torch.ones_like(factors[0].scale)), no
    weights = _weights(terms)
    # In a difference of operators, a factor is negative. Flip its sign, so that the combination is positive.
    units = [
        factor.scaled(_inverse_or_zero(factor.squared_norm().sqrt()) * factor.trace().sign()) for factor in factors
    ]
    values, vectors = decompositions.eigh(_combined(units, weights).to_dense())
    noise = decompositions.round_off(values, _eps(terms))
    decompositions.check_definite(values, noise)
    singular = (values <= noise.unsqueeze(1)).any(1)
    # Directions that are in no factor's range get a finite length.
    floor = torch.maximum(noise, torch.full_like(noise, torch.finfo(noise.dtype).tiny))
    whitening = vectors / torch.maximum(values, floor.unsqueeze(1)).sqrt().unsqueeze(1)
    inside = whitening.transpose(1, 2) @ _combined(units, _largest(terms)).to_dense() @ whitening
    _, rotation = decompositions.eigh((inside + inside.transpose(1, 2)) / 2)
    return Factor.dense(whitening @ rotation, symmetric=False), singular


def _combined(units: Sequence[Factor], weights: Sequence[Tensor]) -> Factor:
    """Return the weighted sum of factors."""
    total = units[0].scaled(weights[0])
    for unit, weight in zip(units[1:], weights[1:], strict=True):
        total = total.plus(unit.scaled(weight))
    return total


def _largest(terms: Sequence[Kronecker]) -> list[Tensor]:
    """Return, for each term, a one for the blocks in which it is the largest term, else zero: `[stack]` each."""
    norms = torch.stack([term.squared_norm() for term in terms])
    place = norms.argmax(0)
    return [(place == i).to(norms) for i in range(len(terms))]


def _weights(terms: Sequence[Kronecker]) -> list[Tensor]:
    """Return the weight of each term in the combination that is whitened, `[stack]` each.

    For two terms, all positive weights lead to the same basis, and equal ones are best conditioned. If there are more,
    small terms must not disturb the basis of large ones. The root splits the weight of a term evenly between both
    sides.
    """
    norms = [term.squared_norm().sqrt() for term in terms]
    if len(terms) == 2:
        return [torch.ones_like(norm) for norm in norms]
    largest = torch.stack(norms).amax(0)
    return [(norm * _inverse_or_zero(largest)).sqrt() for norm in norms]


def _diagonal_in(T: Factor, factor: Factor) -> Tensor:
    """Return the diagonals of `T^T F T`, `[stack, d]`."""
    if T.kind == "identity":
        return factor.entries()
    product = factor.left(T.values.unsqueeze(1)).squeeze(1)
    return (T.values * product).sum(1) * factor.scale.unsqueeze(1)


def _inverse_or_zero(t: Tensor) -> Tensor:
    return torch.where(t > 0, 1 / t, 0.0)


def _eps(terms: Sequence[Kronecker]) -> float | None:
    """Return the largest `eps` of all factors; `None` if none has one."""
    return max(factor.eps or 0.0 for term in terms for factor in (term.A, term.B)) or None
