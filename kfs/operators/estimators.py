r"""Trace, diagonal and Frobenius norm from a few products with random vectors, with error bars.

- *Hutchinson* (1989): $\mathbb{E}\, \omega^\top A\, \omega = \mathrm{tr}\, A$ for random signs $\omega$.
- *Hutch++* (Meyer et al., 2021): take the trace on the range of a sketch exactly, and estimate only the rest.
- *XTrace* (Epperly et al., 2024): do so for every test vector with the sketch made of all others, and average.
- *XDiag* (of the same paper): the same for the diagonal, where Hutchinson's estimate is $\omega \odot A\, \omega$.

The last three need far fewer products where the spectrum decays, as that of curvature does. Samples of XTrace and XDiag
share their sketches and are not independent, so their error bar is a guide (up to a factor two) rather than a standard
error. Normal test vectors in place of signs scatter more: for signs, the diagonal contributes no error.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kfs.describing import Described, Description, counted, number, shaped
from kfs.errors import ShapeError
from kfs.operators.interface import LinearOperator
from kfs.operators.probes import Probes, random_columns
from kfs.operators.solve import product
from kfs.precision import at_least_float32
from kfs.progress import Line, show_progress

# How often each method multiplies columns: what is multiplied later depends on what came out before.
_ROUNDS = {"hutchinson": 1, "hutch++": 3, "xtrace": 2, "xdiag": 2}


@dataclass(frozen=True, repr=False)
class Estimate(Described):
    """An estimate with its standard error.

    Attributes:
        value: The estimate: a scalar, or a flat vector.
        error: Its standard error, estimated from the scatter of the random vectors; shaped alike.
        products: How many products with the operator it took.
    """

    value: Tensor
    error: Tensor
    products: int

    def describe(self) -> Description:
        """Describe a number with its error; of a vector, and of a number on an accelerator, only the size."""
        if self.value.ndim or self.value.device.type != "cpu":
            value = f"{shaped(self.value)}, with an error for each number"
        else:
            value = f"{number(self.value)} +- {number(self.error)}"
        return Description(f"Estimate: {value} ({counted(self.products, 'product')})")


def trace(
    A: LinearOperator,
    *,
    method: Literal["hutchinson", "hutch++", "xtrace"] = "xtrace",
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the trace.

    Args:
        A: A square operator.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        products: How many products with `A` to spend; at least 6. If they suffice for every column, the trace is exact.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show how far it is. By default, if it takes longer than two seconds.

    Returns:
        The estimate with its standard error.

    Raises:
        ShapeError: If the operator is not square, the method unknown or the budget too small.

    Example:
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
        >>> G = GGN(risk)
        >>> estimate = trace(G, products=6)
        >>> bool(abs(estimate.value - G.to_dense().trace()) < 4 * estimate.error)
        True
        >>> estimate  # doctest: +ELLIPSIS
        Estimate: ... +- ... (6 products)
        >>> diagonal(G, products=6)
        Estimate: 8, float32 on cpu, with an error for each number (6 products)
    """
    methods = {"hutchinson": _hutchinson, "hutch++": _hutch_plus_plus, "xtrace": _xtrace}
    with A._ranks.agreed("trace"):
        _check(A, products)
        if method not in methods:
            raise ShapeError(f"method is {method!r}.", f"Choose from {list(methods)}.")
    num = {"hutchinson": products, "hutch++": 2 * (products // 3), "xtrace": products // 2}[method]
    with show_progress("trace", _ROUNDS[method], progress, "round") as line:
        if products >= A.shape[0]:  # enough to look at every column
            exact = _wide_dense(A).trace()
            return Estimate(exact, torch.zeros_like(exact), A.shape[0])
        return methods[method](A, _probes(A, num, probes, seed), line)


def diagonal(
    A: LinearOperator,
    *,
    method: Literal["hutchinson", "xdiag"] = "hutchinson",
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the diagonal as a flat vector. `GGN` and `Fisher` also have it exactly.

    Args:
        A: A square operator.
        method: `"hutchinson"` (Bekas et al., 2007), or `"xdiag"`, which needs fewer products if eigenvalues decay.
        products: How many products with `A` (or its transpose) to spend; at least 6. If they suffice for every column,
            `"xdiag"` is exact.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show how far it is. By default, if it takes longer than two seconds.

    Returns:
        The estimate with a standard error for every entry.

    Raises:
        ShapeError: If the operator is not square, the method unknown or the budget too small.

    Example:
        >>> from kfs import EmpiricalRisk, GGN
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(30, 1).double()
        >>> X, y = torch.rand(4, 30).double(), torch.rand(4, 1).double()
        >>> G = GGN(EmpiricalRisk(model, torch.nn.MSELoss(), (X, y)))
        >>> torch.allclose(diagonal(G, method="xdiag", products=12).value, G.diagonal())  # its rank is four
        True
    """
    with A._ranks.agreed("diagonal"):
        _check(A, products)
        if method not in {"hutchinson", "xdiag"}:
            raise ShapeError(f"method is {method!r}.", "Choose from ['hutchinson', 'xdiag'].")
    with show_progress("diagonal", _ROUNDS[method], progress, "round") as line:
        if method == "hutchinson":
            omega = _probes(A, products, probes, seed)
            samples = omega * _product(A, omega, line)
            return Estimate(samples.mean(1), _standard_error(samples), products)
        if products >= A.shape[0]:  # enough to look at every column
            exact = _wide_dense(A).diagonal().clone()
            return Estimate(exact, torch.zeros_like(exact), A.shape[0])
        return _xdiag(A, _probes(A, products // 2, probes, seed), line)


def squared_frobenius_norm(
    A: LinearOperator,
    *,
    products: int = 60,
    probes: Probes = "rademacher",
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Estimate the sum of all squared entries.

    Args:
        A: An operator.
        products: How many products with `A` to spend; at least 6.
        probes: Test vectors: `"rademacher"` for random signs, or `"normal"`.
        seed: Equal seeds give equal results.
        progress: Whether to show how far it is. By default, if it takes longer than two seconds.

    Returns:
        The estimate with its standard error.
    """
    with A._ranks.agreed("Frobenius norm"):
        _check(A, products, square=False)
    with show_progress("Frobenius norm", 1, progress, "round") as line:
        samples = (_product(A, _probes(A, products, probes, seed), line) ** 2).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), products)


def _hutchinson(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    samples = (omega * _product(A, omega, line)).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), omega.shape[1])


def _hutch_plus_plus(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    num = omega.shape[1] // 2
    Q, _ = torch.linalg.qr(_product(A, omega[:, :num], line))
    G = omega[:, num:]
    G = G - Q @ (Q.T @ G)
    exact = (Q * _product(A, Q, line)).sum()
    samples = (G * _product(A, G, line)).sum(0)
    return Estimate(exact + samples.mean(), _standard_error(samples), 3 * num)


def _xtrace(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    num = omega.shape[1]
    Y = _product(A, omega, line)
    size = Y.abs().max()
    if size == 0:
        return Estimate(size, size, num)
    Y = Y / size  # products of tiny or huge numbers would leave the range of float32
    Q, R = torch.linalg.qr(Y)
    Z = _product(A, Q, line) / size
    H, W = Q.T @ Z, Q.T @ omega
    S = _left_out(R)
    coefficients = W - S * (S * W).sum(0)
    X, AX = omega - Q @ coefficients, Y - Z @ coefficients
    samples = H.trace() - (S * (H @ S)).sum(0) + (X * AX).sum(0)
    return Estimate(size * samples.mean(), size * _standard_error(samples), 2 * num)


def _xdiag(A: LinearOperator, omega: Tensor, line: Line) -> Estimate:
    num = omega.shape[1]
    Y = _product(A, omega, line)
    size = Y.abs().max()
    if size == 0:
        zeros = torch.zeros_like(Y[:, 0])
        return Estimate(zeros, zeros, num)
    Q, R = torch.linalg.qr(Y / size)
    Z = _product(A.T, Q, line) / size
    S = _left_out(R)
    QS = Q @ S
    # Without test vector i, the sketch's range lacks the direction Q s_i. So the exact part lacks its contribution, and
    # of the product with test vector i, that direction is all that remains outside of the range.
    exact = (Q * Z).sum(1, keepdim=True) - QS * (Z @ S)
    samples = exact + omega * QS * (S * R).sum(0)
    return Estimate(size * samples.mean(1), size * _standard_error(samples), 2 * num)


def _left_out(R: Tensor) -> Tensor:
    """Return unit vectors `s_i`: leaving test vector `i` out of a sketch `Q R` removes the direction `Q s_i`."""
    noise = torch.finfo(R.dtype).eps * R.abs().max()
    S = torch.linalg.inv(R + noise * torch.eye(len(R), dtype=R.dtype, device=R.device)).T
    directions: Tensor = S / S.norm(dim=0)
    return directions


def _product(A: LinearOperator, V: Tensor, line: Line) -> Tensor:
    """Multiply, and count it as a round."""
    result = product(A, V)
    line.advance()
    return result


def _wide_dense(A: LinearOperator) -> Tensor:
    """Form the matrix, and return it in float32 at least: sums in half precision would lose digits."""
    return A.to_dense().to(at_least_float32(A.dtype))


def _probes(A: LinearOperator, num: int, probes: Probes, seed: int) -> Tensor:
    """Return test vectors, in float32 at least: there are no decompositions in half precision."""
    with A._ranks.agreed("random vectors", is_short=True):
        return random_columns(probes, A.shape[1], num, at_least_float32(A.dtype), A.device, seed)


def _standard_error(samples: Tensor) -> Tensor:
    return samples.std(-1).div(samples.shape[-1] ** 0.5)


def _check(A: LinearOperator, products: int, square: bool = True) -> None:
    if square and A.domain != A.codomain:
        raise ShapeError(f"The operator has shape {list(A.shape)}.", "Pass one that maps a space to itself.")
    if products < 6:
        raise ShapeError(f"products is {products}, too few for an error bar.", "Spend at least 6.")
