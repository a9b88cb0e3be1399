"""Events of training that goes wrong, and the actions of the optimizer against them.

Events are counted and logged (`Events`). After several of them in a row, damping is raised (`DampingPolicy`). Flags of
steps are read from an accelerator when they have arrived (`PendingChecks`). Gradients and factors that are far larger
than before are refused (`UsualSizes`).
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.errors import SolverError
from kfs.optim.averages import Average
from kfs.problem.whole_parameters import whole
from kfs.runtime.sync import Message, numbers

log = logging.getLogger("kfs.optim")
_DAMPING_RISE = 10.0
# Limits of the factor that multiplies dampings. Beyond them, it has no further effect on steps, and may overflow.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-10, 1e10
_RECOVERY = 20  # A raise of damping is undone after this many times `patience` successes in a row.
# After this many steps without new factors, flags of the oldest are read. The latest may not have arrived yet.
_MOST = 64
_LEFT = 16
# A run has diverged if this many times `patience` steps in a row were skipped.
_MOST_SKIPPED = 10
# The largest size decays by this factor in each comparison. A size that recurs within some thousands of them is usual.
_LEFT_OF_SIZE = 0.999
# It decays by this factor if new sizes are this many times smaller: it was a spike, before usual sizes were known.
_LEFT_OF_SPIKE = 0.9
_FAR_SMALLER = 1000.0
# A usual size reduces the number of refusals by this. Single spikes never add up, but spikes in every other step do.
_FORGOTTEN = 0.5


@dataclass
class Events:
    """How often something went wrong.

    Attributes:
        skipped_steps: Steps skipped because the loss, gradients or products with inverses were not finite.
        refused_gradients: Steps skipped because gradients were more than 100 times larger than before.
        refused_statistics: Factors that were not added to averages, because they were not finite, or more than 10,000
            times larger than before.
        failed_inverses: Decompositions that failed. The previous inverse stayed in use.
        raised_damping: Raises of damping, after several skipped steps, refused statistics or failed inverses in a row.
        shortened_steps: With a quadratic model, steps that were shortened because the loss on the batch did not fall.
        rejected_steps: Steps that were taken back because the loss did not fall, however short they were.
        rising_losses: How often the loss had been far above its lowest value for many steps.
    """

    skipped_steps: int = 0
    refused_gradients: int = 0
    refused_statistics: int = 0
    failed_inverses: int = 0
    raised_damping: int = 0
    shortened_steps: int = 0
    rejected_steps: int = 0
    rising_losses: int = 0

    def note(self, name: str, text: str) -> None:
        """Count an event. Log the first, second, fourth, eighth, ... of its kind."""
        count = getattr(self, name) + 1
        setattr(self, name, count)
        if count & (count - 1) == 0:  # a power of two
            log.warning("kfs.optim: %s%s.", text, "" if count == 1 else f" ({count} times so far)")


@dataclass(eq=False)
class DampingPolicy:
    """Raises damping after several events in a row. After many successes in a row, it takes a raise back.

    Attributes:
        patience: Raise damping after this many events in a row.
        averages: Averages of all blocks. Their inverses are out of date when damping changes.
        scale: The factor that currently multiplies all dampings.
        events: All events so far.
    """

    patience: int
    averages: Mapping[Any, Average]
    scale: float = 1.0
    events: Events = field(default_factory=Events)
    _troubles: int = 0  # events in a row
    _successes: int = 0  # steps without event in a row
    _rises: int = 0  # raises of damping that were not undone yet

    def multiply(self, factor: float) -> None:
        """Multiply all dampings by a factor, within limits. Inverses change when they are recomputed."""
        self.scale = min(max(self.scale * factor, _SMALLEST_SCALE), _LARGEST_SCALE)
        for average in self.averages.values():
            average.changed = True

    def note_trouble(self, name: str, text: str) -> None:
        """Count an event, by its name in `Events`, and raise damping after several in a row."""
        self.events.note(name, text)
        self._successes = 0
        self._troubles += 1
        if self._troubles < self.patience:
            return
        self._troubles = 0
        if self.scale < _LARGEST_SCALE:
            self._rises += 1
            self.multiply(_DAMPING_RISE)
            times = f"damping rises to {self.scale:g} times its value"
            self.events.note("raised_damping", f"{times}, after {self.patience} such events in a row")

    def note_added(self, good: bool) -> None:
        """Count statistics that were added or refused. After many that were added in a row, undo one raise."""
        if not good:
            text = "statistics of a batch are not finite, or absurdly large, and were not used"
            self.note_trouble("refused_statistics", text)
            return
        self._troubles = 0
        self._successes += 1
        if self._rises and self._successes >= _RECOVERY * self.patience:
            self._successes = 0
            self._rises -= 1
            self.multiply(1 / _DAMPING_RISE)

    def note_overflow(self) -> None:
        """Count a step that was skipped because products with inverses are not finite."""
        self.note_trouble("skipped_steps", "products with inverses are not finite, and the step was skipped")

    def note_trial(self, share: float, factor: float) -> None:
        """Multiply dampings by a factor, and count a step of which only a share was taken."""
        self.multiply(factor)
        if not share:
            self.events.note("rejected_steps", "the loss does not fall along a step, which was taken back")
        elif share < 1:
            text = f"the loss falls only along {share:.2g} of a step, which was shortened"
            self.events.note("shortened_steps", text)

    def state(self) -> dict[str, Any]:
        """Return everything that is saved in a checkpoint."""
        in_a_row = [self._troubles, self._successes, self._rises]
        return {"damping_scale": self.scale, "events": asdict(self.events), "in_a_row": in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.scale = float(state["damping_scale"])
        self.events = Events(**state["events"])
        self._troubles, self._successes, self._rises = map(int, state["in_a_row"])


class GoodStep(NamedTuple):
    """A step with finite gradients."""

    step: int
    loss: object  # return value of its closure; it is read from an accelerator only for an error message
    lr: Any
    damping: float

    @classmethod
    def of(cls, step: int, result: object, group: Mapping[str, Any], damping_scale: float) -> "GoodStep":
        """Describe a step by its number, the return value of its closure, its group and its damping."""
        loss = result.detach() if isinstance(result, Tensor) else result
        return cls(step, loss, group.get("lr"), group["damping"] * damping_scale)

    def __str__(self) -> str:
        loss = ""
        if isinstance(self.loss, (int, float)) or (isinstance(self.loss, Tensor) and self.loss.numel() == 1):
            loss = f"loss {float(self.loss):.4g}, "
        lr = "" if self.lr is None else f"lr {float(self.lr):.3g}, "
        return f"Step {self.step} was fine ({loss}{lr}damping {self.damping:.3g})."


class _PendingStep(NamedTuple):
    """A step with flags that the host has not read."""

    fine: GoodStep  # the last good step, if gradients were usable
    # In this order: gradients usable, gradients finite, step taken, and, if there were new factors, factors added.
    flags: Message


@dataclass(eq=False)
class PendingChecks:
    """The last good step, and the steps after it: how many were skipped, and flags that are still on the device.

    It is not saved: a resumed run starts to count again.
    """

    damping: DampingPolicy
    last: GoodStep | None = None  # `None` before the first one
    skipped: int = 0  # number of steps that were skipped since
    _unchecked: bool = False  # whether a step was skipped since the last check
    _steps: list[_PendingStep] = field(default_factory=list)

    def add(self, fine: GoodStep, flags: list[Tensor]) -> None:
        """Send the flags of a step to the host.

        Args:
            fine: Describes the step.
            flags: Whether gradients are finite and of a usual size, whether they are finite, whether the step was
                taken, and, if there were new factors, whether they were added.
        """
        self._steps.append(_PendingStep(fine, Message(torch.stack(flags))))
        if len(self._steps) >= _MOST:
            self._read(len(self._steps) - _LEFT)

    def read_all(self) -> None:
        """Read all flags."""
        self._read(len(self._steps))

    def forget(self) -> None:
        """Discard all flags, after another state was loaded."""
        self._steps.clear()

    def _read(self, count: int) -> None:
        """Read the flags of the oldest steps."""
        steps = self._steps[:count]
        del self._steps[:count]
        for one in steps:
            good, finite, taken, *added = one.flags.read()
            if good:
                self.note_good(one.fine)
            else:
                self.note_skipped(finite)
            if added and good:
                self.damping.note_added(added[0])
            if good and not taken:
                self.damping.note_overflow()

    def note_good(self, fine: GoodStep) -> None:
        """Record a good step."""
        self.skipped = 0
        self.last = fine

    def note_skipped(self, finite: bool) -> None:
        """Count a step that was skipped: its loss or gradients are not finite, or its gradients are far too large."""
        if finite:
            text = "gradients are absurdly larger than all before, and the step was skipped"
            self.damping.events.note("refused_gradients", text)
            return
        self.damping.note_trouble("skipped_steps", "the loss or gradients are not finite, and the step was skipped")
        self.skipped += 1
        self._unchecked = True

    def check(self, params: Mapping[str, Tensor]) -> None:
        """If steps were skipped since the last check, raise if later steps cannot succeed.

        Raises:
            SolverError: If parameters are not finite, or if very many steps in a row were skipped.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        finite = numbers([whole(p.isfinite()).all() for p in params.values()])
        broken = [name for name, is_finite in zip(params, finite, strict=True) if not is_finite]
        if not broken and self.skipped < _MOST_SKIPPED * self.damping.patience:
            return
        what = f"{self.skipped} steps in a row had gradients or losses that are not finite"
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            what = f"parameter {broken[0]!r}{more} is not finite"
        last = self.last or "No step was fine before: check the data, and the initialization of parameters."
        raise SolverError(
            f"The run has diverged: {what}. {last}",
            "Go back to an earlier checkpoint, and use a smaller lr, warm-up, a larger damping or a smaller trust.",
        )


@dataclass(eq=False)
class UsualSizes:
    """The largest sizes so far of gradients or factors, to refuse sizes that are far larger.

    A single gradient that is far too large, because of a broken batch or a flipped bit, would dominate the average over
    gradients, and so all steps, until momentum has forgotten it: for 130 steps, if it is a million times too large. An
    input that is far too large dominates a factor even longer. Sizes that recur are accepted, because the usual size
    has grown. The first size cannot be compared: it is accepted, and decays fast if later ones are far smaller. All
    decisions are made on the device of the sizes, without synchronization.
    """

    limit: float  # Sizes that are larger than this many times the largest so far are refused.
    patience: int  # After this many refusals, with hardly any usual size in between, every size is accepted.
    _refusals: Tensor | float = 0.0
    # Upper bounds of sizes: `limit` times the largest so far, which decay slowly; NaN if only zeros are known.
    _names: tuple[str, ...] = ()  # names that were compared last
    _most: Tensor | None = None  # bounds for these names
    _others: dict[str, Tensor | float] = field(default_factory=dict)  # bounds for other names

    def check(
        self, names: tuple[str, ...], sizes: Tensor, usable: Tensor | None = None, learn: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compare sizes with earlier ones.

        Args:
            names: Names of the tensors that were measured.
            sizes: New sizes, `[n]`; with several processes, the largest of all, which are the same everywhere.
            usable: A flag that is the same on all ranks. If it is false, the tensors are not used for other reasons,
                and their sizes do not count.
            learn: Whether to compare later sizes with these, too. It takes some more operations.

        Returns:
            Whether all sizes are finite, and whether they are finite and accepted.
        """
        refusals = _as_tensor(self._refusals, sizes)
        most = self._most_of(names, sizes)
        # A comparison with NaN is false: sizes without a bound are accepted.
        absurd = ((sizes > most) & (refusals < self.patience - 0.5)).any()
        finite = sizes.isfinite().all()
        good = finite & ~absurd
        refused = finite & absurd
        forgotten = (refusals - _FORGOTTEN * good).clamp(min=0)
        self._refusals = forgotten + (refused if usable is None else refused & usable)
        if learn:
            counts = good if usable is None else good & usable
            new = torch.where(counts & (sizes > 0), self.limit * sizes, torch.nan)
            left = torch.where(_FAR_SMALLER * new < most, _LEFT_OF_SPIKE * most, _LEFT_OF_SIZE * most)
            self._most = torch.fmax(left, new)
        return finite, good

    def _most_of(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        """Return upper bounds of sizes, `[n]`."""
        if self._most is None or self._names != names:
            self._others |= self._known()
            self._names = names
            self._most = torch.stack([_as_tensor(self._others.get(name, torch.nan), like) for name in names])
        return self._most

    def _known(self) -> dict[str, Tensor]:
        return {} if self._most is None else dict(zip(self._names, self._most.unbind(), strict=True))

    def state(self) -> dict[str, Any]:
        """Return bounds and refusals for a checkpoint. This synchronizes with the device."""
        found = {**self._others, **self._known(), "": self._refusals}
        values = dict(zip(found, numbers([torch.as_tensor(one) for one in found.values()]), strict=True))
        refusals = values.pop("")
        return {"most": {name: most for name, most in values.items() if isfinite(most)}, "refusals": refusals}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._most = None
        self._others = dict(state["most"])
        self._refusals = float(state["refusals"])


def _as_tensor(size: Tensor | float, like: Tensor) -> Tensor:
    """Return a size as a scalar tensor."""
    return size.to(like) if isinstance(size, Tensor) else torch.full((), size, dtype=like.dtype, device=like.device)
