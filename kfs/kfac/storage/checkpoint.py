"""Checkpoints: how often sums are written, and what a pass over the data has counted. `journal` writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from torch import Tensor

from kfs.distributed import Ranks
from kfs.errors import LostRankError, StorageError
from kfs.kfac.capture import Audit
from kfs.waiting import number


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often intermediate results are written.

    Attributes:
        path: The file. `EKFAC` writes a second one, with `.eigenvalues` appended to its name.
        batches: Write whenever this many batches were added.
        minutes: Write after the first batch that ends this many minutes after the last writing. If neither is given,
            five minutes.

    Example:
        >>> Checkpoint("run.kfac", batches=100)
        Checkpoint(path='run.kfac', batches=100, minutes=None)
    """

    path: str | Path
    batches: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that are not positive."""
        for name in ("batches", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise StorageError(f"{name} is {value!r}.", "Use a positive number.")


@contextmanager
def naming(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Let the error about a process that has ended name the checkpoint that others can continue from."""
    try:
        yield
    except LostRankError as error:
        way_out = error.way_out
        if checkpoint is not None:
            way_out = (
                "Start the program again, with any number of processes: it continues from the checkpoint "
                f"{checkpoint.path}."
            )
        raise LostRankError(error.cause, way_out) from error


@dataclass
class Progress:
    """What a pass over the data has counted.

    Attributes:
        batches: Number of batches.
        num_data: Number of data.
        count: What a mean over the targets divides by, up to the last time that somebody asked for it.
        counted: What it has to be increased by since then; a tensor if only a device knows it.
        unexplained: `(parameter, why)` of uses that no rule explains.
        reached: Parameters that predictions depend on.
        audit: What was checked on a few data.
    """

    batches: int = 0
    num_data: int = 0
    count: float = 0.0
    unexplained: set[tuple[str, str]] = field(default_factory=set)
    audit: Audit | None = None
    counted: float | Tensor = 0
    reached: set[str] = field(default_factory=set)

    def settle(self) -> None:
        """Ask the device for what only it knows."""
        self.count += number(self.counted)
        self.counted = 0

    def add(self, other: "Progress") -> None:
        """Add what was counted for other data."""
        self.batches += other.batches
        self.num_data += other.num_data
        self.count += other.count
        self.unexplained |= other.unexplained
        self.reached |= other.reached

    def add_up(self, ranks: Ranks) -> None:
        """Replace all of it by that of all ranks together, after the last batch."""
        mine = (self.batches, self.num_data, self.count, self.unexplained, self.audit, self.reached)
        found = ranks.gather("progress", mine)
        self.batches = sum(one[0] for one in found)
        self.num_data = sum(one[1] for one in found)
        self.count = float(sum(one[2] for one in found))
        self.unexplained = set().union(*(one[3] for one in found))
        self.reached = set().union(*(one[5] for one in found))
        audits = [one[4] for one in found if one[4] is not None]  # ranks without data have none
        self.audit = reduce(Audit.merged, audits) if audits else None

    def state(self) -> dict[str, Any]:
        """Return what has to be known to continue, for a file."""
        self.settle()
        return {
            "batches": self.batches,
            "num_data": self.num_data,
            "count": self.count,
            "unexplained": sorted(self.unexplained),
            "reached": sorted(self.reached),
        }

    @classmethod
    def from_state(cls, state: Any) -> "Progress":
        """Undo `state`."""
        unexplained = {(str(name), str(why)) for name, why in state["unexplained"]}
        reached = set(map(str, state["reached"]))
        counts = int(state["batches"]), int(state["num_data"]), float(state["count"])
        return cls(*counts, unexplained, reached=reached)
