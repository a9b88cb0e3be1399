"""Coverage: which parameters KFAC does not cover, why, how that is said, and what stands in for their blocks."""

import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from kfs.distributed import added_up
from kfs.errors import KfsWarning, ModelError
from kfs.kfac.block import Block
from kfs.kfac.layout import Side
from kfs.kfac.settings import Settings
from kfs.kfac.sums.block_sums import BlockSums
from kfs.kfac.vectors import backpropagated_vectors
from kfs.operators.derivatives import leaves_and_rest, pull_back
from kfs.precision import at_least_float32
from kfs.risk import EmpiricalRisk


def not_covered(
    params: Iterable[str],
    blocks: Iterable[BlockSums],
    unexplained: set[tuple[str, str]],
    conflicts: set[tuple[str, str]],
    reached: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the parameters that have no block or one that lacks something, and why.

    A parameter that predictions do not depend on needs no block.

    Args:
        params: All parameters that should be covered.
        blocks: What was found.
        unexplained: `(parameter, why)` of uses that no rule explains.
        conflicts: `(parameter, operation)` of uses that do not fit together with others.
        reached: Parameters that predictions depend on; all of them, if it is not given.
    """
    blocks = list(blocks)
    reasons: dict[str, str] = {}
    for name, why in sorted(unexplained):
        reasons.setdefault(name, why)
    for name, operation in sorted(conflicts):
        reasons.setdefault(name, f"its use by {operation!r} does not fit together with its other uses")
    covered = {name for block in blocks for name in block.layout.params}
    for name in params:
        if name not in covered and (reached is None or name in reached):
            reasons.setdefault(name, "no operation with a rule used it, as far as predictions depend on it")
    return reasons


def shared_with(bad: Iterable[str], blocks: Iterable[BlockSums]) -> dict[str, str]:
    """Return other parameters in blocks of those that are not covered, and that this is why they are not."""
    bad = set(bad)
    broken = [block.layout.params for block in blocks if bad & set(block.layout.params)]
    names = [name for params in broken for name in params if name not in bad]
    return dict.fromkeys(names, "it shares a block with one that is not covered")


def listed(uncovered: Mapping[str, str]) -> str:
    """Return some parameters that are not covered, and why, for a message."""
    some = "; ".join(f"{name!r}: {why}" for name, why in list(uncovered.items())[:5])
    return some + (f"; and {len(uncovered) - 5} more" if len(uncovered) > 5 else "")


def coverage_error(uncovered: Mapping[str, str]) -> ModelError:
    """Return the error for parameters that are not covered."""
    hint = ""
    if any("before it meets the batch" in why for why in uncovered.values()):
        hint = (
            " A weight that is computed from parameters has no Kronecker factors for them; where it is the one that "
            "matters, let it be the parameter: for weight normalization and other parametrizations, by "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.remove_weight_norm."
        )
    if any("sparse" in why for why in uncovered.values()):
        hint += " Products with sparse tensors have no rule; make them dense before: x.to_dense()."
    if any("does not fit together" in why for why in uncovered.values()):
        hint += " Weights that are used in several ways may fit if biases have blocks of their own: joint_bias=False."
    return ModelError(
        f"KFAC does not cover all parameters ({listed(uncovered)}).",
        "Choose others with params=, or pass uncovered='skip' to leave these out, or uncovered='diagonal' for their "
        f"exact diagonal.{hint} kfs.inspect(model, sample) shows what is covered.",
    )


def warn_of_wide(blocks: Iterable[Block], settings: Settings, stacklevel: int) -> None:
    """Warn about factors that keep only their diagonal because they are wide."""
    wide = []
    sides: tuple[Side, ...] = ("A", "B")
    for block in blocks:
        for side in sides:
            size = block.sums.on_side(side)[0].size
            if block.is_diagonal(side) and settings.is_diagonal(size):
                wide.append(f"{block.name}.{side} ({size})")
    if wide:
        text = f"Factors wider than max_dim={settings.max_dim} keep their diagonal only: {', '.join(wide)}."
        warnings.warn(text, KfsWarning, stacklevel=stacklevel)


def exact_diagonals(risk: EmpiricalRisk, names: Iterable[str], settings: Settings) -> dict[str, Tensor]:
    """Sum squares of every datum's backpropagated vectors, without the reduction factor: slow, but right.

    Args:
        risk: Model, loss, data and parameters.
        names: Names of the parameters in question.
        settings: Which curvature matrix. `"forward-only"` has no gradients; its diagonal is zero.

    Returns:
        By name, tensors shaped like the parameters.
    """
    names = list(names)
    dtype = at_least_float32(risk.dtype)
    with risk.ranks.agreed("diagonal"), risk.untouched(), torch.enable_grad():
        total = {name: torch.zeros_like(risk.params[name], dtype=dtype) for name in names}
        for batch in risk.batches("diagonal"):
            leaves, rest = leaves_and_rest(risk, names)
            f = risk.predict(leaves | rest, batch)
            first = settings.first_datum + batch.first
            for vectors in backpropagated_vectors(risk.loss, f.detach(), batch.y, settings, first, 1):
                for n in range(len(f)):
                    one = torch.zeros_like(vectors)
                    one[:, n] = vectors[:, n]
                    for name, g in pull_back(f, leaves, one, keep_graph=True).items():
                        total[name] += g.to(dtype).square().sum(0)
    return added_up(risk.ranks, "diagonal", total)
