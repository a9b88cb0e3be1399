"""Charts drawn with matplotlib. The `plot` methods of objects call these functions.

The computation of the plotted numbers lives with the objects.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from kfs.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, LINE = "#333333", "#8a8a8a"
_LABEL = 32  # characters


def new_figure(width: float, height: float) -> "Figure":
    """Create a figure of the given size in inches. Notebooks show it; in a program, use `matplotlib.pyplot.show()`.

    Raises:
        ModelError: If matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot  # noqa: PLC0415 (optional, and slow to import)
    except ImportError as error:
        raise ModelError("matplotlib is not installed.", "Install it: pip install matplotlib.") from error
    return pyplot.figure(figsize=(width, height), layout="constrained")


def axes_of(axes: "Axes | None", width: float, height: float) -> "Axes":
    """Return the given axes, or the axes of a new figure if `axes` is `None`."""
    return new_figure(width, height).subplots() if axes is None else axes


def grid(figure: "Figure", rows: int, columns: int, **options: Any) -> "list[Axes]":
    """Divide a figure into a grid, and return all axes row by row."""
    return cast("list[Axes]", list(figure.subplots(rows, columns, squeeze=False, **options).flat))


def quiet(axes: "Axes") -> None:
    """Style axes with small labels and thin gray lines."""
    axes.tick_params(which="both", labelsize=6.5, labelcolor=INK, color=LINE, width=0.5, length=2)
    axes.spines[:].set(color=LINE, linewidth=0.6)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=8, color=INK)


def open_frame(axes: "Axes") -> None:
    """Style axes and hide their top and right spines."""
    quiet(axes)
    axes.spines[["top", "right"]].set_visible(False)


def short(name: str, length: int = _LABEL) -> str:
    """Shorten a long name: abbreviate its first modules to initials, then drop its middle if it is still too long.

    Numbers are kept, also at the end of a module's name, since they distinguish layers.

    Example:
        >>> short("transformer.h.10.attn.c_attn.weight", 25)
        't.h.10.attn.c_attn.weight'
        >>> short("transformer.h.10.attn.c_attn.weight", 20)
        't.h.10.a.c.weight'
        >>> short("layer3.0.downsample.0.weight", 20)
        'l3.0.d.0.weight'
        >>> short("a_rather_long_name_of_one_layer", 20)
        'a_rather...one_layer'
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= length:
            break
        letters = part.rstrip("0123456789")
        parts[place] = letters[:1] + part[len(letters) :]
    name = ".".join(parts)
    if len(name) <= length:
        return name
    first = (length - 3) // 2
    return f"{name[:first]}...{name[len(name) - (length - 3 - first) :]}"


_MOST = 30  # maximum number of bars; the remaining numbers are added up
_SIDE_BY_SIDE = 8  # maximum number of layers drawn as groups of bars; more layers are drawn as lines


def draw_bars(
    names: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Callable[[float], str]]]
) -> "list[Axes]":
    """Draw horizontal bars into a new figure, one for each name, in panels side by side.

    If there are many names, the names with the largest numbers (by their largest share of the total of a panel) are
    shown in their original order. The remaining numbers are added up in one bar.

    Args:
        names: Labels of the bars.
        panels: For each title, one number for each name, and the function that formats a number.

    Returns:
        Axes of all panels.
    """
    # Select the names with the largest shares.
    shares = [0.0] * len(names)
    for numbers, _ in panels.values():
        total = sum(numbers) or 1.0
        shares = [max(share, number / total) for share, number in zip(shares, numbers, strict=True)]
    by_share = sorted(range(len(names)), key=lambda place: -shares[place])
    shown = sorted(by_share[:_MOST])
    rest = by_share[_MOST:]
    labels = [short(names[place]) for place in shown]
    labels += [f"{len(rest)} smaller ones"] if rest else []

    # One panel for each title; the panels share the labels on the left.
    figure = new_figure(2.2 + 2.6 * len(panels), 0.9 + 0.2 * len(labels))
    all_axes = grid(figure, 1, len(panels), sharey=True)
    for axes, (title, (numbers, write)) in zip(all_axes, panels.items(), strict=True):
        lengths = [numbers[place] for place in shown]
        lengths += [sum(numbers[place] for place in rest)] if rest else []
        bars = axes.barh(range(len(labels)), lengths, color="C0", height=0.7)
        axes.bar_label(bars, [f" {write(number)}" for number in lengths], fontsize=6.5, color=INK)
        axes.set_title(f"{title}: {write(sum(numbers))}", fontsize=8, color=INK)
        axes.margins(x=0.25)
        axes.set_xticks([])
        open_frame(axes)
        axes.spines["bottom"].set_visible(False)
    all_axes[0].set_yticks(range(len(labels)), labels)
    all_axes[0].set_ylabel("layer")
    all_axes[0].set_ylim(len(labels) - 0.4, -0.6)
    return all_axes


def draw_errors(
    layers: Sequence[str], errors: Mapping[str, Sequence[float]], ylabel: str, axes: "Axes | None" = None
) -> "Axes":
    """Draw errors of several structures by layer, as a group of bars for each layer, or as lines for many layers.

    Args:
        layers: Names of layers.
        errors: For each structure, one error for each layer.
        ylabel: Label of the y-axis.
        axes: Axes to draw into; by default those of a new figure with a legend.
    """
    many = len(layers) > _SIDE_BY_SIDE
    own = axes is None
    axes = axes_of(axes, min(3 + (0.4 if many else 1.3) * len(layers), 14), 4.0 if many else 3.4)
    width = 0.8 / max(len(errors), 1)
    for place, (name, values) in enumerate(errors.items()):
        if many:
            axes.plot(range(len(layers)), values, marker=".", linewidth=0.8, label=name)
        else:
            left = [x - 0.4 + (place + 0.5) * width for x in range(len(layers))]
            axes.bar(left, values, 0.9 * width, label=name)
    turned = many or any(len(layer) > 14 for layer in layers)
    rotation = {"rotation": 90} if many else {"rotation": 30, "ha": "right"} if turned else {}
    axes.set_xticks(range(len(layers)), [short(layer) for layer in layers], **rotation)
    axes.set_xlabel("layer")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    open_frame(axes)
    if own:
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


_MARKERS = 40  # lines with fewer points have markers
_NORMS = {
    "residual": r"relative residual, $\|b - A x\| \,/\, \|b\|$",
    "gradient": r"norm of the gradient, as a fraction of that at zero",
}


def draw_residuals(
    residuals: Sequence[float],
    tolerance: float,
    title: str,
    measure: Literal["residual", "gradient"] = "residual",
    label: str | None = None,
    axes: "Axes | None" = None,
) -> "Axes":
    """Draw relative residuals over iterations on a log axis, with the tolerance as a horizontal line.

    Args:
        residuals: One residual for each iteration.
        tolerance: The tolerance; drawn if it is positive.
        title: Title, used only in a new figure.
        measure: Whether the numbers are norms of the residual or of the gradient.
        label: Label of the line; by default `measure`.
        axes: Axes to draw into; by default those of a new figure.
    """
    own = axes is None
    axes = axes_of(axes, 5.0, 3.0)
    iterations = range(1, len(residuals) + 1)
    marker = "." if len(residuals) < _MARKERS else ""
    axes.plot(iterations, residuals, linewidth=1.2, marker=marker, label=label or measure)
    drawn = [line.get_label() for line in axes.lines]
    if tolerance > 0 and "tolerance" not in drawn:  # several calls may draw into the same axes
        axes.axhline(tolerance, color=LINE, linewidth=0.8, linestyle=":", label="tolerance")
    axes.set_yscale("log")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("iteration")
    axes.set_ylabel(_NORMS[measure])
    if own:
        axes.set_title(title, fontsize=8, color=INK)
    open_frame(axes)
    axes.legend(fontsize=7, frameon=False)
    return axes


_PIXELS = 200  # maximum size of a heat map in each direction
_ACROSS = 3  # maximum number of pairs of factors in a row
_INCHES = 1.6  # size of a heat map
_QUANTILE = 0.98  # quantile of absolute entries at which the color scale ends
_COLORS = "red: positive, blue: negative, up to the number in the title"
_LABELED = 0.03  # smallest share of an axis that has room for a label


@dataclass(frozen=True)
class Panel:
    """The two factors of a block.

    Attributes:
        name: The block's name.
        A: The input-based factor: `[d, d]`, only its diagonal `[d]`, or one factor for each group, `[groups, d, d]`.
        B: The gradient-based factor.
    """

    name: str
    A: Tensor
    B: Tensor


def draw_factors(panels: Sequence[Panel], left_out: int = 0) -> "list[Axes]":
    """Draw the factors of blocks into a new figure.

    The color scale of each factor ends at a quantile of its absolute entries, given in its title, since factors of
    different layers have different units. A diagonal factor is drawn as one row of stripes.

    Args:
        panels: The blocks.
        left_out: Number of blocks that are not drawn.

    Returns:
        Axes of `A` and `B` of each block, in turn.
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
    more = f"\n{left_out} more blocks: pass names to draw them" if left_out else ""
    figure.supxlabel(f"{_COLORS}{more}", fontsize=7, color=INK)
    return axes[: 2 * len(panels)]


def draw_matrix(title: str, matrix: Tensor, rows: Mapping[str, int], columns: Mapping[str, int]) -> "Axes":
    """Draw a matrix as a heat map into a new figure, with lines between its parts.

    Args:
        title: Title of the heat map.
        matrix: The whole matrix.
        rows: Number of rows of each part by name, in order.
        columns: Number of columns of each part by name, in order.

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
    # `Tensor.quantile` supports at most 16 million numbers.
    limit = float(entries.kthvalue(ceil(_QUANTILE * len(entries))).values) if len(entries) else 1.0
    # Axis coordinates are matrix indices, even if several entries share a pixel.
    frame = (-0.5, one.shape[1] - 0.5, one.shape[0] - 0.5, -0.5)
    axes.imshow(_pooled(one).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none", extent=frame)
    axes.set_aspect("auto")
    axes.set_box_aspect(1)
    axes.set_title(f"{title}, to {limit:.2g}", fontsize=6.5, color=INK, loc="left", pad=3)
    axes.set_xticks([])
    axes.set_yticks([])
    quiet(axes)


def _matrix(factor: Tensor) -> tuple[Tensor, str]:
    """Return the matrix that represents a factor, and its description."""
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
    """Downsample a matrix: each new entry is the entry of largest magnitude in its neighborhood, with its sign."""
    strides = [-(-size // _PIXELS) for size in matrix.shape]
    if max(strides) == 1:
        return matrix
    highest, lowest = (max_pool2d(sign * matrix[None, None], strides, ceil_mode=True)[0, 0] for sign in (1, -1))
    return torch.where(highest >= lowest, highest, -lowest)


_LEGEND = 10  # maximum number of blocks in a legend; more blocks get a color bar
_DECADES = 6.0  # range of the density axis


def draw_spectra(spectra: Mapping[str, Tensor], damping: Mapping[str, float], axes: "Axes | None" = None) -> "Axes":
    """Draw the eigenvalues of blocks in descending order as solid lines, and with damping added as dashed lines.

    Eigenvalues that are negative or zero up to round-off are drawn at the lower end of the axis.

    Args:
        spectra: Eigenvalues of each block, in descending order.
        damping: Damping of each block.
        axes: Axes to draw into; by default those of a new figure.

    Returns:
        The axes. Lines are in the order of blocks; the line without damping comes before the line with damping.
    """
    many = len(spectra) > _LEGEND
    axes = axes_of(axes, 7.0, 3.6)  # raises an error if matplotlib is not installed
    from matplotlib import colormaps  # noqa: PLC0415 (optional, and slow to import)

    # One or two lines for each block.
    floor = _floor(spectra, damping)
    positions = torch.linspace(0, 0.92, len(spectra)).tolist()
    for position, (name, values) in zip(positions, spectra.items(), strict=True):
        color = colormaps["viridis"](position)
        places = 100 * torch.arange(len(values)) / max(len(values) - 1, 1)
        below = float((values < damping[name]).double().mean())
        label = f"{short(name)} ({below:.0%} below damping)" if damping[name] else short(name)
        marker = "." if len(values) < _MARKERS and not many else ""
        axes.plot(places, values.clamp(min=floor), color=color, linewidth=1.2, marker=marker, label=label)
        if damping[name]:
            damped = values.clamp(min=0) + damping[name]
            axes.plot(places, damped, color=color, linewidth=0.8, linestyle="--", alpha=0.7)
    for place, level in enumerate(sorted({value for value in damping.values() if value})):
        name = "" if place else "damping"  # one entry of the legend for all levels
        axes.axhline(level, color=LINE, linewidth=0.8, linestyle=":", zorder=0, label=name)
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    axes.set_xlabel("eigenvalues of a block, largest first (%)")
    axes.set_ylabel("eigenvalue" + (" (dashed: plus damping)" if any(damping.values()) else ""))
    open_frame(axes)
    if many:
        _bar_of_blocks(axes, list(spectra))
    else:
        legend = axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="block")
        legend.get_title().set_fontsize(7)
    return axes


def _floor(spectra: Mapping[str, Tensor], damping: Mapping[str, float]) -> float:
    """Return the lower end of the axis: a tenth of the smallest number that is above round-off."""
    above = [damping[name] for name in spectra if damping[name]]
    for values in spectra.values():
        noise = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
        above += values[values > noise].tolist()[-1:]
    return 0.1 * min(above, default=1.0)


def _bar_of_blocks(axes: "Axes", names: list[str]) -> None:
    """Add a color bar that labels the colors of some blocks."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 (optional, and slow to import)
    from matplotlib.colors import Normalize  # noqa: PLC0415

    last = len(names) - 1
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, last / 0.92), "viridis"), ax=axes, pad=0.02)
    bar.ax.set_ylim(0, last)
    chosen = sorted({round(last * part / 5) for part in range(6)})
    bar.set_ticks(chosen, labels=[short(names[place]) for place in chosen])
    bar.outline.set_visible(False)
    bar.set_label("block", fontsize=8, color=INK)
    bar.ax.invert_yaxis()
    bar.ax.tick_params(labelsize=6.5, labelcolor=INK, length=2, pad=2)


def draw_density(
    grid: Tensor, density: Tensor, nodes: Tensor, axis: str = "eigenvalue", axes: "Axes | None" = None
) -> "Axes":
    """Draw a spectral density on a log axis, with ticks at its point masses.

    Args:
        grid: Points at which the density is evaluated.
        density: Values of the density on the grid.
        nodes: Positions of the point masses.
        axis: Label of the x-axis.
        axes: Axes to draw into; by default those of a new figure.
    """
    axes = axes_of(axes, 6.0, 3.2)
    top = float(density.max())
    bottom = top * 10**-_DECADES
    axes.fill_between(grid, density.clamp(min=bottom), bottom, color="C0", alpha=0.25, linewidth=0)
    axes.plot(grid, density.clamp(min=bottom), color="C0", linewidth=1.2, label="density, smoothed")
    (marks,) = axes.plot(nodes, torch.full_like(nodes, bottom), "|", color=LINE, label="point masses")
    marks.set(markersize=6, markeredgewidth=0.5, clip_on=False)
    axes.set_yscale("log")
    axes.set_ylim(bottom, 3 * top)
    axes.set_xlabel(axis)
    axes.set_ylabel("spectral density")
    open_frame(axes)
    axes.legend(fontsize=7, frameon=False)
    return axes


def draw_training(
    steps: Sequence[int], losses: Sequence[float], scales: Sequence[float], title: str, axes: "Axes | None" = None
) -> "Axes":
    """Draw losses over steps, and the scales of the steps on a second axis.

    Args:
        steps: Indices of steps with a known loss.
        losses: Losses at these steps.
        scales: Factors by which the steps were scaled.
        title: Title, used only in a new figure.
        axes: Axes to draw into; by default those of a new figure.
    """
    own = axes is None
    axes = axes_of(axes, 5.0, 3.0)
    axes.plot(steps, losses, linewidth=1.2, color="C0", label="loss of the batch")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if losses and min(losses) > 0:
        axes.set_yscale("log")
    right = axes.twinx()
    right.plot(steps, scales, linewidth=1.2, color="C1", label="scale of steps")
    right.set_ylim(0, 1.05)
    right.set_ylabel("scale of steps")
    if own:
        axes.set_title(title, fontsize=8, color=INK)
    open_frame(axes)
    lines = [*axes.lines, *right.lines]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, frameon=False)
    return axes
