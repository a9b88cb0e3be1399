r"""Losses of preferences: reward models that are trained on pairs, and direct preference optimization (DPO).

The model predicts two numbers for each example, $f = (f_+, f_-)$ for the chosen and the rejected answer. With the
*logit* $u = \beta\, (f_+ - f_- - y)$, the criterion is

$$
c(f, y) = -(1 - \varepsilon) \log \sigma(u) - \varepsilon \log \sigma(-u), \qquad
\nabla c = \beta\, (\sigma(u) - 1 + \varepsilon)\, d, \qquad
\mathrm{H} = \beta^2\, \sigma(u)\, \sigma(-u)\; d d^\top, \qquad d = (1, -1)^\top.
$$

| | $f$ | target $y$ |
|---|---|---|
| `RewardPair` | rewards | the margin by which the chosen reward must be larger, often zero |
| `DPO` | log-probabilities of both answers | the difference of the reference model's log-probabilities |

The likelihood says which answer is preferred: the first with probability $\sigma(u)$ (Bradley and Terry, 1952). So the
Fisher matrix equals the Hessian, for any label smoothing $\varepsilon$.
"""

from torch import Tensor, finfo, nn, stack, tensor, xlogy  # noqa: F401 (tensor is for the examples)

from kfs.errors import LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.losses.interface import Loss, check_floating


class RewardPair(Loss):
    """The loss of a reward model on pairs of answers, `-log sigmoid(chosen - rejected - margin)`.

    Predictions are rewards `[N, 2]`, first those of the chosen answers. Targets are margins `[N]`; pass zeros if there
    are none.

    Args:
        reduction: `"mean"` over pairs, or `"sum"`.
        label_smoothing: Probability that the rejected answer is the better one.

    Raises:
        LossError: If `label_smoothing` is not between 0 and 1.

    Example:
        >>> loss = RewardPair()
        >>> loss(tensor([[2.0, 1.0]]), tensor([1.0]))  # the rewards differ by the margin
        tensor(0.6931)
    """

    beta = 1.0

    def __init__(self, reduction: str = "mean", *, label_smoothing: float = 0.0) -> None:
        super().__init__(type(self).__name__, reduction)
        if not 0 <= label_smoothing < 1:
            raise LossError(f"label_smoothing is {label_smoothing!r}.", "Use a probability from 0 to below 1.")
        self.label_smoothing = label_smoothing

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless predictions are `[N, 2]` and targets are numbers `[N]`."""
        check_floating("The targets", y)
        if f.ndim != 2 or f.shape[1] != 2 or y.shape != f.shape[:1]:
            raise ShapeError(
                f"{self.name}: predictions have shape {list(f.shape)} and targets {list(y.shape)}.",
                "The model must return two numbers for each pair, [N, 2], first that of the chosen answer. Targets are "
                f"{self._targets}. A pair is one example: if the model takes both answers as rows of one batch, wrap "
                "it in a module with inputs [N, 2, ...].",
            )

    def count(self, y: Tensor) -> float:
        """Return the number of pairs."""
        return len(y)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of every preference."""
        u, smoothing = self._logit(f, y), self.label_smoothing
        logsigmoid = nn.functional.logsigmoid
        value: Tensor = (smoothing - 1.0) * logsigmoid(u) - smoothing * logsigmoid(-u)
        return value

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the smallest criterion, the entropy of the smoothed label."""
        masses = y.new_tensor([self.label_smoothing, 1 - self.label_smoothing])
        return self.criterion(f, y) + xlogy(masses, masses).sum()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient above."""
        return self._along_difference(self._logit(f, y).sigmoid() - 1 + self.label_smoothing)

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `log sigmoid(u)`, without label smoothing."""
        return self._along_difference((-self._logit(f, y)).sigmoid())

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the logit `u`, which is `log p / (1 - p)`."""
        return self._along_difference(y.new_ones(len(f)).to(f.dtype))

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every pair with its Hessian, which has rank one."""
        (S,) = self.hessian_factor(f, y)
        product: Tensor = S * (S * v).sum(-1, keepdim=True)
        return product

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the only column."""
        u = self._logit(f, y)
        return self._along_difference((u.sigmoid() * (-u).sigmoid()).sqrt()).unsqueeze(0)[start:stop]

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw which answer is preferred, and return the gradient."""
        probability = self._logit(f, y).sigmoid()
        label = (draws.uniform(len(f), (), f.device) < probability).to(f.dtype)
        return self._along_difference(probability - label)

    @property
    def hessian_needs_targets(self) -> bool:
        """True, since the logit depends on the target."""
        return True

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the norm of the gradient's sums over both answers, relative to the gradient: correct sums are zero."""
        sums: Tensor = g.sum(-1).norm() / g.norm().clamp(min=finfo(g.dtype).tiny)
        return sums

    @property
    def _targets(self) -> str:
        """The targets in words, for messages."""
        return "margins [N]; pass zeros if there are none"

    def _logit(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the logit of the chosen answer, `[N]`."""
        return self.beta * (f[:, 0] - f[:, 1] - y.to(f.dtype))

    def _along_difference(self, derivative: Tensor) -> Tensor:
        """Return the gradient `[N, 2]` with respect to predictions, given that with respect to logits, `[N]`."""
        return self.beta * stack([derivative, -derivative], 1)


class DPO(RewardPair):
    """The loss of direct preference optimization (Rafailov et al., 2023), with the label smoothing of TRL.

    Predictions are log-probabilities `[N, 2]` of whole answers under the model, first those of the chosen ones. Targets
    are the differences `chosen - rejected` `[N]` of log-probabilities under the reference model.

    Args:
        beta: Strength of the penalty for a distance from the reference model.
        label_smoothing: Probability that the rejected answer is the better one.
        reduction: `"mean"` over pairs, or `"sum"`.

    Raises:
        LossError: If `beta` is not positive, or `label_smoothing` is not between 0 and 1.

    Example:
        >>> loss = DPO(beta=0.1)
        >>> loss(tensor([[-10.0, -20.0]]), tensor([10.0]))  # the reference model prefers it as much
        tensor(0.6931)
    """

    def __init__(self, beta: float = 0.1, *, label_smoothing: float = 0.0, reduction: str = "mean") -> None:
        super().__init__(reduction, label_smoothing=label_smoothing)
        if not beta > 0:
            raise LossError(f"beta is {beta!r}.", "Use a positive number, such as 0.1.")
        self.beta = beta

    @property
    def _targets(self) -> str:
        return "differences chosen - rejected of the reference model's log-probabilities, [N]"
