"""Per-datum gradients that are kept, by rows, until somebody takes them: after every batch.

If several columns are sent back, each gives gradients of its own. The inputs of a use are the same for all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.layout import Key, Layout
from kfs.kfac.sums.inputs import Rows, Use
from kfs.kfac.sums.interface import Adder, Ignore, PlannedUse, Receiver, Sums
from kfs.kfac.sums.owners import Owners, Regular
from kfs.kfac.sums.row_products import RowProducts
from kfs.kfac.sums.row_vectors import PlainVectors
from kfs.nested import mapped
from kfs.precision import at_least_float32


class KeptGradients(Sums):
    """Keeps the gradients of every datum of a batch, by block.

    Args:
        layouts: Blocks that are known. If there are any, uses of parameters in another way are not kept, but noted.

    Attributes:
        layouts: The blocks that are known, or were found.
        conflicts: `(parameter, operation)` of uses that do not fit together with other uses, or with known blocks.
    """

    by_datum = True

    def __init__(self, layouts: Mapping[Key, Layout] | None = None) -> None:
        known = layouts or {}
        super().__init__(known.values())
        self.layouts: dict[Key, Layout] = dict(known)
        self.conflicts: set[tuple[str, str]] = set()
        self._fixed = bool(known)
        self._columns: list[dict[Key, list[Captured]]] = []

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return what keeps the gradients of a plan's uses."""
        key = plan.layout.key
        if self._fixed and self.layouts.get(key) != plan.layout:
            self.note_conflict(plan)
            return Ignore()
        self.layouts.setdefault(key, plan.layout)
        return _Keep(plan, self._columns)

    def note_conflict(self, plan: PlannedUse) -> None:
        """Take note of a use that does not fit together with other uses of its parameter."""
        self.conflicts.add((plan.layout.weight, plan.operation))

    def take(self) -> "list[dict[Key, list[Captured]]]":
        """Return the gradients of all uses in the last batch, for each column by block, and forget them.

        If no parameter was used, there are no columns.
        """
        columns = list(self._columns)
        self._columns.clear()
        return columns

    def state(self) -> dict[str, Any]:
        """Return nothing: these are not sums over data."""
        return {}

    def restore(self, state: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Captured:
    """The gradients that one use gives to a parameter.

    Attributes:
        plan: What is known about the use.
        use: The inputs.
        gradient: What came back to it, `[*leading, groups * d_B]`.
    """

    plan: PlannedUse
    use: Use
    gradient: Tensor

    @property
    def shared(self) -> int:
        """Number of rows of each datum."""
        return self.plan.inputs.shared(self.use)

    @property
    def units(self) -> tuple[bool, bool]:
        """Whether vectors are unit vectors, on the input side and on the gradient side of the block."""
        unit = self.plan.inputs.unit
        return (False, unit) if self.plan.side == "B" else (unit, False)

    @property
    def work(self) -> tuple[int, int]:
        """How many multiplications an inner product takes on each side; on both together with groups."""
        groups, rows, columns = self.plan.layout.matrix_shape
        on_inputs, on_gradients = self.units
        return 1 if on_inputs else groups * columns, 1 if on_gradients else groups * rows

    @cached_property
    def rows(self) -> RowProducts:
        """Vectors of all rows, as the block has them."""
        return self._as_in_block(self.plan.inputs.rows(self.use, self.gradient))

    def by_place(self) -> RowProducts:
        """Return the rows where places at which inputs are the same have rows of their own."""
        return self._as_in_block(self.plan.inputs.rows(self.use, self.gradient, by_place=True))

    @property
    def in_order(self) -> bool:
        """Whether rows of a datum are in the order of the activation, and all data have as many."""
        return isinstance(self.use.owners, Regular)

    @property
    def places(self) -> int:
        """At how many places of each datum a parameter was broadcast; zero if that did not happen."""
        if not isinstance(self.plan.inputs, Rows):
            return 0
        return self.plan.inputs.places // self.use.owners.num_data

    def matrices(self) -> Iterator[Tensor]:
        """Form matrices, `[some data, groups, d_B, d_A]`, of a few data at a time."""
        # Products of numbers in half precision would be rounded to half precision.
        wide = at_least_float32(self.gradient.dtype)
        x = mapped(self.use.x, lambda t: t.to(wide) if t.is_floating_point() else t)
        for part in replace(self.use, x=x, cache={}).gradients(self.gradient.to(wide)):
            part = part.transpose(2, 3) if self.plan.side == "B" else part  # noqa: PLW2901
            unused = self.plan.layout.matrix_shape[2] - part.shape[3]
            yield torch.nn.functional.pad(part, (0, unused)) if unused else part

    def _as_in_block(self, rows: RowProducts) -> RowProducts:
        """Exchange the sides where inputs are on that of gradients, and let a bias that was not used have zeros."""
        if self.plan.side == "B":
            return RowProducts(rows.g, rows.x)
        if isinstance(rows.x, PlainVectors) and rows.x.size < self.plan.layout.matrix_shape[2]:
            return replace(rows, x=replace(rows.x, last=0.0))
        return rows


@dataclass
class _Keep(Adder):
    """Keeps the uses of one plan."""

    plan: PlannedUse
    columns: list[dict[Key, list[Captured]]]

    def add(self, x: Any, owners: Owners | None = None) -> Receiver:
        assert owners is not None  # noqa: S101 (it says that it needs them)
        # What is kept must not hold the graph of the pass.
        use = Use(self.plan.inputs, mapped(x, Tensor.detach), owners, self.plan.ones)

        received = 0

        def receive(g: Tensor) -> None:
            # Backward passes come one after the other, each with some of the columns.
            nonlocal received
            for gradient in g:
                if received == len(self.columns):
                    self.columns.append({})
                kept = self.columns[received].setdefault(self.plan.layout.key, [])
                kept.append(Captured(self.plan, use, gradient.detach()))
                received += 1

        return receive
