"""What was last fine in a training, for the error that ends a run which has diverged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kfs.errors import SolverError
from kfs.sharded import whole
from kfs.waiting import numbers

# A run has diverged if this many times `patience` steps in a row were skipped.
_MOST_SKIPPED = 10


class Fine(NamedTuple):
    """A step with finite gradients."""

    step: int
    loss: object  # what its closure returned; an accelerator is not asked for it before there is an error
    lr: Any
    damping: float

    @classmethod
    def of(cls, step: int, result: object, group: Mapping[str, Any], damping_scale: float) -> "Fine":
        """Describe a step by its number, what its closure returned, group and damping."""
        loss = result.detach() if isinstance(result, Tensor) else result
        return cls(step, loss, group["lr"], group["damping"] * damping_scale)

    def __str__(self) -> str:
        """Return a sentence about it."""
        loss = ""
        if isinstance(self.loss, (int, float)) or (isinstance(self.loss, Tensor) and self.loss.numel() == 1):
            loss = f"loss {float(self.loss):.4g}, "
        return f"Step {self.step} was fine ({loss}lr {float(self.lr):.3g}, damping {self.damping:.3g})."


@dataclass
class LastFine:
    """The last step with finite gradients, and how many were skipped since.

    It is not part of a state: a run that is resumed starts to count again.
    """

    patience: int
    last: Fine | None = None  # `None` before the first one
    skipped: int = 0
    _unchecked: bool = False  # whether a step was skipped since the last check

    def note(self, fine: Fine) -> None:
        """Remember a step that was fine."""
        self.skipped = 0
        self.last = fine

    def note_skipped(self) -> None:
        """Count a step that was skipped."""
        self.skipped += 1
        self._unchecked = True

    def check(self, params: Mapping[str, Tensor]) -> None:
        """If steps were skipped since the last check, refuse to go on if no later one can be better.

        Raises:
            SolverError: If parameters are not finite, or if very many steps in a row were skipped.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        finite = numbers([whole(p.isfinite()).all() for p in params.values()])
        broken = [name for name, is_finite in zip(params, finite, strict=True) if not is_finite]
        if not broken and self.skipped < _MOST_SKIPPED * self.patience:
            return
        what = f"{self.skipped} steps in a row had gradients or losses that are not finite"
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            what = f"parameter {broken[0]!r}{more} is not finite"
        last = self.last or "No step was fine before: look at the data, and at how parameters are initialized."
        raise SolverError(
            f"The run has diverged: {what}. {last}",
            "Go back to a checkpoint from before, and use a smaller lr, warm-up, a larger damping or a smaller trust.",
        )
