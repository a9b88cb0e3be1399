r"""Pruning in the eigenbasis of KFAC: EigenDamage (Wang et al., 2019).

In the basis of eigenvectors, $\tilde W = Q_B^\top W Q_A$, curvature is diagonal. Removing a coefficient costs
$\tfrac12 (\lambda_{ba} + \delta)\, \tilde w_{ba}^2$ whatever happens to the others, so these need no update, and
costs add up. That holds for KFAC's eigenvalues and for EKFAC's.

Unstructured, coefficients are set to zero and the layer is multiplied out: it keeps its size, and is described by fewer
numbers, in bases that take room, too. Structured, whole rows and columns of $\tilde W$ are removed: the layer becomes
three in a row, of which the first one projects to the eigenvectors $Q_A$ that are left, and the last one comes back
from those of $Q_B$. A row or column is scored by its cost for each of its numbers.

The layer in the middle may be small while bases are large. If bases count, it is multiplied with one of them: with
$r_B$ rows and $r_A$ columns left, the rank is at most $\min(r_A, r_B)$, and two layers of that width have fewer numbers
than three.
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
        costs: Twice the cost of removing each of them.
    """

    layer: Layer
    basis: Eigenbasis
    coefficients: Tensor
    costs: Tensor

    def back(self, coefficients: Tensor) -> Tensor:
        """Return the matrices with these coefficients."""
        return self.basis.rotated(coefficients.unsqueeze(1), back=True).squeeze(1)


@dataclass(frozen=True)
class Form:
    """What a layer of `[d_B, d_A]` with some rows and columns in its eigenbasis may become.

    Attributes:
        name: Which bases are left: that of the `"input side"`, of the `"output side"`, of `"both sides"`, or none for
            `"one layer"`.
        size: How many numbers it takes.
        inner: How many of them are no bases.
    """

    name: str
    size: int
    inner: int


def rotated(layer: Layer) -> Rotated:
    """Rotate a layer into its eigenbasis.

    Raises:
        ModelError: If eigenvectors of its block are no Kronecker products.
    """
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
    """Write what is left of a layer; with bases counted, it may be better to leave it as it is."""
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
    """Return how many numbers the eigenvectors have that are needed for coefficients `[groups, d_B, d_A]`."""
    _, rows, columns = kept.shape
    return rows * int(kept.any(2).sum()) + columns * int(kept.any(1).sum())


def prune_rows_and_columns(
    model: nn.Module, result: nn.Module, layers: Sequence[Layer], share: float, count_bases: bool
) -> tuple[nn.Module, list[LayerRow]]:
    """Remove the cheapest rows and columns of all layers together, and replace the layers by smaller ones."""
    staying = [layer for layer in layers if len(layers) > 1 and layer.is_read_by_attention(model)]
    replaced = [layer for layer in layers if len(layers) == 1 or not layer.is_read_by_attention(model)]
    for layer in replaced:
        layer.check_replaceable(model, "smaller layers between bases")
    parts = [rotated(layer) for layer in replaced]
    candidates: list[tuple[float, int, int, int]] = []  # cost of each number, layer, axis, place
    for number, part in enumerate(parts):
        for axis in (0, 1):
            costs = part.costs[0].mean(1 - axis)
            # The most expensive one stays: a layer needs one row and one column.
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
    """Return what a layer becomes with some rows and columns: the form with the fewest numbers, if bases count."""
    d_B, d_A = part.layer.matrix.shape[1:]
    r_B, r_A = int(rows.sum()), int(columns.sum())
    inner = r_B * r_A
    one = Form("one layer", d_B * d_A, d_B * d_A)
    input_side = Form("input side", d_A * r_A + r_A * d_B, inner)
    output_side = Form("output side", d_A * r_B + r_B * d_B, inner)
    if count_bases:
        return min(one, input_side, output_side, key=lambda form: form.size)
    # A basis with all its eigenvectors is multiplied with what is left: that takes no more numbers.
    if r_A == d_A:
        return one if r_B == d_B else output_side
    return input_side if r_B == d_B else Form("both sides", d_A * r_A + inner + r_B * d_B, inner)


def _smaller(
    result: nn.Module, part: Rotated, rows: Tensor, columns: Tensor, count_bases: bool
) -> tuple[nn.Module, LayerRow]:
    """Replace a layer by what is left of it in its eigenbasis."""
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
