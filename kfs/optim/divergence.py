"""What was last fine in a training, for the error that ends a run which has diverged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kfs.errors import SolverError
from kfs.waiting import numbers

# A run has diverged if this many times `patience` steps in a row were skipped.
_MOST_SKIPPED = 10


@dataclass
class LastFine:
    """The last step with finite gradients, and how many were skipped since.

    It is not part of a state: a run that is resumed starts to count again.
    """

    patience: int
    step: int | None = None  # `None` before the first one
    loss: object = None  # what its closure returned; an accelerator is not asked for it before there is an error
    lr: Any = None
    damping: float = 0.0
    skipped: int = 0

    def note(self, step: int, result: object, group: Mapping[str, Any], damping_scale: float) -> None:
        """Remember a step that was fine, by its number, what its closure returned, group and damping."""
        self.skipped = 0
        self.step = step
        self.loss = result.detach() if isinstance(result, Tensor) else result
        self.lr = group["lr"]
        self.damping = group["damping"] * damping_scale

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Count a step that was skipped, and refuse to go on if no later one can be better.

        Raises:
            SolverError: If parameters are not finite, or if very many steps in a row were skipped.
        """
        self.skipped += 1
        finite = numbers([p.isfinite().all() for p in params.values()])
        broken = [name for name, is_finite in zip(params, finite, strict=True) if not is_finite]
        if not broken and self.skipped < _MOST_SKIPPED * self.patience:
            return
        what = f"{self.skipped} steps in a row had gradients or losses that are not finite"
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            what = f"parameter {broken[0]!r}{more} is not finite"
        raise SolverError(
            f"The run has diverged: {what}. {self}",
            "Go back to a checkpoint from before, and use a smaller lr, warm-up, a larger damping or a smaller trust.",
        )

    def __str__(self) -> str:
        """Return a sentence about the last step that was fine."""
        if self.step is None:
            return "No step was fine before: look at the data, and at how parameters are initialized."
        loss = ""
        if isinstance(self.loss, (int, float)) or (isinstance(self.loss, Tensor) and self.loss.numel() == 1):
            loss = f"loss {float(self.loss):.4g}, "
        return f"Step {self.step} was fine ({loss}lr {float(self.lr):.3g}, damping {self.damping:.3g})."
