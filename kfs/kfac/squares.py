"""Sums of squared gradients in the eigenbases of factors: the eigenvalues of EKFAC.

Every rank needs the eigenvectors of a block for its own data. If blocks have owners, these send them to all ranks for
one pass over the data, and get the sums. With `factor_memory`, a pass is for as many blocks as fit.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from kfs.distributed.placement import passes
from kfs.distributed.states import fetched, joined
from kfs.kfac.kfac import KFAC
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Progress
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.sums.per_datum import PerDatumSums, Squares
from kfs.kfac.sweep import JournalOf, sweep
from kfs.risk import EmpiricalRisk


def sum_squares(
    risk: EmpiricalRisk, settings: Settings, K: KFAC, blocks: Mapping[str, Eigenbasis], journal: JournalOf | None
) -> Progress:
    """Add squared gradients to the eigenvalues of blocks, in place, without the reduction factor.

    Args:
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how.
        K: The factors.
        blocks: Eigenvectors, and eigenvalues of zero, of the blocks of this process.
        journal: Makes what keeps intermediate results in a file.

    Returns:
        What was counted.
    """
    names = [name for name, block in K.blocks.items() if block.sharing != "exact"]
    sizes = {name: basis.nbytes for name, basis in blocks.items()}
    everywhere = {name: size for some in K.ranks.gather("bases", sizes) for name, size in some.items()}
    memory = float("inf") if settings.factor_memory is None else settings.factor_memory
    progress = Progress()
    for number, subset in enumerate(passes({name: everywhere[name] for name in names}, memory), 1):
        chosen = sorted(subset, key=names.index)
        stage = "eigenvalues" if number == 1 else f"eigenvalues.{number}"
        which = None if settings.factor_memory is None else chosen
        bases = _fetched(K, {name: blocks[name] for name in chosen if name in blocks})
        layouts = {block.layout.key: block.layout for block in K.blocks.values()}
        keys = {K.blocks[name].layout.key: name for name in chosen}
        others = {K.blocks[name].layout.key for name in names if name not in subset}
        owners = {key: K.owners[name] for key, name in keys.items()} if K.owners else None
        sums = PerDatumSums(settings, layouts, {k: _statistic(bases[n]) for k, n in keys.items()}, others, owners)
        made = None if journal is None else journal(stage, blocks=which)
        progress = sweep(risk, sums, settings, "EKFAC", made)
        sums.check_complete(resumed=journal is not None)
        for name in chosen:
            if name in blocks and blocks[name] is not bases[name]:
                blocks[name].values.copy_(bases[name].values)
    return progress


def _fetched(K: KFAC, own: Mapping[str, Eigenbasis]) -> dict[str, Eigenbasis]:
    """Return the eigenvectors of blocks of all ranks, with eigenvalues to add to."""
    if not K.ranks.are_several:
        return dict(own)
    state = {"bases": [[name, basis.state()] for name, basis in own.items()]}
    found = {}
    for name, of_basis in fetched(joined(K.ranks, state, ("bases",)))["bases"]:
        basis = Eigenbasis.from_state(of_basis, *K.blocks[name].layout.matrix_shape)
        device = K.settings.factor_device or K.device
        found[name] = replace(basis.to(device), values=torch.zeros_like(basis.values, device=device))
    return found


def _statistic(basis: Eigenbasis) -> Squares:
    """Return what adds to the eigenvalues of a block."""
    Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in (basis.Q_A, basis.Q_B))
    return Squares(basis.values, Q_A, Q_B)
