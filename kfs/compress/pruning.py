"""Pruning by curvature: single weights, channels, and both in the eigenbasis of KFAC.

`surgery` has the formulas for weights, `channels` those for channels, `eigen` those for the eigenbasis.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import nn

from kfs.compress.channels import prune_channels
from kfs.compress.choosing import allowed, groups
from kfs.compress.eigen import prune_coefficients, prune_rows_and_columns
from kfs.compress.layers import Keep, Layer, layers_of
from kfs.compress.replacing import write_weights
from kfs.compress.report import Compressed, LayerRow, make_report, unchanged
from kfs.compress.surgery import adapted, damage, surgeon
from kfs.errors import ModelError
from kfs.kfac import BlockDiagonal, Relative

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
    damping: float | Relative = Relative(1e-3),  # noqa: B008 (it is frozen)
    count_bases: bool = False,
    sample: Any = None,
) -> Compressed:
    """Remove what matters least for the loss, according to curvature, in one shot.

    Linear layers and convolutions are pruned, with their biases if these share the block of their weight. All other
    modules stay as they are, except for a BatchNorm whose channels go. By default all layers compete: what costs least
    goes first, wherever it is.

    - `basis="parameters"`, `update=False`: optimal brain damage. Weights are set to zero by the diagonal of the
      curvature.
    - `basis="parameters"`, `update=True`: optimal brain surgeon. Weights are chosen by the inverse of the curvature,
      one by one, and those that stay become the minimum of the quadratic model with all chosen weights at zero: exact
      for the whole set, block by block.
    - `basis="eigen"`: the same in the basis of the curvature's eigenvectors (EigenDamage), where it is diagonal, so
      that an update would change nothing.
    - `structured=True` returns smaller layers. In the basis of parameters, channels are removed between layers of
      which one reads the other; `torch.fx` finds them. In the eigenbasis, every layer becomes three in a row, a small
      one between fixed bases; or two, if bases count.

    Args:
        model: A model in evaluation mode. It is not changed.
        K: Its curvature: `KFAC`, `EKFAC`, or another operator with blocks, such as `kfs.kfac.exact_diagonal(risk)`.
            Names and shapes of parameters are checked; a warning says if their values were others when it was computed.
        keep: The share of all numbers in these layers that is kept, above 0 and at most 1. Or shares of some layers, by
            name: each ranks alone, and others stay as they are. With channels, these are shares of a layer's input
            channels, and the layer before loses the same outputs.
        basis: `"parameters"` or `"eigen"`.
        update: Whether weights that stay adapt. In the eigenbasis, they need not.
        structured: Whether to remove whole channels, or rows and columns.
        damping: What is added to the curvature: a number, or a multiple of each block's mean eigenvalue.
        count_bases: Whether the numbers of fixed bases count as kept. A layer that would not become smaller then stays
            as it is. The basis of parameters has no such numbers.
        sample: Input of a forward pass, with its batch axis, for which operations are counted; a tuple for several
            arguments.

    Returns:
        A new model of plain `torch.nn` modules, and a report.

    Raises:
        DtypeError: If something has another type.
        ModelError: If `keep` cannot be reached; if a layer has no block, is tied, or cannot be replaced by smaller
            ones; if the curvature is of other parameters, or BatchNorm is in training mode.
        SolverError: If curvature is singular, and not damped, and an inverse is needed.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
        >>> risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.rand(50, 5), torch.randint(2, (50,))))
        >>> small, report = prune(model, KFAC(risk), keep=0.5)
        >>> sum(int((p != 0).sum()) for p in small.parameters()), report.parameters_before
        (33, 66)
        >>> report
        surgeon of KFAC, keep=0.5
          50.0% of 66 numbers in 2 layers; all parameters: 66 before, 33 after, 66 stored
    """
    if basis not in _BASES:
        raise ModelError(f"basis is {basis!r}.", "Choose 'parameters' or 'eigen'.")
    layers = layers_of(model, K, keep, damping)
    result = deepcopy(model)
    rows: list[LayerRow] = []
    competing = groups(layers, keep)
    if structured and basis == "parameters" and any(part < 1 for _, part in competing):
        result, rows = prune_channels(model, layers, keep, update)
    else:
        for members, part in competing:
            # Nothing is computed where nothing is removed, so that weights stay as they are to the last bit.
            if part == 1:
                rows += map(unchanged, members)
            elif basis == "parameters":
                rows += _prune_weights(result, members, part, update)
            elif structured:
                result, more = prune_rows_and_columns(model, result, members, part, count_bases)
                rows += more
            else:
                rows += prune_coefficients(result, members, part, count_bases)
    name = "eigenbasis" if basis == "eigen" else "surgeon" if update else "damage"
    method = f"{'structured ' if structured else ''}{name} of {K.formula}, keep={keep}"
    return Compressed(result, make_report(method, rows, model, result, count_bases, sample))


def _prune_weights(result: nn.Module, layers: Sequence[Layer], share: float, update: bool) -> list[LayerRow]:
    """Remove the cheapest weights of all layers together, in place."""
    costs = torch.cat([(surgeon(layer) if update else damage(layer)).flatten() for layer in layers])
    removed = costs.argsort(stable=True)[: len(costs) - allowed(share, len(costs))]
    flat = torch.ones(len(costs), dtype=torch.bool, device=costs.device)
    flat[removed] = False
    rows = []
    for layer, mask in zip(layers, flat.split([layer.size for layer in layers]), strict=True):
        kept = mask.reshape(layer.matrix.shape)
        if kept.all():
            rows.append(unchanged(layer))
            continue
        matrix = adapted(layer, kept) if update else torch.where(kept, layer.matrix, 0.0)
        write_weights(result, layer, matrix)
        increase = layer.increase(matrix)
        rows.append(LayerRow(layer.name, layer.size, int(kept.sum()), 0, layer.shape, "masked", increase))
    return rows
