"""Losses that are quadratic near zero and linear elsewhere: `torch.nn.HuberLoss` and `torch.nn.SmoothL1Loss`.

Their second derivative is one near zero and zero elsewhere. At the two transition points, it does not exist and is set
to zero. With `beta=0`, `SmoothL1Loss` is the absolute value, which has no curvature and raises an error.
"""

from torch import Tensor, nn

from kfs.errors import LossError
from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, per_datum


class Huber(Elementwise):
    """`HuberLoss` and `SmoothL1Loss`. They differ by a factor `delta`, which is part of the reduction factor."""

    def __init__(self, module: nn.HuberLoss | nn.SmoothL1Loss) -> None:
        name = type(module).__name__
        if isinstance(module, nn.HuberLoss):
            self.delta, scale = module.delta, 1.0
        else:
            self.delta = module.beta
            if self.delta == 0:
                raise LossError(
                    "SmoothL1Loss with beta=0 is the absolute value, which has no curvature.",
                    "Choose beta > 0, where the loss is quadratic near zero.",
                )
            scale = 1 / self.delta
        super().__init__(name, module.reduction, scale)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over entries."""
        return per_datum(nn.functional.huber_loss(f, y.to(f.dtype), reduction="none", delta=self.delta))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the clipped residual."""
        return (f - y).clamp(-self.delta, self.delta)

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return 1 where the absolute residual is less than `delta`, 0 elsewhere."""
        return ((f - y).abs() < self.delta).to(f.dtype)

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Raise an error: see `sampled_gradient`."""
        raise self._refusal()

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Raise an error: see `sampled_gradient`."""
        raise self._refusal()

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Raise an error: the loss is not used as the negative logarithm of a density."""
        raise self._refusal()

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Raise an error: see `sampled_gradient`."""
        raise self._refusal()

    def _refusal(self) -> LossError:
        return self.no_likelihood("it is chosen for its robustness, not as the logarithm of a density")
