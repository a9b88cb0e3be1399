r"""Softmax cross-entropy: `torch.nn.CrossEntropyLoss`, and a version for language models.

A target puts a mass $p_k$ on class $k$, which counts $w_k$: a one at the label, or probabilities, smoothed if asked
for, and zero if the label is ignored. With $\sigma = \mathrm{softmax}(f)$ and $m = \sum_k w_k p_k$ a position's
criterion is $-\sum_k w_k p_k \log \sigma_k$, with gradient $m \sigma - w p$ and Hessian
$m\, (\mathrm{diag}(\sigma) - \sigma \sigma^\top)$.

The likelihood is categorical, raised to the power $m$ where a position counts more or less than one. So the Fisher
equals the Hessian for every setting, and a draw is $\sqrt{m}\, (\sigma - \mathrm{onehot}(\tilde{y}))$ with
$\tilde{y} \sim \sigma$.
"""

import torch
from torch import Tensor, nn

from kfs.errors import DataError, DtypeError, LossError, ShapeError
from kfs.losses.counter import Draws
from kfs.losses.interface import Loss, per_datum
from kfs.losses.interface import root as root_of


class CrossEntropy(Loss):
    """`CrossEntropyLoss`: logits `[N, C, ...]`, labels `[N, ...]` (int64) or probabilities `[N, C, ...]`."""

    def __init__(self, module: nn.CrossEntropyLoss) -> None:
        """Take all settings over."""
        super().__init__("CrossEntropyLoss", module.reduction)
        self.weight, self.ignore_index = module.weight, module.ignore_index
        self.label_smoothing = module.label_smoothing

    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse logits without class axis, and targets that are neither labels nor probabilities for them."""
        if f.ndim < 2:
            raise ShapeError(
                f"CrossEntropyLoss: predictions have shape {list(f.shape)}, which has no class axis.",
                "Let the model return logits [N, C, ...]; for classes along the last axis see TokenCrossEntropy.",
            )
        labels = not y.is_floating_point()
        expected = f.shape[:1] + f.shape[2:] if labels else f.shape
        if y.shape != expected:
            raise ShapeError(
                f"CrossEntropyLoss: predictions have shape {list(f.shape)}, so targets have shape {list(expected)}, "
                f"but they have shape {list(y.shape)} (dtype {y.dtype}).",
                "Pass labels as int64 and probabilities shaped like the logits. If classes are along the last axis, "
                "use kfs.losses.TokenCrossEntropy.",
            )
        if self.weight is not None and self.weight.shape != f.shape[1:2]:
            raise ShapeError(
                f"CrossEntropyLoss: weight has shape {list(self.weight.shape)}, but there are {f.shape[1]} classes.",
                "Give one weight per class.",
            )
        if labels:
            self._counted(y, f.shape[1])
        if not labels and self.ignore_index >= 0:
            raise LossError(
                f"Targets are probabilities, but ignore_index={self.ignore_index}, which is for labels.",
                "Leave ignore_index at its default of -100.",
            )

    def count(self, y: Tensor) -> float:
        """Return the number of labels, weighted if they are, without the ignored ones."""
        if y.is_floating_point():
            return y.numel() / max(y.shape[1], 1)
        if self.weight is None:
            return int((y != self.ignore_index).sum())
        return float(self.weight[self._counted(y, len(self.weight))].sum())

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over positions."""
        return per_datum(
            nn.functional.cross_entropy(
                f,
                y.to(f.dtype) if y.is_floating_point() else y,
                weight=None if self.weight is None else self.weight.to(f),
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                reduction="none",
            )
        )

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass times the softmax, minus the target's weighted mass."""
        target = self._target(f, y)
        return target.sum(1, keepdim=True) * f.softmax(1) - target

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply with a diagonal minus rank one matrix per position."""
        axis = v.ndim - f.ndim + 1
        sigma, mass = f.softmax(1), self._target(f, y).sum(1, keepdim=True)
        sigma_v = sigma * v
        return mass * (sigma_v - sigma * sigma_v.sum(axis, keepdim=True))

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column per class and position: `sqrt(mass) (sqrt(sigma_k) e_k - sigma sqrt(sigma_k))` there."""
        num_data, classes = f.shape[:2]
        sigma = f.softmax(1).reshape(num_data, classes, -1)
        mass = self._target(f, y).sum(1).reshape(num_data, -1)
        index = torch.arange(classes * sigma.shape[2], device=f.device)[start:stop]
        columns, k, p = torch.arange(len(index), device=f.device), index // sigma.shape[2], index % sigma.shape[2]
        root = sigma[:, k, p].sqrt()  # [N, columns]
        values = -sigma[:, :, p] * root.unsqueeze(1)  # [N, C, columns]
        values[:, k, columns] += root
        values = root_of(mass[:, p]).unsqueeze(1) * values
        result = f.new_zeros(len(index), *sigma.shape)
        result[columns, :, :, p] = values.permute(2, 0, 1)
        return result.reshape(-1, *f.shape)

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the labels: the gradient is negative there alone, and zero at positions that do not count."""
        return torch.where((g == 0).all(1), self.ignore_index, g.argmin(1))

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the length of the gradient's sums over classes: probabilities sum to one."""
        sums: Tensor = g.sum(1).norm() / g.norm().clamp(min=torch.finfo(g.dtype).tiny)
        return sums

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label per position."""
        sigma = f.softmax(1)
        u = draws.uniform(len(f), (1, *f.shape[2:]), f.device)
        cumulative = sigma.double().cumsum(1)
        label = (cumulative < u * cumulative[:, -1:]).sum(1, keepdim=True)
        return self._root_of_mass(f, y) * (sigma - torch.zeros_like(f).scatter(1, label, 1.0))

    def _root_of_mass(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the square root of the mass of every position, `[N, 1, ...]`."""
        if self.weight is None and not y.is_floating_point():  # it is one, or zero where the label is ignored
            return (y != self.ignore_index).unsqueeze(1).to(f.dtype)
        return root_of(self._target(f, y).sum(1, keepdim=True))

    def _counted(self, y: Tensor, classes: int) -> Tensor:
        """Return the labels that are not ignored, and refuse those that are none."""
        if y.dtype != torch.int64:
            raise DtypeError(f"Class labels have dtype {y.dtype}, expected torch.int64.", "Convert them: y.long().")
        counted = y[y != self.ignore_index]
        if counted.numel() and not 0 <= counted.min() <= counted.max() < classes:
            raise DataError(
                f"Labels go from {counted.min().item()} to {counted.max().item()}, but there are {classes} classes.",
                f"Use labels from 0 to {classes - 1}, or ignore_index ({self.ignore_index}) for missing ones.",
            )
        return counted

    def _target(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the weighted mass that the targets put on the classes, shaped like `f`."""
        if y.is_floating_point():
            counts, p = None, y.to(f.dtype)
        else:
            counted = (y != self.ignore_index).unsqueeze(1)
            labels = torch.where(counted, y.unsqueeze(1), 0)
            counts, p = counted.to(f.dtype), torch.zeros_like(f).scatter(1, labels, 1.0)
        if self.label_smoothing:
            p = (1 - self.label_smoothing) * p + self.label_smoothing / f.shape[1]
        if self.weight is not None:
            p = self.weight.to(f).reshape(-1, *[1] * (f.ndim - 2)) * p
        return p if counts is None else counts * p


class TokenCrossEntropy(Loss):
    """Cross-entropy for logits `[N, S, C]` and labels `[N, S]`, as Hugging Face's language models use it.

    Args:
        shift: Whether position `s` predicts label `s + 1` (causal language models) or label `s` (masked ones).
        ignore_index: The label of positions that do not count.
        label_smoothing: As in `CrossEntropyLoss`.
        weight: Class weights, as in `CrossEntropyLoss`.
        reduction: `"mean"` over all positions that count, or `"sum"`.

    Example:
        >>> loss = TokenCrossEntropy(shift=True)
        >>> f, y = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
        >>> expected = nn.functional.cross_entropy(f[:, :-1].reshape(-1, 7), y[:, 1:].reshape(-1), reduction="sum")
        >>> bool(torch.isclose(loss.criterion(f, y).sum(), expected))
        True
    """

    def __init__(
        self,
        shift: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        """Build the loss with the class axis in PyTorch's place."""
        super().__init__("TokenCrossEntropy", reduction)
        module = nn.CrossEntropyLoss(
            weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        self.base, self.shift = CrossEntropy(module), shift

    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse logits that are not `[N, S, C]`, and labels that are not `[N, S]`."""
        if f.ndim != 3 or y.shape != f.shape[:2]:
            raise ShapeError(
                f"TokenCrossEntropy: predictions have shape {list(f.shape)} and labels {list(y.shape)}.",
                "Pass logits [N, S, C] and labels [N, S].",
            )
        self.base.check(self._logits(f), self._labels(y))

    def count(self, y: Tensor) -> float:
        """Return the number of labels that count."""
        return self.base.count(self._labels(y))

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over positions."""
        return self.base.criterion(self._logits(f), self._labels(y))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient, zero where a position predicts nothing."""
        return self._back(self.base.gradient(self._logits(f), self._labels(y)))

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply position by position."""
        return self._back(self.base.hessian_product(self._logits(f), self._labels(y), self._logits(v)))

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column per class and predicting position."""
        return self._back(self.base.hessian_factor(self._logits(f), self._labels(y), start, stop))

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the labels, as `CrossEntropyLoss` does."""
        labels = self.base.stand_in(self._logits(f), self._logits(g))
        return nn.functional.pad(labels, (1, 0), value=self.base.ignore_index) if self.shift else labels

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return that of `CrossEntropyLoss`."""
        return self.base.departure(self._logits(f), self._logits(g))

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label per predicting position."""
        return self._back(self.base.sampled_gradient(self._logits(f), self._labels(y), draws))

    def _logits(self, f: Tensor) -> Tensor:
        """Return `[..., N, C, S]`, without the last position if it predicts nothing."""
        return (f[..., :-1, :] if self.shift else f).transpose(-1, -2)

    def _labels(self, y: Tensor) -> Tensor:
        return y[:, 1:] if self.shift else y

    def _back(self, g: Tensor) -> Tensor:
        """Undo `_logits` for derivatives: `[..., N, S, C]`."""
        g = g.transpose(-1, -2)
        return nn.functional.pad(g, (0, 0, 0, 1)) if self.shift else g
