"""The losses that are quadratic near zero and linear far away: `torch.nn.HuberLoss` and `torch.nn.SmoothL1Loss`.

Their curvature is constant near zero and vanishes far away. At the two kinks in between it does not exist, and we take
that of the linear side. A zero `beta` makes `SmoothL1Loss` the absolute value, which has no curvature to use.
"""

from torch import Tensor, nn

from kfs.errors import LossError
from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, per_datum


class Huber(Elementwise):
    """`HuberLoss` and `SmoothL1Loss`: they differ by a factor `delta`, which goes into the reduction factor."""

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
        """Return the residual, clipped."""
        return (f - y).clamp(-self.delta, self.delta)

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return one where the residual is small, zero elsewhere."""
        return ((f - y).abs() < self.delta).to(f.dtype)

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Refuse: see `sampled_gradient`."""
        raise self._refusal()

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Refuse: see `sampled_gradient`."""
        raise self._refusal()

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Refuse: nobody means the density that would belong to this loss."""
        raise self._refusal()

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Refuse: see `sampled_gradient`."""
        raise self._refusal()

    def _refusal(self) -> LossError:
        return self.no_likelihood("it is chosen for its robustness, not as the logarithm of a density")
