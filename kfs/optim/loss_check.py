"""Checks that the declared loss is the loss that is minimized, using gradients, targets and values of the loss.

The losses themselves live in `kfs.losses`, the passes that provide gradients in `kfs.optim.watch`.

`Targets` finds the scale of the minimized loss. For cross-entropies, the gradient identifies the loss: targets can be
recovered from it, and then the gradient must fit (`shows_targets`). The gradient of a square loss is a residual, which
can have any values.

`LossCheck` compares the declared loss with the results of passes. Another loss, or another reduction, raises an error,
because steps would be wrong by unintended factors. A factor in front of the loss, or an additional term, gives a
warning. Factors are checked in the first steps only.
"""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log2
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kfs.errors import KfsWarning, LossError
from kfs.factors.blocks import computable
from kfs.factors.settings import Fisher
from kfs.losses import Loss, TokenCrossEntropy
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.cross_entropy import CrossEntropy
from kfs.losses.divergence import KLDivergence
from kfs.losses.gaussian import Gaussian
from kfs.losses.huber import Huber
from kfs.losses.poisson import Poisson
from kfs.losses.square import Square
from kfs.optim.averages import StepSums
from kfs.optim.report import callers, user_stacklevel

_SOFTMAX = (CrossEntropy, TokenCrossEntropy)
_SHOWN = (*_SOFTMAX, BinaryCrossEntropy, KLDivergence)
# Losses that are written by users are not compared with other losses.
_COMPARED = (*_SHOWN, Square, Huber, Poisson, Gaussian)
# A gradient belongs to another loss if it fits up to this relative distance. Half precision rounds by less.
_FITS = 0.02
# For predictions near zero, gradients of many losses are alike. The gradient must differ from the one at zero by this.
_DIFFERS_FROM_ZERO = 0.1
# Fewer numbers may fit by accident.
_ENOUGH_NUMBERS = 8


def shows_targets(loss: Loss) -> bool:
    """Whether targets can be recovered from a loss's gradient, so that its scale is known, too."""
    return isinstance(loss, _SHOWN)


def other_losses(declared: Loss, f: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Compare a gradient with the gradients of losses other than the declared one.

    Args:
        declared: The declared loss.
        f: Predictions.
        g: Gradient, with respect to predictions, of the loss that is minimized.

    Returns:
        Flags by name of a loss: whether the gradient belongs to it. This does not synchronize.
    """
    if type(declared) not in _COMPARED or f.numel() < _ENOUGH_NUMBERS:
        return {}
    return {loss.name: _is_gradient_of(loss, f, g) for loss in _candidates(declared, f)}


def fit(g: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor that brings a direction closest to `g`, and the remaining distance relative to `g`."""
    tiny = torch.finfo(g.dtype).tiny
    scale = (g * direction).sum() / direction.square().sum().clamp(min=tiny)
    return scale, (g - scale * direction).norm() / g.norm().clamp(min=tiny)


def _candidates(declared: Loss, f: Tensor) -> Iterator[Loss]:
    """Yield losses of other families that accept such predictions."""
    if not isinstance(declared, BinaryCrossEntropy):
        yield BinaryCrossEntropy(nn.BCEWithLogitsLoss())
    if isinstance(declared, _SOFTMAX):
        return
    if f.ndim > 1 and f.shape[1] > 1:
        yield CrossEntropy(nn.CrossEntropyLoss())
    if f.ndim == 3 and f.shape[2] > 1:
        yield TokenCrossEntropy()


def _is_gradient_of(loss: Loss, f: Tensor, g: Tensor) -> Tensor:
    y = loss.stand_in(f, g)
    direction = loss.gradient(f, y)
    scale, distance = fit(g, direction)
    _, from_zero = fit(direction, loss.gradient(torch.zeros_like(f), y))
    # The scale is zero if the gradient is.
    return (scale > 0) & (distance < _FITS) & (from_zero > _DIFFERS_FROM_ZERO)


# Beyond this relative distance, a gradient belongs to other targets. Half precision rounds by less.
_TOLERANCE = 0.05
_UNITS = 8.0  # of round-off, in each of two gradients


@dataclass
class Targets:
    """The targets of a pass, as far as they are known, and how well they explain the loss's gradient."""

    y: Tensor | None
    given: bool = False  # whether they come from the user or the loss module; otherwise, they are a guess
    scale: Tensor | float = 1.0  # the loss is this many times the sum of criteria; one if it is not needed
    mismatch: Tensor | float = 0.0  # relative distance between the gradient and the declared loss's gradient
    calls_for_changed: int = 0  # how often the loss module was called with labels and modified predictions
    compare: bool = False  # whether to find the scale, and other losses, even if not needed otherwise
    fit: tuple[Tensor, Tensor] | None = None  # scale and relative distance, if targets are known or recovered
    others: dict[str, Tensor] = field(default_factory=dict)  # by name of a loss: whether the gradient belongs to it
    smoothing: Tensor | float = 0.0  # label smoothing that explains the gradient of a cross-entropy

    def give(self, y: Tensor, changed: bool = False) -> None:
        """Set the targets. If they are set twice (mixed labels), they are unknown: neither belongs to the whole loss.

        Args:
            y: The targets.
            changed: Whether they belong to modified predictions, such as a part of them. Then they may not fit these
                predictions, and are only counted.
        """
        if changed:
            self.calls_for_changed += 1
            return
        self.y = None if self.given else y.detach()
        self.given = True

    def match(self, f: Tensor, g: Tensor, loss: Loss, fisher: Fisher) -> Tensor:
        """Return the targets, or substitutes with the same curvature, and set scale and mismatch.

        Predictions are in float32 or better. What has to be known depends on `fisher`.

        Raises:
            LossError: If targets are needed but unknown.
        """
        # Half precision loses the small entries that show whether sums are zero.
        precise = g.dtype == f.dtype
        g = computable(g)
        if self.compare:
            self.others = other_losses(loss, f, g)
        if self.y is not None:
            try:
                loss.check_now(f, self.y)
                direction = loss.gradient(f, self.y)
                own = loss.tangent(f, g) if isinstance(loss, KLDivergence) else g
                self.fit = self.scale, distance = fit(own, direction)
                self.mismatch = distance * (distance > _round_off(f, g, self.y, loss))
                if self.compare and self.mismatch:
                    self.smoothing = _undeclared_smoothing(loss, f, g, self.y)
                if self.given or self.mismatch < _TOLERANCE:
                    return self.y
            except (ValueError, TypeError):
                if self.given:
                    raise
        self.fit = None
        self.mismatch = loss.departure(f, g) if precise else g.new_zeros(())
        return self._stand_in(f, g, loss, fisher)

    def _stand_in(self, f: Tensor, g: Tensor, loss: Loss, fisher: Fisher) -> Tensor:
        """Return substitutes for unknown targets, with the same curvature, and set the scale."""
        self.scale = distance = g.new_ones(())
        try:
            if fisher == "ggn" and loss.hessian_needs_targets:
                raise loss.unknown_targets()
            y = loss.stand_in(f, g)
            if fisher == "empirical" or loss.weighs_targets or (self.compare and shows_targets(loss)):
                own = loss.tangent(f, g) if isinstance(loss, KLDivergence) else g
                self.fit = self.scale, distance = fit(own, loss.gradient(f, y))
                if self.compare and distance > _round_off(f, g, y, loss):
                    self.smoothing = _undeclared_smoothing(loss, f, g, y)
        except LossError:
            # The number of examples is enough if curvature depends on inputs alone. The empirical Fisher raises below.
            if fisher not in {"empirical", "forward-only"}:
                raise
            y = f
        if fisher == "empirical" and not distance < _TOLERANCE:
            raise LossError(
                f"The scale of the gradient is not known, because the targets of {loss.name} are not known.",
                "Call the optimizer's targets(y) between the forward pass and backward(), or compute the loss with the "
                "module that was passed as loss=.",
            )
        # If predictions were modified in a harmless way, such as order or precision, labels explain the gradient.
        if self.calls_for_changed == 1 and self.fit is not None and distance > _round_off(f, g, y, loss):
            self.mismatch = torch.maximum(torch.as_tensor(self.mismatch), distance)
        # Labels that do not explain the gradient are not the true ones, which may be soft, smoothed or mixed.
        if loss.weighs_targets and distance > _TOLERANCE and distance > _round_off(f, g, y, loss):
            raise loss.unknown_targets()
        return y

    def known_scale(self) -> float | None:
        """Return the factor between the loss and the sum of criteria; `None` if it is unknown."""
        if self.fit is None:
            return None
        scale, distance = map(float, self.fit)
        # A zero gradient has no scale.
        return scale if scale and distance < _TOLERANCE else None

    def other_loss(self) -> str:
        """Return the name of another loss that the gradient belongs to; empty if none, or if the declared one fits."""
        if self.known_scale() is not None:
            return ""
        return next((name for name, is_its_own in self.others.items() if is_its_own), "")


def _undeclared_smoothing(loss: Loss, f: Tensor, g: Tensor, y: Tensor) -> Tensor | float:
    """Return the label smoothing that explains the gradient, if the loss is a cross-entropy with another one."""
    if not isinstance(loss, _SOFTMAX) or y.is_floating_point():
        return 0.0
    smoothing = loss.smoothing_in(f, g)
    return smoothing * ((smoothing - loss.label_smoothing).abs() > _SAME * loss.label_smoothing)


def _round_off(f: Tensor, g: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Return the round-off of a gradient that nearly vanishes, relative to its length.

    Its entries are differences of a prediction and a target, or of their probabilities, and have their round-off.
    """
    terms = len(f) if y.is_floating_point() else y.numel()
    weight = loss.scale / (terms if loss.reduction == "mean" else 1)
    size = f.abs().clamp(max=1.0).norm()
    noise = _UNITS * torch.finfo(f.dtype).eps * weight * size
    result: Tensor = noise / g.norm().clamp(min=torch.finfo(f.dtype).tiny)
    return result


# Relative distances between gradients beyond which a loss has an additional term, or is another loss.
_DISTANCE_TO_WARN = 0.05
_DISTANCE_TO_REFUSE = 0.5
# Numbers with a smaller relative difference count as equal. Gradients in half precision are rounded by less.
_SAME = 0.05
# A smaller factor in front of a loss is not taken for the scale of a gradient scaler.
_LEAST_SCALE = 16.0
# A mean over fewer targets than these may be a sum with a factor in front.
_FEW_TARGETS = 4
# Other losses and factors are looked for in this many steps with sums only, since a program does not change.
_STEPS_TO_COMPARE = 10
_CHANGE_THE_LOSS = (
    "Pass the loss that you minimize as loss=, as a function of the model's output. Operations between output and "
    "loss, such as a softmax or a temperature, must be part of the model."
)


@dataclass(eq=False)
class LossCheck:
    """Compares the declared loss with the loss that is minimized.

    Attributes:
        loss: The declared loss.
        ranks: Number of processes over which gradients are averaged.
        steps_left: Compare passes with other losses and reductions in this many further steps.
    """

    loss: Loss
    ranks: int = 1
    steps_left: int = _STEPS_TO_COMPARE
    _warned: set[str] = field(default_factory=set)  # kinds of warnings that were given; each is given once

    def check(self, sums: StepSums, value: Any = None, are_scaled: bool | None = None) -> None:
        """Compare the declared loss with the gradients of a step.

        Args:
            sums: Sums from the passes of the step.
            value: Return value of the closure.
            are_scaled: Whether nobody has changed gradients since the backward pass, so that they are scaled if the
                loss is; `None` if a scaler calls the step itself.

        Raises:
            LossError: If another loss, or another reduction, is minimized, or if gradients are scaled.
        """
        name = self.loss.name
        if sums.other:
            text = f"The gradient at the predictions is that of {sums.other}, but {name} was declared."
            raise LossError(text, _CHANGE_THE_LOSS)
        text = f"The gradient at the predictions is not that of {name}: it differs by {sums.mismatch:.0%}."
        if sums.smoothing:
            self._warn(
                "smoothing",
                f"The gradient at the predictions is that of {name} with label_smoothing={sums.smoothing:.2g}, which "
                "was not declared. The curvature is the same, but the length of steps is chosen for the declared loss. "
                "Pass the loss that you minimize as loss=, with its label_smoothing.",
            )
        if "smoothing" in self._warned:
            return
        if sums.mismatch > _DISTANCE_TO_REFUSE:
            raise LossError(text, _CHANGE_THE_LOSS)
        if sums.mismatch > _DISTANCE_TO_WARN:
            self._warn("term", f"{text} Curvature is computed for the declared loss of the model's output.")
        elif self.steps_left and sums.examples:
            self._compare_scales(sums, value, are_scaled)
        self.steps_left = max(0, self.steps_left - 1)

    def _compare_scales(self, sums: StepSums, value: Any, are_scaled: bool | None) -> None:
        """Detect a factor between the minimized and the declared loss, or another reduction."""
        parts = [(scale, count) for scale, count in sums.scales if scale is not None]
        if not parts or len(parts) < len(sums.scales):
            self._compare_value(sums, value)
            return
        self.steps_left = 0  # The scale is known now.
        if self._matches(self.loss.reduction, parts, sums.count) or called_by_scaler():
            return
        self._refuse_reduction(parts, sums.count)
        expected = self.loss.scale / (sums.count / self.ranks if self.loss.reduction == "mean" else 1.0)
        factors = [scale / expected for scale, _ in parts]
        # A gradient scaler multiplies by a power of two. If gradients have changed since, it has divided them again.
        if are_scaled is not None and factors[0] >= _LEAST_SCALE and _is_power_of_two(factors[0]):
            if are_scaled:
                raise LossError(
                    f"The gradients are multiplied by {factors[0]:g}, as by a GradScaler.",
                    "Divide them before step(): call scaler.unscale_(optimizer).",
                )
            return
        # Different weights for parts are intentional. Trainers divide the loss that a model computes by other counts.
        if sums.in_model or not all(_same(factor, factors[0]) for factor in factors):
            return
        over_data = all(_same(scale, self.loss.scale / (sums.num_data / self.ranks)) for scale, _ in parts)
        hint = ", as if it was averaged over data, not over entries or positions" if over_data else ""
        self._warn(
            "factor",
            f"The loss that is minimized is {factors[0]:.3g} times {self.loss.name} with reduction="
            f"{self.loss.reduction!r}{hint}. Steps are longer or shorter by this factor. Declare the loss that you "
            "minimize, or multiply lr instead of the loss.",
        )

    def _compare_value(self, sums: StepSums, value: Any) -> None:
        """Detect another reduction of a square loss without targets, using its value.

        With residuals `r`, the value is `R |r|^2 / 2` and the gradient is `R r`. Terms that do not depend on
        predictions are part of the value, so a ratio that does not match the other reduction exactly has no meaning.
        """
        value = float(value.detach()) if isinstance(value, torch.Tensor) and value.numel() == 1 else 0.0
        if isinstance(self.loss, Square) and value > 0 and sums.square > 0 and len(sums.scales) == 1:
            self._refuse_reduction([(sums.square / (2 * value), sums.count)], sums.count)

    def _refuse_reduction(self, parts: list[tuple[float, float]], total: float) -> None:
        """Raise if the minimized loss has the other reduction."""
        declared, other = self.loss.reduction, "sum" if self.loss.reduction == "mean" else "mean"
        if min(count for _, count in parts) > _FEW_TARGETS and self._matches(other, parts, total):
            raise LossError(
                f"The loss that is minimized is a {other}, but {self.loss.name} was declared with "
                f"reduction={declared!r}. Steps would be {total:g} times too {'long' if other == 'sum' else 'short'}.",
                f"Pass the loss with reduction={other!r} as loss=.",
            )

    def _matches(self, reduction: str, parts: list[tuple[float, float]], total: float) -> bool:
        """Whether the scales of parts match a reduction. A mean may be one over all parts, or over each of them.

        Gradients are averaged over processes, so a mean over all parts has this many times the scale in each process.
        """
        scale = self.loss.scale
        if reduction == "sum":
            return all(_same(s, scale) for s, _ in parts)
        over_each = all(_same(s, scale / count) for s, count in parts)
        return over_each or all(_same(s, scale / (total / self.ranks)) for s, _ in parts)

    def _warn(self, kind: str, text: str) -> None:
        """Warn once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, KfsWarning, stacklevel=user_stacklevel())


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * abs(b)


def _is_power_of_two(factor: float) -> bool:
    return abs(log2(factor) - round(log2(factor))) < _SAME


def called_by_scaler() -> bool:
    """Whether an enabled gradient scaler calls the step: it has multiplied the loss, and then divided the gradients."""
    file = sys.modules[GradScaler.__module__].__file__
    for frame in callers():
        if frame.f_code.co_filename == file:
            scaler = frame.f_locals.get("self")
            return isinstance(scaler, GradScaler) and scaler.is_enabled()
    return False
