"""The square loss, `torch.nn.MSELoss`: half the squared distance, a normal likelihood of unit variance."""

from torch import Tensor, nn, ones_like

from kfs.losses.counter import Draws
from kfs.losses.interface import Elementwise, per_datum


class Square(Elementwise):
    """`MSELoss`. Its criterion is half the squared distance; the two is in the reduction factor."""

    def __init__(self, module: nn.MSELoss) -> None:
        """Take the reduction over."""
        super().__init__("MSELoss", module.reduction, scale=2.0)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return half the squared distance."""
        return 0.5 * per_datum((f - y) ** 2)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the residual."""
        return f - y

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ones."""
        return ones_like(f)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Return the negative noise of a target drawn around the prediction."""
        return -draws.normal(len(f), tuple(f.shape[1:]), f.device).to(f.dtype)
