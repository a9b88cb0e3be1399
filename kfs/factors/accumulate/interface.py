"""What all sums over uses offer: `FactorSums` for Kronecker factors, `PerDatumSums` for statistics of gradients."""

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

# Takes the gradients of some columns, [columns, *leading, features].
Receiver = Callable[[Tensor], None]


class PlannedUse(Protocol):
    """What sums need to know of a plan."""

    operation: str  # what the user calls the operation
    layout: Layout  # the block that the parameters belong to
    side: Side  # on which side of the block inputs are
    inputs: Inputs
    ones: bool  # whether the bias of the block was used
    narrow: torch.dtype | None  # the precision in which `autocast` multiplies, if it is on
    dtype: torch.dtype  # that of the operation's output
    device: torch.device  # that of the operation's output


class Adder(ABC):
    """Adds the uses of one plan to sums. Owners may be `None` if sums are not `by_datum`."""

    @abstractmethod
    def add(self, x: Tensor | None, row_map: RowMap | None = None) -> Receiver:
        """Add the inputs of a use, and return what takes its gradients."""


class Ignore(Adder):
    """Adds nothing."""

    def add(self, x: Tensor | None, row_map: RowMap | None = None) -> Receiver:
        """Return what ignores gradients."""
        return ignore


def ignore(g: Tensor) -> None:
    """Take gradients, and do nothing."""


class Sums(ABC):
    """Sums over the uses of tracked parameters.

    Attributes:
        by_datum: Whether it matters, for any use, which example a row belongs to.
        counts_rows: Whether it matters which rows count. Where gradients are all that is added up, it does not: others
            have none.
    """

    by_datum: bool = False
    counts_rows: bool = False

    def __init__(self, layouts: Iterable[Layout] = ()) -> None:
        self.adders: dict[Any, Adder] = {}  # what adds the uses of each plan that is known
        self.placement = BlockMap(layouts)

    @abstractmethod
    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return what adds the uses of a plan; called once for every plan."""

    def restart(self) -> None:  # noqa: B027 (most never do)
        """Forget all data, and all blocks."""

    def note_conflict(self, plan: PlannedUse) -> None:  # noqa: B027 (most have nothing to do)
        """Take note of a use that does not fit together with other uses of its parameter."""

    def finish_forward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add what had to wait for the end of a batch's forward pass."""

    def finish_backward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add what had to wait for the end of a backward pass."""

    def finish_batch(self) -> None:  # noqa: B027 (most have nothing to do)
        """Forget the batch."""

    def counts(self) -> dict[Any, float]:
        """Return all numbers on the host that a pass adds to.

        Everything else that a pass changes are tensors, in place. A pass that is replayed on an accelerator changes
        them without running any Python; so it takes `add_counts` with the differences that a recorded pass has made.
        They are the same for all batches of one shape.
        """
        return {}

    def add_counts(self, more: Mapping[Any, float]) -> None:  # noqa: B027 (most have nothing to do)
        """Add differences of `counts`, which may be negative, to take a pass back that was only recorded."""

    def add_up(self, ranks: Ranks, device: torch.device) -> None:  # noqa: B027 (most are for one process)
        """Replace all sums by those of all ranks together, after the last batch.

        Args:
            ranks: Who has sums of the same blocks, or of some of them.
            device: Device of the model, for sums of blocks that only other ranks have.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all sums, between two batches, for a file."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Undo `state`."""

    def add(self, state: Any) -> None:  # noqa: B027 (most are not kept in files)
        """Add what `state` has returned for sums over other data, after the last batch."""
