r"""The marginal likelihood of the data as a function of the prior, and its maximization.

The scale of the log-likelihood's curvature lives in `kfs.laplace.likelihood`.

With the prior $\mathcal N(0, \delta^{-1} I)$, the Laplace approximation of the log marginal likelihood is

$$
\log p(\mathcal D \mid \theta)
- \frac12 \Big( \sum_i \log \frac{\lambda_i + \delta}{\delta} + \delta \|\theta\|^2 \Big)
$$

with the eigenvalues $\lambda_i$ of the log-likelihood's negative curvature. Its derivative with respect to
$\log \delta$ is half of $\gamma(\delta) - \delta \|\theta\|^2$, where
$\gamma(\delta) = \sum_i \lambda_i / (\lambda_i + \delta)$ is the effective number of parameters (MacKay, 1992). The
derivative decreases with $\delta$, so there is one maximum, which bisection finds. If blocks have their own priors,
each block has its own maximum.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import exp, log, pi
from warnings import warn

import torch
from torch import Tensor

from kfs.errors import KfsWarning, ModelError, SolverError
from kfs.factors.blocks import BlockDiagonal, Stack
from kfs.laplace.likelihood import (
    Likelihood,
    Number,
    Prior,
    check_arguments,
    is_regression,
    likelihood_of,
    priors_by_name,
)
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.whole_parameters import whole


@dataclass(frozen=True)
class BlockSpectrum:
    """The numbers of one block that determine the marginal likelihood.

    Attributes:
        eigenvalues: Eigenvalues of the negative curvature of the log-likelihood, in float64 and not negative.
        squared_norm: Sum of squared parameters.
    """

    eigenvalues: Tensor
    squared_norm: float

    def log_determinant_ratio(self, prior: float | Tensor) -> Tensor:
        """Return the log determinant of the posterior precision minus the log determinant of the prior precision."""
        # `log1p` keeps the digits of eigenvalues that are small compared to the prior.
        return (self.eigenvalues / prior).log1p().sum()

    def effective_number(self, prior: float) -> float:
        """Return the effective number of parameters, which the data determine: the sum of `v / (v + prior)`."""
        return float((self.eigenvalues / (self.eigenvalues + prior)).sum())


def decomposed(K: BlockDiagonal, scale: float) -> BlockDiagonal:
    """Return the curvature times `scale`, with Kronecker products as eigenvalues and eigenvectors.

    Factors of KFAC cache their decompositions, so that a second call takes no time.
    """
    stacks = [Stack(stack.layouts, stack.apply(lambda block: block.eigenbasis()).scaled(scale)) for stack in K.stacks]
    return BlockDiagonal(K.domain, stacks).called(f"curvature of the log-likelihood, {type(K).__name__}", K.of)


def spectra(curvature: BlockDiagonal, params: Mapping[str, Tensor]) -> dict[str, BlockSpectrum]:
    """Return the spectrum of each block of the log-likelihood's curvature, by name.

    Raises:
        SolverError: If a block has a negative eigenvalue that is too large to be round-off.
    """
    columns = {name: whole(p.detach()).double().unsqueeze(0) for name, p in params.items()}
    found: dict[str, BlockSpectrum] = {}
    for stack in curvature.stacks:
        values = stack.apply(lambda structure: structure.eigenvalues())
        # A generous bound on the errors of eigenvalues; errors of sums grow with the number of terms.
        noise = values.abs().amax(1).double() * torch.finfo(values.dtype).eps ** 0.5
        for layout, part in stack.slices():
            mine = values[part].double()
            if bool((mine < -noise[part].unsqueeze(1)).any()):
                raise SolverError(
                    f"Block {layout.name!r} has a negative eigenvalue, {float(mine.min()):.3g}.",
                    "A posterior needs curvature that is positive semi-definite: use the GGN or the Fisher.",
                )
            squared_norm = float(layout.matrix(columns).square().sum())
            found[layout.name] = BlockSpectrum(mine.clamp(min=0).flatten(), squared_norm)
    return found


_MOST_ROUNDS = 1_000
_TOLERANCE = 1e-10
# Warn if there are more effective parameters than this share of the targets: then the noise is more than 1.4 times the
# residuals.
_MOST_EFFECTIVE = 0.5


def log_marginal_likelihood(
    K: BlockDiagonal,
    risk: EmpiricalRisk,
    prior_precision: Prior,
    *,
    noise: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Approximate the logarithm of the data's marginal likelihood.

    Args:
        K: The curvature of the risk: `KFAC`, `EKFAC`, or another operator with blocks.
        risk: Model, loss and data.
        prior_precision: Inverse variance of the prior, which has mean zero: one number, or one for every block, by
            name. The result is differentiable with respect to tensors.
        noise: Standard deviation of targets, for regression.
        temperature: Divisor of the log-likelihood.

    Returns:
        A scalar in float64. It lacks the constants that the loss omits, for example in Poisson regression.

    Raises:
        ModelError: If parameters, loss or data differ from those of the curvature, a prior precision is not positive,
            or noise is missing.
        SolverError: If the curvature has a negative eigenvalue.

    Example:
        >>> from kfs import KFAC
        >>> _ = torch.manual_seed(0)
        >>> X = torch.rand(20, 3, dtype=torch.float64)
        >>> model, y = torch.nn.Linear(3, 2).double(), (X[:, 0] > 0.5).long()
        >>> risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (X, y))
        >>> K = KFAC(risk)
        >>> best = tune_prior(K, risk)
        >>> bool(log_marginal_likelihood(K, risk, best) > log_marginal_likelihood(K, risk, 2 * best))
        True
    """
    with _shared_with_ranks(risk):
        check_arguments(K, risk)
        likelihood = likelihood_of(K, risk, noise, temperature)
        priors = priors_by_name(prior_precision, K)
        return evidence(decomposed(K, likelihood.scale), risk, priors, likelihood)


def _shared_with_ranks(risk: object) -> AbstractContextManager[None]:
    """Return a context that raises on all ranks of a risk if one of them raises."""
    return risk.ranks.agreed("kfs.laplace", is_short=True) if isinstance(risk, EmpiricalRisk) else nullcontext()


def evidence(
    curvature: BlockDiagonal, risk: EmpiricalRisk, priors: Mapping[str, Number], likelihood: Likelihood
) -> Tensor:
    """Return the log marginal likelihood, given the curvature of the log-likelihood; see `log_marginal_likelihood`."""
    found = spectra(curvature, risk.params)
    terms = [
        block.log_determinant_ratio(priors[name])
        + torch.as_tensor(priors[name], dtype=torch.float64) * block.squared_norm
        for name, block in found.items()
    ]
    return log_likelihood(risk, likelihood) - 0.5 * torch.stack([term.reshape(()).cpu() for term in terms]).sum()


def log_likelihood(risk: EmpiricalRisk, likelihood: Likelihood) -> float:
    """Return the log-likelihood of the data at the current parameters."""
    criteria = risk.value() / risk.reduction_factor
    normalization = 0.0
    if likelihood.noise is not None:
        normalization = _num_targets(risk) * log(likelihood.noise * (2 * pi) ** 0.5)
    factor = (likelihood.noise or 1.0) ** 2 * likelihood.temperature
    return -criteria / factor - normalization


def _num_targets(risk: EmpiricalRisk) -> int:
    """Return the number of predicted values, summed over all examples and ranks."""
    with risk.ranks.agreed("counting targets"):
        own = sum(batch.y.numel() for batch in risk.batches())
        return sum(risk.ranks.gather("counting targets", own))


def tune_prior(
    K: BlockDiagonal,
    risk: EmpiricalRisk,
    *,
    per_block: bool = False,
    noise: float | None = None,
    temperature: float = 1.0,
) -> float | dict[str, float]:
    """Return the prior precision that maximizes the marginal likelihood.

    Args:
        K: The curvature of the risk.
        risk: Model, loss and data.
        per_block: Whether every block has its own prior precision.
        noise: Standard deviation of targets, for regression. `tune_prior_and_noise` can find it.
        temperature: Divisor of the log-likelihood.

    Returns:
        The precision, or a dictionary with the precision of each block, by name.

    Raises:
        SolverError: If there is no maximum, because all parameters are zero, or there is no curvature.
        ModelError: As in `log_marginal_likelihood`.
    """
    # Ranks communicate here only for blocks with owner ranks, so errors need not reach the ranks of the risk.
    with K.ranks.agreed("kfs.laplace.tune_prior") if isinstance(K, BlockDiagonal) else nullcontext():
        check_arguments(K, risk)
        likelihood = likelihood_of(K, risk, noise, temperature)
        return best_priors(spectra(decomposed(K, likelihood.scale), risk.params), per_block)


def best_priors(found: Mapping[str, BlockSpectrum], per_block: bool) -> float | dict[str, float]:
    """Return the prior precisions that maximize the marginal likelihood, given the spectrum of each block."""
    if per_block:
        return {name: _best_prior([block], f"block {name!r}") for name, block in found.items()}
    return _best_prior(found.values(), "the model")


def _best_prior(blocks: Iterable[BlockSpectrum], what: str) -> float:
    """Return the prior precision at which the derivative of the marginal likelihood is zero."""
    parts = list(blocks)
    values = torch.cat([block.eigenvalues.cpu() for block in parts])
    # Drop eigenvalues that are only round-off.
    values = values[values > values.numel() * torch.finfo(values.dtype).eps * values.amax()]
    squared_norm = sum(block.squared_norm for block in parts)
    if not len(values):
        raise SolverError(
            f"There is no curvature in {what}, so no prior precision is optimal.",
            "Choose a prior precision for every block.",
        )
    if not squared_norm:
        raise SolverError(
            f"The parameters of {what} are zero, so the optimal prior precision is infinite.",
            "Choose a prior precision for every block.",
        )

    def excess(log_prior: float) -> float:
        prior = exp(log_prior)
        return float((values / (values + prior)).sum()) - prior * squared_norm

    # The upper bound follows because at most all parameters are effective.
    return exp(_root(excess, log(len(values) / squared_norm)))


def _root(function: Callable[[float], float], upper: float) -> float:
    """Find the zero of a decreasing function by bisection. The function must not be positive at the upper end."""
    step = 1.0
    lower = upper - step
    while function(lower) < 0:
        upper = lower
        step *= 2
        lower -= step
    while upper - lower > _TOLERANCE * max(1.0, abs(upper)):
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if function(middle) > 0 else (lower, middle)
    return (lower + upper) / 2


def tune_prior_and_noise(
    K: BlockDiagonal, risk: EmpiricalRisk, *, per_block: bool = False
) -> tuple[float | dict[str, float], float]:
    r"""Return the prior precision and the noise that maximize the marginal likelihood of a regression.

    Both are optimized in turn. The optimal noise for a given prior solves
    $\sigma^2 = \sum_n \|f_n - y_n\|^2 / (n - \gamma)$, where $n$ is the number of all predicted values, and $\gamma$ is
    the effective number of parameters. The exact curvature has at most $n$ nonzero eigenvalues, but Kronecker products
    have more. Hence, if there are more parameters than data, $\gamma$ and the noise are overestimated. A `KfsWarning`
    is issued if $\gamma$ is more than half of $n$.

    Args:
        K: The curvature of the risk.
        risk: Model, loss and data.
        per_block: Whether every block has its own prior precision.

    Returns:
        Prior precision and noise, in the format of the arguments of `posterior`.

    Raises:
        ModelError: If the loss is not for regression.
        SolverError: If there is no optimal noise: the model predicts all targets exactly, or the search does not
            converge.
    """
    with _shared_with_ranks(risk):
        check_arguments(K, risk)
        if not is_regression(risk):
            raise ModelError(f"{risk.loss.name} has no noise parameter.", "Use kfs.laplace.tune_prior.")
    criteria = risk.value() / risk.reduction_factor
    num_targets = _num_targets(risk)
    if not criteria:
        raise SolverError("The model predicts all targets exactly, so the optimal noise is zero.", "Choose noise=.")
    # Decompose once, for unit noise. Other noise only scales the eigenvalues.
    unit = spectra(decomposed(K, likelihood_of(K, risk, 1.0).scale), risk.params)
    # Start with the variance of the residuals, as if no parameter were effective.
    log_variance = log(2 * criteria / num_targets)
    for _ in range(_MOST_ROUNDS):
        scaled = {
            name: BlockSpectrum(block.eigenvalues / exp(log_variance), block.squared_norm)
            for name, block in unit.items()
        }
        priors = best_priors(scaled, per_block)
        before = log_variance
        log_variance = _best_log_variance(unit, priors, criteria, num_targets)
        if abs(log_variance - before) < 100 * _TOLERANCE:
            noise = exp(log_variance / 2)
            _warn_of_overestimate(noise, (2 * criteria / num_targets) ** 0.5)
            return priors, noise
    raise SolverError(
        f"Prior and noise have not converged after {_MOST_ROUNDS} rounds.",
        "Choose the noise, and use kfs.laplace.tune_prior(K, risk, noise=...).",
    )


def _warn_of_overestimate(noise: float, residual: float) -> None:
    """Warn if the noise is much larger than the root mean square of residuals: too many effective parameters."""
    # The best noise has residual^2 = noise^2 (1 - gamma / n).
    share = 1 - (residual / noise) ** 2
    if share > _MOST_EFFECTIVE:
        warn(
            f"The noise is probably overestimated: it is {noise:.3g}, but the residuals have a root mean square of "
            f"{residual:.3g}. The effective number of parameters is {share:.0%} of the number of targets. Approximate "
            "curvature has more effective parameters than the data determine. Compare with noise="
            f"{residual:.3g} and kfs.laplace.tune_prior(K, risk, noise={residual:.3g}) on held-out data: "
            "posterior.predict(X, noise=True) returns mean and variance.",
            KfsWarning,
            stacklevel=3,
        )


def _best_log_variance(
    unit: Mapping[str, BlockSpectrum], priors: float | Mapping[str, float], criteria: float, num_targets: int
) -> float:
    """Return the logarithm of the optimal variance of targets for given priors."""

    def excess(log_variance: float) -> float:
        variance = exp(log_variance)
        effective = sum(
            block.effective_number(variance * (priors[name] if isinstance(priors, Mapping) else priors))
            for name, block in unit.items()
        )
        return 2 * criteria / variance + effective - num_targets

    # The excess is positive if the variance is too small. Increase the upper bound until it is large enough.
    upper = log(2 * criteria / num_targets)
    while excess(upper) > 0:
        upper += 1.0
    return _root(excess, upper)
