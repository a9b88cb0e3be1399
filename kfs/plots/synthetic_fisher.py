"""Fisher matrices of a small network, in both flattenings, and the convergence of the Monte Carlo Fisher.

For the square loss the exact Fisher is the GGN. The Monte Carlo Fisher is unbiased but noisy: its error falls like one
over the square root of the number of labels drawn per example. The empirical Fisher uses the labels of the data
instead of drawn ones. It is a different matrix, for any number of examples.

Run it: `python kfs/plots/synthetic_fisher.py figures`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfs.display.charts import INK, quiet
from kfs.operators import GGN, Fisher
from kfs.plots.heatmaps import FORMATS, draw_flattenings, problem, run, save
from kfs.problem.risk import EmpiricalRisk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = tuple(2**k for k in range(9))
SEEDS = 10


def data(flattening: str, risk: EmpiricalRisk | None = None) -> dict[str, Tensor]:
    """Compute the matrices of the figure.

    Args:
        flattening: `"cvec"` or `"rvec"`.
        risk: The problem; by default, the synthetic one.

    Returns:
        Matrices by title of the panel.
    """
    risk = problem() if risk is None else risk
    return {
        "GGN": GGN(risk).to_dense(flattening),
        "Fisher, exact (type II)": Fisher(risk, "type-2").to_dense(flattening),
        "GGN, block-diagonal": GGN(risk, block_diagonal="parameter").to_dense(flattening),
        "Monte Carlo Fisher, 1 sample": Fisher(risk, "type-1", mc_samples=1).to_dense(flattening),
        "Monte Carlo Fisher, 100 samples": Fisher(risk, "type-1", mc_samples=100, chunk_size=64).to_dense(flattening),
        "empirical Fisher": Fisher(risk, "empirical").to_dense(flattening),
    }


def convergence(samples: tuple[int, ...] = SAMPLES, seeds: int = SEEDS) -> Tensor:
    """Compute the error of the Monte Carlo Fisher, compared to the GGN.

    Args:
        samples: Numbers of draws per example.
        seeds: Number of repetitions with different seeds.

    Returns:
        Spectral norms of the errors, divided by the norm of the GGN, shape `[seeds, len(samples)]`.
    """
    risk = problem()
    G = GGN(risk).to_dense()
    errors = torch.empty(seeds, len(samples), dtype=torch.float64)
    for seed in range(seeds):
        for i, mc_samples in enumerate(samples):
            F = Fisher(risk, "type-1", mc_samples=mc_samples, seed=seed, chunk_size=len(G)).to_dense()
            errors[seed, i] = torch.linalg.matrix_norm(F - G, 2) / torch.linalg.matrix_norm(G, 2)
    return errors


def draw_convergence(samples: tuple[int, ...], errors: Tensor) -> "Figure":
    """Draw errors `[seeds, len(samples)]`, their mean, and a line that falls like one over the square root."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    figure = Figure(figsize=(4.2, 2.9), layout="constrained")
    axes = figure.subplots()
    M, mean = torch.tensor(samples, dtype=torch.float64), errors.mean(0)
    constant = (mean * M.sqrt()).log().mean().exp()
    for i, single in enumerate(errors):
        axes.loglog(samples, single.numpy(), color="#b9cfe4", linewidth=0.7, label=None if i else "single runs")
    axes.loglog(samples, mean.numpy(), color="#2166ac", linewidth=1.4, marker="o", markersize=3, label="mean")
    line = (constant / M.sqrt()).numpy()
    axes.loglog(samples, line, color=INK, linewidth=0.9, linestyle="--", label="$\\propto 1/\\sqrt{M}$")
    axes.set_xlabel("samples per example, $M$")
    axes.set_ylabel("relative error, spectral norm")
    quiet(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    return figure


def draw(
    folder: str | Path,
    formats: tuple[str, ...] = FORMATS,
    samples: tuple[int, ...] = SAMPLES,
    seeds: int = SEEDS,
) -> list[Path]:
    """Draw the figures: matrices in each flattening, and the convergence.

    Args:
        folder: The folder to write to.
        formats: Formats to write.
        samples: As in `convergence`.
        seeds: As in `convergence`.

    Returns:
        Paths of the files.
    """
    paths = draw_flattenings(data, folder, "synthetic_fisher", 3, formats)
    figure = draw_convergence(samples, convergence(samples, seeds))
    return paths + save(figure, folder, "synthetic_fisher_convergence", formats)


if __name__ == "__main__":
    run(draw)
