r"""Damping: three ways to invert Kronecker products that are close to singular.

Curvature matrices of neural networks have many tiny eigenvalues. Damping is added before they are inverted:

- `"exact"`: $(B \otimes A + \delta I)^{-1}$ in `rvec`, up to round-off, from the eigendecompositions of both factors.
- `"factored"` (Martens & Grosse, 2015): $(B + \tfrac{\sqrt{\delta}}{\pi} I)^{-1} \otimes (A + \pi \sqrt{\delta}
  I)^{-1}$. It is a Kronecker product and needs only Cholesky factors. Expanded, it adds $\delta I$ and two more terms,
  $\pi \sqrt{\delta}\, B \otimes I + \tfrac{\sqrt{\delta}}{\pi} I \otimes A$. These are small in the trace norm for
  $\pi^2 = \frac{\mathrm{tr}(A) / d_A}{\mathrm{tr}(B) / d_B}$. It damps more than `"exact"` does. If one factor is a
  multiple of the identity, $A = a I$, then $(a B + \delta I)^{-1} \otimes I$ is exact, costs no more, and is computed
  instead. Factors that are single numbers are an example (biases, scales of normalizations).
- `"per-factor"`: $(B + \delta I)^{-1} \otimes (A + \delta I)^{-1}$. Simple and common, but factors have no common
  unit: the amount of damping depends on how a scale is split between them.

In a sum of Kronecker products, `"exact"` damping is one more term (see `kronecker_sum`). The other methods damp every
term: `"factored"` with an equal share of $\delta$, `"per-factor"` with all of it. Two terms then have an inverse in
closed form.

Damping is a number, or `Relative`: a multiple of each block's mean eigenvalue.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from kfs.display.describe import Described, Description, number
from kfs.display.suggestions import few, guess
from kfs.errors import DtypeError, KfsWarning, ModelError
from kfs.factors.blocks import decompositions
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import KroneckerSum
from kfs.factors.blocks.stack import Stack
from kfs.factors.blocks.structure import Structure


@dataclass(frozen=True, repr=False)
class Relative(Described):
    """Damping in units of each block's mean eigenvalue: its trace over its number of rows.

    Absolute numbers mean little if curvature differs by orders of magnitude between layers, or changes in training.
    A layer with groups of channels is one block. The mean eigenvalue of a block of zeros is zero; an example is the
    block of a parameter that predictions do not depend on (`K.audit.unused`). Its damping is a multiple of the mean
    eigenvalue of all other blocks together. Its gradient is zero anyway.

    Args:
        fraction: The multiple of the mean eigenvalue that is added.

    Raises:
        DtypeError: If the fraction is negative or not a finite number.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> model = torch.nn.Linear(3, 2)
        >>> risk = EmpiricalRisk(model, torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> K = KFAC(risk)
        >>> mean = float(K.trace()) / K.shape[0]
        >>> one, other = K.inverse(Relative(0.1)), K.inverse(0.1 * mean)
        >>> torch.allclose(one.to_dense(), other.to_dense())
        True
        >>> Relative(0.1)
        Relative(0.1)
        >>> one
        KFAC.inverse(Relative(0.1)) of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
          1 block, 112 B
    """

    fraction: float

    def __post_init__(self) -> None:
        _check_number(self.fraction, "A relative damping")

    def describe(self) -> Description:
        """Describe the damping by the call that creates it."""
        return Description(f"Relative({self.fraction!r})")


_NO_CURVATURE = "has no curvature, and neither has any other block, so relative damping is zero: use an absolute number"
# One number for all blocks, or one for each block, by name.
Damping = float | Relative | Mapping[str, float | Relative]
Method = Literal["exact", "factored", "per-factor"]
METHODS = ("exact", "factored", "per-factor")


def _check_number(value: object, what: str) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise DtypeError(f"{what} is {value!r}.", "Use a finite number that is not negative, or kfs.Relative of one.")


def damping_by_name(damping: Damping, names: set[str]) -> Mapping[str, float | Relative]:
    """Return the damping of each block.

    Args:
        damping: One number (or `Relative`), or one for every block, by name.
        names: The blocks' names.

    Raises:
        ModelError: If names are unknown or missing.
        DtypeError: If a damping is negative or not a finite number.
    """
    numbers = damping if isinstance(damping, Mapping) else dict.fromkeys(names, damping)
    if set(numbers) != names:
        missing = sorted(names - set(numbers))
        extra = sorted(set(numbers) - names)
        hint = guess(extra, missing)
        raise ModelError(
            f"damping lacks the blocks {few(missing) or 'none'}, and has {few(extra) or 'none'} too many.",
            f"Give one number, or one for every block. {hint}".rstrip(),
        )
    for value in numbers.values():
        if not isinstance(value, Relative):
            _check_number(value, "A damping")
    return numbers


def formula_of(damping: Damping) -> str:
    """Return the text of a damping in a formula."""
    return "damping of each block" if isinstance(damping, Mapping) else number(damping)


def absolute_damping(stack: Stack, damping: Mapping[str, float | Relative], mean: Tensor | float) -> Tensor:
    """Return the damping of each block as a number, `[stack]`.

    Args:
        stack: The blocks.
        damping: Damping of each block, by name.
        mean: The mean eigenvalue of all blocks that are not zero; it determines the relative damping of blocks of
            zeros.

    Raises:
        SolverError: If damping is relative, and no block has curvature.
    """
    given = {name: damping[name] for name in stack.names}
    absolute = {name: 0.0 if isinstance(d, Relative) else d for name, d in given.items()}
    fractions = {name: d.fraction if isinstance(d, Relative) else 0.0 for name, d in given.items()}
    numbers = stack.per_block(absolute)
    if not any(fractions.values()):
        return numbers
    relative = stack.per_block(fractions)
    means = mean_eigenvalues(stack).to(relative)
    means = torch.where(means == 0, torch.as_tensor(mean).to(relative), means)

    # Checked within `apply`, so that an error names the block.
    stack.apply(lambda _: decompositions.check_each(~(relative > 0) | (means > 0), _NO_CURVATURE))
    return numbers + relative * means


def mean_eigenvalues(stack: Stack) -> Tensor:
    """Return the mean eigenvalue of each block, `[stack]`.

    Groups of channels of the same layer are one block and have the same mean.
    """
    size = stack.structure.rows * stack.structure.columns
    means = stack.structure.trace() / size
    return torch.cat([means[part].mean().expand(layout.groups) for layout, part in stack.slices()])


def traces_and_rows(stack: Stack) -> Tensor:
    """Return the sum of traces and the number of rows of the blocks of a stack that are not zero, `[2]`."""
    traces = stack.structure.trace().double()
    # All groups of channels of one layer are one block.
    rows = (mean_eigenvalues(stack) != 0) * float(stack.structure.rows * stack.structure.columns)
    return torch.stack([traces.sum(), rows.sum()])


def damped_inverse(structure: Structure, damping: Tensor, method: Method) -> Structure:
    """Return the inverses of damped blocks.

    Args:
        structure: The blocks. Damping must be exact unless they are Kronecker products, or sums of them.
        damping: One number per block, `[stack]`, not negative.
        method: `"exact"`, `"factored"` or `"per-factor"`.

    Returns:
        The inverses: Kronecker products, or eigenvalues and eigenvectors for exact damping. Inverses of sums are stored
        in a common basis, or applied using conjugate gradients.
    """
    if decompositions.is_zero(damping):
        if not isinstance(structure, Kronecker):
            return structure.inverse()
        inverse = structure.inverse()
        _warn_of_round_off(structure.A, inverse.A)
        _warn_of_round_off(structure.B, inverse.B)
        return inverse
    if method == "exact":
        return structure.power(-1.0, damping)
    return _with_all_factors_damped(structure, damping, method).inverse()


def _warn_of_round_off(factor: Factor, inverse: Factor) -> None:
    """Warn about singular factors that were inverted only because of round-off."""
    if factor.kind != "dense" or not factor.symmetric:
        return  # Entries of diagonal factors are exact, and nonsymmetric factors are checked by their inversion.
    noise = decompositions.unexplained_noise(factor.size, factor.eps or torch.finfo(inverse.values.dtype).eps)
    # One over this number is the part of a feature's square that is not a linear combination of other features.
    dependence = factor.values.diagonal(dim1=-2, dim2=-1) * inverse.values.diagonal(dim1=-2, dim2=-1)
    singular = (dependence > 1 / noise).any(1)
    if singular.any():
        warnings.warn(
            f"{int(singular.sum())} of {len(singular)} factors are singular, up to round-off, so their inverses "
            "are one over round-off. Pass damping.",
            KfsWarning,
            stacklevel=2,
        )


def damped(structure: Structure, damping: Tensor, method: Method | None = None) -> Structure:
    """Return blocks plus damping, in a form that can be added to other blocks.

    `damped(structure, d, method).inverse()` is `damped_inverse(structure, d, method)`, up to round-off. Kronecker
    products are not decomposed.

    Args:
        structure: The blocks, which are symmetric.
        damping: One number per block, `[stack]`, not negative.
        method: As in `damped_inverse`. `None` means `"factored"` for Kronecker products with a dense factor and for
            sums of Kronecker products, and `"exact"` for all other structures.
    """
    if decompositions.is_zero(damping):
        return structure
    if method is None:
        method = "factored" if _has_dense_factors(structure) else "exact"
    if method != "exact":
        return _with_all_factors_damped(structure, damping, method)
    if not isinstance(structure, Kronecker) or not _has_dense_factors(structure):
        return structure.shift(damping)  # Diagonal blocks stay diagonal.
    A, B = structure.A, structure.B
    if A.is_multiple_of_identity or B.is_multiple_of_identity:
        return _with_damped_factors(structure, damping, "factored")
    # The eigenbasis of the product would work, too, but a term with the identity needs no decomposition.
    ones = torch.ones_like(A.scale)
    identity = Kronecker(Factor.identity(A.size, damping.to(A.scale)), Factor.identity(B.size, ones))
    return KroneckerSum((structure, identity))


def _has_dense_factors(structure: Structure) -> bool:
    """Whether blocks are Kronecker products with a dense factor, or sums of Kronecker products."""
    if isinstance(structure, Kronecker):
        return "dense" in {structure.A.kind, structure.B.kind}
    return isinstance(structure, KroneckerSum)


def _with_all_factors_damped(structure: Structure, damping: Tensor, method: Method) -> Structure:
    """Add damping `[stack]` to the factors of Kronecker products, or of all terms of sums."""
    if isinstance(structure, KroneckerSum):
        part = damping if method == "per-factor" else damping / len(structure.terms)
        return KroneckerSum(tuple(_with_damped_factors(term, part, method) for term in structure.terms))
    if isinstance(structure, Eigenbasis) and not structure.values.any():
        return structure.shift(damping)  # blocks of zeros, of unused parameters
    if not isinstance(structure, Kronecker):
        raise ModelError(
            f"Blocks without Kronecker factors cannot have {method} damping.", "Use method='exact' for them."
        )
    return _with_damped_factors(structure, damping, method)


def _with_damped_factors(structure: Kronecker, damping: Tensor, method: Method) -> Kronecker:
    """Add damping `[stack]` to factors."""
    A, B = structure.A, structure.B
    if method == "per-factor":
        return Kronecker(A.shift(damping), B.shift(damping))
    # Exact damping is as cheap if one factor is a multiple of the identity.
    if A.is_multiple_of_identity:
        return Kronecker(_identity_like(A), B.scaled(A.entries()[:, 0]).shift(damping))
    if B.is_multiple_of_identity:
        return Kronecker(A.scaled(B.entries()[:, 0]).shift(damping), _identity_like(B))
    pi = trace_norm_ratio(structure)
    root = damping.to(pi).sqrt()
    return Kronecker(A.shift(pi * root), B.shift(root / pi))


def _identity_like(factor: Factor) -> Factor:
    return Factor.identity(factor.size, torch.ones_like(factor.scale))


def trace_norm_ratio(structure: Kronecker) -> Tensor:
    """Return `pi` of Martens & Grosse (2015), `[stack]`: the root of the ratio of the factors' mean eigenvalues."""
    mean_A = structure.A.trace() / structure.columns
    mean_B = structure.B.trace() / structure.rows
    # Unless both traces are positive, their units cannot be compared, and damping is split evenly.
    return torch.where((mean_A > 0) & (mean_B > 0), mean_A / mean_B, 1.0).sqrt()


if __name__ == "__main__":
    from kfs.verification import verify, verify_differs, verify_that

    torch.manual_seed(0)
    X, G = torch.randn(4, 3, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    A, B = X.T @ X, 0.01 * G.T @ G
    delta = 0.1
    K = Kronecker(Factor.dense(A.unsqueeze(0)), Factor.dense(B.unsqueeze(0)))
    rescaled = Kronecker(Factor.dense(100 * A.unsqueeze(0)), Factor.dense(B.unsqueeze(0) / 100))
    I_A, I_B = torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    damping = torch.full((1,), delta, dtype=torch.float64)
    methods: list[Method] = ["exact", "factored", "per-factor"]
    inverses = {m: damped_inverse(K, damping, m).to_dense()[0] for m in methods}
    others = {m: damped_inverse(rescaled, damping, m).to_dense()[0] for m in methods}

    exact = torch.linalg.inv(torch.kron(B, A) + delta * torch.kron(I_B, I_A))
    verify("exact damping adds a multiple of the identity", inverses["exact"], exact)
    pi = float(trace_norm_ratio(K))
    sides = torch.kron(pi * delta**0.5 * B, I_A) + torch.kron(I_B, delta**0.5 / pi * A)
    expanded = torch.linalg.inv(torch.kron(B, A) + sides + delta * torch.kron(I_B, I_A))
    verify("factored damping adds two terms more", inverses["factored"], expanded)
    verify_differs("so that it differs from exact damping", inverses["factored"], exact)
    gap = torch.linalg.eigvalsh(exact - inverses["factored"]).min()
    verify_that("and damps more, in every direction", bool(gap > 0))
    single = torch.full((1, 1), 0.3, dtype=torch.float64)
    bias = Kronecker(Factor.dense(single.unsqueeze(0)), Factor.dense(B.unsqueeze(0)))
    expected = torch.linalg.inv(0.3 * B + delta * I_B)
    verify(
        "if one factor is a number, factored damping is exact",
        damped_inverse(bias, damping, "factored").to_dense()[0],
        expected,
    )
    verify("exact damping does not depend on how a scale is split between factors", others["exact"], inverses["exact"])
    verify("nor does factored damping", others["factored"], inverses["factored"])
    verify_differs("per-factor damping does", others["per-factor"], inverses["per-factor"])
