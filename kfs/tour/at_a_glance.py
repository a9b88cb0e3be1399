"""KFAC at a glance: the GGN of a small network, its diagonal blocks by layer, and its KFAC. The README's picture.

These are three panels of `synthetic_kfac`, which describes their rows and columns.

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
        folder: Folder to write to.
        formats: File formats to write.

    Returns:
        Paths of the files.
    """
    risk = problem()
    matrices = synthetic_kfac.data("cvec", risk)
    figure = draw_panels({title: matrices[title] for title in PANELS}, risk, columns=len(PANELS))
    return save(figure, folder, "at_a_glance", formats)


if __name__ == "__main__":
    run(draw)
