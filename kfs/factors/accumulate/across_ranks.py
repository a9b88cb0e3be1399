"""The blocks of all ranks: which ones there are, how they are stored, their counts, and who owns them.

The sums themselves are added up by `kfs.factors.accumulate.statistic`.

Ranks may have seen different blocks. First, they exchange their blocks without numbers: sums on the meta device, and
counts on the host. A rank without data, or a rank whose data do not use an expert, starts the missing sums with zeros.
Then all sums can be sent together.

With owners, the sums of a block that another rank owns are on the meta device: sizes and counts are known, numbers are
not.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kfs.distributed import Ranks
from kfs.distributed.assignment import Part, eigenvalues, place
from kfs.factors.accumulate.block_sums import BlockSums, RoleSums, merge, read_counts
from kfs.factors.layout import BlockMap, Key, Side
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
        known: Owners that were chosen before. The result has them, too.
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
            block.to("meta")


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
    return joined_blocks(ranks.gather("blocks", without_numbers(blocks.values())), blocks, device, products)


def without_numbers(blocks: Collection[BlockSums]) -> list[BlockSums]:
    """Return copies of blocks with sums on the meta device, to send them. Their counts move to the host, at once."""
    read_counts(blocks)
    roles = [role for block in blocks for role in block.roles.values()]
    on_device = [role for role in roles if isinstance(role.inverse_squares, Tensor)]
    for role, number in zip(on_device, numbers([role.inverse_squares for role in on_device]), strict=True):  # type: ignore[misc]
        role.inverse_squares = number
    return [block.without_numbers() for block in blocks]


def joined_blocks(
    every: Iterable[Iterable[BlockSums]],
    blocks: Mapping[Key, BlockSums],
    device: torch.device | str,
    products: Products,
) -> tuple[dict[Key, BlockSums], set[tuple[str, str]]]:
    """Return the blocks of all ranks, and contradictions, like `agreed_blocks`, without communication.

    Args:
        every: For each rank, its blocks from `without_numbers`.
        blocks: The blocks of this rank.
        device: Device for sums that only other ranks have.
        products: Precision in which further vectors are multiplied.
    """
    # Merge the blocks of all ranks, without their numbers.
    agreed: dict[Key, BlockSums] = {}
    conflicts: set[tuple[str, str]] = set()
    block_map = BlockMap()
    for theirs in every:
        conflicts |= merge(agreed, theirs, block_map)
    # Fill in the sums of this rank. A rank whose first use of a parameter was on the other side turns its block.
    for key, block in agreed.items():
        mine = blocks[key].turned_to(block.layout) if key in blocks else None
        own = mine.roles if mine is not None and mine.layout == block.layout else {}
        block.roles = {
            side: _filled(role, own.get(side), device, products) for side, role in sorted(block.roles.items())
        }
    return agreed, conflicts


def _filled(role: RoleSums, own: RoleSums | None, device: torch.device | str, products: Products) -> RoleSums:
    """Return the counts of a role with this rank's sums, or with zeros where only other ranks have sums."""
    if own is None or not own.fits(role):
        both = [s.zeros_like(device, products) for s in (role.input, role.gradient)]
    else:
        both = [own.input, own.gradient]
    for s in both:
        s.computed = None  # other ranks may have computed other strips
    filled = replace(role, input=both[0], gradient=both[1])
    filled.ones = role.ones
    return filled
