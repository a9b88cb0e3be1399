r"""Poisson regression, `torch.nn.PoissonNLLLoss`: targets are counts.

The prediction is the logarithm of the rate $\lambda$ (`log_input=True`, the default) or the rate itself:

| | criterion | Hessian | Fisher |
|---|---|---|---|
| $\lambda = e^f$ | $e^f - y f$ | $e^f$ | $e^f$ |
| $\lambda = f$ | $f - y \log (f + \varepsilon)$ | $y / (f + \varepsilon)^2$ | $f / (f + \varepsilon)^2$ |

In the second line the Hessian depends on the target, so that GGN and Fisher differ.
"""

import torch
from torch import Tensor, nn

from kfs.errors import LossError
from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, diagonal_factor, per_datum, root
from kfs.runtime import sync

# Rates up to two to this power have counts with at most one more binary digit.
_DIGITS = 40


class Poisson(Elementwise):
    """`PoissonNLLLoss`; the constant that `full=True` adds has no derivatives."""

    def __init__(self, module: nn.PoissonNLLLoss) -> None:
        super().__init__("PoissonNLLLoss", module.reduction)
        self.module = module

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over entries."""
        m = self.module
        entries = nn.functional.poisson_nll_loss(f, y, log_input=m.log_input, full=m.full, eps=m.eps, reduction="none")
        return per_datum(entries)

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare with a rate that equals the count."""
        rate = f.exp() if self.module.log_input else f + self.module.eps
        return per_datum(rate - y - torch.xlogy(y, rate) + torch.xlogy(y, y))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return rate minus count, in the prediction's coordinates."""
        return f.exp() - y if self.module.log_input else 1 - y / (f + self.module.eps)

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the second line of the table above."""
        return f.exp() if self.module.log_input else y / (f + self.module.eps) ** 2

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply with the last column of the table above."""
        return self.second_derivative(f, self._rate(f)) * v

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the square root of the last column of the table above."""
        return diagonal_factor(root(self.second_derivative(f, self._rate(f))), start, stop)

    @property
    def hessian_needs_targets(self) -> bool:
        """The Hessian of the second line has counts in it."""
        return not self.module.log_input

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return no counts at all: the Fisher matrix does not depend on them."""
        return torch.zeros_like(f)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a count per entry."""
        count = poisson_quantile(draws.uniform(len(f), tuple(f.shape[1:]), f.device), self._rate(f).double())
        return self.gradient(f, count.to(f.dtype))

    def _rate(self, f: Tensor) -> Tensor:
        """Return the rates. If one is negative or infinite, raise; on an accelerator, return NaN there."""
        rate = f.exp() if self.module.log_input else f
        right = (rate >= 0) & rate.isfinite()
        if sync.is_asynchronous(f.device):
            return torch.where(right, rate, torch.nan)
        if not right.all():
            raise LossError(
                "PoissonNLLLoss was given a negative or infinite rate, for which no counts can be drawn.",
                "Let the model predict the logarithm of the rate (log_input=True), and keep it in range.",
            )
        return rate


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """Return the smallest count whose cumulative probability reaches `u`, one binary digit after the other.

    Args:
        u: Numbers between 0 and 1, float64.
        rate: The Poisson rates, float64, same shape.

    Returns:
        Counts as float64; NaN where the rate is.
    """
    # Beyond 2**40 counts, a normal distribution differs by less than the incomplete gamma function could resolve.
    large = rate > 2.0**_DIGITS
    approximate = torch.round(rate + rate.sqrt() * torch.special.ndtri(u))
    rate = torch.where(large, 1.0, rate)
    # An accelerator is not asked how large counts are. Digits that they do not have are zero.
    digits = _DIGITS + 1
    if rate.numel() and not sync.is_asynchronous(rate.device):
        # No quantile that 52 bits can ask for is further than 9 standard deviations and a few counts from the rate.
        digits = int((rate + 9 * rate.sqrt() + 40).nan_to_num().max()).bit_length()
    rate = rate.clamp(min=1e-300)
    count = 0 * rate
    for digit in reversed(range(digits)):
        # The probability of fewer than `larger` counts; if it does not reach `u`, there are at least so many.
        larger = count + 2.0**digit
        count = torch.where(torch.special.gammaincc(larger, rate) < u, larger, count)
    return torch.where(large, approximate, count)
