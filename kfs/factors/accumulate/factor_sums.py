"""Sums for Kronecker factors, over the inputs and gradients of every use.

With `expand`, inputs are added in the forward pass, and gradients as soon as they are computed. With `reduce`, the sums
over the shared positions of all uses of a parameter are collected for one batch, and added when they are complete.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.errors import DataError, ModelError
from kfs.factors.accumulate.across_ranks import agreed_blocks, choose_owners, keep_own
from kfs.factors.accumulate.block_sums import BlockSums, RoleCounts, RoleSums, read_counts
from kfs.factors.accumulate.inputs import Vectors
from kfs.factors.accumulate.outer_products import OuterProductSum, check_products, full_precision
from kfs.factors.accumulate.statistic import (
    Adder,
    Place,
    PlannedUse,
    Statistic,
    Total,
    ignore,
    without_inputs,
)
from kfs.factors.layout import Key, Side
from kfs.factors.rows.row_map import Receiver, RowMap, StridedRows
from kfs.factors.settings import Settings
from kfs.runtime import sync
from kfs.runtime.memory import beyond_memory
from kfs.runtime.precision import at_least_float32

# Dense factors with fewer numbers than this always fit.
_MANY = 2**26
_MAX_DIM = 8192  # is suggested if a factor does not fit


class FactorSums(Statistic):
    """Sums of outer products of inputs and gradients, for all blocks.

    Args:
        settings: Settings of the computation.
        dry: Whether to find blocks only, without computing sums.
        chosen: Names of the blocks to compute. By default, all are computed.
        owners: The owner rank of each block, as far as known.

    Attributes:
        blocks: The blocks by key.
        left_out: Blocks that were not chosen, without sums.
        owners: The owner rank of each block, by name; empty if all ranks have all blocks.
    """

    counts_rows = True

    def __init__(
        self,
        settings: Settings,
        dry: bool = False,
        chosen: Collection[str] | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.dry = dry
        self.chosen = chosen
        self.owners: dict[str, int] = dict(owners or {})
        self.left_out: dict[Key, BlockSums] = {}
        self.needs_rows = settings.sharing != "expand" and not dry
        self.blocks: dict[Key, BlockSums] = {}
        # `(parameter, operation)` of uses that contradict other uses of the parameter.
        self.conflicts: set[tuple[str, str]] = set()
        self._collected: dict[tuple[Key, Side], _Collected] = {}

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder for the uses of a plan. The first use of a block decides how it is stored."""
        layout = plan.layout
        is_chosen = self.chosen is None or layout.name in self.chosen
        blocks = self.blocks if is_chosen else self.left_out
        # Create block and role at their first use. Sums of blocks that were not chosen are on the meta device.
        if layout.key not in blocks:
            forward_only = self.settings.fisher == "forward-only"
            sharing = self.settings.sharing_of(layout.weight)
            blocks[layout.key] = BlockSums(layout, sharing, forward_only)
        block = blocks[layout.key]
        block.operations.add(plan.operation)
        if plan.side not in block.roles:
            block.roles[plan.side] = self._new_role(block, plan, dry=self.dry or not is_chosen)
        role = block.roles[plan.side]
        wide = self.settings.is_diagonal(role.input.size)
        if role.input.diagonal and not plan.inputs.sparse and not wide:
            # The first use had unit vectors, so the factor was created diagonal. It cannot store dense inputs.
            self.conflicts.add((layout.weight, plan.operation))
        if not is_chosen:
            return without_inputs(ignore)
        if self.dry:
            return without_inputs(role.count)
        if block.sharing == "expand":
            return _Expand(plan, role, block.forward_only).add
        return _Reduce(plan, role, block.forward_only, self._collected).add

    def note_conflict(self, plan: PlannedUse) -> None:
        """Record a use that contradicts other uses of its parameter."""
        self.conflicts.add((plan.layout.weight, plan.operation))

    def finish_forward(self) -> None:
        """Add each example's sum of inputs."""
        for collected in self._collected.values():
            with full_precision(collected.inputs.device.type):
                total = collected.role.input.on(collected.inputs.device)
                total.add_whole(collected.inputs)
                collected.role.input.merge_in(total)
            # Examples that do not use the parameter do not count.
            if collected.all_used:
                collected.role.add_count("counted", len(collected.inputs))
            else:
                using = (collected.counts > 0).sum()
                collected.role.add_count("counted", using if sync.is_asynchronous(using.device) else float(using))
            if self.settings.fisher == "forward-only":
                collected.role.add_positions(collected.counts)

    def finish_backward(self) -> None:
        """Add each example's average of gradients, for every column."""
        for collected in self._collected.values():
            if collected.gradients is None:
                continue
            with full_precision(collected.counts.device.type):
                averages = collected.gradients / collected.counts.clamp(min=1).unsqueeze(-1)
                total = collected.role.gradient.on(averages.device)
                total.add(averages.flatten(0, 1))
                collected.role.gradient.merge_in(total)
            collected.gradients = None

    def finish_batch(self) -> None:
        """Discard the sums of the current batch."""
        self._collected.clear()

    def tensors(self) -> dict[Place, Total]:
        """Return the sums of all blocks that this process stores, and their counts on the device."""
        found: dict[Place, Total] = {}
        for key, block in self.blocks.items():
            for side, role in sorted(block.roles.items()) if block.is_local else ():
                found[key, side, "input"] = Total(role.input.total, not role.input.diagonal)
                found[key, side, "gradient"] = Total(role.gradient.total, not role.gradient.diagonal)
                found |= {(key, side, place): Total(t) for place, t in enumerate(role.on_device)}
        return found

    def counts(self) -> dict[Place, float]:
        """Return the counts of all roles.

        On an accelerator, counts that depend on data are not included: see `read_counts`.
        """
        found: dict[Place, float] = {}
        for key, side, role in self._roles():
            for name in RoleCounts._fields:
                value = getattr(role, name)
                if not isinstance(value, Tensor):
                    found[key, side, name] = value
        return found

    def add_counts(self, more: Mapping[Place, float]) -> None:
        """Add differences of `counts`."""
        for (key, side, name), number in more.items():
            self.blocks[key].roles[side].add_count(name, number)
        for _, _, role in self._roles():
            # A replayed pass has changed the counters on the device, too.
            role.counts_are_read = not role.counters

    def read_counts(self) -> None:
        """Add the counters on the device to those on the host, synchronizing once for all blocks."""
        read_counts(role for _, _, role in self._roles())

    def agree(self, ranks: Ranks, device: torch.device) -> Mapping[Key, int]:
        """Take over the blocks and counts of all ranks. If blocks have owners, choose those of new blocks."""
        self.read_counts()
        conflicts = ranks.gather("conflicts", self.conflicts)
        where = self.settings.factor_device or device
        self.blocks, more = agreed_blocks(ranks, self.blocks, where, self.settings.products)
        self.conflicts = more.union(*conflicts)
        if self.settings.placement != "owner":
            return {}
        self.owners = choose_owners(self.blocks.values(), ranks.size, self.owners)
        return {key: self.owners[block.layout.name] for key, block in self.blocks.items()}

    def keep_own(self, rank: int) -> None:
        """Free the sums of blocks that another rank owns."""
        keep_own(self.blocks.values(), self.owners, rank)

    def complete(self, dtype: torch.dtype | None = None) -> None:
        """Complete all sums, and convert them to `dtype` if given."""
        self.read_counts()
        for block in self.blocks.values():
            block.complete(dtype)

    def state(self) -> dict[str, Any]:
        """Return all sums for a file, between two batches. If blocks have owners, these are the blocks of this rank."""
        self.read_counts()
        blocks = [block.state() for block in self.blocks.values() if block.is_local]
        return {"blocks": blocks, "conflicts": [list(conflict) for conflict in sorted(self.conflicts)]}

    def add(self, state: Any) -> None:
        """Add the result of `state`. Uses that contradict each other are recorded as conflicts."""
        self.read_counts()
        self.conflicts |= {(str(name), str(operation)) for name, operation in state["conflicts"]}
        for one in state["blocks"]:
            block = BlockSums.from_state(one, self.settings.products)
            mine = self.blocks.get(block.layout.key)
            block = block if mine is None else block.turned_to(mine.layout)
            if not self.block_map.admit(block.layout) or (mine is not None and not mine.fits(block)):
                self.conflicts |= {(block.layout.weight, operation) for operation in block.operations}
            else:
                self.blocks[block.layout.key] = block if mine is None else mine.plus(block)

    def take(self, other: "FactorSums") -> None:
        """Take over the blocks that another pass over the same data has computed."""
        self.blocks |= other.blocks
        self.conflicts |= other.conflicts
        self.owners = other.owners

    def _roles(self) -> Iterator[tuple[Key, Side, RoleSums]]:
        """Iterate over the roles of all blocks."""
        for key, block in self.blocks.items():
            for side, role in block.roles.items():
                yield key, side, role

    def _new_role(self, block: BlockSums, plan: PlannedUse, dry: bool) -> RoleSums:
        """Return empty sums for a new role of a parameter; on the meta device if nothing is to be computed."""
        layout, s = block.layout, self.settings
        rows, columns = layout.row_size, layout.column_size
        input_size, gradient_size = (columns, rows) if plan.side == "A" else (rows, columns)
        bias = layout.bias is not None and plan.side == "A"
        dtype = s.factor_dtype or plan.dtype
        check_products(s.products, at_least_float32(dtype), plan.device, layout.name)
        device = "meta" if dry else s.factor_device or plan.device
        sparse = plan.inputs.sparse or s.is_diagonal(input_size + bias)
        narrow = block.forward_only or s.is_diagonal(gradient_size)
        numbers = (0 if sparse else (input_size + bias) ** 2) + (0 if narrow else gradient_size**2)
        if numbers > _MANY and not dry:
            nbytes = numbers * layout.groups * at_least_float32(dtype).itemsize
            too_large = beyond_memory(layout.name, nbytes, torch.device(device))
            if too_large:
                raise ModelError(
                    f"{too_large} Nothing was allocated.",
                    f"Pass max_dim={min(_MAX_DIM, max(input_size, gradient_size) // 2)}, so that wider factors keep "
                    "their diagonal only, or leave the parameter out with params=.",
                )
        return RoleSums(
            OuterProductSum.zeros(input_size, layout.groups, sparse, bias, dtype, device, s.products),
            OuterProductSum.zeros(gradient_size, layout.groups, narrow, False, dtype, device, s.products),
        )


class _Expand:
    """Adds uses of one plan; treats shared positions as separate examples (`expand`)."""

    def __init__(self, plan: PlannedUse, role: RoleSums, forward_only: bool) -> None:
        self.inputs = plan.inputs
        self.are_vectors = isinstance(plan.inputs, Vectors)
        self.ones = plan.ones
        self.narrow = None if role.gradient.products == "float32" else plan.narrow
        self.device = plan.device
        self.role = role
        self.is_local = role.input.device == plan.device  # sums may be on another device than the model
        self.forward_only = forward_only

    def add(self, x: Tensor | None, row_map: RowMap | None) -> Receiver:
        total = self.role.input if self.is_local else self.role.input.on(self.device)
        counted = None if row_map is None else row_map.counted
        if counted is not None:
            self.role.add_count("counted", self.inputs.add_counted(total, x, self.ones, counted))  # type: ignore[arg-type]
        elif self.are_vectors:  # shortcut for the most common case
            self.role.counted += total.add(x, self.ones)  # type: ignore[arg-type]
        else:
            self.role.add_count("counted", self.inputs.add_to(total, x, self.ones))  # type: ignore[arg-type]
        if not self.is_local:  # pragma: no cover (tested on a GPU)
            self.role.input.merge_in(total)
        # A bound method that is an attribute would be a cycle, which keeps the sums until a garbage collection.
        return ignore if self.forward_only else self.add_gradients

    def add_gradients(self, g: Tensor) -> None:
        if self.narrow is not None and g.dtype == torch.float32:
            g = g.to(self.narrow)  # the precision in which autocast multiplies
        total = self.role.gradient if self.is_local else self.role.gradient.on(self.device)
        total.add(g.flatten(0, -3) if g.ndim > 3 else g.flatten(0, -2))
        if not self.is_local:  # pragma: no cover (tested on a GPU)
            self.role.gradient.merge_in(total)


@dataclass
class _Collected:
    """Sums over the shared positions of all uses of a parameter in one batch, in one role."""

    role: RoleSums  # the sums that they are added to
    inputs: Tensor  # [batch, groups, d]
    counts: Tensor  # number of positions, [batch]
    all_used: bool  # whether every example has positions
    gradients: Tensor | None = None  # [columns, batch, groups * d]


@dataclass
class _Reduce:
    """Adds uses of one plan; sums over the shared positions of each example first (`reduce`)."""

    plan: PlannedUse
    role: RoleSums
    forward_only: bool
    collected: dict[tuple[Key, Side], _Collected]

    def __post_init__(self) -> None:
        self.key = (self.plan.layout.key, self.plan.side)

    def add(self, x: Tensor | None, row_map: RowMap | None) -> Receiver:
        assert row_map is not None  # noqa: S101 (statistics with `needs_rows` always get a row map)
        if not row_map.complete:
            raise DataError(
                f"Some inputs of {self.plan.operation} (block {self.plan.layout.name!r}) have no gradient, and the "
                "order of the others does not say to which example they belong.",
                "Use sharing='expand' for it, which does not need to know: sharing={name: 'expand', ...}.",
            )
        # Sum inputs over positions; the bias coordinate of the sum is the number of positions.
        inputs, counts = self.plan.inputs.sums(x, row_map)  # type: ignore[arg-type]
        self.role.add_count("positions", self._number(x, row_map.counted))
        if self.role.input.bias:
            last = counts if self.plan.ones else torch.zeros_like(counts)
            last = last.reshape(-1, 1, 1).expand(*inputs.shape[:2], 1)
            inputs = torch.cat([inputs, last], dim=2)
        # If rows are in a regular order and all count, all examples have the same number of positions.
        all_count = row_map.counted is None and self.plan.inputs.not_padding(x) is None
        all_used = isinstance(row_map, StridedRows) and all_count and prod(self.plan.inputs.leading(x)) > 0
        # A parameter may have several uses in a batch; their sums are added.
        before = self.collected.get(self.key)
        if before is None:
            self.collected[self.key] = _Collected(self.role, inputs, counts, all_used)
        else:
            before.inputs = before.inputs + inputs
            before.counts = before.counts + counts
            before.all_used = before.all_used or all_used
        if self.forward_only:
            return ignore
        leading = len(self.plan.inputs.leading(x))
        return lambda g: self.add_gradients(g, row_map, leading)

    def _number(self, x: Tensor | None, counted: Tensor | None) -> float | Tensor:
        """Return the number of positions that count; a tensor if reading it would synchronize with the device."""
        if counted is None:
            return self.plan.inputs.positions(x)
        number = counted.sum()
        return number if sync.is_asynchronous(number.device) else float(number)

    def add_gradients(self, g: Tensor, row_map: RowMap, leading: int) -> None:
        """Add gradients `[columns, *leading, ..., features]` to each example's sum."""
        dtype = at_least_float32(g.dtype)
        by_datum = (row_map.by_datum(column, trailing=column.ndim - leading) for column in g)
        columns = [one.flatten(1, -2).sum(1, dtype=dtype) for one in by_datum]
        collected = self.collected[self.key]
        sums = torch.stack(columns)
        collected.gradients = sums if collected.gradients is None else collected.gradients + sums
