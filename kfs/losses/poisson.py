r"""Poisson regression, `torch.nn.PoissonNLLLoss`: targets are counts.

The prediction is the logarithm of the rate $\lambda$ (`log_input=True`, the default) or the rate itself:

| | criterion | Hessian | Fisher |
|---|---|---|---|
| $\lambda = e^f$ | $e^f - y f$ | $e^f$ | $e^f$ |
| $\lambda = f$ | $f - y \log (f + \varepsilon)$ | $y / (f + \varepsilon)^2$ | $f / (f + \varepsilon)^2$ |

In the second row, the Hessian depends on the target, so the GGN and the Fisher differ.
"""

import torch
from torch import Tensor, nn

from kfs.errors import LossError
from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, diagonal_factor, per_datum, root
from kfs.runtime import sync

# Counts for rates up to two to this power have at most one more binary digit.
_DIGITS = 40


class Poisson(Elementwise):
    """`PoissonNLLLoss`; the term that `full=True` adds does not depend on the prediction."""

    def __init__(self, module: nn.PoissonNLLLoss) -> None:
        super().__init__("PoissonNLLLoss", module.reduction)
        self.module = module

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over entries."""
        m = self.module
        entries = nn.functional.poisson_nll_loss(f, y, log_input=m.log_input, full=m.full, eps=m.eps, reduction="none")
        return per_datum(entries)

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the criterion at a rate that is equal to the count."""
        rate = f.exp() if self.module.log_input else f + self.module.eps
        return per_datum(rate - y - torch.xlogy(y, rate) + torch.xlogy(y, y))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the derivative: rate minus count, or `1 - y / (f + eps)` if the prediction is the rate."""
        return f.exp() - y if self.module.log_input else 1 - y / (f + self.module.eps)

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian in the table above."""
        return f.exp() if self.module.log_input else y / (f + self.module.eps) ** 2

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply with the Fisher matrix in the table above."""
        return self.second_derivative(f, self._rate(f)) * v

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the square root of the Fisher matrix in the table above."""
        return diagonal_factor(root(self.second_derivative(f, self._rate(f))), start, stop)

    @property
    def hessian_needs_targets(self) -> bool:
        """Whether the prediction is the rate: then the Hessian depends on counts."""
        return not self.module.log_input

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return zeros, since the Fisher matrix does not depend on counts."""
        return torch.zeros_like(f)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a count for every entry and return its gradient."""
        count = poisson_quantile(draws.uniform(len(f), tuple(f.shape[1:]), f.device), self._rate(f).double())
        return self.gradient(f, count.to(f.dtype))

    def _rate(self, f: Tensor) -> Tensor:
        """Return the rates. Negative or infinite rates raise an error, or become NaN on an accelerator."""
        rate = f.exp() if self.module.log_input else f
        right = (rate >= 0) & rate.isfinite()
        if sync.is_asynchronous(f.device):
            return torch.where(right, rate, torch.nan)
        if not right.all():
            raise LossError(
                "PoissonNLLLoss was given a negative or infinite rate, for which no counts can be drawn.",
                "Make the model predict the logarithm of the rate (log_input=True), and keep it in range.",
            )
        return rate


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """Return the smallest count whose cumulative probability reaches `u`, computed digit by digit in binary.

    Args:
        u: Numbers between 0 and 1, float64.
        rate: Poisson rates, float64, same shape.

    Returns:
        Counts as float64; NaN where the rate is NaN.
    """
    # For rates beyond 2**40, the error of the normal approximation is below the resolution of the incomplete gamma
    # function.
    large = rate > 2.0**_DIGITS
    approximate = torch.round(rate + rate.sqrt() * torch.special.ndtri(u))
    rate = torch.where(large, 1.0, rate)
    # On an accelerator, use the maximum number of digits, since reading the largest rate would synchronize.
    digits = _DIGITS + 1
    if rate.numel() and not sync.is_asynchronous(rate.device):
        # For `u` with 52 bits, the quantile is at most 9 standard deviations and a few counts away from the rate.
        digits = int((rate + 9 * rate.sqrt() + 40).nan_to_num().max()).bit_length()
    rate = rate.clamp(min=1e-300)
    count = 0 * rate
    for digit in reversed(range(digits)):
        # `gammaincc` is the probability of fewer than `larger` counts. If it is below `u`, the count is at least
        # `larger`.
        larger = count + 2.0**digit
        count = torch.where(torch.special.gammaincc(larger, rate) < u, larger, count)
    return torch.where(large, approximate, count)
