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
from kfs.losses.counter import Draws
from kfs.losses.interface import Elementwise, diagonal_factor, per_datum, root


class Poisson(Elementwise):
    """`PoissonNLLLoss`; the constant that `full=True` adds has no derivatives."""

    def __init__(self, module: nn.PoissonNLLLoss) -> None:
        """Take all settings over."""
        super().__init__("PoissonNLLLoss", module.reduction)
        self.module = module

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over entries."""
        m = self.module
        entries = nn.functional.poisson_nll_loss(f, y, log_input=m.log_input, full=m.full, eps=m.eps, reduction="none")
        return per_datum(entries)

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

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return no counts at all: the Fisher matrix does not depend on them."""
        return torch.zeros_like(f)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a count per entry."""
        count = poisson_quantile(draws.uniform(len(f), tuple(f.shape[1:]), f.device), self._rate(f).double())
        return self.gradient(f, count.to(f.dtype))

    def _rate(self, f: Tensor) -> Tensor:
        rate = f.exp() if self.module.log_input else f
        if (rate < 0).any() or not rate.isfinite().all():
            raise LossError(
                "PoissonNLLLoss was given a negative or infinite rate, for which no counts can be drawn.",
                "Let the model predict the logarithm of the rate (log_input=True), and keep it in range.",
            )
        return rate


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """Return the smallest count whose cumulative probability reaches `u`, by bisection.

    Args:
        u: Numbers between 0 and 1, float64.
        rate: The Poisson rates, float64, same shape.

    Returns:
        Counts as float64.
    """
    # Beyond 2**40 counts, a normal distribution differs by less than the bisection could resolve.
    large = rate > 2.0**40
    approximate = torch.round(rate + rate.sqrt() * torch.special.ndtri(u))
    rate = torch.where(large, 1.0, rate)
    # No quantile that 52 bits can ask for is further than 9 standard deviations and a few counts from the rate.
    low, high = torch.full_like(rate, -1), torch.ceil(rate + 9 * rate.sqrt() + 40)
    while (high - low > 1).any():
        middle = torch.floor((low + high) / 2)
        reached = torch.special.gammaincc(middle + 1, rate.clamp(min=1e-300)) >= u
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return torch.where(large, approximate, high)
