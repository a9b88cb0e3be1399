r"""The interface of losses, vectorized over a batch.

A loss is $\mathcal{L} = R \sum_n c(f_n, y_n)$. A `Loss` describes its criterion $c$, by value and by derivatives
with respect to the prediction, and the count that its reduction factor $R$ depends on. It does not depend on the model.

Axes: predictions `f` are `[N, ...]`, targets `y` are `[N, ...]`, and columns `v` to multiply are `[..., N, ...]`,
any number of leading axes followed by the axes of `f`. Each example has two matrices in prediction space:

- the **Hessian** of the criterion for the given target. It defines the GGN.
- the **Fisher** matrix: the covariance of the gradient if targets follow the model's likelihood. It defines the (type-I
  and type-II) Fisher. For many losses, it equals the Hessian. A loss overrides the methods for the Fisher matrix if it
  differs, or raises an error if there is no likelihood.

On an accelerator, methods do not synchronize with the device unless their documentation says so, so they do not check
values. There are three ways to check data:

| | checks | synchronizes | call it |
|---|---|---|---|
| `check` | shapes, dtypes and settings; on a CPU also values | never | for every batch |
| `wrong` | values | never | for every batch on an accelerator; read the results together at the end |
| `check_now` | all of the above | on an accelerator | for a single batch, and always before `criterion` of labels |

If `wrong` has marked examples, `check` of copies on the CPU raises the error with its cause. Other invalid values, such
as negative curvatures, raise errors on a CPU and become NaN on an accelerator. To see the error message, repeat the
computation on the CPU. With CUDA, an index out of range would abort the process, so no method uses invalid labels as
indices, except for `criterion`, which calls PyTorch's function.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kfs.errors import DtypeError, LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.runtime import sync

# Cached copies of settings on other devices: for each setting and device, the version that was copied, and the copy.
_COPIES = WeakTensorKeyDictionary()


class Loss(ABC):
    """Base class of the description of a loss.

    Args:
        name: Name of the loss for messages.
        reduction: `"mean"` or `"sum"`.
        scale: The loss is `scale` times the sum (or mean) of the criterion.

    Attributes:
        output: The output of the model that is the prediction, if it has several: a key, an attribute, or an index;
            see `describe`.

    Raises:
        LossError: If the reduction is neither `"mean"` nor `"sum"`.
    """

    output: str | int | None = None

    def __init__(self, name: str, reduction: str, scale: float = 1.0) -> None:
        if reduction not in {"mean", "sum"}:
            raise LossError(
                f"{name} has reduction={reduction!r}, so it is not one number.",
                "Choose reduction='mean' or reduction='sum'.",
            )
        self.name = name
        self.reduction = reduction
        self.scale = scale

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, `R` times the sum of the criterion, after `check_now`."""
        self.check_now(f, y)
        count, total = self.count(y), self.criterion(f, y).sum()
        if isinstance(count, Tensor) and self.reduction == "mean":
            return (self.scale / count.double() * total).to(total.dtype)
        return self.reduction_factor(count) * total

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the loss by name; functions and other objects are represented by their names."""
        plain = (Tensor, int, float, str, tuple, list, torch.dtype, type(None))
        return {"loss": type(self).__name__} | {
            name: v if isinstance(v, plain) else getattr(v, "__qualname__", type(v).__name__)
            for name, v in vars(self).items()
        }

    @abstractmethod
    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error if predictions and targets are inconsistent, without synchronization.

        Shapes, dtypes and settings are checked on every device. Values are checked only on devices that need no
        synchronization: see `kfs.runtime.sync.is_asynchronous`.
        """

    def check_inputs(self, x: Any, y: Tensor) -> None:  # noqa: B027 (most losses have nothing to check)
        """Raise an error if targets contradict the inputs of the first batch. This may synchronize."""

    def wrong(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return booleans `[N]`: which examples have invalid values, without synchronization.

        Invalid values are those for which `check` raises an error on a CPU. Shapes and dtypes must have passed `check`.
        `None` means that all values are valid.
        """
        return None

    def check_now(self, f: Tensor, y: Tensor) -> None:
        """Check shapes, dtypes, settings and values on every device. This synchronizes with an accelerator."""
        self.check(f, y)
        if not sync.is_asynchronous(f.device):
            return
        wrong = self.wrong(f, y)
        with sync.allow_sync():
            if wrong is not None and wrong.any():
                self.check(f.cpu(), y.cpu())

    @abstractmethod
    def count(self, y: Tensor) -> float | Tensor:
        """Return the divisor of a mean over these targets. It is additive over batches.

        It is a number, or a zero-dimensional tensor if it depends on values of targets on an accelerator.
        """

    @abstractmethod
    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the criterion of every example, `[N]`, differentiable with respect to `f`."""

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the criterion of every example minus its minimum over predictions for the same target, `[N]`.

        By default, the minimum is zero.
        """
        return self.criterion(f, y)

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the criterion with respect to `f`, with the shape of `f`."""

    @abstractmethod
    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply the Hessian of every example with its part of `v`, `[..., *f.shape]`."""

    @abstractmethod
    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return columns `[K, *f.shape]` whose outer products sum to the Hessian of every example.

        `start` and `stop` select a half-open range of the columns.
        """

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply the Fisher matrix of every example with its part of `v`. By default, it equals the Hessian."""
        return self.hessian_product(f, y, v)

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return columns `[K, *f.shape]` whose outer products sum to the Fisher matrix of every example.

        `start` and `stop` select a half-open range of the columns.
        """
        return self.hessian_factor(f, y, start, stop)

    @abstractmethod
    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Return a random vector per example, shaped like `f`, whose expected outer product is the Fisher matrix.

        It is the gradient for a label drawn from the likelihood. The true target matters only if it is weighted or
        missing: the weight of the true target is used, not the weight of the drawn label.
        """

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the targets' log-probability with respect to `f`, without weights and smoothing.

        Raises:
            LossError: If the loss has no likelihood, or if it requires labels and the targets are not labels.
        """
        return -self.gradient(f, y)

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `log p / (1 - p)`, where `p` is the probability of the label (Park et al., 2023).

        Raises:
            LossError: If targets are not labels.
        """
        raise LossError(
            f"{self.name} has no class labels, so the margin is not defined.",
            "Use another quantity: the loss, the log-probability, or a function of a prediction and a target.",
        )

    @property
    def class_axis(self) -> int | None:
        """Axis of predictions whose entries share one target, if targets may be ignored; otherwise `None`."""
        return None

    def counted(self, y: Tensor) -> Tensor | None:
        """Return booleans: which predictions count, with the shape of predictions and length one along `class_axis`.

        `None` means that all predictions count. This does not synchronize with an accelerator.
        """
        return None

    def examples(self, y: Tensor) -> float | Tensor:
        """Return the divisor of an average over the examples of these targets; see `count`."""
        return self.count(y)

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return targets with the same Fisher matrix as the true targets, given only the gradient of the loss.

        Args:
            f: Predictions.
            g: Gradient of the loss with respect to predictions, up to a positive factor.

        Raises:
            LossError: If the Fisher matrix depends on targets and they cannot be recovered from the gradient.
        """
        raise self.unknown_targets()

    def unknown_targets(self) -> LossError:
        """Return the error for curvature that depends on targets if only the gradient of the loss is known."""
        return LossError(
            f"The curvature of {self.name} depends on targets, which are unknown.",
            "Call targets(y) of the optimizer between the forward pass and backward(), or compute the loss with the "
            "module passed as loss=.",
        )

    @property
    def hessian_needs_targets(self) -> bool:
        """Whether the Hessian depends on targets, so that the targets of `stand_in` cannot be used for it."""
        return False

    @property
    def weighs_targets(self) -> bool:
        """Whether the weight of an example depends on its target, so that `stand_in` must recover the true target."""
        return False

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the relative distance of `g` from all possible gradients of this loss; 0 if it is not computed."""
        return g.new_zeros(())

    def reduction_factor(self, count: float | Tensor) -> float:
        """Return `R`, given the count of all targets. This synchronizes if the count is a tensor on an accelerator."""
        if self.reduction == "sum":
            return self.scale
        if isinstance(count, Tensor):
            (count,) = sync.numbers([count])
        return self.scale / count

    def no_likelihood(self, why: str) -> LossError:
        """Return the error for a computation that requires a likelihood."""
        return LossError(
            f"{self.name} has no Fisher matrix and no labels to draw: {why}.",
            "Use the GGN or the empirical Fisher, or pass a likelihood: kfs.losses.Custom(..., likelihood=...).",
        )


class Elementwise(Loss):
    """A loss whose criterion is a sum over entries: targets are shaped like predictions and Hessians are diagonal."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error if targets are integers or their shape differs from predictions (PyTorch would broadcast)."""
        check_floating("The targets", y)
        if f.shape != y.shape:
            raise ShapeError(
                f"{self.name}: predictions have shape {list(f.shape)}, but targets have shape {list(y.shape)}.",
                "Use the same shape for both; they are not broadcast.",
            )

    def count(self, y: Tensor) -> float:
        """Return the number of entries."""
        return y.numel()

    def examples(self, y: Tensor) -> float:
        """Return the number of examples."""
        return len(y)

    @abstractmethod
    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the second derivative of the criterion with respect to every entry, shaped like `f`."""

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply `v` with the diagonal Hessian."""
        return self.second_derivative(f, y) * v

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the square root of the diagonal Hessian as columns."""
        return diagonal_factor(root(self.second_derivative(f, y)), start, stop)


def per_datum(t: Tensor) -> Tensor:
    """Return the sum over all entries of each example: `[N, ...]` to `[N]`."""
    return t.flatten(1).sum(1) if t.ndim > 1 else t


def any_per_datum(t: Tensor) -> Tensor:
    """Return for each example whether any of its entries is true: `[N, ...]` to `[N]`."""
    return t.flatten(1).any(1) if t.ndim > 1 else t


def placed(setting: Tensor, device: torch.device) -> Tensor:
    """Return a setting on a device, and cache the copy, so that the host does not synchronize for every batch.

    The first call must not be part of a CUDA graph capture.
    """
    if setting.device == device:
        return setting
    copies: dict[torch.device, tuple[int, Tensor]] = _COPIES.setdefault(setting, {})
    version = 0 if setting.is_inference() else setting._version
    if device not in copies or copies[device][0] != version:
        copy = setting.to(device, non_blocking=sync.is_asynchronous(device))
        copies[device] = version, sync.unwrapped(copy)
    return copies[device][1]


def root(curvature: Tensor) -> Tensor:
    """Return the square root of curvatures. Negative values raise an error, or become NaN on an accelerator."""
    if not sync.is_asynchronous(curvature.device) and (curvature < 0).any():
        raise LossError(
            "A target gives the criterion a negative curvature, which has no real factor.",
            "Use targets and weights in the loss's range (probabilities from 0 to 1, counts from 0).",
        )
    return curvature.sqrt()


def diagonal_factor(entries: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return columns `[K, N, ...]`, each with one entry of every example of `entries`, `[N, ...]`, and zeros elsewhere.

    `start` and `stop` select a half-open range of the columns.
    """
    flat = entries.flatten(1) if entries.ndim > 1 else entries.unsqueeze(1)
    index = torch.arange(flat.shape[1], device=entries.device)[start:stop]
    columns = flat.new_zeros(len(index), *flat.shape)
    columns[torch.arange(len(index), device=entries.device), :, index] = flat[:, index].T
    return columns.reshape(-1, *entries.shape)


def check_floating(name: str, t: Tensor) -> None:
    """Raise an error unless a tensor has a real floating-point dtype."""
    if not t.is_floating_point():
        raise DtypeError(
            f"{name} have dtype {t.dtype}, expected a real floating-point dtype.",
            "Convert them, e.g. with .to(torch.float32).",
        )
