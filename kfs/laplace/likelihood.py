r"""The relation between the curvature of a risk and the curvature of a log-likelihood, and checks of arguments.

A risk is $R \sum_n c(f_n, y_n)$, where $c$ is a negative log-likelihood, up to a constant. For regression with noise of
standard deviation $\sigma$, and a temperature $T$, the log-likelihood is

$$
-\frac{1}{\sigma^2 T} \sum_n c(f_n, y_n) + \text{const}.
$$

Its negative curvature is $K / (R \sigma^2 T)$, where $K$ is the curvature of the risk. For classification $\sigma = 1$.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

from torch import Tensor

from kfs.display.suggestions import few, guess
from kfs.errors import DtypeError, ModelError
from kfs.factors import EKFAC, KFAC
from kfs.factors.block import LossScale
from kfs.factors.blocks import BlockDiagonal, Relative
from kfs.factors.match import check_curvature, check_risk, warn_of_other_values
from kfs.problem.risk import EmpiricalRisk

NAME = "The Laplace approximation"  # in error messages
# One prior precision for all blocks, or one for each block, by name.
Number = float | Tensor
Prior = Number | Mapping[str, Number]
# Losses with a normal distribution of unit variance as likelihood.
_REGRESSION = {"MSELoss", "HalfSquaredError"}


@dataclass(frozen=True)
class Likelihood:
    """The scale of a log-likelihood.

    Attributes:
        reduction_factor: `R` of the data that the curvature was computed from.
        noise: Standard deviation of targets in regression; `None` for other losses.
        temperature: Divisor of the log-likelihood.
    """

    reduction_factor: float
    noise: float | None = None
    temperature: float = 1.0

    @property
    def scale(self) -> float:
        """Factor between the curvature of the risk and the negative curvature of the log-likelihood."""
        return 1 / (self.reduction_factor * (self.noise or 1.0) ** 2 * self.temperature)


def likelihood_of(
    K: BlockDiagonal, risk: EmpiricalRisk | None, noise: float | None, temperature: float = 1.0
) -> Likelihood:
    """Return the scale of the log-likelihood that belongs to a curvature.

    Args:
        K: The curvature.
        risk: Model, loss and data; `None` if only the curvature is known.
        noise: Standard deviation of targets in regression.
        temperature: Divisor of the log-likelihood.

    Raises:
        ModelError: If the loss differs from the loss of the curvature, noise is missing for regression, or noise is
            given for another loss.
        DtypeError: If noise or temperature is not a positive number.
    """
    _check_positive(temperature, "The temperature")
    if isinstance(K, KFAC | EKFAC):
        loss = (K.factors if isinstance(K, EKFAC) else K).loss
        if risk is not None:
            loss.check_same(LossScale.of(risk))
        name, R = loss.name, loss.reduction_factor(K.count)
    elif risk is not None:
        name, R = risk.loss.name, risk.reduction_factor
    else:
        raise ModelError(
            f"A {type(K).__name__} does not know the loss that it is the curvature of.",
            "Pass kfs.EmpiricalRisk(model, loss, data) with these data in place of the model.",
        )
    _check_noise(noise, name)
    return Likelihood(R, noise, temperature)


def _check_noise(noise: float | None, loss: str) -> None:
    """Raise `ModelError` for regression without noise, and for noise with other losses."""
    if noise is None and loss in _REGRESSION:
        raise ModelError(
            f"{loss} is the loss of a regression, and its posterior depends on the noise of targets.",
            "Pass noise=, the standard deviation of targets, or find it with "
            "kfs.laplace.tune_prior_and_noise(K, risk).",
        )
    if noise is not None and loss not in _REGRESSION:
        raise ModelError(f"{loss} has no noise parameter.", "Leave noise= out; it is for MSELoss.")
    if noise is not None:
        _check_positive(noise, "The noise")


def is_regression(risk: EmpiricalRisk) -> bool:
    """Return whether the likelihood is a normal distribution, with a noise that the loss does not determine."""
    return risk.loss.name in _REGRESSION


def _check_positive(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise DtypeError(f"{what} is {value!r}.", "Use a positive, finite number.")


def priors_by_name(prior_precision: Prior, K: BlockDiagonal) -> dict[str, Number]:
    """Return the prior precision of each block.

    Args:
        prior_precision: One number for all blocks, or one for every block, by name. Tensors with one entry are accepted
            as numbers.
        K: The operator with the blocks.

    Raises:
        ModelError: If names are unknown or missing, or a precision is not positive.
    """
    names = set(K.structures)
    if not isinstance(prior_precision, Mapping):
        prior_precision = dict.fromkeys(names, prior_precision)
    missing = sorted(names - set(prior_precision))
    extra = sorted(set(prior_precision) - names)
    if missing or extra:
        raise ModelError(
            f"prior_precision lacks the blocks {few(missing) or 'none'}, and has {few(extra) or 'none'} too many.",
            f"Give one number, or one for every block. {guess(extra, missing)}".rstrip(),
        )
    for value in prior_precision.values():
        _check_prior(value)
    return dict(prior_precision)


def _check_prior(value: object) -> None:
    if isinstance(value, Relative):
        raise ModelError(
            f"The prior precision is {value!r}, but a prior does not depend on the curvature.",
            "Use a positive number, such as N times the weight decay, or kfs.laplace.tune_prior(K, risk).",
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    plain = value.detach() if isinstance(value, Tensor) else value
    number = float(plain) if is_number or is_scalar else -inf  # type: ignore[arg-type]
    if not (number > 0 and isfinite(number)):
        raise ModelError(
            f"The prior precision is {value!r}. Curvature may be singular, and then has no inverse without a prior.",
            "Use a positive number, such as N times the weight decay, or kfs.laplace.tune_prior(K, risk).",
        )


def check_arguments(K: BlockDiagonal, risk: EmpiricalRisk) -> None:
    """Check that an operator has blocks, and that a risk has its parameters and number of examples.

    Warns if the parameters had other values when the curvature was computed.

    Raises:
        ModelError: If it has not.
    """
    check_curvature(K, NAME)
    check_risk(K, risk, "risk")
    if isinstance(K, KFAC | EKFAC) and K.num_data != risk.num_data:
        raise ModelError(
            f"The curvature was computed from {K.num_data:,} examples, and the risk has {risk.num_data:,}.",
            "Use the risk that the curvature was computed for.",
        )
    warn_of_other_values(K, risk.params, stacklevel=4)
