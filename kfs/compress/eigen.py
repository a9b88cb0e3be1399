r"""Pruning in the eigenbasis of KFAC: EigenDamage (Wang et al., 2019).

In the basis of eigenvectors, $\tilde W = Q_B^\top W Q_A$, curvature is diagonal. Removing a coefficient costs
$\tfrac12 (\lambda_{ba} + \delta)\, \tilde w_{ba}^2$, independently of all other coefficients. So costs add up, and the
other coefficients need no update. This holds for the eigenvalues of KFAC and of EKFAC.

Unstructured pruning sets coefficients to zero and rotates the layer back: it keeps its size, and is described by fewer
numbers, together with the bases. Structured pruning removes whole rows and columns of $\tilde W$: the layer is replaced
by three layers. The first one projects to the remaining eigenvectors $Q_A$, and the last one maps back from the
remaining eigenvectors $Q_B$. The score of a row or column is its cost per entry.

The inner layer may be small compared to the bases. If bases count, it is therefore merged with one of them: with $r_B$
rows and $r_A$ columns left, the rank is at most $\min(r_A, r_B)$, and two layers of that width have fewer entries than
three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfs.compress.choosing import allowed, shortest, some_of
from kfs.compress.layers import Layer, in_a_row, replace_module, write_weights
from kfs.compress.report import LayerRow, unchanged
from kfs.errors import ModelError
from kfs.factors.blocks import Eigenbasis


@dataclass(frozen=True)
class Rotated:
    """A layer in its eigenbasis.

    Attributes:
        layer: The layer.
        basis: The eigenvectors.
        coefficients: The matrices in this basis, `[groups, d_B, d_A]`.
        costs: Twice the cost of removing each coefficient.
    """

    layer: Layer
    basis: Eigenbasis
    coefficients: Tensor
    costs: Tensor

    def back(self, coefficients: Tensor) -> Tensor:
        """Return the matrices with the given coefficients."""
        return self.basis.rotated(coefficients.unsqueeze(1), back=True).squeeze(1)


@dataclass(frozen=True)
class Form:
    """A possible form of a layer after removing rows and columns in its eigenbasis.

    Attributes:
        name: The sides with a fixed basis: `"input side"`, `"output side"` or `"both sides"`; `"one layer"` without
            one.
        size: Total number of entries.
        inner: Number of entries that do not belong to bases.
    """

    name: str
    size: int
    inner: int


def rotated(layer: Layer) -> Rotated:
    """Return a layer in its eigenbasis; raise `ModelError` if its eigenvectors are not Kronecker products."""
    basis = layer.eigenbasis
    if not isinstance(basis, Eigenbasis):
        raise ModelError(
            f"The eigenvectors of the block of layer {layer.name!r} are not Kronecker products.",
            "Pass a kfs.KFAC or kfs.EKFAC, or prune with basis='parameters'.",
        )
    W = basis.rotated(layer.matrix.unsqueeze(1)).squeeze(1)
    return Rotated(layer, basis, W, (basis.values.clamp(min=0) + layer.damping) * W.square())


def prune_coefficients(result: nn.Module, layers: Sequence[Layer], share: float, count_bases: bool) -> list[LayerRow]:
    """Set the cheapest coefficients of all layers together to zero, in place."""
    parts = [rotated(layer) for layer in layers]
    costs = torch.cat([part.costs.flatten() for part in parts])
    order = costs.argsort(stable=True)
    sizes = [layer.size for layer in layers]

    def kept(removed: int) -> list[Tensor]:
        flat = torch.ones(len(costs), dtype=torch.bool, device=costs.device)
        flat[order[:removed]] = False
        masks = flat.split(sizes)
        return [mask.reshape(part.costs.shape) for mask, part in zip(masks, parts, strict=True)]

    def size(removed: int) -> int:
        if not count_bases:
            return len(costs) - removed
        return sum(min(mask.numel(), int(mask.sum()) + _basis_size(mask)) for mask in kept(removed))

    masks = kept(shortest(size, len(costs), some_of(layers, share), "coefficients"))
    return [_with_coefficients(result, part, mask, count_bases) for part, mask in zip(parts, masks, strict=True)]


def _with_coefficients(result: nn.Module, part: Rotated, kept: Tensor, count_bases: bool) -> LayerRow:
    """Write the pruned layer back, unless bases count and storing them costs more than it saves."""
    layer = part.layer
    num_kept = int(kept.sum())
    bases = _basis_size(kept)
    if num_kept == kept.numel() or (count_bases and num_kept + bases >= kept.numel()):
        return unchanged(layer)
    matrix = part.back(torch.where(kept, part.coefficients, 0.0))
    write_weights(result, layer, matrix)
    shape = f"{int(kept.any(2).sum())} x {int(kept.any(1).sum())} of {layer.shape}"
    return LayerRow(layer.name, layer.size, num_kept, bases, shape, "one layer", layer.increase(matrix))


def _basis_size(kept: Tensor) -> int:
    """Return the number of entries of the eigenvectors that the kept coefficients `[groups, d_B, d_A]` need."""
    _, rows, columns = kept.shape
    return rows * int(kept.any(2).sum()) + columns * int(kept.any(1).sum())


def prune_rows_and_columns(
    model: nn.Module, result: nn.Module, layers: Sequence[Layer], share: float, count_bases: bool
) -> tuple[nn.Module, list[LayerRow]]:
    """Remove the cheapest rows and columns of all layers together, and replace the layers by smaller ones.

    The last layer of an attention cannot be replaced. It is unchanged, but counts for the budget; if it is the only
    layer, an error is raised.
    """
    staying = [layer for layer in layers if len(layers) > 1 and layer.is_read_by_attention(model)]
    replaced = [layer for layer in layers if len(layers) == 1 or not layer.is_read_by_attention(model)]
    for layer in replaced:
        layer.check_replaceable(model, "smaller layers between bases")
    parts = [rotated(layer) for layer in replaced]
    candidates: list[tuple[float, int, int, int]] = []  # cost per entry, layer, axis, index
    for number, part in enumerate(parts):
        for axis in (0, 1):
            costs = part.costs[0].mean(1 - axis)
            # Keep the most expensive one: a layer needs at least one row and one column.
            places = costs.argsort(stable=True)[:-1].tolist()
            candidates += [(float(costs[place]), number, axis, place) for place in places]
    candidates.sort()

    def kept(removed: int) -> list[tuple[Tensor, Tensor]]:
        masks = [tuple(torch.ones(n, dtype=torch.bool) for n in part.costs.shape[1:]) for part in parts]
        for _, number, axis, place in candidates[:removed]:
            masks[number][axis][place] = False
        return [(rows, columns) for rows, columns in masks]

    def size(removed: int) -> int:
        found = (_form(part, *masks, count_bases) for part, masks in zip(parts, kept(removed), strict=True))
        return sum(form.size if count_bases else form.inner for form in found)

    budget = allowed(share, sum(layer.size for layer in layers)) - sum(layer.size for layer in staying)
    masks = kept(shortest(size, len(candidates), budget, "rows and columns"))
    rows = [unchanged(layer) for layer in staying]
    for part, mask in zip(parts, masks, strict=True):
        result, row = _smaller(result, part, *mask, count_bases)
        rows.append(row)
    return result, rows


def _form(part: Rotated, rows: Tensor, columns: Tensor, count_bases: bool) -> Form:
    """Return the form of a layer with the given rows and columns: the smallest form, if bases count."""
    d_B, d_A = part.layer.matrix.shape[1:]
    r_B, r_A = int(rows.sum()), int(columns.sum())
    inner = r_B * r_A
    one = Form("one layer", d_B * d_A, d_B * d_A)
    input_side = Form("input side", d_A * r_A + r_A * d_B, inner)
    output_side = Form("output side", d_A * r_B + r_B * d_B, inner)
    if count_bases:
        return min(one, input_side, output_side, key=lambda form: form.size)
    # A basis with all its eigenvectors is merged into the inner matrix, which does not increase the size.
    if r_A == d_A:
        return one if r_B == d_B else output_side
    return input_side if r_B == d_B else Form("both sides", d_A * r_A + inner + r_B * d_B, inner)


def _smaller(
    result: nn.Module, part: Rotated, rows: Tensor, columns: Tensor, count_bases: bool
) -> tuple[nn.Module, LayerRow]:
    """Replace a layer by smaller layers with the remaining rows and columns in its eigenbasis."""
    layer = part.layer
    form = _form(part, rows, columns, count_bases)
    if form.name == "one layer":
        return result, unchanged(layer)
    Q_A = part.basis.Q_A.to_dense()[0][:, columns]
    Q_B = part.basis.Q_B.to_dense()[0][:, rows]
    inner = part.coefficients[0][rows][:, columns]
    factors, fixed = {
        "input side": ([Q_A.T, Q_B @ inner], [True, False]),
        "output side": ([inner @ Q_A.T, Q_B], [False, True]),
        "both sides": ([Q_A.T, inner, Q_B], [True, False, True]),
    }[form.name]
    result = replace_module(result, layer.name, in_a_row(layer, factors, fixed))
    shape = f"{len(inner)} x {inner.shape[1]} of {layer.shape}"
    name = "three layers" if len(factors) == 3 else "two layers"
    increase = layer.increase((Q_B @ inner @ Q_A.T).unsqueeze(0))
    return result, LayerRow(layer.name, layer.size, form.inner, form.size - form.inner, shape, name, increase)
