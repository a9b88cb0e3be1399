"""Pruning using curvature: single weights, channels, and both in the eigenbasis of KFAC.

Formulas are in `surgery` (weights), `channels` (channels) and `eigen` (eigenbasis).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, get_args
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
from kfs.problem.data_shards import data_of_rank
from kfs.problem.risk import EmpiricalRisk

Basis = Literal["parameters", "eigen"]


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
    """Remove the weights that matter least for the loss, according to curvature, without further training.

    Linear layers and convolutions are pruned, with their biases if these share the block of their weight. All other
    modules are unchanged, except for a BatchNorm of removed channels. By default, all layers compete: the cheapest
    weights are removed first, in any layer. Layers with zero curvature, because predictions do not depend on them, are
    unchanged and do not count, unless `keep` names them.

    - `basis="parameters"`, `update=False`: optimal brain damage. Weights are set to zero in the order of costs from the
      diagonal of the curvature.
    - `basis="parameters"`, `update=True`: optimal brain surgeon. Costs come from the inverse of the curvature. Weights
      are removed in several steps that keep about two thirds each, because weights that compensate for removed ones
      become more important. The remaining weights of each block minimize the quadratic model, exactly for the whole set
      of removed weights.
    - `basis="eigen"`: the same in the basis of the curvature's eigenvectors (EigenDamage). There, the curvature is
      diagonal, so an update would change nothing.
    - `structured=True` returns smaller layers. In the basis of parameters, channels are removed between pairs of
      layers that `torch.fx` finds. In the eigenbasis, each layer is replaced by three layers: a small one between two
      fixed bases; or by two layers, if bases count.

    Args:
        model: A model in evaluation mode. It is not changed.
        K: Its curvature: `KFAC`, `EKFAC`, or another operator with blocks, such as `kfs.factors.exact_diagonal(risk)`.
            Names and shapes of parameters are checked; there is a warning if their values have changed since the
            curvature was computed.
        keep: Share of the entries in these layers to keep, above 0 and at most 1. Or shares of some layers, by name:
            each layer is pruned separately, and other layers are unchanged. If channels are removed, these are shares
            of a layer's input channels, and the layer before loses the same outputs.
        basis: `"parameters"` or `"eigen"`.
        update: Whether the remaining weights adapt. In the eigenbasis, they need not.
        structured: Whether to remove whole channels, or rows and columns.
        damping: Damping of the curvature: a number, or a multiple of each block's mean eigenvalue. By default,
            `kfs.Relative` of 0.001, 0.01, 0.1 and 1 are tried, and the result with the lowest training loss on at most
            eight batches is chosen. The report contains all losses. Without training data, the default is
            `kfs.Relative(0.03)`.
        risk: Loss and training data for that choice. By default, the ones that `K` was computed from: a `KFAC` or
            `EKFAC` knows them unless it comes from a file or is a copy. If several processes share the data, all of
            them must call `prune`, with the same settings.
        count_bases: Whether the entries of fixed bases count as kept. A layer that would not become smaller is
            unchanged then. No effect in the basis of parameters, which has no such entries.
        sample: Input of a forward pass, with its batch axis, for counting operations; a tuple for several arguments.

    Returns:
        A new model of plain `torch.nn` modules, and a report.

    Raises:
        DistributedError: If settings differ between processes.
        DtypeError: If an argument has a wrong type.
        ModelError: If `keep` cannot be reached, or leaves nothing; if a layer has no block, is tied, or cannot be
            replaced by smaller ones; if the curvature belongs to other parameters, or BatchNorm is in training mode.
        SolverError: If an inverse is needed, and curvature is singular and not damped.

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
        if basis not in get_args(Basis):
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
                # If nothing is removed, compute nothing, so that weights are unchanged to the last bit.
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

        # Choose the damping by training loss, unless it is given or there are no training data.
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
    """Return the ranks that share training data or blocks; they prune together."""
    if isinstance(K, BlockDiagonal) and K.ranks.are_several:
        return K.ranks
    if risk is not None:
        return risk.ranks
    return Ranks() if risk_of is None else data_of_rank(risk_of.keywords["data"], risk_of.keywords["group"])[0]


def _training_risk(K: BlockDiagonal, risk: EmpiricalRisk | None) -> partial[EmpiricalRisk] | None:
    """Return the function from a model to its risk on training data; `None` if there are none."""
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
            f"Nothing is left of the layers {few(empty)}, so their outputs do not depend on their inputs. "
            "Keep more, or give each layer a share of its own: keep={...}.",
            KfsWarning,
            stacklevel=3,
        )


def _prune_weights(
    result: nn.Module, layers: Sequence[Layer], share: float, update: bool, roughly: bool
) -> list[LayerRow]:
    """Set the cheapest weights of all layers together to zero, in place."""
    number = some_of(layers, share)
    sizes = [layer.size for layer in layers]
    matrices = [layer.matrix for layer in layers]
    kept = [torch.ones_like(matrix, dtype=torch.bool) for matrix in matrices]
    # Without updates, scores do not change, so one step suffices.
    shares = steps(share) if update else [share]
    for left in shares:
        costs = torch.cat(
            [
                torch.where(mask, surgeon(layer, matrix) if update else damage(layer), -1.0).flatten()
                for layer, matrix, mask in zip(layers, matrices, kept, strict=True)
            ]
        )
        # Keep the most expensive weights. Removed weights have a score of -1, so they stay removed.
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
