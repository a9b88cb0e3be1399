r"""Statistics of per-example gradients: moments accumulated right away, and gradients kept for one batch.

Algebra on rows lives in `kfs.factors.accumulate.row_products`.

Per-example gradients show how accurate factors are, and can correct them. The curvature of a block is
$C = R \sum_{n,c} \mathrm{vec}(G_{n,c})\, \mathrm{vec}(G_{n,c})^\top$. Here $G_{n,c} = \sum_s g_{n,s,c}\, x_{n,s}^\top$
is the gradient of the parameter for one backpropagated vector of one example, summed over shared positions and over all
uses of the parameter.

- `PerDatumSums` passes these gradients to a `Moment` of each block, which accumulates a sum.
- `KeptGradients` keeps them as rows until they are taken after a batch. Several columns that are sent back together
  have different gradients. The inputs of a use are the same for all of them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.errors import ModelError
from kfs.factors.accumulate.inputs import Rows, Use, add_rotated_squares
from kfs.factors.accumulate.outer_products import HALF
from kfs.factors.accumulate.row_products import PlainVectors, RowProducts
from kfs.factors.accumulate.statistic import (
    Adder,
    Place,
    PlannedUse,
    Statistic,
    Total,
    add_nothing,
    in_block,
)
from kfs.factors.layout import Key, Layout
from kfs.factors.rows.row_map import Receiver, RowMap, StridedRows
from kfs.factors.settings import Settings
from kfs.runtime.nested import mapped
from kfs.runtime.precision import at_least_float32, full_precision, tf32


class Moment(ABC):
    """A sum over functions of the per-example gradients of one block, such as their squares.

    Attributes:
        total: The sum, changed in place.
    """

    total: Tensor

    @property
    def totals(self) -> list[Tensor]:
        """All sums, if there are several."""
        return [self.total]

    @abstractmethod
    def add(self, gradients: Tensor) -> None:
        """Add gradients, `[n, groups, d_B, d_A]`."""

    def add_use(self, use: Use, g: Tensor) -> None:
        """Add the gradients of a parameter's only use in a batch, given one column `g` of gradients of its output."""
        for gradients in use.gradients(g):
            self.add(gradients)


@dataclass
class Squares(Moment):
    """Sums of squared gradients, expressed in other bases (their vectors are columns; `None`: the standard basis)."""

    total: Tensor  # [groups, d_B, d_A], changed in place
    Q_A: Tensor | None = None  # basis of the input side, [groups, d_A, d_A]
    Q_B: Tensor | None = None  # basis of the gradient side, [groups, d_B, d_B]

    def add(self, gradients: Tensor) -> None:
        """Rotate gradients to the bases, square them and add them to the total."""
        with self._on(gradients.device) as (total, Q_A, Q_B):
            add_rotated_squares(total, gradients, Q_A, Q_B)

    def add_use(self, use: Use, g: Tensor) -> None:
        """Rotate, square and add gradients, in the way that is cheapest for this kind of inputs.

        Gradients in half precision have no more digits than TF32, so a GPU may use TF32 here.
        """
        if not g.is_cuda and self.total.device == g.device:  # without contexts, which take as long as a small product
            use.inputs.add_squares(self.total, use, g, self.Q_A, self.Q_B)
            return
        with self._on(g.device) as (total, Q_A, Q_B), tf32(True if g.dtype in HALF else None):  # pragma: no cover
            use.inputs.add_squares(total, use, g, Q_A, Q_B)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Provide total and bases on the device of the gradients, and add the total back if it is stored elsewhere."""
        if self.total.device == device:  # pragma: no branch
            yield self.total, self.Q_A, self.Q_B
            return
        total = torch.zeros_like(self.total, device=device)  # pragma: no cover (tested on a GPU)
        Q_A, Q_B = (None if Q is None else Q.to(device) for Q in (self.Q_A, self.Q_B))  # pragma: no cover
        yield total, Q_A, Q_B  # pragma: no cover
        self.total += total.to(self.total.device)  # pragma: no cover


class PerDatumSums(Statistic):
    """Passes per-example gradients to the moment of their block, for blocks that are known.

    Blocks that are `left_out` are computed by another pass. If blocks have owners, a rank keeps the moments of its own.
    """

    needs_rows = True

    def __init__(
        self,
        settings: Settings,
        layouts: Mapping[Key, Layout],
        moments: Mapping[Key, Moment],
        left_out: Collection[Key] = (),
        owners: Mapping[Key, int] | None = None,
    ) -> None:
        super().__init__(layouts.values())
        self._left_out = left_out
        self._owners = owners or {}
        self._kept: Collection[Key] = moments.keys()
        self.settings = settings
        self._layouts = layouts
        self._moments = moments
        self._times_used: Counter[Key] = Counter()
        self._several_uses: dict[Key, Tensor] = {}
        self._seen: set[Key] = set()
        self._unknown: set[str] = set()

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder that passes the gradients of a plan's uses to the block's moment."""
        key = plan.layout.key
        self._seen.add(key)
        if key in self._left_out and self._layouts[key] == plan.layout:
            return add_nothing
        if key not in self._moments or self._layouts[key] != plan.layout:
            self._unknown.add(plan.layout.name)
            return add_nothing
        return _show(plan, self._moments[key], self._times_used, self._several_uses)

    def note_conflict(self, plan: PlannedUse) -> None:
        """Take note of a use that does not fit together with other uses of its parameter."""
        self._unknown.add(plan.layout.name)

    def finish_backward(self) -> None:
        """Add the gradients of parameters with several uses, which are summed by now."""
        for key, gradients in self._several_uses.items():
            with full_precision(gradients.device.type):
                self._moments[key].add(gradients)
        self._several_uses.clear()

    def finish_batch(self) -> None:
        """Forget the batch."""
        self._times_used.clear()

    def check_complete(self, resumed: bool) -> None:
        """Raise if this pass has not seen the same blocks as the first one. A resumed pass may have seen fewer."""
        unused = [self._layouts[key].name for key in self._moments if key not in self._seen]
        missing = [] if resumed else unused
        new = sorted(self._unknown) if self.settings.uncovered == "error" else []
        if missing or new:
            raise ModelError(
                f"The blocks differ from those of the factors: {missing} are not used, and {new} are new.",
                "Use the same model and parameters, and data that use all of them.",
            )

    def tensors(self) -> dict[Place, Total]:
        """Return the sums of all moments that this process keeps."""
        kept = {key: moment for key, moment in self._moments.items() if key in self._kept}
        return {(key, n): Total(t) for key, moment in kept.items() for n, t in enumerate(moment.totals)}

    def agree(self, ranks: Ranks, device: torch.device) -> Mapping[Key, int]:
        """Exchange which blocks were seen. Ranks need not have seen the same ones."""
        seen = ranks.gather("blocks of per-example gradients", (self._seen, self._unknown))
        self._seen = set().union(*(keys for keys, _ in seen))
        self._unknown = set().union(*(names for _, names in seen))
        return self._owners

    def keep_own(self, rank: int) -> None:
        """Leave out the moments of blocks that another rank owns."""
        self._kept = {key for key, owner in self._owners.items() if owner == rank}


def _show(plan: PlannedUse, moment: Moment, times_used: Counter[Key], several_uses: dict[Key, Tensor]) -> Adder:
    """Return the adder that passes gradients on if their parameter is used once in a batch, or sums them over uses."""
    key = plan.layout.key

    def add(x: Any, row_map: RowMap | None) -> Receiver:
        assert row_map is not None  # noqa: S101 (statistics with `needs_rows` always get a row map)
        use = Use(plan.inputs, x, row_map, plan.ones)
        times_used[key] += 1

        def receive(g: Tensor) -> None:
            if times_used[key] == 1 and plan.side == "A":
                for column in g:
                    moment.add_use(use, column)
                return
            gradients = in_block(plan, torch.cat([part for column in g for part in use.gradients(column)]))
            several_uses[key] = several_uses[key] + gradients if key in several_uses else gradients

        return receive

    return add


class KeptGradients(Statistic):
    """Keeps the per-example gradients of a batch, by block.

    Args:
        layouts: Known blocks. If there are any, uses that do not belong to them are not kept, but recorded as
            conflicts.

    Attributes:
        layouts: The blocks that are known, or were found.
    """

    needs_rows = True

    def __init__(self, layouts: Mapping[Key, Layout] | None = None) -> None:
        known = layouts or {}
        super().__init__(known.values())
        self.layouts: dict[Key, Layout] = dict(known)
        self._fixed = bool(known)
        self._columns: list[dict[Key, list[Captured]]] = []

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder that keeps the gradients of a plan's uses."""
        key = plan.layout.key
        if self._fixed and self.layouts.get(key) != plan.layout:
            self.note_conflict(plan)
            return add_nothing
        self.layouts.setdefault(key, plan.layout)
        return _keep(plan, self._columns)

    def take(self) -> "list[dict[Key, list[Captured]]]":
        """Return and discard the gradients of all uses in the last batch: for each column, by block.

        If no parameter was used, there are no columns.
        """
        columns = list(self._columns)
        self._columns.clear()
        return columns


@dataclass(frozen=True)
class Captured:
    """The per-example gradients of a parameter from one of its uses.

    Attributes:
        plan: The plan of the use.
        use: The inputs.
        gradient: Gradients of the operation's output, `[*leading, groups * d_B]`.
    """

    plan: PlannedUse
    use: Use
    gradient: Tensor

    @property
    def shared(self) -> int:
        """Number of rows of each example."""
        return self.plan.inputs.shared(self.use)

    @property
    def units(self) -> tuple[bool, bool]:
        """Whether vectors are unit vectors, on the input side and on the gradient side of the block."""
        unit = self.plan.inputs.unit
        return (False, unit) if self.plan.side == "B" else (unit, False)

    @property
    def work(self) -> tuple[int, int]:
        """Multiplications per inner product of rows, on the input side and on the gradient side, for all groups."""
        groups, rows, columns = self.plan.layout.matrix_shape
        on_inputs, on_gradients = self.units
        return 1 if on_inputs else groups * columns, 1 if on_gradients else groups * rows

    @cached_property
    def rows(self) -> RowProducts:
        """The vectors of all rows, on the sides of the block that they belong to."""
        return self._as_in_block(self.plan.inputs.rows(self.use, self.gradient))

    def by_place(self) -> RowProducts:
        """Return rows that are separate for all places, also if their inputs are equal."""
        return self._as_in_block(self.plan.inputs.rows(self.use, self.gradient, by_place=True))

    @property
    def in_order(self) -> bool:
        """Whether the rows of each example are in the order of the activation, and all examples have equally many."""
        return isinstance(self.use.row_map, StridedRows)

    @property
    def places(self) -> int:
        """Number of places per example to which a parameter was broadcast; zero if it was not."""
        if not isinstance(self.plan.inputs, Rows):
            return 0
        return self.plan.inputs.places // self.use.row_map.num_data

    def matrices(self) -> Iterator[Tensor]:
        """Yield the gradients as matrices, `[some examples, groups, d_B, d_A]`, a few examples at a time."""
        # In half precision, products would be rounded to half precision.
        wide = at_least_float32(self.gradient.dtype)
        x = mapped(self.use.x, lambda t: t.to(wide) if t.is_floating_point() else t)
        for part in replace(self.use, x=x, cache={}).gradients(self.gradient.to(wide)):
            yield in_block(self.plan, part)

    def _as_in_block(self, rows: RowProducts) -> RowProducts:
        """Exchange sides if inputs belong to the side `"B"`, and add zeros for a bias that was not used."""
        if self.plan.side == "B":
            return RowProducts(rows.g, rows.x)
        if isinstance(rows.x, PlainVectors) and rows.x.size < self.plan.layout.matrix_shape[2]:
            return RowProducts(PlainVectors(rows.x.values, 0.0), rows.g)
        return rows


def _keep(plan: PlannedUse, columns: list[dict[Key, list[Captured]]]) -> Adder:
    """Return the adder that keeps the uses of a plan."""

    def add(x: Any, row_map: RowMap | None) -> Receiver:
        assert row_map is not None  # noqa: S101 (statistics with `needs_rows` always get a row map)
        # Detached, because the kept tensors must not keep the graph of the pass alive.
        use = Use(plan.inputs, mapped(x, Tensor.detach), row_map, plan.ones)
        received = 0

        def receive(g: Tensor) -> None:
            # There may be several backward passes, one after the other, each for some of the columns.
            nonlocal received
            for gradient in g:
                if received == len(columns):
                    columns.append({})
                columns[received].setdefault(plan.layout.key, []).append(Captured(plan, use, gradient.detach()))
                received += 1

        return receive

    return add
