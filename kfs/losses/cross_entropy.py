r"""Softmax cross-entropy: `torch.nn.CrossEntropyLoss`, and a version for language models.

A target assigns the mass $p_k$ to class $k$, which has weight $w_k$. The mass is one at the label, or a probability. It
may be smoothed, and is zero if the label is ignored. With $\sigma = \mathrm{softmax}(f)$ and $m = \sum_k w_k p_k$, the
criterion of a position is $-\sum_k w_k p_k \log \sigma_k$, with gradient $m \sigma - w p$ and Hessian
$m\, (\mathrm{diag}(\sigma) - \sigma \sigma^\top)$.

The likelihood is categorical, raised to the power $m$ if a position has another weight than one. The Fisher therefore
equals the Hessian for all settings, and a sampled gradient is $\sqrt{m}\, (\sigma - \mathrm{onehot}(\tilde{y}))$ with
$\tilde{y} \sim \sigma$.

Probabilities, `[N, C, ...]`, and draws are computed in place, since logits of language models take much memory. Drawing
labels requires cumulative sums in float64, which are computed for a limited number of positions at a time. Apart from
the result, no tensor as large as the logits is allocated.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from kfs.errors import DataError, DtypeError, LossError, ShapeError
from kfs.losses.draws import Draws
from kfs.losses.interface import Loss, any_per_datum, per_datum, placed
from kfs.losses.interface import root as root_of
from kfs.runtime import sync
from kfs.runtime.precision import at_least_float32

# Probabilities that differ from one by less than this many units of round-off are considered certain.
_CERTAIN = 1e3
# A label smoothing up to this value is found at positions where no probability is larger than this.
_UNSURE = 0.5
_SMALLEST_SMOOTHING = 0.01
_ENOUGH_LABELS = 8  # fewer may be equal to tokens by chance
# A gradient is explained up to this relative distance. Half precision rounds by less.
_EXPLAINED = 0.02
# Approximate memory limit for cumulative sums.
_TEMPORARY_BYTES = 2**26
# With more classes than this, a draw takes two steps: first a block of `_BLOCK` classes, then a class of the block.
_MANY_CLASSES = 4096
_BLOCK = 256


class CrossEntropy(Loss):
    """`CrossEntropyLoss`: logits `[N, C, ...]`, labels `[N, ...]` (int64) or probabilities `[N, C, ...]`."""

    def __init__(self, module: nn.CrossEntropyLoss) -> None:
        super().__init__("CrossEntropyLoss", module.reduction)
        self.weight, self.ignore_index = module.weight, module.ignore_index
        self.label_smoothing = module.label_smoothing

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error if logits have no class axis, or if targets are not labels or probabilities for them."""
        if f.ndim < 2:
            raise ShapeError(
                f"CrossEntropyLoss: predictions have shape {list(f.shape)}, which has no class axis.",
                "The model must return logits [N, C, ...]; for classes along the last axis, see TokenCrossEntropy.",
            )
        labels = not y.is_floating_point()
        expected = f.shape[:1] + f.shape[2:] if labels else f.shape
        if y.shape != expected:
            raise ShapeError(
                f"CrossEntropyLoss: predictions have shape {list(f.shape)}, so targets must have shape "
                f"{list(expected)}, but they have shape {list(y.shape)} (dtype {y.dtype}).",
                "Pass labels as int64 and probabilities shaped like the logits. If classes are along the last axis, "
                "use kfs.losses.TokenCrossEntropy.",
            )
        if self.weight is not None and self.weight.shape != f.shape[1:2]:
            raise ShapeError(
                f"CrossEntropyLoss: weight has shape {list(self.weight.shape)}, but there are {f.shape[1]} classes.",
                "Pass one weight per class.",
            )
        if labels:
            self._check_labels(y, f.shape[1])
        if not labels and self.ignore_index >= 0:
            raise LossError(
                f"Targets are probabilities, but ignore_index={self.ignore_index}, which is for labels.",
                "Leave ignore_index at its default of -100.",
            )

    def wrong(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return which examples have a label that is neither a class nor ignored."""
        return None if y.is_floating_point() else any_per_datum(self._wrong_labels(y, f.shape[1]))

    def count(self, y: Tensor) -> float | Tensor:
        """Return the number of labels that are not ignored, or the sum of their weights."""
        if y.is_floating_point():
            if y.ndim < 2:
                raise LossError(
                    f"Targets are {y.dtype} of shape {list(y.shape)}. Floating-point targets are probabilities and "
                    "need a class axis.",
                    "Convert labels to integers: y.long().",
                )
            return y.numel() / max(y.shape[1], 1)
        if self.weight is None:
            count = self._counts(y).sum()
        else:
            self._check_labels(y, len(self.weight))
            count = self._weights(self.weight, y, torch.float64).sum()
        return count if sync.is_asynchronous(y.device) else count.item()

    @property
    def class_axis(self) -> int:
        """The class axis, 1."""
        return 1

    def counted(self, y: Tensor) -> Tensor:
        """Return booleans `[N, 1, ...]`: which positions have a non-zero weighted mass."""
        if y.is_floating_point():
            weights = 1.0 if self.weight is None else placed(self.weight, y.device).reshape(-1, *[1] * (y.ndim - 2))
            return (weights * y != 0).any(1, keepdim=True) | bool(self.label_smoothing)
        # Label smoothing assigns mass to all classes, so a label of a class with weight zero counts, too.
        if self.weight is None or self.label_smoothing:
            return self._counts(y).unsqueeze(1)
        return (self._weights(self.weight, y, self.weight.dtype) != 0).unsqueeze(1)

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over positions."""
        return per_datum(
            nn.functional.cross_entropy(
                f,
                y.to(f.dtype) if y.is_floating_point() else y,
                weight=None if self.weight is None else placed(self.weight, f.device).to(f.dtype),
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                reduction="none",
            )
        )

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Subtract the smallest criterion for the targets, their entropy; it is zero for labels without smoothing."""
        if not (y.is_floating_point() or self.label_smoothing):
            return self.criterion(f, y)
        target = self._target(f, y)
        mass = target.sum(1)
        return self.criterion(f, y) - per_datum(torch.xlogy(mass, mass) - torch.xlogy(target, target).sum(1))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass times the softmax, minus the target's weighted mass."""
        if self.in_place(f, y):
            return self.gradient_(softmax(f), y)
        target = self._target(f, y)
        return target.sum(1, keepdim=True) * softmax(f) - target

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the one-hot label minus the softmax, at positions that count."""
        return self._labels_only(f, y) * (self._at_label(f, y) - softmax(f))

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the one-hot label minus the softmax over all other classes, at positions that count."""
        counts = self._labels_only(f, y)
        if f.shape[1] < 2:
            raise LossError(
                f"{self.name}: there is only one class, so the margin is not defined.", "Use at least two classes."
            )
        at_label = self._at_label(f, y)
        others = softmax(f.masked_fill(at_label > 0, -torch.inf))
        return counts * (at_label - others)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every position with the mass times `diag(sigma) - sigma sigma^T`."""
        return covariance_product(softmax(f), v, 1 - f.ndim).mul_(self.mass(f, y))

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column per class and position, `sqrt(mass) (sqrt(sigma_k) e_k - sigma sqrt(sigma_k))`."""
        num_data, classes = f.shape[:2]
        sigma = f.softmax(1).reshape(num_data, classes, -1)
        root_of_mass = self._root_of_mass(f, y).reshape(num_data, 1, -1)
        index = torch.arange(classes * sigma.shape[2], device=f.device)[start:stop]
        # Class `k` and position `p` of each column.
        columns, k, p = torch.arange(len(index), device=f.device), index // sigma.shape[2], index % sigma.shape[2]
        root = sigma[:, k, p].sqrt()  # [N, columns]
        values = -sigma[:, :, p] * root.unsqueeze(1)  # [N, C, columns]
        values[:, k, columns] += root
        values *= root_of_mass[:, :, p]
        result = f.new_zeros(len(index), *sigma.shape)
        result[columns, :, :, p] = values.permute(2, 0, 1)
        return result.reshape(-1, *f.shape)

    @property
    def weighs_targets(self) -> bool:
        """Whether classes have weights."""
        return self.weight is not None

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the labels: the gradient is negative only at the label, and zero at positions that do not count.

        The gradient is also zero if a prediction is certain and correct, since all other probabilities are zero.
        """
        certain = (softmax(f.detach()) > 0).sum(1) == 1
        zero = (g == 0).all(1)
        label = torch.where(zero, f.argmax(1), g.argmin(1))
        return torch.where(zero & ~certain, self.ignore_index, label)

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the norm of the gradient's sums over classes, relative to the gradient: correct sums are zero.

        If a prediction is nearly certain, the gradient for the correct label is round-off. Such positions are ignored.
        """
        precision = torch.finfo(g.dtype)
        doubt = 1 - softmax(f.detach()).amax(1, keepdim=True)
        known = torch.where(doubt > _CERTAIN * precision.eps, g, 0.0)
        sums: Tensor = known.sum(1).norm() / known.norm().clamp(min=precision.tiny)
        return sums

    def smoothing_in(self, f: Tensor, g: Tensor) -> Tensor:
        r"""Return the label smoothing that explains a gradient; zero if none does, or if classes have weights.

        With $C$ classes, smoothing $\varepsilon$ and scale $R$, the gradient at all classes but the label is
        $R\, (\sigma_k - \varepsilon / C)$: a line, whose slope and intercept are fitted. Its smallest entry is at the
        label, unless the prediction is nearly certain; such positions are ignored.
        """
        if self.weight is not None:
            return g.new_zeros(())
        sigma, g = softmax(f.detach()), g.to(f.dtype)
        classes = f.shape[1]
        used = (sigma.amax(1, keepdim=True) <= _UNSURE) & (g != 0).any(1, keepdim=True)
        label = torch.zeros_like(g).scatter_(1, g.argmin(1, keepdim=True), 1.0)

        # Fit the line.
        weight = used * (1 - label)
        total = weight.sum(dtype=torch.float64).clamp(min=1)
        mean_sigma, mean_g = ((weight * t).sum(dtype=torch.float64) / total for t in (sigma, g))
        from_mean = weight * (sigma - mean_sigma)
        slope = (from_mean * g).sum(dtype=torch.float64) / (from_mean * sigma).sum(dtype=torch.float64)
        smoothing = classes * (mean_sigma - mean_g / slope)

        # Compare the gradient for this smoothing.
        target = (1 - smoothing) * label + smoothing / classes
        distance = (used * (g - slope * (sigma - target))).norm() / (used * g).norm()
        explains = (distance < _EXPLAINED) & (smoothing > _SMALLEST_SMOOTHING) & (smoothing < _UNSURE) & (slope > 0)
        return torch.where(explains, smoothing, 0.0)

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label for every position and return its gradient, scaled by the square root of the mass."""
        return self.sampled_gradient_(softmax(f.detach()), y, draws)

    def in_place(self, f: Tensor, y: Tensor) -> bool:
        """Return whether `gradient_` can be used: targets are plain labels, and `f` does not require gradients."""
        return self.weight is None and not (y.is_floating_point() or self.label_smoothing or f.requires_grad)

    def gradient_(self, sigma: Tensor, y: Tensor) -> Tensor:
        """Convert probabilities into the gradient for plain labels, in place."""
        labels = self._classes(y, sigma.shape[1]).unsqueeze(1)
        return subtract_one_(sigma, labels).mul_(self._counts(y).unsqueeze(1))

    def sampled_gradient_(self, sigma: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Convert probabilities into the gradient for labels that are drawn from them, in place."""
        u = draws.uniform(len(sigma), (1, *sigma.shape[2:]), sigma.device)
        return subtract_draws_(sigma, u).mul_(self._root_of_mass(sigma, y))

    def mass(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mass of every position, `[N, 1, ...]`; it has dtype bool if all masses are zero or one."""
        if y.is_floating_point() or (self.weight is not None and self.label_smoothing):
            return self._target(f, y).sum(1, keepdim=True)
        # Without weights, label smoothing only moves mass between classes.
        return (self._counts(y) if self.weight is None else self._weights(self.weight, y, f.dtype)).unsqueeze(1)

    def _root_of_mass(self, f: Tensor, y: Tensor) -> Tensor:
        mass = self.mass(f, y)
        return mass if mass.dtype == torch.bool else root_of(mass)

    def _counts(self, y: Tensor) -> Tensor:
        """Return which labels are not ignored."""
        return y != self.ignore_index

    def _classes(self, y: Tensor, classes: int) -> Tensor:
        """Return labels that are valid indices; ignored or invalid labels are clamped to some class."""
        return y.clamp(0, classes - 1)

    def _weights(self, weight: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the labels, shaped like `y`; zero for ignored labels."""
        classes = self._classes(y, len(weight))
        weights = placed(weight, y.device).to(dtype).index_select(0, classes.flatten()).reshape(y.shape)
        return weights * self._counts(y)

    def _wrong_labels(self, y: Tensor, classes: int) -> Tensor:
        """Return which labels are neither a class nor ignored, shaped like `y`."""
        return self._counts(y) & ((y < 0) | (y >= classes))

    def _check_labels(self, y: Tensor, classes: int) -> None:
        """Raise an error for labels of the wrong dtype and, if it needs no synchronization, for invalid labels."""
        if y.dtype != torch.int64:
            raise DtypeError(f"Class labels have dtype {y.dtype}, expected torch.int64.", "Convert them: y.long().")
        if not sync.is_asynchronous(y.device) and self._wrong_labels(y, classes).any():
            counted = y[self._counts(y)]
            raise DataError(
                f"Labels go from {counted.min().item()} to {counted.max().item()}, but there are {classes} classes.",
                f"Use labels from 0 to {classes - 1}, or ignore_index ({self.ignore_index}) for missing ones. If the "
                "model returns hidden states instead of logits, use one with a head, such as AutoModelForCausalLM.",
            )

    def _labels_only(self, f: Tensor, y: Tensor) -> Tensor:
        """Return which positions count, `[N, 1, ...]`; raise an error if targets are not labels."""
        if y.is_floating_point():
            raise LossError(
                f"{self.name}: targets are probabilities instead of labels.",
                "Pass labels, or use another quantity: the loss, or a function of a prediction and a target.",
            )
        return self._counts(y).unsqueeze(1).to(f.dtype)

    def _at_label(self, f: Tensor, y: Tensor) -> Tensor:
        """Return one-hot labels, shaped like `f`."""
        return torch.zeros_like(f).scatter(1, self._classes(y, f.shape[1]).unsqueeze(1), 1.0)

    def _target(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the weighted mass that the targets assign to each class, shaped like `f`."""
        p = y.to(f.dtype) if y.is_floating_point() else self._at_label(f, y)
        if self.label_smoothing:
            p = (1 - self.label_smoothing) * p + self.label_smoothing / f.shape[1]
        if self.weight is not None:
            p = placed(self.weight, f.device).to(f.dtype).reshape(-1, *[1] * (f.ndim - 2)) * p
        return p if y.is_floating_point() else self._counts(y).unsqueeze(1) * p


class TokenCrossEntropy(Loss):
    """Cross-entropy for logits `[N, S, C]` and labels `[N, S]`, as Hugging Face's language models use it.

    Targets may also be probabilities `[N, S, C]`, as for distillation. A position without probabilities (all of them
    zero) does not count. The predictions of a teacher belong to the same positions as the student's: `shift=False`.

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
        # `base` is the same loss with the class axis along axis 1.
        super().__init__("TokenCrossEntropy", reduction)
        module = nn.CrossEntropyLoss(
            weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        self.base, self.shift = CrossEntropy(module), shift

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless logits are `[N, S, C]`, and targets labels `[N, S]` or probabilities `[N, S, C]`."""
        if f.ndim != 3 or y.shape != (f.shape if y.is_floating_point() else f.shape[:2]):
            raise ShapeError(
                f"TokenCrossEntropy: predictions have shape {list(f.shape)} and {y.dtype} targets {list(y.shape)}.",
                "Pass logits [N, S, C], and integer labels [N, S] or probabilities [N, S, C].",
            )
        self.base.check(self._logits(f), self._labels(y))

    def check_inputs(self, x: Any, y: Tensor) -> None:
        """Raise an error if labels are shifted already, so that position `s` would predict token `s + 2`.

        This is so if all labels that count are the next tokens, and not all of them the tokens at their position.
        """
        tokens = x.get("input_ids") if isinstance(x, Mapping) else x
        if not self.shift or y.ndim != 2 or not isinstance(tokens, Tensor) or tokens.shape != y.shape:
            return
        label, here, following = y[:, :-1], tokens[:, :-1], tokens[:, 1:]
        counts = label != self.base.ignore_index
        with sync.allow_sync():
            many = int(counts.sum()) >= _ENOUGH_LABELS
            if many and bool(((label == following) | ~counts).all()) and not bool(((label == here) | ~counts).all()):
                raise DataError(
                    "Labels are shifted twice: label s of a batch is token s + 1 already, and shift=True shifts it "
                    "again.",
                    "Pass labels that are at the positions of their tokens, as Hugging Face does, or "
                    "TokenCrossEntropy(shift=False).",
                )

    def wrong(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return which examples have a predicted label that is neither a class nor ignored."""
        return self.base.wrong(self._logits(f), self._labels(y))

    def count(self, y: Tensor) -> float | Tensor:
        """Return the number of predicted labels that are not ignored, or the sum of their weights.

        For probabilities, it is the number of positions that have some.
        """
        labels = self._labels(y)
        if not y.is_floating_point() or self.base.label_smoothing:
            return self.base.count(labels)
        count = (labels != 0).any(1).sum()
        return count if sync.is_asynchronous(y.device) else count.item()

    @property
    def class_axis(self) -> int:
        """The class axis, 2."""
        return 2

    def counted(self, y: Tensor) -> Tensor:
        """Return which positions predict a label that counts, `[N, S, 1]`."""
        counted = self.base.counted(self._labels(y)).transpose(1, 2)
        return nn.functional.pad(counted, (0, 0, 0, 1)) if self.shift else counted

    def criterion(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the sum over positions."""
        return self.base.criterion(self._logits(f), self._labels(y))

    def deviance(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the deviance of `CrossEntropyLoss`."""
        return self.base.deviance(self._logits(f), self._labels(y))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient; it is zero at positions that predict no label."""
        if not self.base.in_place(f, y):
            return self._back(self.base.gradient(self._logits(f), self._labels(y)))
        g = f.softmax(-1)
        self.base.gradient_(self._logits(g), self._labels(y))
        return self._without_last(g)

    def log_probability_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `CrossEntropyLoss`; it is zero at positions that predict no label."""
        return self._back(self.base.log_probability_gradient(self._logits(f), self._labels(y)))

    def margin_gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `CrossEntropyLoss`; it is zero at positions that predict no label."""
        return self._back(self.base.margin_gradient(self._logits(f), self._labels(y)))

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Multiply every position with its Hessian."""
        product = covariance_product(f.softmax(-1), v, -1)
        self._logits(product).mul_(self.base.mass(self._logits(f), self._labels(y)))
        return self._without_last(product)

    def hessian_factor(self, f: Tensor, y: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return one column per class and position that predicts a label."""
        return self._back(self.base.hessian_factor(self._logits(f), self._labels(y), start, stop))

    @property
    def weighs_targets(self) -> bool:
        """Whether classes have weights."""
        return self.base.weighs_targets

    def stand_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the labels, as `CrossEntropyLoss` does."""
        labels = self.base.stand_in(self._logits(f), self._logits(g))
        return nn.functional.pad(labels, (1, 0), value=self.base.ignore_index) if self.shift else labels

    def departure(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the departure of `CrossEntropyLoss`."""
        return self.base.departure(self._logits(f), self._logits(g))

    @property
    def label_smoothing(self) -> float:
        """The label smoothing."""
        return self.base.label_smoothing

    def smoothing_in(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the label smoothing that explains a gradient, as `CrossEntropyLoss` does."""
        return self.base.smoothing_in(self._logits(f), self._logits(g))

    def sampled_gradient(self, f: Tensor, y: Tensor, draws: Draws) -> Tensor:
        """Draw a label for every position that predicts one, and return its gradient."""
        g = f.detach().softmax(-1)
        self.base.sampled_gradient_(self._logits(g), self._labels(y), draws)
        return self._without_last(g)

    def _logits(self, f: Tensor) -> Tensor:
        """Return logits as `[..., N, C, S]`, without the last position if it predicts no label."""
        return (f[..., :-1, :] if self.shift else f).transpose(-1, -2)

    def _labels(self, y: Tensor) -> Tensor:
        """Return the predicted labels `[N, S]`, or probabilities `[N, C, S]`."""
        y = y[:, 1:] if self.shift else y
        return y.transpose(1, 2) if y.is_floating_point() and y.ndim == 3 else y

    def _back(self, g: Tensor) -> Tensor:
        """Return derivatives as `[..., N, S, C]`, the inverse of `_logits`."""
        g = g.transpose(-1, -2)
        return nn.functional.pad(g, (0, 0, 0, 1)) if self.shift else g

    def _without_last(self, g: Tensor) -> Tensor:
        """Set derivatives at positions that predict no label to zero, in place to avoid a copy."""
        if self.shift:
            g[..., -1:, :] = 0
        return g


def softmax(f: Tensor) -> Tensor:
    """Return the softmax over axis 1. If classes are contiguous in memory in `f`, they are in the result, too.

    PyTorch's softmax would copy a tensor that is not contiguous, and return it with another memory layout.
    """
    if f.ndim > 2 and not f.is_contiguous():
        rows = f.movedim(1, -1)
        if rows.is_contiguous():
            return rows.softmax(-1).movedim(-1, 1)
    return f.softmax(1)


def subtract_one_(sigma: Tensor, labels: Tensor) -> Tensor:
    """Subtract one from `sigma` `[N, C, ...]` at the labels `[N, 1, ...]`, in place, and return `sigma`."""
    return sigma.scatter_add_(1, labels, sigma.new_full((1,) * labels.ndim, -1.0).expand(labels.shape))


def subtract_draws_(sigma: Tensor, u: Tensor) -> Tensor:
    """Draw a label for every position, and subtract one at the label, in place.

    Args:
        sigma: Probabilities `[N, C, ...]`. Their sums may differ from one by rounding.
        u: Uniform numbers between 0 and 1, `[N, 1, ...]`.

    Returns:
        `sigma`.
    """
    num_data, classes = sigma.shape[:2]
    positions = prod(sigma.shape[2:])
    # Numbers per position. Two steps need cumulative sums over blocks, and a few tensors with the size of a block.
    numbers = classes // _BLOCK + 8 * _BLOCK if classes > _MANY_CLASSES else max(classes, 1)
    at_a_time = _TEMPORARY_BYTES // (8 * numbers)
    if 0 < num_data * positions <= at_a_time:
        return subtract_one_(sigma, _draw(sigma, u))
    # Use `view`, which fails instead of copying: the result must be written into `sigma`.
    flat = sigma.view(num_data, classes, positions)
    u = u.reshape(num_data, 1, positions)
    for data, where in _pieces(num_data, positions, at_a_time):
        piece = flat[data, :, where]
        subtract_one_(piece, _draw(piece, u[data, :, where]))
    return sigma


def covariance_product(sigma: Tensor, v: Tensor, axis: int) -> Tensor:
    """Multiply `diag(sigma) - sigma sigma^T` with `v` along a (negative) axis."""
    product = sigma * v
    return product.addcmul_(sigma, product.sum(axis, keepdim=True), value=-1)


def _draw(sigma: Tensor, u: Tensor) -> Tensor:
    """Return labels `[N, 1, ...]` for `[N, C, ...]`: the first class whose cumulative probability reaches `u`."""
    rows = sigma.movedim(1, -1)
    if rows.shape[-1] > _MANY_CLASSES:
        return _draw_in_two_steps(rows, u.movedim(1, -1)).movedim(-1, 1)
    cumulative = rows.to(torch.float64, copy=True, memory_format=torch.contiguous_format).cumsum_(-1)
    # Scale `u` by the sum of probabilities, which differs from one by rounding.
    reached = u.movedim(1, -1) * cumulative[..., -1:]
    # If probabilities are NaN, no class is reached. Clamp the index to keep it valid.
    return torch.searchsorted(cumulative, reached).clamp_(max=rows.shape[-1] - 1).movedim(-1, 1)


def _draw_in_two_steps(rows: Tensor, u: Tensor) -> Tensor:
    """Return labels `[..., 1]` for probabilities `[..., C]`: draw a block of classes, then a class of the block.

    Cumulative sums in float64 over tens of thousands of classes would dominate the run time.
    """
    # Draw a block, using the sums of all blocks.
    classes = rows.shape[-1]
    whole = classes // _BLOCK * _BLOCK
    dtype = at_least_float32(rows.dtype)
    sums = [rows[..., :whole].unflatten(-1, (-1, _BLOCK)).sum(-1, dtype=dtype)]
    if whole < classes:
        sums.append(rows[..., whole:].sum(-1, keepdim=True, dtype=dtype))
    cumulative = torch.cat(sums, -1).double().cumsum_(-1)
    reached = u * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, reached).clamp_(max=cumulative.shape[-1] - 1)

    # Draw a class of the block.
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    index = block * _BLOCK + sync.counting(_BLOCK, rows.device)
    # The last block may be shorter.
    inside = (rows.gather(-1, index.clamp(max=classes - 1)).double() * (index < classes)).cumsum_(-1)
    # Rescale to the sum of the classes of the block. The sum of the block may be rounded to a larger number, and the
    # last class would then be drawn for the difference, even if its probability is zero.
    share = (reached - before) / (cumulative.gather(-1, block) - before)
    place = torch.searchsorted(inside, share * inside[..., -1:])
    return (block * _BLOCK + place.clamp_(max=_BLOCK - 1)).clamp_(max=classes - 1)


def _pieces(num_data: int, positions: int, at_a_time: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of examples and positions with about `at_a_time` positions each, at least one."""
    width = max(1, min(positions, at_a_time))
    data = max(1, at_a_time // max(positions, 1))
    for n in range(0, num_data, data):
        for p in range(0, positions, width):
            yield slice(n, n + data), slice(p, p + width)
