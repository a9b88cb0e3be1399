"""How a training went: losses, and how much of each step was taken."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfs.charts.canvas import INK, axes_of, open_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_training(
    steps: Sequence[int], losses: Sequence[float], scales: Sequence[float], title: str, axes: "Axes | None" = None
) -> "Axes":
    """Draw losses over steps, and the scale of steps on an axis of its own.

    Args:
        steps: Steps of which the loss is known.
        losses: Their losses.
        scales: How much of each was taken.
        title: What to say about it, in a new figure.
        axes: Where to draw; by default in a new figure.
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
