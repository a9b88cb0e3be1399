"""Pruning by curvature: single weights, channels, and both in the eigenbasis of KFAC.

`surgery` has the formulas for weights, `channels` those for channels, `eigen` those for the eigenbasis.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal
from warnings import warn

import torch
from torch import nn

from kfs.compress.channels import prune_channels
from kfs.compress.choosing import WITHOUT_DATA, TrainingLoss, allowed, best, groups, some_of, steps
from kfs.compress.eigen import prune_coefficients, prune_rows_and_columns
from kfs.compress.layers import Keep, Layer, layers_of, write_weights
from kfs.compress.report import Compressed, LayerRow, make_report, unchanged
from kfs.compress.surgery import adapted, damage, surgeon
from kfs.display.suggestions import few
from kfs.distributed import Ranks, Same, check_same
from kfs.errors import DtypeError, KfsWarning, ModelError
from kfs.factors import EKFAC, KFAC, BlockDiagonal, Relative
from kfs.problem.data_shards import part_of
from kfs.problem.risk import EmpiricalRisk

Basis = Literal["parameters", "eigen"]
_BASES = ("parameters", "eigen")


def prune(
    model: nn.Module,
    K: BlockDiagonal,
    keep: Keep = 0.2,
    *,
    basis: Basis = "parameters",
    update: bool = True,
    structured: bool = False,
    damping: float | Relative | None = None,
    risk: EmpiricalRisk | None = None,
    count_bases: bool = False,
    sample: Any = None,
) -> Compressed:
    """Remove what matters least for the loss, according to curvature, in one shot.

    Linear layers and convolutions are pruned, with their biases if these share the block of their weight. All other
    modules stay as they are, except for a BatchNorm whose channels go. By default all layers compete: what costs least
    goes first, wherever it is. Layers without any curvature, since predictions do not depend on them, stay as
    they are and do not count, unless `keep` names them.

    - `basis="parameters"`, `update=False`: optimal brain damage. Weights are set to zero by the diagonal of the
      curvature.
    - `basis="parameters"`, `update=True`: optimal brain surgeon. Weights are chosen by the inverse of the curvature,
      in several steps that leave about two thirds of them each. Those that stay become the minimum of the quadratic
      model with all chosen weights at zero: exact for the whole set, block by block. Every step scores them anew, since
      weights that make up for others are worth more than before.
    - `basis="eigen"`: the same in the basis of the curvature's eigenvectors (EigenDamage), where it is diagonal, so
      that an update would change nothing.
    - `structured=True` returns smaller layers. In the basis of parameters, channels are removed between layers of
      which one reads the other; `torch.fx` finds them. In the eigenbasis, every layer becomes three in a row, a small
      one between fixed bases; or two, if bases count.

    Args:
        model: A model in evaluation mode. It is not changed.
        K: Its curvature: `KFAC`, `EKFAC`, or another operator with blocks, such as `kfs.factors.exact_diagonal(risk)`.
            Names and shapes of parameters are checked; a warning says if their values were others when it was computed.
        keep: The share of all numbers in these layers that is kept, above 0 and at most 1. Or shares of some layers, by
            name: each ranks alone, and others stay as they are. With channels, these are shares of a layer's input
            channels, and the layer before loses the same outputs.
        basis: `"parameters"` or `"eigen"`.
        update: Whether weights that stay adapt. In the eigenbasis, they need not.
        structured: Whether to remove whole channels, or rows and columns.
        damping: What is added to the curvature: a number, or a multiple of each block's mean eigenvalue. By default,
            `kfs.Relative` of 0.001, 0.01, 0.1 and 1 are tried, and the one with the lowest training loss of the result
            on at most eight batches is taken. The report has all losses. Where no training data are known, it is
            `kfs.Relative(0.03)`.
        risk: Loss and data for that choice. By default those that `K` was computed from: a `KFAC` or `EKFAC` knows them
            unless it comes from a file or is a copy. If several processes share the data, all of them call `prune`,
            with the same settings.
        count_bases: Whether the numbers of fixed bases count as kept. A layer that would not become smaller then stays
            as it is. The basis of parameters has no such numbers.
        sample: Input of a forward pass, with its batch axis, for which operations are counted; a tuple for several
            arguments.

    Returns:
        A new model of plain `torch.nn` modules, and a report.

    Raises:
        DistributedError: If settings differ between processes.
        DtypeError: If something has another type.
        ModelError: If `keep` cannot be reached, or leaves nothing; if a layer has no block, is tied, or cannot be
            replaced by smaller ones; if the curvature is of other parameters, or BatchNorm is in training mode.
        SolverError: If curvature is singular, and not damped, and an inverse is needed.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
        >>> risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.rand(50, 5), torch.randint(2, (50,))))
        >>> small, report = prune(model, KFAC(risk), keep=0.5)
        >>> sum(int((p != 0).sum()) for p in small.parameters()), report.parameters_before
        (33, 66)
        >>> report  # doctest: +ELLIPSIS
        surgeon of KFAC, keep=0.5
          50.0% of 66 numbers in 2 layers; all parameters: 66 before, 33 after, 66 stored
          damping Relative(0.1), chosen by the training loss of 50 examples: ...
    """
    risk_of = _training_risk(K, risk)
    ranks = _sharing(K, risk, risk_of)
    with ranks.agreed("kfs.compress.prune"):
        chosen_layers = sorted(keep.items(), key=str) if isinstance(keep, Mapping) else keep
        settings: dict[str, Any] = {"keep": chosen_layers, "basis": basis, "update": update, "structured": structured}
        settings |= {"damping": damping, "count_bases": count_bases}
        check_same(ranks, "settings of prune", {"Settings": Same(settings, "Pass the same ones in all processes.")})
        if basis not in _BASES:
            raise ModelError(f"basis is {basis!r}.", "Choose 'parameters' or 'eigen'.")
        layers = layers_of(model, K, keep, WITHOUT_DATA if damping is None else damping)
        competing = groups(layers, keep)

        def attempt(damping: float | Relative, roughly: bool = False) -> tuple[nn.Module, list[LayerRow]]:
            damped = {layer.name: layer.damped_by(damping) for layer in layers}
            if structured and basis == "parameters" and any(part < 1 for _, part in competing):
                return prune_channels(model, list(damped.values()), keep, update)
            result = deepcopy(model)
            rows: list[LayerRow] = []
            for group, part in competing:
                members = [damped[layer.name] for layer in group]
                # Nothing is computed where nothing is removed, so that weights stay as they are to the last bit.
                if part == 1:
                    rows += map(unchanged, members)
                elif basis == "parameters":
                    rows += _prune_weights(result, members, part, update, roughly)
                elif structured:
                    result, more = prune_rows_and_columns(model, result, members, part, count_bases)
                    rows += more
                else:
                    rows += prune_coefficients(result, members, part, count_bases)
            return result, rows

        about: dict[str, Any] = {"damping": WITHOUT_DATA if damping is None else damping}
        if damping is None and risk_of is not None and any(part < 1 for _, part in competing):
            loss = TrainingLoss(risk_of, model)
            chosen, losses = best(lambda damping: attempt(damping, roughly=True)[0], loss)
            about = {"damping": chosen, "losses": losses, "loss_before": loss.before, "loss_data": loss.num_data}
        result, rows = attempt(about["damping"])
        _warn_of_empty_layers(rows)
        name = "eigenbasis" if basis == "eigen" else "surgeon" if update else "damage"
        method = f"{'structured ' if structured else ''}{name} of {K.formula}, keep={keep}"
        return Compressed(result, make_report(method, rows, model, result, count_bases, sample, **about))


def _sharing(K: object, risk: EmpiricalRisk | None, risk_of: partial[EmpiricalRisk] | None) -> Ranks:
    """Return the processes that share training data or blocks; they prune together."""
    if isinstance(K, BlockDiagonal) and K.ranks.are_several:
        return K.ranks
    if risk is not None:
        return risk.ranks
    return Ranks() if risk_of is None else part_of(risk_of.keywords["data"], risk_of.keywords["group"])[0]


def _training_risk(K: BlockDiagonal, risk: EmpiricalRisk | None) -> partial[EmpiricalRisk] | None:
    """Return the function from a model to its risk on training data; `None` if no such data are known."""
    if risk is None:
        factors = K.factors if isinstance(K, EKFAC) else K
        return factors.risk_of if isinstance(factors, KFAC) else None
    if not isinstance(risk, EmpiricalRisk):
        raise DtypeError(f"risk is a {type(risk).__name__}.", "Pass a kfs.EmpiricalRisk.")
    return risk.with_model


def _warn_of_empty_layers(rows: Sequence[LayerRow]) -> None:
    empty = [row.layer for row in rows if row.kept == 0]
    if empty:
        warn(
            f"Nothing is left of the layers {few(empty)}, so that what they compute does not depend on their input. "
            "Keep more, or give each layer a share of its own: keep={...}.",
            KfsWarning,
            stacklevel=3,
        )


def _prune_weights(
    result: nn.Module, layers: Sequence[Layer], share: float, update: bool, roughly: bool
) -> list[LayerRow]:
    """Remove the cheapest weights of all layers together, in place."""
    number = some_of(layers, share)
    sizes = [layer.size for layer in layers]
    matrices = [layer.matrix for layer in layers]
    kept = [torch.ones_like(matrix, dtype=torch.bool) for matrix in matrices]
    # Without updates, scores do not change.
    shares = steps(share) if update else [share]
    for left in shares:
        costs = torch.cat(
            [
                torch.where(mask, surgeon(layer, matrix) if update else damage(layer), -1.0).flatten()
                for layer, matrix, mask in zip(layers, matrices, kept, strict=True)
            ]
        )
        last = left == share
        many = number if last else allowed(left, len(costs))
        flat = torch.ones(len(costs), dtype=torch.bool, device=costs.device)
        flat[costs.argsort(stable=True)[: len(costs) - many]] = False
        kept = [mask.reshape(layer.matrix.shape) for mask, layer in zip(flat.split(sizes), layers, strict=True)]
        matrices = [
            adapted(layer, mask, roughly or not last) if update else torch.where(mask, layer.matrix, 0.0)
            for layer, mask in zip(layers, kept, strict=True)
        ]
    rows = []
    for layer, mask, matrix in zip(layers, kept, matrices, strict=True):
        if mask.all():
            rows.append(unchanged(layer))
            continue
        write_weights(result, layer, matrix)
        increase = layer.increase(matrix)
        rows.append(LayerRow(layer.name, layer.size, int(mask.sum()), 0, layer.shape, "masked", increase))
    return rows
