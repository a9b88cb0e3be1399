r"""Trace, diagonal and Frobenius norm from a few products with random vectors, with error bars.

- *Hutchinson* (1989): $\mathbb{E}\, \omega^\top A\, \omega = \mathrm{tr}\, A$ for random signs $\omega$.
- *Hutch++* (Meyer et al., 2021): take the trace on the range of a sketch exactly, and estimate only the rest.
- *XTrace* (Epperly et al., 2024): do so for every test vector with the sketch made of all others, and average.

The last two need far fewer products where the spectrum decays, as that of curvature does. XTrace's samples share their
sketches and are not independent, so its error bar is a guide (up to a factor two) rather than a standard error.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kfs.errors import ShapeError
from kfs.operators.interface import LinearOperator
from kfs.operators.probes import rademacher


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error.

    Attributes:
        value: The estimate: a scalar, or a flat vector.
        error: Its standard error, estimated from the scatter of the random vectors; shaped alike.
        products: How many products with the operator it took.
    """

    value: Tensor
    error: Tensor
    products: int


def trace(
    A: LinearOperator,
    *,
    method: Literal["hutchinson", "hutch++", "xtrace"] = "xtrace",
    products: int = 60,
    seed: int = 0,
) -> Estimate:
    """Estimate the trace.

    Args:
        A: A square operator.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        products: How many products with `A` to spend; at least 6. If they suffice for every column, the trace is exact.
        seed: Equal seeds give equal results.

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
    """
    _check(A, products)
    methods = {"hutchinson": _hutchinson, "hutch++": _hutch_plus_plus, "xtrace": _xtrace}
    if method not in methods:
        raise ShapeError(f"method is {method!r}.", f"Choose from {list(methods)}.")
    if products >= A.shape[0]:  # enough to look at every column
        exact = A.to_dense().trace()
        return Estimate(exact, torch.zeros_like(exact), A.shape[0])
    return methods[method](A, products, seed)


def diagonal(A: LinearOperator, *, products: int = 60, seed: int = 0) -> Estimate:
    """Estimate the diagonal as a flat vector (Bekas et al., 2007). `GGN` and `Fisher` also have it exactly.

    Args:
        A: A square operator.
        products: How many products with `A` to spend; at least 6.
        seed: Equal seeds give equal results.

    Returns:
        The estimate with a standard error for every entry.
    """
    _check(A, products)
    omega = _probes(A, products, seed)
    samples = omega * (A @ omega)
    return Estimate(samples.mean(1), _standard_error(samples), products)


def squared_frobenius_norm(A: LinearOperator, *, products: int = 60, seed: int = 0) -> Estimate:
    """Estimate the sum of all squared entries.

    Args:
        A: An operator.
        products: How many products with `A` to spend; at least 6.
        seed: Equal seeds give equal results.

    Returns:
        The estimate with its standard error.
    """
    _check(A, products, square=False)
    samples = ((A @ _probes(A, products, seed)) ** 2).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), products)


def _hutchinson(A: LinearOperator, products: int, seed: int) -> Estimate:
    omega = _probes(A, products, seed)
    samples = (omega * (A @ omega)).sum(0)
    return Estimate(samples.mean(), _standard_error(samples), products)


def _hutch_plus_plus(A: LinearOperator, products: int, seed: int) -> Estimate:
    num = products // 3
    omega = _probes(A, 2 * num, seed)
    Q, _ = torch.linalg.qr(A @ omega[:, :num])
    G = omega[:, num:]
    G = G - Q @ (Q.T @ G)
    exact, samples = (Q * (A @ Q)).sum(), (G * (A @ G)).sum(0)
    return Estimate(exact + samples.mean(), _standard_error(samples), 3 * num)


def _xtrace(A: LinearOperator, products: int, seed: int) -> Estimate:
    num = products // 2
    omega = _probes(A, num, seed)
    Y = A @ omega
    size = Y.abs().max()
    if size == 0:
        return Estimate(size, size, num)
    Y = Y / size  # products of tiny or huge numbers would leave the range of float32
    Q, R = torch.linalg.qr(Y)
    Z = (A @ Q) / size
    H, W = Q.T @ Z, Q.T @ omega
    # Leaving test vector i out of the sketch removes the direction Q s_i from its range.
    S = torch.linalg.inv(
        R + torch.finfo(R.dtype).eps * R.abs().max() * torch.eye(num, dtype=R.dtype, device=R.device)
    ).T
    S = S / S.norm(dim=0)
    coefficients = W - S * (S * W).sum(0)
    X, AX = omega - Q @ coefficients, Y - Z @ coefficients
    samples = H.trace() - (S * (H @ S)).sum(0) + (X * AX).sum(0)
    return Estimate(size * samples.mean(), size * _standard_error(samples), 2 * num)


def _probes(A: LinearOperator, num: int, seed: int) -> Tensor:
    return rademacher(A.shape[1], num, A.dtype, A.device, seed)


def _standard_error(samples: Tensor) -> Tensor:
    return samples.std(-1).div(samples.shape[-1] ** 0.5)


def _check(A: LinearOperator, products: int, square: bool = True) -> None:
    if square and A.domain != A.codomain:
        raise ShapeError(f"The operator has shape {list(A.shape)}.", "Pass one that maps a space to itself.")
    if products < 6:
        raise ShapeError(f"products is {products}, too few for an error bar.", "Spend at least 6.")
