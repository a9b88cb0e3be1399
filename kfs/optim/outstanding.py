"""What an accelerator has not told yet about the last steps: whether gradients, factors and steps were finite.

Nobody waits for these flags. The device looks at them itself: where one is false, averages and parameters stay as they
are. The host goes on as if all was well. When it reads the flags, which are long there by then, it counts what went
wrong, and puts its own numbers right. Flags are read at the start of the next step with new factors, and by everybody
who looks at what they decide: states, reports, events.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kfs.optim.curvature import Curvature
from kfs.optim.divergence import Fine, LastFine
from kfs.optim.parameters import Parameters
from kfs.optim.updates import State, Taken, grow_older
from kfs.waiting import Message

# If there are so many steps without new factors, the oldest are looked at. Some are left: they may not be there yet.
_MOST = 64
_LEFT = 16


class _Step(NamedTuple):
    """A step about which the host does not know everything."""

    fine: Fine  # what to remember if gradients were finite
    names: tuple[str, ...]  # parameters that have grown older, as if the step was taken
    # Whether gradients were used, whether they were finite, whether the step was taken, and whether factors were added.
    flags: Message


@dataclass(eq=False)
class Outstanding:
    """Steps whose flags nobody has read."""

    curvature: Curvature
    last_fine: LastFine
    params: Parameters
    _steps: list[_Step] = field(default_factory=list)

    def add(self, state: State, fine: Fine, finite: Tensor, good: Tensor, taken: Taken) -> None:
        """Send the flags of a step to the host.

        Args:
            state: The optimizer's.
            fine: Describes the step.
            finite: Whether gradients were.
            good: Whether they were, and of a usual size.
            taken: Whether the step was taken.
        """
        flags = [good, finite, taken.flag]
        if self.curvature.unconfirmed is not None:
            flags.append(self.curvature.unconfirmed)
            self.curvature.unconfirmed = None
        self._steps.append(_Step(fine, taken.names, Message(torch.stack(flags))))
        if len(self._steps) >= _MOST:
            self._read(state, len(self._steps) - _LEFT)

    def settle(self, state: State) -> None:
        """Read all flags, count what went wrong, and put right what assumed that nothing did."""
        self._read(state, len(self._steps))
        self.curvature.note_failures()

    def forget(self) -> None:
        """Forget all steps, after another state was loaded."""
        self._steps.clear()

    def _read(self, state: State, count: int) -> None:
        """Read the flags of the oldest steps."""
        steps = self._steps[:count]
        del self._steps[:count]
        for one in steps:
            good, finite, taken, *added = one.flags.read()
            if good:
                self.last_fine.note(one.fine)
            else:
                self.note_skipped(finite)
            if added:
                self.curvature.confirm(good, added[0])
            if good and not taken:
                self.curvature.note_overflow()
            if not taken:
                grow_older(self.params, state, one.names, by=-1)

    def note_skipped(self, finite: bool) -> None:
        """Count a step that was skipped because of its gradients, which may be finite and too large, or of its loss."""
        if finite:
            text = "gradients are absurdly larger than all before, and the step was skipped"
            self.curvature.events.note("refused_gradients", text)
            return
        self.curvature.note_trouble("skipped_steps", "the loss or gradients are not finite, and the step was skipped")
        self.last_fine.note_skipped()
