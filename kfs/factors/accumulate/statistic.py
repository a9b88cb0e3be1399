"""Statistics accumulate the uses of tracked parameters in a pass. They have one additive state.

The state of a `Statistic` is a sum over data: its `tensors()`, and its `counts()` on the host. The operations on any
such sum exist once: `reset` sets it to zero, `add_up_over_ranks` adds it up over processes, `Statistic.state` and
`Statistic.add` are for files, and `Statistic.add_counts` for replay.

Which blocks there are, and how they are stored, is not additive. A statistic whose blocks are found in the data, such
as `FactorSums`, decides in `agree` and `add` which blocks of others it takes over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kfs.distributed import Ranks, add_up, add_up_at
from kfs.distributed.collectives import fill_lower_triangle, upper_triangle
from kfs.factors.accumulate.inputs import Inputs
from kfs.factors.layout import BlockMap, Key, Layout, Side
from kfs.factors.rows.row_map import Receiver, RowMap

# Adds the inputs of a use of one plan, and returns the callback for its gradients. The row map is `None` if nothing
# needs it.
Adder = Callable[[Any, RowMap | None], Receiver]
# The key of a block, and what the sum is.
Place = tuple[Any, ...]


class PlannedUse(Protocol):
    """The part of a plan that statistics read."""

    operation: str  # name of the operation, as the user calls it
    layout: Layout  # the block that the parameters belong to
    side: Side  # the side of the block that inputs belong to
    inputs: Inputs
    ones: bool  # whether the bias of the block was used
    narrow: torch.dtype | None  # the precision in which `autocast` multiplies, if it is on
    dtype: torch.dtype  # dtype of the operation's output
    device: torch.device  # device of the operation's output


def in_block(plan: PlannedUse, gradients: Tensor) -> Tensor:
    """Return gradients of a use as matrices of its block, `[n, groups, d_B, d_A]`."""
    gradients = gradients.transpose(-2, -1) if plan.side == "B" else gradients
    unused = plan.layout.matrix_shape[2] - gradients.shape[-1]  # one, for a bias that was not used
    return torch.nn.functional.pad(gradients, (0, unused)) if unused else gradients


class Total(NamedTuple):
    """A tensor that is a sum over data, and is changed in place."""

    tensor: Tensor
    symmetric: bool = False  # whether it has matrices `[..., D, D]` whose upper triangle is enough


def ignore(g: Tensor) -> None:
    """Ignore gradients: a `Receiver` that does nothing."""


def add_nothing(_: Any, __: RowMap | None) -> Receiver:
    """Add neither inputs nor gradients: an `Adder`."""
    return ignore


def all_of(adders: Sequence[Adder]) -> Adder:
    """Return the adder that calls several adders."""

    def add(x: Any, row_map: RowMap | None) -> Receiver:
        receivers = [adder(x, row_map) for adder in adders]

        def receive(g: Tensor) -> None:
            for one in receivers:
                one(g)

        return receive

    return add


class Statistic(ABC):
    """A sum over data that passes accumulate from the uses of tracked parameters.

    Its constructor takes the layouts of blocks that are known before the first pass.

    Attributes:
        needs_rows: Whether any use needs the example that each row belongs to.
        counts_rows: Whether rows that do not count must be excluded. Sums over gradients alone need not exclude them,
            because such rows have no gradients.
        adders: The adder of each known plan.
        conflicts: `(parameter, operation)` of uses that contradict other uses of the parameter, or known blocks.
    """

    needs_rows: bool = False
    counts_rows: bool = False

    def __init__(self, layouts: Iterable[Layout] = ()) -> None:
        self.adders: dict[Any, Adder] = {}
        self.conflicts: set[tuple[str, str]] = set()
        self.block_map = BlockMap(layouts)

    @abstractmethod
    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder for the uses of a plan; called once per plan."""

    def note_conflict(self, plan: PlannedUse) -> None:
        """Record a use that contradicts other uses of its parameter."""
        self.conflicts.add((plan.layout.weight, plan.operation))

    def finish_forward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add the sums that are complete only after a batch's forward pass."""

    def finish_backward(self) -> None:  # noqa: B027 (most have nothing to do)
        """Add the sums that are complete only after a backward pass."""

    def finish_batch(self) -> None:  # noqa: B027 (most have nothing to do)
        """Discard the state of the current batch."""

    def tensors(self) -> dict[Place, Total]:
        """Return all tensors that are sums over data. A pass changes them in place."""
        return {}

    def counts(self) -> dict[Place, float]:
        """Return all numbers on the host that are sums over data.

        Replaying a recorded pass on an accelerator changes tensors without running Python. The counts are then updated
        by `add_counts`, with the differences that the recorded pass has made. These are the same for all batches of one
        shape.
        """
        return {}

    def add_counts(self, more: Mapping[Place, float]) -> None:  # noqa: B027 (most have no counts)
        """Add differences of `counts`. Negative ones undo a pass that was only recorded."""

    def agree(self, ranks: Ranks, device: torch.device) -> Mapping[Key, int]:
        """Agree with other ranks on blocks and counts, after the last batch: both are those of all ranks then.

        Here, all ranks have the same blocks, and counts are added up.

        Args:
            ranks: The ranks that have sums of the same blocks, or of some of them.
            device: Device of the model, for sums of blocks that only other ranks have.

        Returns:
            The rank that keeps the sums of each block; nothing if all ranks keep all sums.
        """
        mine = self.counts()
        every = ranks.gather("counts", mine)
        self.add_counts({place: sum(one[place] for one in every) - number for place, number in mine.items()})
        return {}

    def keep_own(self, rank: int) -> None:  # noqa: B027 (most have no owners)
        """Discard the sums of blocks that another rank owns."""

    def state(self) -> dict[str, Any]:
        """Return all sums, between two batches, as the content of a file."""
        totals = [[repr(place), total.tensor] for place, total in self.tensors().items()]
        return {"totals": totals, "counts": {repr(place): number for place, number in self.counts().items()}}

    def add(self, state: Any) -> None:
        """Add the result of `state`: to zeros, or to sums over other data."""
        totals = {repr(place): total.tensor for place, total in self.tensors().items()}
        for place, tensor in state["totals"]:
            totals[place].add_(tensor.to(totals[place].device))
        self.add_counts({place: state["counts"][repr(place)] for place in self.counts()})


def reset(statistic: Statistic) -> None:
    """Set all sums over data to zero, in place."""
    tensors = [total.tensor for total in statistic.tensors().values()]
    if tensors:
        torch._foreach_zero_(tensors)
    statistic.add_counts({place: -number for place, number in statistic.counts().items()})


def add_up_over_ranks(ranks: Ranks, statistic: Statistic, device: torch.device) -> None:
    """Replace all sums by the sums over all ranks, after the last batch. Arguments are those of `Statistic.agree`."""
    owners = statistic.agree(ranks, device)
    totals = statistic.tensors()
    if not owners:
        add_up_totals(ranks, list(totals.values()))
        return
    for owner in sorted(set(owners.values())):
        add_up_totals(ranks, [total for place, total in totals.items() if owners[place[0]] == owner], owner)
    statistic.keep_own(ranks.rank)


def add_up_totals(ranks: Ranks, totals: Sequence[Total], owner: int | None = None) -> None:
    """Add up sums that all ranks have, in place: on all ranks, or only on the owner."""
    if owner is None:
        add_up(ranks, "sums", _parts(totals))
    else:
        add_up_at(ranks, owner, _parts(totals))
    for tensor, symmetric in totals:
        if symmetric and owner in {None, ranks.rank}:
            fill_lower_triangle(tensor)


def _parts(totals: Iterable[Total]) -> Iterator[Tensor]:
    """Yield all parts that are sent; of symmetric matrices, the upper triangle."""
    for tensor, symmetric in totals:
        yield from upper_triangle(tensor) if symmetric else [tensor]
