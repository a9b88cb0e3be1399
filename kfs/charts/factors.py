"""Matrices as heat maps: whole ones, and Kronecker factors block by block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from kfs.charts.canvas import INK, LINE, grid, new_figure, quiet, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PIXELS = 200  # of a heat map, in each direction
_ACROSS = 3  # pairs of factors beside each other
_INCHES = 1.6  # of a heat map
_QUANTILE = 0.98  # of absolute entries, which colors distinguish
_COLORS = "red: positive, blue: negative, up to the number in the title"
_LABELED = 0.03  # least share of an axis for which a label has room


@dataclass(frozen=True)
class Panel:
    """Both factors of a block.

    Attributes:
        name: The block's name.
        A: The input-based factor, `[d, d]`, its diagonal `[d]`, or one for each group, `[groups, d, d]`.
        B: The gradient-based factor.
    """

    name: str
    A: Tensor
    B: Tensor


def draw_factors(panels: Sequence[Panel], left_out: int = 0) -> "list[Axes]":
    """Draw the factors of some blocks into a new figure.

    Colors of each factor end at a quantile of its absolute entries, which its title says: factors of different layers
    have different units. A factor of which only the diagonal is known is drawn as one row of stripes.

    Args:
        panels: The blocks.
        left_out: How many other blocks there are.

    Returns:
        Axes of `A` and `B` of all blocks, in turn.
    """
    across = min(_ACROSS, len(panels))
    rows = -(-len(panels) // across)
    figure = new_figure(2 * across * _INCHES, rows * (_INCHES + 0.33) + 0.3)
    axes = grid(figure, rows, 2 * across)
    for place, panel in enumerate(panels):
        for side, factor, target in zip("AB", (panel.A, panel.B), axes[2 * place :], strict=False):
            name = short(panel.name) if side == "A" else ""
            one, how = _matrix(factor)
            _draw(target, f"{name}\n{side}: {how}", one)
    for target in axes[2 * len(panels) :]:
        target.remove()
    more = f"\n{left_out} more blocks: name those to draw" if left_out else ""
    figure.supxlabel(f"{_COLORS}{more}", fontsize=7, color=INK)
    return axes[: 2 * len(panels)]


def draw_matrix(title: str, matrix: Tensor, rows: Mapping[str, int], columns: Mapping[str, int]) -> "Axes":
    """Draw a matrix into a new figure, with lines between parts.

    Args:
        title: What it is.
        matrix: All of it.
        rows: Names of parts and how many rows they have, in their order.
        columns: The same for columns.

    Returns:
        Axes of the heat map.
    """
    (axes,) = grid(new_figure(*[3 * _INCHES] * 2), 1, 1)
    _draw(axes, title, matrix.detach().cpu().double())
    parts = ((axes.axhline, axes.set_yticks, rows), (axes.axvline, axes.set_xticks, columns))
    for draw_line, set_ticks, sizes in parts:
        ends = [0, *accumulate(sizes.values())]
        for end in ends[1:-1]:
            draw_line(end - 0.5, color=LINE, linewidth=0.4)
        labels = {
            (start + end - 1) / 2: short(name, 24)
            for name, (start, end) in zip(sizes, pairwise(ends), strict=True)
            if end - start >= _LABELED * ends[-1]
        }
        set_ticks(list(labels), list(labels.values()))
    axes.set_xlabel(_COLORS, fontsize=7, color=INK)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    return axes


def _draw(axes: "Axes", title: str, one: Tensor) -> None:
    entries = one.abs().flatten()
    entries = entries[entries > 0]
    # `Tensor.quantile` takes no more than 16 million numbers.
    limit = float(entries.kthvalue(ceil(_QUANTILE * len(entries))).values) if len(entries) else 1.0
    # Axes count entries, however many of them share a pixel.
    frame = (-0.5, one.shape[1] - 0.5, one.shape[0] - 0.5, -0.5)
    axes.imshow(_pooled(one).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none", extent=frame)
    axes.set_aspect("auto")
    axes.set_box_aspect(1)
    axes.set_title(f"{title}, to {limit:.2g}", fontsize=6.5, color=INK, loc="left", pad=3)
    axes.set_xticks([])
    axes.set_yticks([])
    quiet(axes)


def _matrix(factor: Tensor) -> tuple[Tensor, str]:
    """Return what is drawn of a factor, and what it is."""
    factor = factor.detach().cpu().double()
    size = factor.shape[-1]
    if factor.ndim == 1:
        return factor.unsqueeze(0), f"diagonal {size}"
    if factor.ndim == 2 and factor.shape[0] == size:
        return factor, f"{size} x {size}"
    if factor.ndim == 2:
        return factor, f"{len(factor)} diagonals of {size}"
    return factor[0], f"{size} x {size} (1 of {len(factor)})"


def _pooled(matrix: Tensor) -> Tensor:
    """Return a matrix with fewer entries: the largest of its neighborhood, by magnitude, with its sign."""
    strides = [-(-size // _PIXELS) for size in matrix.shape]
    if max(strides) == 1:
        return matrix
    highest, lowest = (max_pool2d(sign * matrix[None, None], strides, ceil_mode=True)[0, 0] for sign in (1, -1))
    return torch.where(highest >= lowest, highest, -lowest)
