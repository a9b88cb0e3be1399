"""Hessian and GGN of a small network, and what their block diagonals leave of them, in both flattenings.

A ReLU network is piecewise linear in the parameters of any one layer. The network's own second derivatives are thus
zero within a layer: on the diagonal the blocks of both matrices are the same, and they differ only beside it.

Run it: `python kfs/plots/synthetic_hessian.py figures`.
"""

from pathlib import Path

from torch import Tensor

from kfs.operators import GGN, Hessian
from kfs.plots.heatmaps import FORMATS, draw_flattenings, problem, run
from kfs.problem.risk import EmpiricalRisk


def data(flattening: str, risk: EmpiricalRisk | None = None) -> dict[str, Tensor]:
    """Compute what is shown.

    Args:
        flattening: `"cvec"` or `"rvec"`.
        risk: The problem; by default the synthetic one.

    Returns:
        Matrices by the panels' titles: full ones, then those with one diagonal block per parameter.
    """
    risk = problem() if risk is None else risk
    return {
        "Hessian": Hessian(risk).to_dense(flattening),
        "GGN": GGN(risk).to_dense(flattening),
        "Hessian, block-diagonal": Hessian(risk, block_diagonal="parameter").to_dense(flattening),
        "GGN, block-diagonal": GGN(risk, block_diagonal="parameter").to_dense(flattening),
    }


def draw(folder: str | Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Draw the figures, one per flattening.

    Args:
        folder: Where to write them.
        formats: Which files to write of each.

    Returns:
        Where the files are.
    """
    return draw_flattenings(data, folder, "synthetic_hessian", 2, formats)


if __name__ == "__main__":
    run(draw)
