r"""The Rosenbrock function and its convex approximation by partial linearization.

The function is the squared norm of $h(x)$. Replacing $h$ by its tangent at the anchor gives a quadratic function with
the GGN as Hessian. It touches the function at the anchor, and a Gauss-Newton step leads to its minimum. At this anchor
the function itself has negative curvature in one direction.

Run it: `python kfs/plots/linearized_rosenbrock.py figures`.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.func import vmap

from kfs.basics.ggn_rosenbrock import (
    linearized_rosenbrock,
    rosenbrock_ggn,
    rosenbrock_inner,
    rosenbrock_outer,
)
from kfs.display.charts import INK, quiet
from kfs.plots.heatmaps import FORMATS, run, save

ALPHA = 10.0
ANCHOR = (0.5, 1.5)
LEVELS = [float(2**k) for k in range(-2, 11, 2)]
SOLID, DASHED = "#2166ac", "#b2182b"


def data(points: int = 301) -> dict[str, Tensor]:
    """Compute the data of the figure.

    Args:
        points: Number of grid points per axis.

    Returns:
        Coordinates `x1`, `x2` `[points]`; `function` and `approximation` on their grid, `[x2, x1]`; the `anchor`, the
        `minimum` of the function and the minimum of the approximation, `step`, `[2]` each.
    """
    x1 = torch.linspace(-2, 3, points, dtype=torch.float64)
    x2 = torch.linspace(-2, 3, points, dtype=torch.float64)
    anchor = torch.tensor(ANCHOR, dtype=torch.float64)
    grid = torch.cartesian_prod(x2, x1).flip(1)
    function = vmap(_rosenbrock)(grid)
    approximation = vmap(lambda x: linearized_rosenbrock(x, anchor, ALPHA))(grid)
    gradient = torch.func.grad(_rosenbrock)(anchor)
    return {
        "x1": x1,
        "x2": x2,
        "function": function.reshape(points, points),
        "approximation": approximation.reshape(points, points),
        "anchor": anchor,
        "minimum": torch.ones(2, dtype=torch.float64),
        "step": anchor - torch.linalg.solve(rosenbrock_ggn(anchor, ALPHA), gradient),
    }


def draw(folder: str | Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Draw the figure.

    Args:
        folder: The folder to write to.
        formats: Formats to write.

    Returns:
        Paths of the files.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    shown = {name: t.numpy() for name, t in data().items()}
    figure = Figure(figsize=(4.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, color, style in (("function", SOLID, "solid"), ("approximation", DASHED, "dashed")):
        axes.contour(
            shown["x1"], shown["x2"], shown[name], LEVELS, colors=color, linestyles=style, linewidths=0.9, alpha=0.85
        )
        label = {"function": "$f$, the Rosenbrock function", "approximation": "$\\bar{f}$, partially linearized"}[name]
        axes.plot([], [], color=color, linestyle=style, linewidth=0.9, label=label)
    axes.plot(*shown["anchor"], "*", color=INK, markersize=11, markeredgewidth=0, label="anchor $\\hat{x}$")
    axes.plot(*shown["minimum"], "o", color=SOLID, markersize=4.5, label="minimum of $f$")
    axes.plot(*shown["step"], "o", color=DASHED, markersize=4.5, markerfacecolor="white", label="minimum of $\\bar{f}$")
    axes.set(xlabel="$x_1$", ylabel="$x_2$", xticks=range(-2, 4), yticks=range(-2, 4), aspect="equal")
    quiet(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7, labelcolor=INK)
    return save(figure, folder, "linearized_rosenbrock", formats)


def _rosenbrock(x: Tensor) -> Tensor:
    """Evaluate the Rosenbrock function, composed of its outer and inner function."""
    return rosenbrock_outer(rosenbrock_inner(x, ALPHA))


if __name__ == "__main__":
    run(draw)
