"""How residuals of a solver fall."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kfs.charts.canvas import INK, LINE, axes_of, open_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = 40  # fewer iterations are marked
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
    """Draw relative residuals on a log axis, iteration by iteration, and the tolerance.

    Args:
        residuals: One for each iteration.
        tolerance: Drawn as a line, if it is positive.
        title: What to say about it, in a new figure.
        measure: What residuals are norms of.
        label: What the line is called; by default what is measured.
        axes: Where to draw; by default in a new figure.
    """
    own = axes is None
    axes = axes_of(axes, 5.0, 3.0)
    iterations = range(1, len(residuals) + 1)
    marker = "." if len(residuals) < _MARKERS else ""
    axes.plot(iterations, residuals, linewidth=1.2, marker=marker, label=label or measure)
    drawn = [line.get_label() for line in axes.lines]
    if tolerance > 0 and "tolerance" not in drawn:  # there may be several solutions, with one tolerance
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
