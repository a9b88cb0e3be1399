"""From a risk, or a file, to the sums of all blocks: checked, and those of this process if blocks have owners."""

from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite
from typing import Any

import torch

from kfs import waiting
from kfs.distributed import Ranks
from kfs.errors import DataError
from kfs.kfac.coverage import coverage_error, exact_diagonals, not_covered, shared_with
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Checkpoint, Progress, naming
from kfs.kfac.storage.journal import Journal
from kfs.kfac.sums.block_sums import BlockSums
from kfs.kfac.sums.owned import choose_owners, keep_own
from kfs.kfac.sweep import explain_vectors, kfac
from kfs.kfac.vectors import one_by_one_if_needed
from kfs.risk import EmpiricalRisk
from kfs.storage import with_tensors
from kfs.waiting import numbers


def compute_sums(
    risk: EmpiricalRisk,
    settings: Settings,
    checkpoint: Checkpoint | None = None,
    owners: Mapping[str, int] | None = None,
) -> tuple[list[BlockSums], dict[str, int], Progress]:
    """Compute the sums of all blocks, check them, and deal with parameters that are not covered.

    Args:
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how.
        checkpoint: Where and how often intermediate results are written.
        owners: The ranks that own blocks, as far as they are known.

    Returns:
        The sums; the rank that owns each block, if blocks have owners; and what was counted.
    """
    journal = None if checkpoint is None else partial(Journal, checkpoint, risk, settings)
    with naming(checkpoint):
        sums, progress = one_by_one_if_needed(settings, lambda s: kfac(risk, s, journal, owners))
    found = list(sums.blocks.values())
    bad = not_covered(risk.params, found, progress.unexplained, sums.conflicts, progress.reached)
    blocks = [block for block in found if not bad.keys() & set(block.layout.params)]
    uncovered = bad | shared_with(bad, found)
    if uncovered and settings.uncovered == "error":
        raise coverage_error(uncovered)
    if not all(risk.ranks.gather("finite", _is_finite(blocks))):
        if waiting.runs_behind(risk.device):
            explain_vectors(risk, settings)
        with risk.ranks.agreed("factors"):
            _refuse_not_finite(blocks)
    if uncovered and settings.uncovered == "diagonal":
        diagonals = exact_diagonals(risk, uncovered, settings)
        exact = [BlockSums.of_diagonal(name, entries) for name, entries in diagonals.items()]
        if sums.owners:
            sums.owners = choose_owners(exact, risk.ranks.size, sums.owners)
            keep_own(exact, sums.owners, risk.ranks.rank)
        blocks += exact
    if not blocks:
        raise coverage_error(uncovered or not_covered(risk.params, [], set(), set()))
    return blocks, sums.owners, progress


def read_blocks(states: Iterable[Any], ranks: Ranks) -> tuple[list[BlockSums], dict[str, int]]:
    """Return the sums of blocks from a file, and the rank that owns each block, if there are several.

    Of blocks that others own, no number is read.
    """
    states = list(states)
    if not ranks.are_several:
        return list(map(BlockSums.from_state, states)), {}
    blocks = [BlockSums.from_state(with_tensors(state, lambda t: t.to("meta"))) for state in states]
    owners = choose_owners(blocks, ranks.size, {})
    for place, block in enumerate(blocks):
        if owners[block.layout.name] == ranks.rank:
            blocks[place] = BlockSums.from_state(states[place])
    return blocks, owners


def _is_finite(blocks: list[BlockSums]) -> bool:
    """Whether there is neither NaN nor infinity; the device is asked once if all is well."""
    totals = [s.total for block in blocks if block.is_here for s in block.sums]
    if not totals or all(map(isfinite, numbers([torch.nn.utils.get_total_norm(totals)]))):
        return True
    # Numbers may only be so large that the norm overflows.
    return all(numbers([total.isfinite().all() for total in totals]))


def _refuse_not_finite(blocks: list[BlockSums]) -> None:
    """Raise the error for the first sums that are not finite, if this process has them."""
    for block in blocks:
        for role in block.roles.values():
            for what, s in (("inputs", role.input), ("gradients", role.gradient)):
                if block.is_here and not s.total.isfinite().all():
                    raise DataError(
                        f"The {what} of block {block.layout.name!r} are not finite.",
                        "Look for NaN or infinity in the data, the parameters or the loss.",
                    )
