"""KFAC at a glance: the GGN of a small network, its layers' blocks, and KFAC of it. The picture of the README.

These are three panels of `synthetic_kfac`, which says what its rows and columns are.

Run it: `python kfs/tour/at_a_glance.py docs/assets`.
"""

from pathlib import Path
from typing import Final

from kfs.plots import synthetic_kfac
from kfs.plots.heatmaps import draw_panels, problem, run, save

PANELS: Final = ("GGN", "GGN, layer blocks", "KFAC of the GGN")


def draw(folder: str | Path, formats: tuple[str, ...] = ("png",)) -> list[Path]:
    """Draw the figure.

    Args:
        folder: Where to write it.
        formats: Which files to write.

    Returns:
        Where the files are.
    """
    risk = problem()
    matrices = synthetic_kfac.data("cvec", risk)
    figure = draw_panels({title: matrices[title] for title in PANELS}, risk, columns=len(PANELS))
    return save(figure, folder, "at_a_glance", formats)


if __name__ == "__main__":
    run(draw)
