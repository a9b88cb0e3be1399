"""The loss that was announced, compared with what passes show about the loss that is minimized.

Another loss, and another reduction, are errors: steps would be wrong by factors that nobody has asked for. A factor in
front of the loss, or an additional term, is announced by a warning. Factors are looked for in the first steps alone.
"""

import sys
import warnings
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler

from kfs.errors import KfsWarning, LossError
from kfs.losses import Loss
from kfs.losses.square import Square
from kfs.optim.step_sums import StepSums

# Relative distance between gradients beyond which a loss has an additional term, or is another loss.
_DISTANCE_TO_WARN = 0.05
_DISTANCE_TO_REFUSE = 0.5
# Numbers that differ by less are the same. Gradients in half precision are rounded by less.
_SAME = 0.05
# A mean over fewer targets than these may be a sum with a factor in front.
_FEW_TARGETS = 4
# Other losses, and factors, are looked for in this many steps that have sums, since a program does not change.
_STEPS_TO_COMPARE = 10
_CHANGE_THE_LOSS = (
    "Pass the loss that you minimize as loss=, for what the model returns. What happens to that before the loss, such "
    "as a softmax or a temperature, belongs into the model."
)


@dataclass(eq=False)
class Announcement:
    """The announced loss.

    Attributes:
        loss: Its description.
        ranks: Over how many processes gradients are averaged.
        steps_left: Compare passes with other losses and reductions in this many further steps.
    """

    loss: Loss
    ranks: int = 1
    steps_left: int = _STEPS_TO_COMPARE
    _warned: set[str] = field(default_factory=set)  # kinds of warnings, each of which comes once

    def check(self, sums: StepSums, value: Any = None) -> None:
        """Compare it with what the passes of a step show.

        Args:
            sums: What they gave.
            value: What a closure returned.

        Raises:
            LossError: If another loss, or another reduction, is minimized.
        """
        name = self.loss.name
        if sums.other:
            text = f"The gradient at the predictions is that of {sums.other}, but {name} was announced."
            raise LossError(text, _CHANGE_THE_LOSS)
        text = f"The gradient at the predictions is not that of {name}: it differs by {sums.mismatch:.0%}."
        if sums.mismatch > _DISTANCE_TO_REFUSE:
            raise LossError(text, _CHANGE_THE_LOSS)
        if sums.mismatch > _DISTANCE_TO_WARN:
            self._warn("term", f"{text} Curvature is that of the announced loss, of what the model returns.", 0)
        elif self.steps_left and sums.examples:
            self._compare_scales(sums, value)
        self.steps_left = max(0, self.steps_left - 1)

    def _compare_scales(self, sums: StepSums, value: Any) -> None:
        """Find a factor between the loss and the announced one, or another reduction."""
        parts = [(scale, count) for scale, count in sums.scales if scale is not None]
        if not parts or len(parts) < len(sums.scales):
            self._compare_value(sums, value)
            return
        self.steps_left = 0  # It is known now.
        if self._is(self.loss.reduction, parts, sums.count) or _called_by_scaler():
            return
        self._refuse_reduction(parts, sums.count)
        expected = self.loss.scale / (sums.count / self.ranks if self.loss.reduction == "mean" else 1.0)
        factors = [scale / expected for scale, _ in parts]
        # Parts with weights of their own are no accident. And trainers divide what a model computes by other counts.
        if sums.in_model or not all(_same(factor, factors[0]) for factor in factors):
            return
        over_data = all(_same(scale, self.loss.scale / (sums.num_data / self.ranks)) for scale, _ in parts)
        hint = ", as if it was averaged over data, not over entries or positions" if over_data else ""
        self._warn(
            "factor",
            f"The loss that is minimized is {factors[0]:.3g} times {self.loss.name} with reduction="
            f"{self.loss.reduction!r}{hint}. Steps are longer or shorter by this factor. Announce the loss that you "
            "minimize, or multiply lr instead of the loss.",
            1,
        )

    def _compare_value(self, sums: StepSums, value: Any) -> None:
        """Find another reduction of a square loss without targets, by its value.

        With residuals `r`, the value is `R |r|^2 / 2` and the gradient is `R r`. Terms that do not depend on
        predictions are part of the value, so a ratio that is not exactly that of the other reduction says nothing.
        """
        value = float(value.detach()) if isinstance(value, torch.Tensor) and value.numel() == 1 else 0.0
        if isinstance(self.loss, Square) and value > 0 and sums.square > 0 and len(sums.scales) == 1:
            self._refuse_reduction([(sums.square / (2 * value), sums.count)], sums.count)

    def _refuse_reduction(self, parts: list[tuple[float, float]], total: float) -> None:
        """Raise if the loss has the other reduction than the announced one."""
        announced, other = self.loss.reduction, "sum" if self.loss.reduction == "mean" else "mean"
        if min(count for _, count in parts) > _FEW_TARGETS and self._is(other, parts, total):
            raise LossError(
                f"The loss that is minimized is a {other}, but {self.loss.name} was announced with "
                f"reduction={announced!r}. Steps would be {total:g} times too {'long' if other == 'sum' else 'short'}.",
                f"Pass the loss with reduction={other!r} as loss=.",
            )

    def _is(self, reduction: str, parts: list[tuple[float, float]], total: float) -> bool:
        """Whether scales of parts are those of a reduction: a mean may be one over all parts, or over each.

        Gradients are averages over processes. So a mean over all parts has so many times the scale in each process.
        """
        scale = self.loss.scale
        if reduction == "sum":
            return all(_same(s, scale) for s, _ in parts)
        over_each = all(_same(s, scale / count) for s, count in parts)
        return over_each or all(_same(s, scale / (total / self.ranks)) for s, _ in parts)

    def _warn(self, kind: str, text: str, frames: int) -> None:
        """Warn once, at the call of `step`, given the number of functions between `check` and this one."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, KfsWarning, stacklevel=7 + frames)


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * abs(b)


def _called_by_scaler() -> bool:
    """Whether a gradient scaler takes the step: it has multiplied the loss, and has divided gradients since."""
    file = sys.modules[GradScaler.__module__].__file__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
