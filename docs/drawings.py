"""The figures of the book: captions, the modules that draw them, and the pages that show them."""

from pathlib import Path
from typing import NamedTuple

from kfs.plots import linearized_rosenbrock, synthetic_fisher, synthetic_hessian, synthetic_kfac
from kfs.tour import structure_errors

SMALL_NET = "a network 5-4-4-3 with ReLU, square loss and 100 examples; lines mark parameters"


class Figure(NamedTuple):
    """A figure.

    Attributes:
        name: Name of its file, without extension.
        plot: The file that draws it.
        page: The page of a definition that shows it, too.
        caption: Its caption.
        document: Numbers of the paper's figures with the same contents; empty if there are none.
    """

    name: str
    plot: str
    page: str
    caption: str
    document: tuple[int, ...] = ()

    @property
    def origin(self) -> str:
        """Name the paper's figure, as a phrase."""
        if not self.document:
            return "This figure is not in the paper."
        numbers = " and ".join(map(str, self.document))
        return f"Figure{'s' if len(self.document) > 1 else ''} {numbers} of the paper."


FIGURES = (
    Figure(
        "linearized_rosenbrock",
        "kfs/plots/linearized_rosenbrock.py",
        "kfs/basics/ggn_rosenbrock",
        "The Rosenbrock function and its partial linearization around an anchor.",
        document=(4,),
    ),
    Figure(
        "synthetic_hessian_cvec",
        "kfs/plots/synthetic_hessian.py",
        "kfs/basics/ggns",
        f"Hessian and GGN of {SMALL_NET}. Flattened by columns.",
        document=(5,),
    ),
    Figure(
        "synthetic_hessian_rvec",
        "kfs/plots/synthetic_hessian.py",
        "kfs/basics/ggns",
        f"Hessian and GGN of {SMALL_NET}. Flattened by rows.",
        document=(5,),
    ),
    Figure(
        "synthetic_fisher_cvec",
        "kfs/plots/synthetic_fisher.py",
        "kfs/basics/exact_fishers",
        f"GGN and Fisher matrices of {SMALL_NET}. Flattened by columns.",
        document=(6, 8),
    ),
    Figure(
        "synthetic_fisher_rvec",
        "kfs/plots/synthetic_fisher.py",
        "kfs/basics/exact_fishers",
        f"GGN and Fisher matrices of {SMALL_NET}. Flattened by rows.",
        document=(6, 8),
    ),
    Figure(
        "synthetic_fisher_convergence",
        "kfs/plots/synthetic_fisher.py",
        "kfs/basics/mc_fisher_convergence",
        "Relative distance of the Monte Carlo Fisher to the GGN, in the spectral norm.",
        document=(7,),
    ),
    Figure(
        "synthetic_kfac_cvec",
        "kfs/plots/synthetic_kfac.py",
        "kfs/kfac/scaffold",
        f"Curvature, its layer blocks, and KFAC, of {SMALL_NET}. Flattened by columns.",
        document=(9,),
    ),
    Figure(
        "synthetic_kfac_rvec",
        "kfs/plots/synthetic_kfac.py",
        "kfs/kfac/scaffold",
        f"Curvature, its layer blocks, and KFAC, of {SMALL_NET}. Flattened by rows.",
        document=(10,),
    ),
    Figure(
        "structure_errors",
        "kfs/tour/structure_errors.py",
        "kfs/factors/alternatives",
        "Relative errors of structures against the exact blocks of the GGN, for the layers of a small convolutional "
        "network. kfs.compare(risk) does the same for your model.",
    ),
)
PLOTS = {
    "linearized_rosenbrock": linearized_rosenbrock,
    "synthetic_hessian": synthetic_hessian,
    "synthetic_fisher": synthetic_fisher,
    "synthetic_kfac": synthetic_kfac,
}


def plots() -> list[str]:
    """Return the names of the modules that draw figures."""
    return [*PLOTS, "structure_errors"]


def file_of(plot: str) -> str:
    """Return the path of the module that draws a figure."""
    return f"kfs/{'plots' if plot in PLOTS else 'tour'}/{plot}.py"


def draw(plot: str, folder: Path) -> None:
    """Draw the figures of one module into a folder."""
    if plot == "structure_errors":
        structure_errors.draw(folder / "structure_errors.svg")
    else:
        PLOTS[plot].draw(folder, ("svg",))


def figures_of(docname: str) -> list[Figure]:
    """Return the figures on a page: those of a definition, and those that a module draws."""
    return [figure for figure in FIGURES if docname in {figure.page, figure.plot.removesuffix(".py")}]
