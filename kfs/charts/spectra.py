"""Eigenvalues: of all blocks of an operator, with the effect of damping, and the density of an operator's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfs.charts.canvas import INK, LINE, axes_of, open_frame, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND = 10  # more blocks have a color bar instead
_MARKERS = 40  # fewer eigenvalues are marked
_DECADES = 6.0  # of densities that are shown


def draw_spectra(spectra: Mapping[str, Tensor], damping: Mapping[str, float], axes: "Axes | None" = None) -> "Axes":
    """Draw the eigenvalues of blocks in descending order, solid, and with damping added, dashed.

    Eigenvalues that are zero up to round-off, or negative, are drawn at the lower end of the axis.

    Args:
        spectra: Eigenvalues of each block, in descending order.
        damping: Damping of each block.
        axes: Where to draw; by default in a new figure.

    Returns:
        The axes. Lines are in the order of blocks, those without damping before the one with it.
    """
    many = len(spectra) > _LEGEND
    axes = axes_of(axes, 7.0, 3.6)  # says so if matplotlib is missing
    from matplotlib import colormaps  # noqa: PLC0415 (optional, and slow to import)

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
    """Return the lower end of the axis: a tenth of the smallest number that is not round-off."""
    above = [damping[name] for name in spectra if damping[name]]
    for values in spectra.values():
        noise = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
        above += values[values > noise].tolist()[-1:]
    return 0.1 * min(above, default=1.0)


def _bar_of_blocks(axes: "Axes", names: list[str]) -> None:
    """Show which color is which block, for some of them."""
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
    """Draw a spectral density on a log axis, and where its point masses are.

    Args:
        grid: Where it is evaluated.
        density: Its values there.
        nodes: Point masses.
        axis: What it is a density of.
        axes: Where to draw; by default in a new figure.
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
