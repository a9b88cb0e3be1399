r"""Approximations of low rank, in the metric of KFAC.

With curvature $B \otimes A$, a layer's matrix $W$ may be replaced by $V$ at a cost of

$$
\tfrac12 \mathrm{tr}\left((V - W)^\top B\, (V - W) A\right) = \tfrac12 \|B^{1/2} (V - W) A^{1/2}\|_F^2.
$$

So the best $V$ of rank $r$ comes from the truncated singular value decomposition of $B^{1/2} W A^{1/2}$, and dropping
the singular value $\sigma_i$ costs $\tfrac12 \sigma_i^2$. A plain decomposition of $W$ is the same without curvature.

Of rank $r$, the layer becomes two, with $r (d_A + d_B)$ numbers instead of $d_A d_B$. For a convolution, the first one
has $r$ channels and the old kernel, and the second one is of one pixel. (The other split, pixels first, is not optimal
in this metric: $A$ knows channels and pixels together only.) Ranks share the budget such that the sum of all costs is
small: among the steps along the lower convex hulls of cost against size, of all layers, those are taken first that cost
least for each number saved.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kfs.compress.choosing import allowed, groups
from kfs.compress.layers import Keep, Layer, in_a_row, layers_of, replace_module
from kfs.compress.report import Compressed, LayerRow, make_report, unchanged
from kfs.errors import ModelError
from kfs.factors import EKFAC, BlockDiagonal, Relative
from kfs.factors.blocks import Kronecker, Stack, damped_inverse

Option = tuple[int, float]  # how many numbers it takes, and what it costs


@dataclass(frozen=True)
class Decomposition:
    """A layer's matrix as a sum of products of columns with rows.

    Attributes:
        layer: The layer.
        columns: `[d_B, d]`, the largest first.
        rows: `[d, d_A]`.
        costs: Twice the cost of dropping each of them, `[d]`.
    """

    layer: Layer
    columns: Tensor
    rows: Tensor
    costs: Tensor

    @property
    def options(self) -> list[Option]:
        """The layer as it is, then all ranks that save something, the highest first. Their places are in `ranks`."""
        per_rank = self.columns.shape[0] + self.rows.shape[1]
        lost = [0.5 * float(self.costs[rank:].sum()) for rank in self.ranks]
        return [(self.layer.size, 0.0), *((rank * per_rank, cost) for rank, cost in zip(self.ranks, lost, strict=True))]

    @property
    def ranks(self) -> list[int]:
        """All ranks that save something, the highest first."""
        per_rank = self.columns.shape[0] + self.rows.shape[1]
        return [rank for rank in range(len(self.costs), 0, -1) if rank * per_rank < self.layer.size]


def low_rank(
    model: nn.Module,
    K: BlockDiagonal,
    keep: Keep = 0.3,
    *,
    damping: float | Relative = Relative(1e-3),  # noqa: B008 (it is frozen)
    sample: Any = None,
) -> Compressed:
    """Replace layers by two smaller ones each, such that the loss changes least according to KFAC.

    Linear layers and convolutions are replaced where that saves numbers. Their biases take part if they share the block
    of their weight. All other modules stay as they are, and so does the last layer of a `MultiheadAttention`, which
    counts for `keep`. Layers that predictions do not depend on, so that they have no curvature, stay as they are and do
    not count, unless `keep` names them.

    Args:
        model: A model in evaluation mode. It is not changed.
        K: Its curvature: `KFAC`, or another operator whose blocks are Kronecker products. The factors of an `EKFAC` are
            used without its eigenvalues. Names and shapes of parameters are checked; a warning says if their values
            were others when it was computed.
        keep: The share of all numbers in these layers that is kept, above 0 and at most 1. Or shares of some layers, by
            name, and others stay as they are.
        damping: What is added to the curvature, factored (see `kfs.factors.blocks.damping`).
        sample: Input of a forward pass, with its batch axis, for which operations are counted; a tuple for several
            arguments.

    Returns:
        A new model of plain `torch.nn` modules, and a report.

    Raises:
        DtypeError: If something has another type.
        ModelError: If `keep` cannot be reached; if a layer has no block with two factors, is tied, has groups of
            channels or is no plain layer; if the curvature is of other parameters, or BatchNorm is in training mode.
        SolverError: If curvature is singular, and not damped.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).eval()
        >>> risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.rand(50, 20), torch.randint(4, (50,))))
        >>> small, report = low_rank(model, KFAC(risk), keep=0.5)
        >>> small[0]
        Sequential(
          (0): Linear(in_features=20, out_features=4, bias=True)
          (1): Linear(in_features=4, out_features=30, bias=False)
        )
    """
    K = K.factors if isinstance(K, EKFAC) else K
    layers = layers_of(model, K, keep, damping)
    result = deepcopy(model)
    rows = []
    for members, share in groups(layers, keep):
        parts: dict[str, Decomposition] = {}
        for layer in members:
            # Nothing is decomposed where nothing is removed. Unless it is named, a layer that has to stay only counts.
            if share < 1 and (isinstance(keep, Mapping) or not layer.is_read_by_attention(model)):
                layer.check_replaceable(model, "two layers")
                parts[layer.name] = decomposed(layer)
        options = [parts[layer.name].options if layer.name in parts else [(layer.size, 0.0)] for layer in members]
        places = chosen(options, allowed(share, sum(layer.size for layer in members)))
        for layer, place in zip(members, places, strict=True):
            if place == 0:
                rows.append(unchanged(layer))
                continue
            part = parts[layer.name]
            rank = part.ranks[place - 1]
            first, second = part.rows[:rank], part.columns[:, :rank]
            result = replace_module(result, layer.name, in_a_row(layer, [first, second], [False, False]))
            increase = layer.increase((second @ first).unsqueeze(0))
            size = first.numel() + second.numel()
            rows.append(LayerRow(layer.name, layer.size, size, 0, f"rank {rank}", "two layers", increase))
    method = f"low rank in the metric of {K.formula}, keep={keep}"
    return Compressed(result, make_report(method, rows, model, result, False, sample, damping=damping))


def decomposed(layer: Layer) -> Decomposition:
    """Decompose a layer's matrix in the metric of its curvature.

    Raises:
        ModelError: If its block is not a Kronecker product.
        SolverError: If a factor is singular, and not damped.
    """
    if not isinstance(layer.structure, Kronecker):
        raise ModelError(
            f"The block of layer {layer.name!r} is not a Kronecker product, so it is no metric for low rank.",
            "Pass a kfs.KFAC, or kfs.factors.optimal_kronecker(risk).",
        )
    inverse = Stack((layer.layout,), layer.structure).apply(_inverse, layer.damping)
    root_A, root_B = (factor.power(-0.5).to_dense()[0] for factor in (inverse.A, inverse.B))
    inverse_root_A, inverse_root_B = (factor.power(0.5).to_dense()[0] for factor in (inverse.A, inverse.B))
    U, sizes, V = torch.linalg.svd(root_B @ layer.matrix[0] @ root_A, full_matrices=False)
    balanced = sizes.sqrt()  # both layers get numbers of one size
    columns = inverse_root_B @ (U * balanced)
    rows = (balanced.unsqueeze(1) * V) @ inverse_root_A
    return Decomposition(layer, columns, rows, sizes.square())


def _inverse(structure: Kronecker, damping: float) -> Kronecker:
    """Invert both factors. Without damping, singular ones are an error, and nothing is added to them."""
    delta = structure.like.new_full((1,), damping)
    inverse = structure.power(-1.0) if damping == 0 else damped_inverse(structure, delta, "factored")
    assert isinstance(inverse, Kronecker)  # noqa: S101 (both of them keep the structure)
    return inverse


def chosen(options: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Choose one option of every layer such that all sizes together are within a budget, at a small total cost.

    Args:
        options: Sizes and costs. Sizes fall, costs rise.
        budget: The largest sum of sizes.

    Returns:
        Places of the options.

    Raises:
        ModelError: If the smallest options are too large.

    Example:
        >>> chosen([[(10, 0.0), (6, 1.0), (3, 9.0)], [(10, 0.0), (5, 5.0)]], budget=14)
        [1, 1]
    """
    smallest = sum(of_layer[-1][0] for of_layer in options)
    if smallest > budget:
        raise ModelError(
            f"With rank one in all layers, {smallest:,} numbers are left, more than the {budget:,} that keep allows.",
            "Keep more.",
        )
    steps = []
    for layer, of_layer in enumerate(options):
        hull = lower_hull(of_layer)
        for before, after in pairwise(hull):
            saved = of_layer[before][0] - of_layer[after][0]
            steps.append(((of_layer[after][1] - of_layer[before][1]) / saved, layer, after))
    places = [0] * len(options)
    total = sum(of_layer[0][0] for of_layer in options)
    for _, layer, after in sorted(steps):
        if total <= budget:
            break
        others = total - options[layer][places[layer]][0]
        # The last step may save more than needed: then an option between both ends of it is better.
        fitting = [
            place for place in range(places[layer] + 1, after + 1) if others + options[layer][place][0] <= budget
        ]
        places[layer] = fitting[0] if fitting else after
        total = others + options[layer][places[layer]][0]
    return places


def lower_hull(options: Sequence[Option]) -> list[int]:
    """Return the places of options on the lower convex hull of cost against size, from the largest size on.

    Example:
        >>> lower_hull([(10, 0.0), (8, 4.0), (6, 5.0), (2, 20.0)])
        [0, 2, 3]
    """
    hull: list[int] = []
    for place, (size, cost) in enumerate(options):
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) >= _slope(options[hull[-2]], (size, cost)):
            hull.pop()
        hull.append(place)
    return hull


def _slope(larger: Option, smaller: Option) -> float:
    """Return the cost of each number that is saved."""
    return (smaller[1] - larger[1]) / (larger[0] - smaller[0])
