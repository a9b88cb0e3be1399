"""Interface of sums over uses: `FactorSums` for Kronecker factors, `PerDatumSums` for statistics of gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.factors.accumulate.block_sums import BlockMap
from kfs.factors.accumulate.inputs import Inputs
from kfs.factors.layout import Layout, Side
from kfs.factors.rows.row_map import RowMap

# Gradient callback: receives the gradients of some columns, [columns, *leading, features].
Receiver = Callable[[Tensor], None]


class PlannedUse(Protocol):
    """The part of a plan that sums read."""

    operation: str  # name of the operation, as the user calls it
    layout: Layout  # the block that the parameters belong to
    side: Side  # the side of the block that inputs belong to
    inputs: Inputs
    ones: bool  # whether the bias of the block was used
    narrow: torch.dtype | None  # the precision in which `autocast` multiplies, if it is on
    dtype: torch.dtype  # dtype of the operation's output
    device: torch.device  # device of the operation's output


class Adder(ABC):
    """Adds the uses of one plan to sums. The row map may be `None` unless the sums have `needs_rows`."""

    @abstractmethod
    def add(self, x: Tensor | None, row_map: RowMap | None = None) -> Receiver:
        """Add the inputs of a use, and return the callback for its gradients."""


class Ignore(Adder):
    """Adds nothing."""

    def add(self, x: Tensor | None, row_map: RowMap | None = None) -> Receiver:
        """Return a callback that ignores gradients."""
        return ignore


def ignore(g: Tensor) -> None:
    """Ignore gradients: a `Receiver` that does nothing."""


class Sums(ABC):
    """Sums over the uses of tracked parameters.

    Attributes:
        needs_rows: Whether any use needs the example that each row belongs to.
        counts_rows: Whether rows that do not count must be excluded. Sums over gradients alone need not exclude them,
            because such rows have no gradients.
    """

    needs_rows: bool = False
    counts_rows: bool = False

    def __init__(self, layouts: Iterable[Layout] = ()) -> None:
        self.adders: dict[Any, Adder] = {}  # the adder of each known plan
        self.block_map = BlockMap(layouts)

    @abstractmethod
    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder for the uses of a plan; called once per plan."""

    def restart(self) -> None:  # noqa: B027 (most never do)
        """Discard all data and all blocks."""

    def note_conflict(self, plan: PlannedUse) -> None:  # noqa: B027 (most have nothing to do)
        """Record a use that contradicts other uses of its parameter."""

    def finish_forward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add the sums that are complete only after a batch's forward pass."""

    def finish_backward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add the sums that are complete only after a backward pass."""

    def finish_batch(self) -> None:  # noqa: B027 (most have nothing to do)
        """Discard the state of the current batch."""

    def counts(self) -> dict[Any, float]:
        """Return all counters on the host that a pass increments.

        A pass changes everything else in place, in tensors. Replaying a recorded pass on an accelerator updates these
        tensors without running Python. The counters are then updated by `add_counts`, with the differences that the
        recorded pass has made. These are the same for all batches of one shape.
        """
        return {}

    def add_counts(self, more: Mapping[Any, float]) -> None:  # noqa: B027 (most have nothing to do)
        """Add differences of `counts`. Negative ones undo a pass that was only recorded."""

    def add_up(self, ranks: Ranks, device: torch.device) -> None:  # noqa: B027 (most are for one process)
        """Replace all sums by the sums over all ranks, after the last batch.

        Args:
            ranks: The ranks that have sums of the same blocks, or of some of them.
            device: Device of the model, for sums of blocks that only other ranks have.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all sums, between two batches, as the content of a file."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Load the result of `state`."""

    def add(self, state: Any) -> None:  # noqa: B027 (most are not kept in files)
        """Add sums over other data, as returned by `state`, after the last batch."""
