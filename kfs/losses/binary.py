r"""Binary cross-entropy with logits, `torch.nn.BCEWithLogitsLoss`: independent yes-or-no labels.

With $\sigma = 1 / (1 + e^{-f})$, weight $w$, positive weight $p$ and target $y \in [0, 1]$, an entry's criterion is
$-w\, [\, p\, y \log \sigma + (1 - y) \log (1 - \sigma)]$ with second derivative
$w\, (p y + 1 - y)\, \sigma (1 - \sigma)$. The first two factors are the *mass* of the entry, its total weight.
The likelihood is Bernoulli, with each entry raised to the power of its mass.
"""

from torch import Tensor, nn, ones_like, xlogy

from kfs.losses.draws import Draws
from kfs.losses.interface import Elementwise, per_datum, placed, root


class BinaryCrossEntropy(Elementwise):
    """`BCEWithLogitsLoss`, with `weight` and `pos_weight` (both may be broadcast over examples)."""

    def __init__(self, module: nn.BCEWithLogitsLoss) -> None:
        super().__init__("BCEWithLogitsLoss", module.reduction)
        self.weight, self.pos_weight = module.weight, module.pos_weight

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the weighted sum over entries."""
        y = y.to(f.dtype)
        weight, pos_weight = self._weights(f)
        return per_datum(
            nn.functional.binary_cross_entropy_with_logits(f, y, weight, pos_weight=pos_weight, reduction="none")
        )

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the smallest criterion for the targets, which is their weighted entropy."""
        yes, mass = self._yes(f, y), self._mass(f, y)
        entropy = xlogy(mass, mass) - xlogy(yes, yes) - xlogy(mass - yes, mass - yes)
        return self.criterion(f, y) - per_datum(entropy)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass times the probability, minus the mass of the positive label."""
        return self._mass(f, y) * f.sigmoid() - self._yes(f, y)

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the label minus the probability."""
        return y.to(f.dtype) - f.sigmoid()

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return 1 for positive and -1 for negative labels, since the logit is `log p / (1 - p)`."""
        return (2 * y.to(f.dtype) - 1).expand_as(f)

    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass times the variance of the label."""
        return self._mass(f, y) * f.sigmoid() * (-f).sigmoid()

    @property
    def weighs_targets(self) -> bool:
        """Whether positive labels have a weight of their own, `pos_weight`."""
        return self.pos_weight is not None

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return labels according to the sign of the gradient; only their weights matter."""
        return (g < 0).to(f.dtype)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label for every entry and return its gradient, scaled by the square root of the mass."""
        probability = f.sigmoid()
        label = (draws.uniform(len(f), tuple(f.shape[1:]), f.device) < probability).to(f.dtype)
        return root(self._mass(f, y)) * (probability - label)

    def _yes(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass of the positive label of every entry."""
        weight, pos_weight = self._weights(f)
        yes = y * (ones_like(f) if pos_weight is None else pos_weight)
        return yes if weight is None else weight * yes

    def _mass(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass of every entry."""
        weight, _ = self._weights(f)
        no = (1 - y) * ones_like(f)
        return self._yes(f, y) + (no if weight is None else weight * no)

    def _weights(self, f: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return `weight` and `pos_weight` on the device of the predictions."""
        weight, pos_weight = (t if t is None else placed(t, f.device) for t in (self.weight, self.pos_weight))
        return weight, pos_weight
