"""Hessian and GGN of a small network, and their block diagonals, in both flattenings.

A ReLU network is piecewise linear in the parameters of any single layer. The network's own second derivatives are thus
zero within a layer: both matrices have the same diagonal blocks, and differ only in off-diagonal blocks.

Run it: `python kfs/plots/synthetic_hessian.py figures`.
"""

from pathlib import Path

from torch import Tensor

from kfs.operators import GGN, Hessian
from kfs.plots.heatmaps import FORMATS, draw_flattenings, problem, run
from kfs.problem.risk import EmpiricalRisk


def data(flattening: str, risk: EmpiricalRisk | None = None) -> dict[str, Tensor]:
    """Compute the matrices of the figure.

    Args:
        flattening: `"cvec"` or `"rvec"`.
        risk: The problem; by default, the synthetic one.

    Returns:
        Matrices by title of the panel: full ones, then block-diagonal ones with one block per parameter.
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
        folder: The folder to write to.
        formats: Formats to write.

    Returns:
        Paths of the files.
    """
    return draw_flattenings(data, folder, "synthetic_hessian", 2, formats)


if __name__ == "__main__":
    run(draw)
