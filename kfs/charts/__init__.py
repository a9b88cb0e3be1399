"""Charts: numbers drawn into matplotlib's axes. Objects have `plot` methods, which call these.

They need matplotlib, `pip install matplotlib`, which is imported when something is drawn. Figures of the book, which
compute what they show, are in `kfs.plots`.
"""

from kfs.charts.bars import draw_bars, draw_errors
from kfs.charts.convergence import draw_residuals
from kfs.charts.factors import Panel, draw_factors, draw_matrix
from kfs.charts.spectra import draw_density, draw_spectra

__all__ = [
    "Panel",
    "draw_bars",
    "draw_density",
    "draw_errors",
    "draw_factors",
    "draw_matrix",
    "draw_residuals",
    "draw_spectra",
]
