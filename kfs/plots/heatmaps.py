"""Code shared by the matrix figures: the synthetic problem, heatmaps of block matrices, and saving of figures.

All panels of a figure have the same color scale, so they can be compared. The figures are in the other files of this
folder.
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
    """Return the synthetic problem: a small ReLU network and random data, in double precision.

    The global random state is not changed. Weights have a larger variance than PyTorch's initialization, so that the
    blocks of all layers are visible. The seed was chosen for legible pictures: every unit is active for some examples
    and inactive for others, and the empirical Fisher is about as large as the GGN, which is not so for most seeds.
    Therefore, errors of approximations in these figures are not typical.

    Args:
        num_data: Number of examples.
        seed: Seed for parameters and data.

    Returns:
        A risk with three weights and three biases as parameters, alternating: 59 numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(d_in, d_out).double() for d_in, d_out in pairwise(SIZES)]
        X = torch.randn(num_data, SIZES[0], dtype=torch.float64)
        y = torch.rand(num_data, SIZES[-1], dtype=torch.float64)
        for layer in layers:
            nn.init.normal_(layer.weight, std=1.25 * layer.in_features**-0.5)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return EmpiricalRisk(model, nn.MSELoss(), (X, y), progress=False)  # the tour shows its own progress


def blocks(risk: EmpiricalRisk) -> dict[str, int]:
    """Return the number of rows of each parameter's block, by label: `W1`, `b1`, `W2`, and so on."""
    labels: dict[str, int] = {}
    for i, p in enumerate(risk.params.values()):
        labels[f"{'b' if i % 2 else 'W'}{i // 2 + 1}"] = p.numel()
    return labels


def common_limit(matrices: Mapping[str, Tensor], quantile: float = 0.98) -> float:
    """Return the limit of the color scale: a quantile of the absolute non-zero entries of all panels.

    Args:
        matrices: The matrices, by panel.
        quantile: Share of entries within the limit; the few entries beyond have the last color.

    Returns:
        The limit on both sides of zero; one if all entries are zero.
    """
    entries = torch.cat([M.abs().flatten() for M in matrices.values()])
    entries = entries[entries > 0]
    return torch.quantile(entries, quantile).item() if len(entries) else 1.0


def draw_matrix(axes: "Axes", matrix: Tensor, labels: Mapping[str, int], limit: float) -> "AxesImage":
    """Draw a matrix as a heatmap, with thin lines between blocks and thicker ones between layers.

    Args:
        axes: The axes to draw in.
        matrix: A square matrix.
        labels: Number of rows of each block, by label. A layer begins at each label that starts with `W`.
        limit: The absolute value at which the colors end.

    Returns:
        The image, for a color bar.
    """
    image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none")
    ends = torch.tensor([0, *labels.values()]).cumsum(0).tolist()
    for label, start in list(zip(labels, ends, strict=False))[1:]:
        width = 0.6 if label.startswith("W") else 0.25
        axes.axhline(start - 0.5, color=LINE, linewidth=width)
        axes.axvline(start - 0.5, color=LINE, linewidth=width)
    centers = [(start + end - 1) / 2 for start, end in pairwise(ends)]
    names = [f"${label[0]}_{{{label[1:]}}}$" for label in labels]
    axes.set_xticks(centers, names)
    axes.set_yticks(centers, names)
    quiet(axes)
    axes.tick_params(length=0, pad=2)
    return image


def draw_panels(matrices: Mapping[str, Tensor], risk: EmpiricalRisk, columns: int) -> "Figure":
    """Draw heatmaps in a grid, all with the same colors; only the outer ones have labels.

    Args:
        matrices: The matrices, by title of the panel.
        risk: The risk with the parameters that rows and columns of the matrices belong to.
        columns: Number of panels per row.

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
    """Save a figure, with equal bytes for equal figures.

    Args:
        figure: The figure.
        folder: The folder to write to, created if missing.
        name: Name of the files, without extension.
        formats: Formats to write.

    Returns:
        Paths of the files.
    """
    from matplotlib import rc_context  # noqa: PLC0415 (optional)

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # freeze the layout, which otherwise could depend on formats written before
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
    """Draw and save one figure per flattening.

    Args:
        data: Function from a flattening and a problem to the matrices of the panels.
        folder: The folder to write to.
        name: Name of the files, without flattening and extension.
        columns: Number of panels per row.
        formats: Formats to write.

    Returns:
        Paths of the files.
    """
    risk, paths = problem(), []
    for flattening in FLATTENINGS:
        figure = draw_panels(data(flattening, risk), risk, columns)
        paths += save(figure, folder, f"{name}_{flattening}", formats)
    return paths


def run(draw: Callable[[str], list[Path]]) -> None:
    """Draw into the folder given on the command line, or the current one, and print the paths of the files."""
    for path in draw(sys.argv[1] if len(sys.argv) > 1 else "."):
        print(path)
