"""Sums of blocks that have owners: which rank owns which block, and how sums get there.

A block that another rank owns has its sums on the meta device here: sizes and counts are known, numbers are not.
"""

from collections.abc import Iterable, Mapping

from kfs.distributed import Ranks, add_up_at
from kfs.distributed.placement import parts_of, place
from kfs.distributed.summing import fill_lower_triangle
from kfs.kfac.sums.across_ranks import parts_of as tensors_of
from kfs.kfac.sums.block_sums import BlockSums


def choose_owners(blocks: Iterable[BlockSums], ranks: int, known: Mapping[str, int]) -> dict[str, int]:
    """Return the rank that owns each block, by name; the same on all ranks.

    Args:
        blocks: Sums, which may be on the meta device.
        ranks: How many ranks there are.
        known: Owners that were chosen before.

    Returns:
        Owners of all blocks, and those that were known.
    """
    new = [block for block in blocks if block.layout.name not in known]
    if not new:
        return dict(known)
    # EKFAC keeps eigenvectors and eigenvalues, and so do inverses with exact damping.
    parts = [part for block in new for part in parts_of(block, eigen=True)]
    placed = place(parts, ranks, divide=False).owners
    return dict(known) | {block.layout.name: placed[block.layout.name, "A"] for block in new}


def add_up_at_owners(ranks: Ranks, blocks: Iterable[BlockSums], owners: Mapping[str, int]) -> None:
    """Add up the totals of blocks that all ranks have. Owners keep the sums, and others keep no numbers."""
    of_rank: dict[int, list[BlockSums]] = {}
    for block in blocks:
        of_rank.setdefault(owners[block.layout.name], []).append(block)
    for owner in sorted(of_rank):
        add_up_at(ranks, owner, (t for block in of_rank[owner] for t in tensors_of(block)))
        keep_own(of_rank[owner], owners, ranks.rank)
        for s in (s for block in of_rank[owner] if block.is_here for s in block.sums):
            if not s.diagonal:
                fill_lower_triangle(s.total)
                s.computed = None


def keep_own(blocks: Iterable[BlockSums], owners: Mapping[str, int], rank: int) -> None:
    """Forget the numbers of blocks that others own."""
    for block in blocks:
        if owners[block.layout.name] != rank:
            for s in block.sums:
                s.total = s.total.to("meta")
