"""Interactive plots: fragments of HTML with their data, for `assets/play.js`."""

import json
from html import escape
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from kfs.factors import EKFAC, KFAC
from kfs.operators import GGN, Fisher
from kfs.plots.heatmaps import problem
from kfs.problem.risk import EmpiricalRisk

SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_SAMPLES = (1, 4, 16)
TITLES = {
    "rosenbrock": "Drag the anchor: a function, its linearized version, and their curvature",
    "samples": "Monte Carlo samples: how the Fisher matrix converges to the GGN",
    "structures": "Structures and flattenings of one matrix",
}
# What to see in them.
HINTS = {
    "rosenbrock": "The GGN is positive definite wherever the anchor is; the Hessian is not.",
    "samples": "More samples bring the matrix closer to the GGN: the error falls with the root of their number.",
    "structures": "All structures drop what is between layers; KFAC and EKFAC are also off within layers.",
}


def play_data(quick: bool = False) -> dict[str, dict[str, Any]]:
    """Compute the data of the three interactive plots.

    Args:
        quick: Whether to draw fewer samples.

    Returns:
        Their data, by name, ready for JSON.
    """
    risk = problem()
    return {
        "rosenbrock": {"alpha": 10.0, "anchor": [-0.5, 1.0]},
        "samples": _samples(risk, QUICK_SAMPLES if quick else SAMPLES),
        "structures": _structures(risk),
    }


def fragment(name: str, data: dict[str, Any], title: bool = True) -> str:
    """Return the HTML of one plot: a title and a hint unless `title` is false, a placeholder, and its data."""
    heading = f"<h3>{escape(TITLES[name])}</h3>\n<p>{escape(HINTS[name])}</p>\n" if title else ""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'{heading}<div class="play" id="play-{name}" data-widget="{name}"></div>\n'
        f'<script type="application/json" id="play-{name}-data">{text}</script>'
    )


def asset(name: str) -> str:
    """Return a file that pages need: `"play.js"` for interactive plots, or a style, `"play.css"` or `"report.css"`."""
    return (files("kfs.tour") / "assets" / name).read_text(encoding="utf-8")


def _samples(risk: EmpiricalRisk, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return Monte Carlo Fishers with increasing numbers of samples, and their errors relative to the GGN."""
    G = GGN(risk).to_dense()
    fishers = [Fisher(risk, "type-1", mc_samples=count).to_dense() for count in counts]
    size = torch.linalg.matrix_norm(G, ord=2)
    errors = [float(torch.linalg.matrix_norm(F - G, ord=2) / size) for F in fishers]
    return {
        "samples": list(counts),
        "errors": errors,
        "matrices": [_rounded(F) for F in fishers],
        "blocks": _blocks(risk),
        "limit": float(G.abs().max()),
    }


def _structures(risk: EmpiricalRisk) -> dict[str, Any]:
    """Return the GGN, its blocks, KFAC and EKFAC, in both flattenings."""
    operators = {
        "exact": GGN(risk),
        "block-diagonal": GGN(risk, block_diagonal="layer"),
        "KFAC": KFAC(risk),
        "EKFAC": EKFAC(risk),
    }
    G = operators["exact"].to_dense()
    flattenings = ("rvec", "cvec")
    return {
        "flattenings": list(flattenings),
        "structures": list(operators),
        "matrices": {f: {name: _rounded(op.to_dense(f)) for name, op in operators.items()} for f in flattenings},
        "errors": {name: float((op.to_dense() - G).norm() / G.norm()) for name, op in operators.items()},
        "blocks": _blocks(risk),
        "limit": float(G.abs().max()),
    }


def _blocks(risk: EmpiricalRisk) -> list[list[Any]]:
    """Return the name of every parameter, and its half-open range in a flat vector."""
    found, start = [], 0
    for name, p in risk.params.items():
        found.append([name, start, start + p.numel()])
        start += p.numel()
    return found


def _rounded(matrix: Tensor) -> list[list[float]]:
    """Return numbers with four digits, which keep the page small."""
    return [[float(f"{value:.3e}") for value in row] for row in matrix.tolist()]
