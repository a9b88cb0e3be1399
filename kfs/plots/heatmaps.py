"""What the matrix figures share: the synthetic problem, heatmaps of block matrices, and how figures are written.

One figure, one colour scale: its panels can be compared. The figures themselves are in the files next to this one.
"""

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from kfs.display.charts import INK, LINE, quiet
from kfs.problem.risk import EmpiricalRisk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FLATTENINGS: Final = ("cvec", "rvec")
SIZES: Final = (5, 4, 4, 3)
FORMATS: Final = ("png", "svg")


def problem(num_data: int = 100, seed: int = 6) -> EmpiricalRisk:
    """Make the synthetic problem: a small ReLU network and random data, in double precision.

    The global random state stays as it is. Weights are drawn wider than PyTorch does, so that no layer's block is too
    pale to be seen next to another's. The seed was chosen for legible pictures: every unit is on for some data and off
    for others, and the empirical Fisher is about as large as the GGN, which it is not for most seeds. So errors of
    approximations here are examples, and not typical ones.

    Args:
        num_data: How many examples.
        seed: Seed for parameters and data.

    Returns:
        A risk whose parameters are three weights and three biases, in turn: 59 numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(d_in, d_out).double() for d_in, d_out in pairwise(SIZES)]
        X = torch.randn(num_data, SIZES[0], dtype=torch.float64)
        y = torch.rand(num_data, SIZES[-1], dtype=torch.float64)
        for layer in layers:
            nn.init.normal_(layer.weight, std=1.25 * layer.in_features**-0.5)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return EmpiricalRisk(model, nn.MSELoss(), (X, y), progress=False)  # the tour shows its own


def blocks(risk: EmpiricalRisk) -> dict[str, int]:
    """Return how many rows each parameter's block has, by its label: `W1`, `b1`, `W2`, and so on."""
    labels: dict[str, int] = {}
    for i, p in enumerate(risk.params.values()):
        labels[f"{'b' if i % 2 else 'W'}{i // 2 + 1}"] = p.numel()
    return labels


def common_limit(matrices: Mapping[str, Tensor], quantile: float = 0.98) -> float:
    """Return the largest absolute entry that the colours distinguish: a quantile of the non-zero ones of all panels.

    Args:
        matrices: What is shown, by panel.
        quantile: How many of the entries keep their own colour; the few beyond have the last one.

    Returns:
        The limit on both sides of zero; one if all entries are zero.
    """
    entries = torch.cat([M.abs().flatten() for M in matrices.values()])
    entries = entries[entries > 0]
    return torch.quantile(entries, quantile).item() if len(entries) else 1.0


def draw_matrix(axes: "Axes", matrix: Tensor, labels: Mapping[str, int], limit: float) -> "AxesImage":
    """Draw a matrix as a heatmap, with thin lines between blocks and thicker ones between layers.

    Args:
        axes: Where.
        matrix: A square matrix.
        labels: How many rows each block has, by its label. A layer begins at each label that starts with `W`.
        limit: The absolute value at which the colours end.

    Returns:
        The image, for a colour bar.
    """
    image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none")
    ends = torch.tensor([0, *labels.values()]).cumsum(0).tolist()
    for label, start in list(zip(labels, ends, strict=False))[1:]:
        width = 0.6 if label.startswith("W") else 0.25
        axes.axhline(start - 0.5, color=LINE, linewidth=width)
        axes.axvline(start - 0.5, color=LINE, linewidth=width)
    centres = [(start + end - 1) / 2 for start, end in pairwise(ends)]
    names = [f"${label[0]}_{{{label[1:]}}}$" for label in labels]
    axes.set_xticks(centres, names)
    axes.set_yticks(centres, names)
    quiet(axes)
    axes.tick_params(length=0, pad=2)
    return image


def draw_panels(matrices: Mapping[str, Tensor], risk: EmpiricalRisk, columns: int) -> "Figure":
    """Draw heatmaps in rows, all with the same colours; only the outer ones have labels.

    Args:
        matrices: What is shown, by the panels' titles.
        risk: Whose parameters the rows and columns of the matrices belong to.
        columns: How many panels stand side by side.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    rows, limit = -(-len(matrices) // columns), common_limit(matrices)
    size = (2.2 * columns + 0.6, 2.35 * rows + 0.1)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=True):
        image = draw_matrix(axes, matrix, blocks(risk), limit)
        axes.set_title(title, fontsize=8, color=INK, pad=4)
    beyond = max(M.abs().max().item() for M in matrices.values()) > limit
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30, pad=0.02, extend="both" if beyond else "neither")
    bar.outline.set_visible(False)
    bar.set_label("entry of the matrix")
    quiet(bar.ax)
    bar.solids.set_edgecolor("face")  # type: ignore[union-attr]  # no gaps in vector graphics
    return figure


def save(figure: "Figure", folder: str | Path, name: str, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Write a figure, equal bytes for equal figures.

    Args:
        figure: What to write.
        folder: Where to; it is made if need be.
        name: Name of the files, without what the format adds.
        formats: Which ones.

    Returns:
        Where the files are.
    """
    from matplotlib import rc_context  # noqa: PLC0415 (optional)

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is done: it must not depend on what was written before
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / f"{name}.{kind}" for kind in formats]
    for path in paths:
        with rc_context({"svg.hashsalt": name}):
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw_flattenings(
    data: Callable[[str, EmpiricalRisk], Mapping[str, Tensor]],
    folder: str | Path,
    name: str,
    columns: int,
    formats: tuple[str, ...],
) -> list[Path]:
    """Draw and write one figure per flattening.

    Args:
        data: Computes panels, for a flattening and a problem.
        folder: Where to write figures.
        name: Name of the files, without flattening and format.
        columns: How many panels stand side by side.
        formats: Which files to write of each.

    Returns:
        Where the files are.
    """
    risk, paths = problem(), []
    for flattening in FLATTENINGS:
        figure = draw_panels(data(flattening, risk), risk, columns)
        paths += save(figure, folder, f"{name}_{flattening}", formats)
    return paths


def run(draw: Callable[[str], list[Path]]) -> None:
    """Draw into the folder that the command line names, or into this one, and print where the files are."""
    for path in draw(sys.argv[1] if len(sys.argv) > 1 else "."):
        print(path)
