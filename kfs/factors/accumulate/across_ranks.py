"""The blocks of all ranks: which ones there are, how they are stored, their counts, and who owns them.

The sums themselves are added up by `kfs.factors.accumulate.statistic`.

Ranks may have seen different blocks. First, they exchange which blocks they have, how these are stored, and their
counts on the host. A rank without data, or a rank whose data do not use an expert, starts the missing sums with zeros.
Then all sums can be sent together.

With owners, the sums of a block that another rank owns are on the meta device: sizes and counts are known, numbers are
not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.distributed.assignment import Part, eigenvalues, place
from kfs.factors.accumulate.block_sums import BlockMap, BlockSums, RoleCounts, RoleSums, read_counts, roles_for
from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.layout import Key, Layout, Side
from kfs.factors.settings import Products
from kfs.runtime.sync import numbers


def parts_of(block: BlockSums, num_data: int = 1, eigen: bool = False) -> list[Part]:
    """Return the parts of a block, given its sums, which may be on the meta device.

    Args:
        block: The sums of the block.
        num_data: Number of examples that the sums are over.
        eigen: Whether owners keep eigenvectors and corrected eigenvalues instead of inverses.
    """
    groups, rows, columns = block.layout.matrix_shape
    name = block.layout.name
    parts = []
    sides: tuple[Side, ...] = ("A", "B")
    for side in sides:
        sums = block.on_side(side)
        diagonal = tuple(one.diagonal for one in sums)
        itemsize = sums[0].total.element_size()
        positions = block.terms / len(sums) / num_data
        parts.append(Part(name, side, sums[0].size, groups, diagonal, itemsize, positions, eigen))
    return [*parts, eigenvalues(name, groups * rows * columns, itemsize)] if eigen else parts


def choose_owners(blocks: Iterable[BlockSums], ranks: int, known: Mapping[str, int]) -> dict[str, int]:
    """Return the owner rank of each block, by name; the result is the same on all ranks.

    Args:
        blocks: Sums, which may be on the meta device.
        ranks: Number of ranks.
        known: Owners that were chosen before.

    Returns:
        The owners of all blocks, including the known ones.
    """
    new = [block for block in blocks if block.layout.name not in known]
    if not new:
        return dict(known)
    # Count memory for eigenvectors and eigenvalues: EKFAC and inverses with exact damping keep them.
    parts = [part for block in new for part in parts_of(block, eigen=True)]
    placed = place(parts, ranks, divide=False).owners
    return dict(known) | {block.layout.name: placed[block.layout.name, "A"] for block in new}


def keep_own(blocks: Iterable[BlockSums], owners: Mapping[str, int], rank: int) -> None:
    """Free the sums of blocks that other ranks own."""
    for block in blocks:
        if owners[block.layout.name] != rank:
            for s in block.sums:
                s.total = s.total.to("meta")


class _Stored(NamedTuple):
    """Storage format of a sum."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    diagonal: bool
    bias: bool

    @classmethod
    def of(cls, s: OuterProductSum) -> "_Stored":
        return cls(tuple(s.total.shape), s.total.dtype, s.diagonal, s.bias)

    def zeros(self, device: torch.device | str, products: Products) -> OuterProductSum:
        size, groups = self.shape[-1] - self.bias, self.shape[0]
        return OuterProductSum.zeros(size, groups, self.diagonal, self.bias, self.dtype, device, products)


@dataclass(frozen=True)
class _Role:
    """Metadata of a role's sums, exchanged between ranks."""

    input: _Stored
    gradient: _Stored
    counts: RoleCounts


@dataclass(frozen=True)
class _Block:
    """Block metadata exchanged between ranks."""

    layout: Layout
    sharing: str
    forward_only: bool
    operations: tuple[str, ...]
    roles: dict[Side, _Role]


def agreed_blocks(
    ranks: Ranks, blocks: dict[Key, BlockSums], device: torch.device | str, products: Products
) -> tuple[dict[Key, BlockSums], set[tuple[str, str]]]:
    """Make the set of blocks equal on all ranks, with counts summed over ranks. Totals are not summed yet.

    Args:
        ranks: The participating ranks.
        blocks: The blocks of this rank.
        device: Device for sums that only other ranks have.
        products: Precision in which further vectors are multiplied.

    Returns:
        The blocks of all ranks, in the same order on each rank, and `(parameter, operation)` of the uses that
        contradict those on other ranks.
    """
    found = [block for some in ranks.gather("blocks", _described(blocks)) for block in some]
    # A rank whose first use of a parameter was on the other side has the transposed layout.
    first: dict[Key, Layout] = {}
    for one in found:
        first.setdefault(one.layout.key, one.layout)
    found = [_turned_to(first[one.layout.key], one) for one in found]
    blocks = {key: block.turned_to(first[key]) for key, block in blocks.items()}
    agreed, conflicts = _agreed(found)
    result = {key: _with_roles(blocks.get(key), block, device, products) for key, block in agreed.items()}
    for block in result.values():
        for side, role in block.roles.items():
            every = [one.roles[side].counts for one in found if one.layout == block.layout and side in one.roles]
            role.counts = reduce(RoleCounts.plus, every)
    return result, conflicts


def _described(blocks: dict[Key, BlockSums]) -> list[_Block]:
    """Return the metadata of this rank's blocks. Counts are moved to the host, for all blocks at once."""
    every = [role for block in blocks.values() for role in block.roles.values()]
    read_counts(every)
    on_device = [role for role in every if isinstance(role.inverse_squares, Tensor)]
    for role, number in zip(on_device, numbers([role.inverse_squares for role in on_device]), strict=True):  # type: ignore[misc]
        role.inverse_squares = number
    described = []
    for block in blocks.values():
        roles = {s: _Role(_Stored.of(r.input), _Stored.of(r.gradient), r.counts) for s, r in block.roles.items()}
        operations = tuple(sorted(block.operations))
        described.append(_Block(block.layout, block.sharing, block.forward_only, operations, roles))
    return described


def _agreed(found: list[_Block]) -> tuple[dict[Key, _Block], set[tuple[str, str]]]:
    """Return merged metadata of every block, and the uses that contradict those on lower ranks."""
    block_map = BlockMap()
    agreed: dict[Key, _Block] = {}
    conflicts: set[tuple[str, str]] = set()
    for block in found:
        key = block.layout.key
        before = agreed.get(key, block)
        both = before.roles.keys() & block.roles.keys()
        same = all(_storage(before.roles[side]) == _storage(block.roles[side]) for side in both)
        if not block_map.admit(block.layout) or not same:
            conflicts |= {(block.layout.weight, operation) for operation in block.operations}
            continue
        operations = tuple(sorted({*before.operations, *block.operations}))
        agreed[key] = replace(before, operations=operations, roles=block.roles | before.roles)
    return agreed, conflicts


def _turned_to(layout: Layout, block: _Block) -> _Block:
    """Return the metadata after `BlockSums.turned_to`."""
    roles = roles_for(layout, block.layout, block.roles)
    return block if roles is block.roles else replace(block, layout=layout, roles=roles)


def _storage(role: _Role) -> Any:
    return role.input, role.gradient


def _with_roles(mine: BlockSums | None, block: _Block, device: torch.device | str, products: Products) -> BlockSums:
    """Return the sums of this rank for a block, with zeros for roles that only other ranks have."""
    result = BlockSums(block.layout, block.sharing, block.forward_only, operations=set(block.operations))
    for side, role in sorted(block.roles.items()):
        own = None if mine is None or mine.layout != block.layout else mine.roles.get(side)
        if own is None or (_Stored.of(own.input), _Stored.of(own.gradient)) != _storage(role):
            both = role.input.zeros(device, products), role.gradient.zeros(device, products)
        else:
            both = own.input, own.gradient
        for s in both:
            s.computed = None  # other ranks may have computed other strips
        result.roles[side] = RoleSums(*both)
    return result
