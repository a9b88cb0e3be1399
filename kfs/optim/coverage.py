"""Which parameters of a training turn out not to be covered by KFAC. How that is said is in `kfs.kfac.coverage`."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from kfs.distributed import Ranks, all_true
from kfs.kfac.coverage import shared_with
from kfs.kfac.layout import Key
from kfs.kfac.sums import BlockSums
from kfs.optim.step_sums import StepSums


def lost_parameters(
    sums: StepSums, trained: Collection[str], grads: Mapping[str, Tensor], known: Collection[Key], ranks: Ranks
) -> dict[str, str]:
    """Return parameters that turn out not to be covered, and why.

    A parameter without gradient, or with one of zero, is not trained in this step, and nothing is lost: it may be used
    in others.

    Args:
        sums: What the passes of a step gave.
        trained: Names of parameters that should be covered.
        grads: Gradients by name.
        known: Blocks that have averages.
        ranks: Processes that train together. Each has a part of the sums, and maybe of the gradients.
    """
    new = [block for key, block in sorted(sums.blocks.items()) if key not in known and block.terms]
    # Such as the blocks of a second head, whose output has a loss of its own.
    flat = _without_curvature([block for block in new if not block.forward_only], ranks)
    if flat:
        # If there is no curvature anywhere, it is the loss that has none here, such as Huber's far from its targets.
        used = [block for _, block in sorted(sums.blocks.items()) if block.terms and not block.forward_only]
        everywhere = _without_curvature(used, ranks)
        if len(everywhere) == sum(len(block.layout.params) for block in used):
            flat = []
    beside = dict.fromkeys(flat, "the loss depends on it, but predictions do not")
    reasons = {n: why for n, why in (beside | sums.uncovered).items() if n in trained and n in grads}
    unused = _all_vanish([[grads[n]] for n in reasons], ranks)
    lost = {n: why for (n, why), is_unused in zip(reasons.items(), unused, strict=True) if not is_unused}
    return lost | shared_with(lost, sums.blocks.values())


def _without_curvature(blocks: Collection[BlockSums], ranks: Ranks) -> list[str]:
    """Return parameters of blocks in which no gradient with respect to predictions has arrived."""
    totals = [[role.gradient.total for role in block.roles.values()] for block in blocks]
    vanish = _all_vanish(totals, ranks)
    return [name for block, gone in zip(blocks, vanish, strict=True) if gone for name in block.layout.params]


def _all_vanish(groups: Iterable[Iterable[Tensor]], ranks: Ranks) -> list[bool]:
    """Return for each group of tensors whether all of its numbers are zero, on all ranks. This waits for a device."""
    flags = [~torch.stack([t.any() for t in tensors]).any() for tensors in groups]
    return all_true(ranks, torch.stack(flags)).tolist() if flags else []
