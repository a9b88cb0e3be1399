r"""Low-rank approximation in the metric of KFAC.

With curvature $B \otimes A$ in `rvec`, replacing a layer's matrix $W$ by $V$ costs

$$
\tfrac12 \mathrm{tr}\left((V - W)^\top B\, (V - W) A\right) = \tfrac12 \|B^{1/2} (V - W) A^{1/2}\|_F^2.
$$

So the best $V$ of rank $r$ comes from the truncated singular value decomposition of $B^{1/2} W A^{1/2}$, and dropping
the singular value $\sigma_i$ costs $\tfrac12 \sigma_i^2$. With identities for $A$ and $B$, this is the plain singular
value decomposition of $W$.

With rank $r$, the layer is replaced by two layers with $r (d_A + d_B)$ entries in total instead of $d_A d_B$. For a
convolution, the first one has $r$ channels and the old kernel, and the second one has a kernel of one pixel. (Splitting
off the pixels first is not optimal in this metric, because $A$ couples channels and pixels.) Ranks are chosen such that
the total size fits the budget and the sum of all costs is small: follow the lower convex hulls of cost against size of
all layers, and take the steps with the least cost per entry saved first.
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

Option = tuple[int, float]  # size and cost


@dataclass(frozen=True)
class Decomposition:
    """A layer's matrix as a sum of products of columns with rows, in the order of falling costs.

    Attributes:
        layer: The layer.
        columns: `[d_B, d]`.
        rows: `[d, d_A]`.
        costs: Twice the cost of dropping each product, `[d]`.
    """

    layer: Layer
    columns: Tensor
    rows: Tensor
    costs: Tensor

    @property
    def options(self) -> list[Option]:
        """Options: the unchanged layer, followed by one option for each of `ranks`."""
        per_rank = self.columns.shape[0] + self.rows.shape[1]
        lost = [0.5 * float(self.costs[rank:].sum()) for rank in self.ranks]
        return [(self.layer.size, 0.0), *((rank * per_rank, cost) for rank, cost in zip(self.ranks, lost, strict=True))]

    @property
    def ranks(self) -> list[int]:
        """All ranks that make the layer smaller, the highest first."""
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
    """Replace each layer by two smaller ones, such that the loss changes least according to KFAC.

    Linear layers and convolutions are replaced if that reduces their size. Their biases are included if they share the
    block of their weight. All other modules are unchanged. The last layer of a `MultiheadAttention` is unchanged, too,
    but counts for `keep`. Layers with zero curvature, because predictions do not depend on them, are unchanged and do
    not count, unless `keep` names them.

    Args:
        model: A model in evaluation mode. It is not changed.
        K: Its curvature: `KFAC`, or another operator with Kronecker products as blocks. Of an `EKFAC`, only the factors
            are used. Names and shapes of parameters are checked; there is a warning if their values have changed since
            the curvature was computed.
        keep: Share of the entries in these layers to keep, above 0 and at most 1. Or shares of some layers, by name;
            other layers are unchanged then.
        damping: Factored damping of the curvature (see `kfs.factors.blocks.damping`).
        sample: Input of a forward pass, with its batch axis, for counting operations; a tuple for several arguments.

    Returns:
        A new model of plain `torch.nn` modules, and a report.

    Raises:
        DtypeError: If an argument has a wrong type.
        ModelError: If `keep` cannot be reached; if a layer has no block with two factors, is tied, has groups of
            channels or is not a plain layer; if the curvature belongs to other parameters, or BatchNorm is in training
            mode.
        SolverError: If curvature is singular and not damped.

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
            # Decompose only layers that can become smaller. The last layer of an attention cannot: it is skipped, or
            # raises an error if `keep` names it.
            if share < 1 and (isinstance(keep, Mapping) or not layer.is_read_by_attention(model)):
                layer.check_replaceable(model, "two layers")
                parts[layer.name] = decomposed(layer)
        # Choose the ranks of all competing layers together, and replace the layers.
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
    """Return the singular value decomposition of a layer's matrix in the metric of its Kronecker product."""
    if not isinstance(layer.structure, Kronecker):
        raise ModelError(
            f"The block of layer {layer.name!r} is not a Kronecker product, so it cannot be the metric of low_rank.",
            "Pass a kfs.KFAC, or kfs.factors.optimal_kronecker(risk).",
        )
    inverse = Stack((layer.layout,), layer.structure).apply(_inverse, layer.damping)
    root_A, root_B = (factor.power(-0.5).to_dense()[0] for factor in (inverse.A, inverse.B))
    inverse_root_A, inverse_root_B = (factor.power(0.5).to_dense()[0] for factor in (inverse.A, inverse.B))
    U, sizes, V = torch.linalg.svd(root_B @ layer.matrix[0] @ root_A, full_matrices=False)
    balanced = sizes.sqrt()  # scale both layers equally
    columns = inverse_root_B @ (U * balanced)
    rows = (balanced.unsqueeze(1) * V) @ inverse_root_A
    return Decomposition(layer, columns, rows, sizes.square())


def _inverse(structure: Kronecker, damping: float) -> Kronecker:
    """Return inverses of both factors. Without damping, a singular factor raises an error."""
    delta = structure.like.new_full((1,), damping)
    inverse = structure.power(-1.0) if damping == 0 else damped_inverse(structure, delta, "factored")
    assert isinstance(inverse, Kronecker)  # noqa: S101 (both functions keep the structure)
    return inverse


def chosen(options: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Choose one option for each layer, such that the total size is within a budget, at a small total cost.

    Each layer has options with falling sizes and rising costs. The result has the indices of the chosen ones.

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
    # Steps along the convex hulls of all layers, by cost per entry saved.
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
        # The last step may save more than needed. Then, a cheaper option between its ends suffices.
        fitting = [
            place for place in range(places[layer] + 1, after + 1) if others + options[layer][place][0] <= budget
        ]
        places[layer] = fitting[0] if fitting else after
        total = others + options[layer][places[layer]][0]
    return places


def lower_hull(options: Sequence[Option]) -> list[int]:
    """Return the indices of options on the lower convex hull of cost against size, starting with the largest size.

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
    """Return the additional cost per entry saved."""
    return (smaller[1] - larger[1]) / (larger[0] - smaller[0])
