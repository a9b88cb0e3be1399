r"""What the rest of the library needs to know about a loss, for a whole batch at once.

A loss is $\mathcal{L} = R \sum_n c(f_n, y_n)$. A `Loss` describes its criterion $c$, by value and by derivatives
with respect to the prediction, and what its reduction factor $R$ counts. It has no opinion about networks.

Axes: predictions `f` are `[N, ...]`, targets `y` are `[N, ...]`, and columns `v` to multiply are `[..., N, ...]`,
any number of leading axes followed by those of `f`. Two matrices per example exist in prediction space:

- the **Hessian** of the criterion for the target at hand. It makes the GGN.
- the **Fisher** matrix: the covariance of the gradient if targets follow the model's likelihood. It makes the (type-I
  and type-II) Fisher. For many losses it equals the Hessian. Where it does not, or where there is no likelihood, a
  loss says so.

On an accelerator no method waits for the device, except those that say so. Values are therefore not looked at when a
method is called. There are three ways to refuse data:

| | looks at | waits | call it |
|---|---|---|---|
| `check` | shapes, dtypes and settings; on a CPU also values | never | for every batch |
| `wrong` | values | never | for every batch on an accelerator, and read the results together at the end |
| `check_now` | all of that | on an accelerator | for a single batch, and always before `criterion` of labels |

Once `wrong` has marked data, `check` of copies on the CPU raises the error with its cause. Other values that have no
result, such as negative curvatures, are errors on a CPU and NaN on an accelerator. Repeat the computation on the CPU
for the message. An index that is out of range would abort a process with CUDA, so methods make none of wrong labels;
except for `criterion`, which is PyTorch's.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kfs.errors import DtypeError, LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.runtime import sync

# Copies of settings on other devices: for each setting, by device, the version that was copied and the copy.
_COPIES = WeakTensorKeyDictionary()


class Loss(ABC):
    """One family of losses.

    Args:
        name: What the user calls it, for messages.
        reduction: `"mean"` or `"sum"`.
        scale: The loss is `scale` times the sum of the criterion (or its mean).

    Raises:
        LossError: If the reduction is another one.
    """

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
        """Return what it consists of, by name: tensors, numbers and texts, and of anything else what it is called."""
        plain = (Tensor, int, float, str, tuple, list, torch.dtype, type(None))
        return {"loss": type(self).__name__} | {
            name: v if isinstance(v, plain) else getattr(v, "__qualname__", type(v).__name__)
            for name, v in vars(self).items()
        }

    @abstractmethod
    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse predictions and targets that do not belong together, without waiting.

        Shapes, dtypes and settings are looked at on every device, values only where that costs nothing: see
        `kfs.runtime.sync.is_asynchronous`.
        """

    def wrong(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return which data have values that `check` refuses on a CPU, as booleans `[N]`, without waiting.

        Shapes and dtypes must have passed `check`. `None` means that no value is refused.
        """
        return None

    def check_now(self, f: Tensor, y: Tensor) -> None:
        """Refuse what `check` refuses, and values on every device; waits for an accelerator."""
        self.check(f, y)
        if not sync.is_asynchronous(f.device):
            return
        wrong = self.wrong(f, y)
        with sync.allow_sync():
            if wrong is not None and wrong.any():
                self.check(f.cpu(), y.cpu())

    @abstractmethod
    def count(self, y: Tensor) -> float | Tensor:
        """Return what a mean over these targets divides by; additive over batches.

        It is a number or, if it depends on values of targets on an accelerator, a tensor without axes there.
        """

    @abstractmethod
    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the criterion of every example, `[N]`, differentiable with respect to `f`."""

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Return how far the criterion of every example is above the smallest one for its target, `[N]`.

        By default, the smallest one is zero.
        """
        return self.criterion(f, y)

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the criterion's gradient with respect to `f`, shaped like it."""

    @abstractmethod
    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every example's Hessian with its part of `v`, `[..., *f.shape]`."""

    @abstractmethod
    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return columns `[K, *f.shape]` whose outer products sum up to every example's Hessian; or some of them."""

    def fisher_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every example's Fisher matrix with its part of `v`. By default, it equals the Hessian."""
        return self.hessian_product(f, y, v)

    def fisher_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return columns `[K, *f.shape]` whose outer products sum up to every example's Fisher; or some of them."""
        return self.hessian_factor(f, y, start, stop)

    @abstractmethod
    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Return a random vector per example, shaped like `f`, whose expected outer product is the Fisher matrix.

        It is the gradient for a label drawn from the likelihood. The true target matters only where it is weighted or
        missing: the weight belongs to the example, not to the label that was drawn.
        """

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the targets' log-probability with respect to `f`, without weights and smoothing.

        Raises:
            LossError: If the loss has no likelihood, or if targets are not labels where these are asked for.
        """
        return -self.gradient(f, y)

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `log p / (1 - p)`, where `p` is the probability of the label (Park et al., 2023).

        Raises:
            LossError: If targets are not labels.
        """
        raise LossError(
            f"{self.name} has no labels, so that there is no margin between them.",
            "Use another quantity: the loss, the log-probability, or a function of a prediction and a target.",
        )

    @property
    def class_axis(self) -> int | None:
        """The axis of predictions whose entries share one target, if targets may be ignored; `None` if all count."""
        return None

    def counted(self, y: Tensor) -> Tensor | None:
        """Return which predictions count, as booleans shaped like them, with length one along `class_axis`.

        `None` means that all do. Nothing waits for an accelerator.
        """
        return None

    def examples(self, y: Tensor) -> float | Tensor:
        """Return how many examples these targets are: what an average over examples divides by; see `count`."""
        return self.count(y)

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return targets that have the Fisher matrix of the true ones, where only the loss's gradient is at hand.

        Args:
            f: Predictions.
            g: Gradient of the loss with respect to them, up to a positive factor.

        Raises:
            LossError: If the Fisher matrix depends on targets in a way that the gradient does not show.
        """
        raise self.unknown_targets()

    def unknown_targets(self) -> LossError:
        """Return the error for curvature that depends on targets, where only the loss's gradient is at hand."""
        return LossError(
            f"The curvature of {self.name} depends on targets, and these are not known.",
            "Call targets(y) of the optimizer between the forward pass and backward(), or compute the loss with the "
            "module passed as loss=.",
        )

    @property
    def hessian_needs_targets(self) -> bool:
        """Whether the Hessian depends on targets, so that those of `stand_in` do not do for it."""
        return False

    @property
    def weighs_targets(self) -> bool:
        """Whether targets say how much an example counts. Then `stand_in` is right only if it finds the true ones."""
        return False

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return how far `g` is from a gradient of this loss, whatever the targets are, relative to its length."""
        return g.new_zeros(())

    def reduction_factor(self, count: float | Tensor) -> float:
        """Return `R`, given the count of all targets; waits if that is a tensor on an accelerator."""
        if self.reduction == "sum":
            return self.scale
        if isinstance(count, Tensor):
            (count,) = sync.numbers([count])
        return self.scale / count

    def no_likelihood(self, why: str) -> LossError:
        """Return the error for a question that only a likelihood answers."""
        return LossError(
            f"{self.name} has no Fisher matrix and no labels to draw: {why}.",
            "Use the GGN or the empirical Fisher, or state a likelihood: kfs.losses.Custom(..., likelihood=...).",
        )


class Elementwise(Loss):
    """A loss whose criterion is a sum over entries: targets are shaped like predictions and Hessians are diagonal."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse targets of another shape (PyTorch would broadcast them) and integers."""
        check_floating("The targets", y)
        if f.shape != y.shape:
            raise ShapeError(
                f"{self.name}: predictions have shape {list(f.shape)}, but targets have shape {list(y.shape)}.",
                "Give both the same shape; they are not broadcast.",
            )

    def count(self, y: Tensor) -> float:
        """Return the number of entries."""
        return y.numel()

    def examples(self, y: Tensor) -> float:
        """Return the number of examples."""
        return len(y)

    @abstractmethod
    def second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the second derivative of every entry's criterion, shaped like `f`."""

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply with a diagonal matrix."""
        return self.second_derivative(f, y) * v

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the square root of a diagonal matrix."""
        return diagonal_factor(root(self.second_derivative(f, y)), start, stop)


def per_datum(t: Tensor) -> Tensor:
    """Sum all entries of each example: `[N, ...]` to `[N]`."""
    return t.flatten(1).sum(1) if t.ndim > 1 else t


def any_per_datum(t: Tensor) -> Tensor:
    """Tell for each example whether any of its entries is true: `[N, ...]` to `[N]`."""
    return t.flatten(1).any(1) if t.ndim > 1 else t


def placed(setting: Tensor, device: torch.device) -> Tensor:
    """Return a setting on a device. An accelerator is sent one copy, not one per batch: the host would wait each time.

    A recording of the device's work must not contain the first call.
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
    """Return the square root of curvatures. If there is none, raise; on an accelerator, return NaN there."""
    if not sync.is_asynchronous(curvature.device) and (curvature < 0).any():
        raise LossError(
            "A target gives the criterion a negative curvature, which has no real factor.",
            "Use targets and weights in the loss's range (probabilities from 0 to 1, counts from 0).",
        )
    return curvature.sqrt()


def diagonal_factor(entries: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return columns `[K, N, ...]`, one per entry of an example: `entries` `[N, ...]` there, else zero; or some."""
    flat = entries.flatten(1) if entries.ndim > 1 else entries.unsqueeze(1)
    index = torch.arange(flat.shape[1], device=entries.device)[start:stop]
    columns = flat.new_zeros(len(index), *flat.shape)
    columns[torch.arange(len(index), device=entries.device), :, index] = flat[:, index].T
    return columns.reshape(-1, *entries.shape)


def check_floating(name: str, t: Tensor) -> None:
    """Refuse anything but real floating-point tensors."""
    if not t.is_floating_point():
        raise DtypeError(
            f"{name} have dtype {t.dtype}, expected real floating point.",
            "Convert them, e.g. with .to(torch.float32).",
        )
