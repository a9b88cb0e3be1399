"""Numbers by layer: what layers cost, and how wrong structures are."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kfs.charts.canvas import INK, axes_of, grid, new_figure, open_frame, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 30  # bars; smaller ones are added up
_SIDE_BY_SIDE = 8  # layers with a group of bars each; more are drawn as lines


def draw_bars(
    names: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Callable[[float], str]]]
) -> "list[Axes]":
    """Draw horizontal bars into a new figure, one for each name, in panels side by side.

    If there are many names, those with the largest numbers (by their share of the total, in any panel) are shown in
    order, and all others together as one bar.

    Args:
        names: What the numbers belong to.
        panels: Numbers by title, with what writes them.

    Returns:
        Axes of all panels.
    """
    shares = [0.0] * len(names)
    for numbers, _ in panels.values():
        total = sum(numbers) or 1.0
        shares = [max(share, number / total) for share, number in zip(shares, numbers, strict=True)]
    by_share = sorted(range(len(names)), key=lambda place: -shares[place])
    shown = sorted(by_share[:_MOST])
    rest = by_share[_MOST:]
    labels = [short(names[place]) for place in shown]
    labels += [f"{len(rest)} smaller ones"] if rest else []
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
    """Draw errors of several structures by layer: a group of bars for each layer, or lines if there are many layers.

    Args:
        layers: Names of layers.
        errors: By structure, one error for each layer.
        ylabel: What an error is.
        axes: Where to draw; by default in a new figure, with a legend.
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
