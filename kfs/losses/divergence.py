r"""The Kullback-Leibler divergence of predicted classes from target distributions, `torch.nn.KLDivLoss`.

Predictions are log-probabilities $f = \log\, \mathrm{softmax}(z)$ with classes along the last axis, as PyTorch's module
takes them. For a target distribution $p$ with mass $m = \sum_k p_k$, the criterion of a position is
$\sum_k p_k (\log p_k - f_k)$, which is linear in $f$: taken literally, its GGN would be zero. But log-probabilities
cannot vary freely. So the criterion is

$$
c(f) = \sum_k p_k\, (\log p_k - \log\, \mathrm{softmax}(f)_k), \qquad
\nabla c = m \sigma - p, \qquad
\mathrm{H} = m\, (\mathrm{diag}(\sigma) - \sigma \sigma^\top), \qquad \sigma = \mathrm{softmax}(f).
$$

It has PyTorch's value, since $\log\, \mathrm{softmax}(f) = f$ for log-probabilities. With
$\mathrm{J}_z f = I - \mathbf{1} \sigma^\top$ and $\mathrm{H} \mathbf{1} = 0$, it follows that
$(\mathrm{J}_z f)^\top\, \mathrm{H}\; \mathrm{J}_z f = \mathrm{H}$: the GGN is that of the cross-entropy of the
logits $z$ with soft targets. The same holds for the gradient: PyTorch's is $-p$, and
$(\mathrm{J}_z f)^\top (-p) = m \sigma - p$. The likelihood is categorical, raised to the power $m$.
"""

from torch import Tensor, nn, where, xlogy

from kfs.errors import LossError, ShapeError
from kfs.losses.cross_entropy import CrossEntropy
from kfs.losses.draws import Draws
from kfs.losses.interface import Loss, any_per_datum, check_floating, per_datum
from kfs.runtime import sync

# The logarithm of the sum of probabilities differs from zero by less, even if they were computed in bfloat16.
_NORMALIZED = 0.05


class KLDivergence(Loss):
    """`KLDivLoss`: log-probabilities `[N, ..., C]`, and targets of the same shape."""

    def __init__(self, module: nn.KLDivLoss) -> None:
        # PyTorch's "mean" divides by the number of entries, "batchmean" by the number of examples.
        self.over_entries = module.reduction == "mean"
        super().__init__("KLDivLoss", "mean" if module.reduction == "batchmean" else module.reduction)
        self.log_target = module.log_target
        self.base = CrossEntropy(nn.CrossEntropyLoss())

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless predictions are log-probabilities, and targets probabilities (or their logarithms)."""
        check_floating("The targets", y)
        if f.ndim < 2 or f.shape != y.shape:
            raise ShapeError(
                f"KLDivLoss: predictions have shape {list(f.shape)}, and targets {list(y.shape)}.",
                "Use the same shape [N, ..., C] for both, with classes along the last axis.",
            )
        if sync.is_asynchronous(f.device):
            return
        if self._unnormalized(f).any():
            raise LossError(
                "KLDivLoss takes log-probabilities with classes along the last axis, but the exponentials of a "
                f"prediction sum to {f.detach().exp().sum(-1)[self._unnormalized(f)][0]:.3g}.",
                "Let the model return logits.log_softmax(-1). Or declare CrossEntropyLoss (logits [N, C, ...]) or "
                "kfs.losses.TokenCrossEntropy (logits [N, S, C]), which take logits and probabilities, and have the "
                "same gradient and curvature.",
            )
        if self._out_of_range(y).any():
            raise LossError(
                f"KLDivLoss with log_target={self.log_target} was given the target {y[self._out_of_range(y)][0]:.3g}.",
                "Pass probabilities, or their logarithms with log_target=True.",
            )

    def wrong(self, f: Tensor, y: Tensor) -> Tensor:
        """Return which examples have predictions that are no log-probabilities, or targets out of range."""
        return any_per_datum(self._unnormalized(f) | self._out_of_range(y).any(-1))

    def count(self, y: Tensor) -> float:
        """Return the number of entries for PyTorch's `"mean"`, and the number of examples for `"batchmean"`."""
        return y.numel() if self.over_entries else len(y)

    def examples(self, y: Tensor) -> float:
        """Return the number of positions."""
        return y.numel() / max(y.shape[-1], 1)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over positions and classes."""
        entries = nn.functional.kl_div(f.log_softmax(-1), y.to(f.dtype), reduction="none", log_target=self.log_target)
        return per_datum(entries)

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the smallest criterion, which is zero if the mass is one."""
        mass = self._probabilities(f, y).sum(-1)
        return self.criterion(f, y) - per_datum(xlogy(mass, mass))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass times the softmax, minus the target."""
        return self.base.gradient(_classes_second(f), self._target(f, y)).movedim(1, -1)

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Raise an error, since targets are not labels."""
        return self.base.log_probability_gradient(_classes_second(f), self._target(f, y))

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every position with its Hessian."""
        second = 1 - f.ndim  # the class axis of the columns in the form of `CrossEntropy`
        product = self.base.hessian_product(_classes_second(f), self._target(f, y), v.movedim(-1, second))
        return product.movedim(second, -1)

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column per class and position."""
        return self.base.hessian_factor(_classes_second(f), self._target(f, y), start, stop).movedim(2, -1)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label for every position and return its gradient, scaled by the root of the mass."""
        return self.base.sampled_gradient(_classes_second(f), self._target(f, y), draws).movedim(1, -1)

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return targets of mass one where there is a gradient: PyTorch's is a multiple of the targets."""
        are_targets = ((g <= 0).all(-1) & (g < 0).any(-1)).unsqueeze(-1)
        total = where(are_targets, g.sum(-1, keepdim=True), 1.0)
        y = where(are_targets, g / total, f.softmax(-1) * (g != 0).any(-1, keepdim=True))
        y = y.log() if self.log_target else y
        self.check(f, y)
        return y

    def tangent(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the gradient at the logits. Log-probabilities stay normalized, so the rest of `g` has no effect."""
        return g - f.softmax(-1) * g.sum(-1, keepdim=True)

    def _probabilities(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the targets as probabilities."""
        return (y.exp() if self.log_target else y).to(f.dtype)

    def _target(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the targets in the form of `CrossEntropy`."""
        return _classes_second(self._probabilities(f, y))

    def _unnormalized(self, f: Tensor) -> Tensor:
        """Return at which positions the probabilities do not sum to one."""
        return f.detach().logsumexp(-1).abs() > _NORMALIZED

    def _out_of_range(self, y: Tensor) -> Tensor:
        """Return which targets are negative, or whose logarithms are positive, beyond round-off."""
        return y > _NORMALIZED if self.log_target else y < 0


def _classes_second(t: Tensor) -> Tensor:
    """Return predictions or targets `[N, ..., C]` as `[N, C, ...]`."""
    return t.movedim(-1, 1)
