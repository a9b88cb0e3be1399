"""Three curvature matrices of a small network, their exact block diagonals, and KFAC, in both flattenings.

KFAC has one block per layer, for weight and bias together, which approximates the block of the matrix in the middle
column. Rows and columns are ordered as in the other figures, a weight and then its bias. In `cvec`, a block therefore
looks like a Kronecker product. In `rvec` it does not: the entries of the bias are at the end of the block instead of at
the end of each row.

Run it: `python kfs/plots/synthetic_kfac.py figures`.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from kfs.factors import KFAC
from kfs.operators import GGN, Fisher
from kfs.plots.heatmaps import FORMATS, draw_flattenings, problem, run
from kfs.problem.risk import EmpiricalRisk

MC_SAMPLES = 100


def data(flattening: str, risk: EmpiricalRisk | None = None) -> dict[str, Tensor]:
    """Compute the matrices of the figure.

    Args:
        flattening: `"cvec"` or `"rvec"`.
        risk: The problem; by default, the synthetic one.

    Returns:
        Matrices by title of the panel: full, block-diagonal and KFAC, for GGN, Monte Carlo Fisher (with equal draws for
        all three) and empirical Fisher.
    """
    risk = problem() if risk is None else risk
    sampled = partial(Fisher, risk, "type-1", mc_samples=MC_SAMPLES, chunk_size=64)  # one chunk: labels are drawn once
    operators = {
        "GGN": GGN(risk),
        "GGN, layer blocks": GGN(risk, block_diagonal="layer"),
        "KFAC of the GGN": KFAC(risk, "type-2"),
        "Monte Carlo Fisher": sampled(),
        "Monte Carlo Fisher, layer blocks": sampled(block_diagonal="layer"),
        "KFAC of the Monte Carlo Fisher": KFAC(risk, "mc", mc_samples=MC_SAMPLES),
        "empirical Fisher": Fisher(risk, "empirical"),
        "empirical Fisher, layer blocks": Fisher(risk, "empirical", block_diagonal="layer"),
        "KFAC of the empirical Fisher": KFAC(risk, "empirical"),
    }
    return {title: operator.to_dense(flattening) for title, operator in operators.items()}


def draw(folder: str | Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Draw the figures, one per flattening.

    Args:
        folder: The folder to write to.
        formats: Formats to write.

    Returns:
        Paths of the files.
    """
    return draw_flattenings(data, folder, "synthetic_kfac", 3, formats)


if __name__ == "__main__":
    run(draw)
