r"""Heteroscedastic regression, `torch.nn.GaussianNLLLoss`: the model predicts mean and variance.

PyTorch's module takes three tensors. The model has one output, so the prediction is $[N, 2, \dots]$: first the mean
$\mu$, then the variance $v$ (clamped from below at `eps`, as in PyTorch). With the residual $r = \mu - y$, the
criterion of an entry is $\tfrac12 (\log v + r^2 / v)$, with

$$
\mathrm{H} = \begin{pmatrix} 1 / v & -r / v^2 \\ -r / v^2 & r^2 / v^3 - 1 / (2 v^2) \end{pmatrix},
\qquad
\mathrm{F} = \begin{pmatrix} 1 / v & 0 \\ 0 & 1 / (2 v^2) \end{pmatrix}.
$$

The Hessian is indefinite where $r^2 < v$, which is the typical case, and so is the GGN. Use the Fisher instead.
"""

from math import log, pi

from torch import Tensor, nn, no_grad, stack

from kfs.errors import LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.losses.interface import Loss, any_per_datum, check_floating, diagonal_factor, per_datum
from kfs.runtime import sync


class Gaussian(Loss):
    """`GaussianNLLLoss` for a prediction that stacks mean and variance along axis 1."""

    def __init__(self, module: nn.GaussianNLLLoss) -> None:
        super().__init__("GaussianNLLLoss", module.reduction)
        self.full, self.eps = module.full, module.eps

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless predictions are `[N, 2, ...]` for targets `[N, ...]`, with non-negative variances."""
        check_floating("The targets", y)
        if f.ndim < 2 or f.shape[1] != 2 or f.shape[:1] + f.shape[2:] != y.shape:
            raise ShapeError(
                f"GaussianNLLLoss: predictions have shape {list(f.shape)} and targets {list(y.shape)}.",
                "The model must return mean and variance stacked along axis 1: [N, 2, ...] for targets [N, ...].",
            )
        if not sync.is_asynchronous(f.device) and self.wrong(f, y).any():
            raise LossError(
                "GaussianNLLLoss was given a negative variance.",
                "Make the second output of the model positive, e.g. using softplus.",
            )

    def wrong(self, f: Tensor, y: Tensor) -> Tensor:
        """Return which examples have a negative variance."""
        return any_per_datum(f.select(1, 1) < 0)

    def count(self, y: Tensor) -> float:
        """Return the number of entries."""
        return y.numel()

    def examples(self, y: Tensor) -> float:
        """Return the number of examples."""
        return len(y)

    @property
    def hessian_needs_targets(self) -> bool:
        """True, since the Hessian depends on residuals."""
        return True

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the mean, since the Fisher matrix does not depend on targets."""
        mean = f.select(1, 0) if f.ndim > 1 else f
        self.check(f, mean)
        return mean

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over entries.

        These are the operations of PyTorch's function, without its check for negative variances, which synchronizes.
        """
        mean, variance = f.unbind(1)
        variance = variance.clone()
        with no_grad():
            variance.clamp_(min=self.eps)
        entries = 0.5 * (variance.log() + (mean - y) ** 2 / variance)
        return per_datum(entries + 0.5 * log(2 * pi) if self.full else entries)

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the criterion at the true mean and the same variance; it has no minimum over variances."""
        r, v = self._parts(f, y)
        return per_datum(0.5 * r**2 / v)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient with respect to mean and variance."""
        r, v = self._parts(f, y)
        return stack([r / v, 0.5 * (1 / v - (r / v) ** 2)], 1)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every entry with the Hessian above."""
        r, var = self._parts(f, y)
        axis = v.ndim - f.ndim + 1
        v0, v1 = v.unbind(axis)
        off, last = -r / var**2, r**2 / var**3 - 0.5 / var**2
        return stack([v0 / var + off * v1, off * v0 + last * v1], axis)

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Raise an error: an indefinite matrix has no symmetric factor."""
        raise LossError(
            "The Hessian of GaussianNLLLoss with respect to the variance is indefinite and has no symmetric factor.",
            "Use the Fisher (type-1, type-2), which is positive semi-definite.",
        )

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every entry with the Fisher matrix above."""
        return self._fisher_diagonal(f, y) * v

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the square root of the Fisher matrix above."""
        return diagonal_factor(self._fisher_diagonal(f, y).sqrt(), start, stop)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a target from the predicted distribution and return its gradient."""
        _, v = self._parts(f, y)
        noise = draws.normal(len(f), tuple(y.shape[1:]), f.device).to(f.dtype)
        return self.gradient(f, f.select(1, 0) + v.sqrt() * noise)

    def _fisher_diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        _, v = self._parts(f, y)
        return stack([1 / v, 0.5 / v**2], 1)

    def _parts(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual and clamped variance. As in PyTorch, derivatives ignore the clamp."""
        mean, variance = f.unbind(1)
        return mean - y, variance.clamp(min=self.eps)
