"""Sums for Kronecker factors, over the inputs and gradients of every use.

With `expand`, inputs are added in the forward pass, and gradients as soon as they are computed. With `reduce`, the sums
over the shared positions of all uses of a parameter are collected for one batch, and added when they are complete.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.errors import DataError, ModelError
from kfs.factors.accumulate.across_ranks import agreed_blocks, choose_owners, keep_own
from kfs.factors.accumulate.block_sums import BlockSums, RoleSums, merge, read_counts
from kfs.factors.accumulate.inputs import Vectors
from kfs.factors.accumulate.outer_products import OuterProductSum, check_products
from kfs.factors.accumulate.statistic import (
    Adder,
    Place,
    PlannedUse,
    Statistic,
    Total,
    add_nothing,
    ignore,
)
from kfs.factors.layout import Key, Side
from kfs.factors.rows.row_map import Receiver, RowMap, StridedRows
from kfs.factors.settings import Settings
from kfs.runtime.memory import beyond_memory
from kfs.runtime.precision import at_least_float32, full_precision

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
            self.note_conflict(plan)
        if not is_chosen:
            return add_nothing
        if self.dry:
            return lambda _, __: role.count
        if block.sharing == "expand":
            return _expand(plan, role, block.forward_only)
        return _reduce(plan, role, block.forward_only, self._collected)

    def finish_forward(self) -> None:
        """Add each example's sum of inputs."""
        for collected in self._collected.values():
            with full_precision(collected.inputs.device.type):
                total = collected.role.input.on(collected.inputs.device)
                total.add_whole(collected.inputs)
                collected.role.input.merge_in(total)
            # Examples that do not use the parameter do not count.
            using = len(collected.inputs) if collected.all_used else (collected.counts > 0).sum()
            collected.role.add_count("counted", using)
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
                on_device = role.counters | {"inverse_squares": role.inverse_squares}
                found |= {(key, side, name): Total(t) for name, t in on_device.items() if isinstance(t, Tensor)}
        return found

    def counts(self) -> dict[Place, float]:
        """Return the counts of all roles.

        On an accelerator, counts that depend on data are not included: see `read_counts`.
        """
        found: dict[Place, float] = {}
        for key, block in self.blocks.items():
            for side, role in block.roles.items():
                counts = ((name, count) for name, count in role.counts.items() if not isinstance(count, Tensor))
                found |= {(key, side, name): count for name, count in counts}
        return found

    def add_counts(self, more: Mapping[Place, float]) -> None:
        """Add differences of `counts`."""
        for (key, side, name), number in more.items():
            self.blocks[key].roles[side].add_count(name, number)
        # A replayed pass has changed the counters on the device, too.
        for block in self.blocks.values():
            for role in block.roles.values():
                role.counts_are_read = not role.counters

    def agree(self, ranks: Ranks, device: torch.device) -> Mapping[Key, int]:
        """Take over the blocks and counts of all ranks. If blocks have owners, choose those of new blocks."""
        read_counts(self.blocks.values())
        conflicts = ranks.gather("conflicts", self.conflicts)
        self.blocks, more = agreed_blocks(ranks, self.blocks, device, self.settings.products)
        self.conflicts = more.union(*conflicts)
        if self.settings.placement != "owner":
            return {}
        self.owners = choose_owners(self.blocks.values(), ranks.size, self.owners)
        return {key: self.owners[block.layout.name] for key, block in self.blocks.items()}

    def keep_own(self, rank: int) -> None:
        """Free the sums of blocks that another rank owns."""
        keep_own(self.blocks.values(), self.owners, rank)

    def complete(self, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> None:
        """Complete all sums, convert them to `dtype` and move them to a device, if these are given."""
        read_counts(self.blocks.values())
        for block in self.blocks.values():
            block.complete(dtype)
            if device is not None:
                block.to(device)

    def state(self) -> dict[str, Any]:
        """Return all sums for a file, between two batches. If blocks have owners, these are the blocks of this rank."""
        read_counts(self.blocks.values())
        blocks = [block.state() for block in self.blocks.values() if block.is_local]
        return {"blocks": blocks, "conflicts": [list(conflict) for conflict in sorted(self.conflicts)]}

    def add(self, state: Any) -> None:
        """Add the result of `state`. Uses that contradict each other are recorded as conflicts."""
        read_counts(self.blocks.values())
        self.conflicts |= {(str(name), str(operation)) for name, operation in state["conflicts"]}
        blocks = (BlockSums.from_state(one, self.settings.products) for one in state["blocks"])
        self.conflicts |= merge(self.blocks, blocks, self.block_map)

    def take(self, other: "FactorSums") -> None:
        """Take over the blocks that another pass over the same data has computed."""
        self.blocks |= other.blocks
        self.conflicts |= other.conflicts
        self.owners = other.owners

    def _new_role(self, block: BlockSums, plan: PlannedUse, dry: bool) -> RoleSums:
        """Return empty sums for a new role of a parameter; on the meta device if nothing is to be computed."""
        layout, s = block.layout, self.settings
        rows, columns = layout.row_size, layout.column_size
        input_size, gradient_size = (columns, rows) if plan.side == "A" else (rows, columns)
        bias = layout.bias is not None and plan.side == "A"
        dtype = s.factor_dtype or plan.dtype
        if s.products != "auto":
            check_products(s.products, at_least_float32(dtype), plan.device, layout.name)
        device = "meta" if dry else plan.device
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


def _expand(plan: PlannedUse, role: RoleSums, forward_only: bool) -> Adder:
    """Return the adder that treats shared positions as separate examples (`expand`)."""
    inputs, ones, device = plan.inputs, plan.ones, plan.device
    are_vectors = isinstance(inputs, Vectors)
    narrow = None if role.gradient.products == "float32" else plan.narrow
    is_local = role.input.device == device  # sums may be on another device than the model

    def add(x: Any, row_map: RowMap | None) -> Receiver:
        total = role.input if is_local else role.input.on(device)
        counted = None if row_map is None else row_map.counted
        if counted is None and are_vectors:  # shortcut for the most common case
            role.counted += total.add(x, ones)
        else:
            role.add_count("counted", inputs.add_to(total, x, ones, counted))
        if not is_local:  # pragma: no cover (tested on a GPU)
            role.input.merge_in(total)
        return ignore if forward_only else add_gradients

    def add_gradients(g: Tensor) -> None:
        if narrow is not None and g.dtype == torch.float32:
            g = g.to(narrow)  # the precision in which autocast multiplies
        total = role.gradient if is_local else role.gradient.on(device)
        total.add(g.flatten(0, -3) if g.ndim > 3 else g.flatten(0, -2))
        if not is_local:  # pragma: no cover (tested on a GPU)
            role.gradient.merge_in(total)

    return add


@dataclass
class _Collected:
    """Sums over the shared positions of all uses of a parameter in one batch, in one role."""

    role: RoleSums  # the sums that they are added to
    inputs: Tensor  # [batch, groups, d]
    counts: Tensor  # number of positions, [batch]
    all_used: bool  # whether every example has positions
    gradients: Tensor | None = None  # [columns, batch, groups * d]


def _reduce(
    plan: PlannedUse, role: RoleSums, forward_only: bool, of_batch: dict[tuple[Key, Side], _Collected]
) -> Adder:
    """Return the adder that sums over the shared positions of each example first (`reduce`)."""
    key = (plan.layout.key, plan.side)

    def add(x: Any, row_map: RowMap | None) -> Receiver:
        assert row_map is not None  # noqa: S101 (statistics with `needs_rows` always get a row map)
        if not row_map.complete:
            raise DataError(
                f"Some inputs of {plan.operation} (block {plan.layout.name!r}) have no gradient, and the "
                "order of the others does not say to which example they belong.",
                "Use sharing='expand' for it, which does not need to know: sharing={name: 'expand', ...}.",
            )
        # Sum inputs over positions; the bias coordinate of the sum is the number of positions.
        inputs, counts = plan.inputs.sums(x, row_map)
        counted = row_map.counted
        leading = plan.inputs.leading(x)
        role.add_count("positions", prod(leading) * plan.inputs.per_row if counted is None else counted.sum())
        if role.input.bias:
            last = counts if plan.ones else torch.zeros_like(counts)
            last = last.reshape(-1, 1, 1).expand(*inputs.shape[:2], 1)
            inputs = torch.cat([inputs, last], dim=2)
        # If rows are in a regular order and all count, all examples have the same number of positions.
        all_count = counted is None and plan.inputs.not_padding(x) is None
        all_used = isinstance(row_map, StridedRows) and all_count and prod(leading) > 0
        # A parameter may have several uses in a batch; their sums are added.
        collected = of_batch.get(key)
        if collected is None:
            of_batch[key] = _Collected(role, inputs, counts, all_used)
        else:
            collected.inputs = collected.inputs + inputs
            collected.counts = collected.counts + counts
            collected.all_used = collected.all_used or all_used
        return ignore if forward_only else lambda g: add_gradients(g, row_map, len(leading))

    def add_gradients(g: Tensor, row_map: RowMap, leading: int) -> None:
        """Add gradients `[columns, *leading, ..., features]` to each example's sum."""
        dtype = at_least_float32(g.dtype)
        by_datum = (row_map.by_datum(column, trailing=column.ndim - leading) for column in g)
        sums = torch.stack([one.flatten(1, -2).sum(1, dtype=dtype) for one in by_datum])
        collected = of_batch[key]
        collected.gradients = sums if collected.gradients is None else collected.gradients + sums

    return add
