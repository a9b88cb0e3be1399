"""The square loss: half the squared distance, with a normal likelihood of unit variance. `MSELoss` has factor two."""

from torch import Tensor, nn, ones, ones_like, zeros  # noqa: F401 (ones and zeros are for the example)

from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, Loss, per_datum


class Square(Elementwise):
    """`MSELoss`. Its criterion is half the squared distance; its reduction factor includes a factor of two."""

    def __init__(self, module: nn.MSELoss) -> None:
        super().__init__("MSELoss", module.reduction, scale=2.0)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return half the squared distance."""
        return 0.5 * per_datum((f - y) ** 2)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the residual."""
        return f - y

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the predictions, since the Fisher matrix does not depend on targets."""
        return f

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ones."""
        return ones_like(f)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a target from a normal distribution around the prediction and return its gradient."""
        return -draws.normal(len(f), tuple(f.shape[1:]), f.device).to(f.dtype)


class HalfSquaredError(Square):
    """Half the squared distance of each example, summed over its entries and averaged over examples (not entries).

    Args:
        reduction: `"mean"` over examples, or `"sum"`.

    Example:
        >>> loss = HalfSquaredError()
        >>> f, y = ones(10, 3), zeros(10, 3)
        >>> loss.reduction_factor(loss.count(y)) * loss.criterion(f, y).sum()
        tensor(1.5000)
    """

    def __init__(self, reduction: str = "mean") -> None:
        Loss.__init__(self, "HalfSquaredError", reduction)

    def count(self, y: Tensor) -> float:
        """Return the number of examples."""
        return len(y)
