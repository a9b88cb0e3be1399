"""Comparison of approximations with exact blocks, layer by layer: their errors, and what each structure costs."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfs.display.charts import draw_errors
from kfs.display.describe import DescribedByTables, Description, Table, readable_size
from kfs.display.progress import show_progress
from kfs.display.suggestions import suggest
from kfs.errors import ModelError
from kfs.factors.alternatives import (
    exact_blocks,
    exact_diagonal,
    exact_matrices,
    optimal_kronecker,
    trace_scaled,
)
from kfs.factors.blocks import BlockDiagonal, Structure
from kfs.factors.ekfac import EKFAC
from kfs.factors.kfac import KFAC
from kfs.problem.risk import EmpiricalRisk, check_risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRUCTURES: dict[str, Callable[..., BlockDiagonal]] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "diagonal": exact_diagonal,
    "trace-scaled": trace_scaled,
    "optimal Kronecker": optimal_kronecker,
    "exact blocks": exact_blocks,
}


@dataclass(frozen=True)
class Row:
    """The error and size of one structure of one layer.

    Attributes:
        layer: Name of the block.
        structure: Name of the structure.
        frobenius: Error in the Frobenius norm, relative to the exact block.
        spectral: Error in the spectral norm, relative to the exact block.
        nbytes: Bytes that the block takes.
    """

    layer: str
    structure: str
    frobenius: float
    spectral: float
    nbytes: int


@dataclass(frozen=True, repr=False)
class Comparison(DescribedByTables):
    """The result of `compare`: errors and costs. Print it, or `plot` it.

    Attributes:
        rows: One row for every layer and structure.
        costs: Time that each structure took for all layers, in units of one gradient of the risk.
        left_out: Layers that are too large for an exact block.

    Example:
        >>> rows = Row("fc", "KFAC", 0.25, 0.125, nbytes=256), Row("fc", "EKFAC", 0.2, 0.1, nbytes=384)
        >>> Comparison(rows, {"KFAC": 1.5, "EKFAC": 2.0}, left_out=("head",))
        Errors against exact blocks, relative to them
        layer  structure  Frobenius  spectral  bytes  cost / gradient
        -----  ---------  ---------  --------  -----  ---------------
        fc     KFAC        2.50e-01  1.25e-01  256 B              1.5
               EKFAC       2.00e-01  1.00e-01  384 B              2.0
        Too large for exact blocks: head.
    """

    rows: tuple[Row, ...]
    costs: dict[str, float]
    left_out: tuple[str, ...] = ()

    def describe(self) -> Description:
        """Describe errors and costs, layer by layer."""
        numbers = ("Frobenius", "spectral", "bytes", "cost / gradient")
        rows = []
        before = None
        for row in self.rows:
            layer = "" if row.layer == before else row.layer  # each layer's name is shown once
            before = row.layer
            errors = f"{row.frobenius:.2e}", f"{row.spectral:.2e}"
            cost = f"{self.costs[row.structure]:.1f}"
            rows.append((layer, row.structure, *errors, readable_size(row.nbytes), cost))
        table = Table("", ("layer", "structure", *numbers), rows, numbers)
        notes = (f"Too large for exact blocks: {', '.join(self.left_out)}.",) if self.left_out else ()
        return Description("Errors against exact blocks, relative to them", tables=(table,), notes=notes)

    def plot(self, *, axes: "Axes | None" = None) -> "Axes":
        """Draw errors in the Frobenius norm, by layer. Exact structures are left out.

        Args:
            axes: Axes of matplotlib to draw into. By default, in a new figure, with a legend.

        Returns:
            Axes of matplotlib.
        """
        layers = list(dict.fromkeys(row.layer for row in self.rows))
        wrong = {row.structure for row in self.rows if row.frobenius > 0}
        names = [name for name in self.costs if name in wrong]
        errors = {name: [row.frobenius for row in self.rows if row.structure == name] for name in names}
        return draw_errors(layers, errors, r"error, $\|S - C\|_F \,/\, \|C\|_F$", axes)


def compare(
    risk: EmpiricalRisk,
    structures: Iterable[str] | Mapping[str, Callable[..., BlockDiagonal]] = tuple(STRUCTURES),
    *,
    max_size: int = 4096,
    **settings: Any,
) -> Comparison:
    """Compare structures with the exact blocks of a curvature matrix, layer by layer.

    With `fisher="mc"`, exact blocks use the same draws as KFAC's factors. EKFAC's eigenvalues use other draws, so a
    part of its error is their noise.

    Args:
        risk: Model, loss, data and parameters.
        structures: Names from `"KFAC"`, `"EKFAC"`, `"diagonal"`, `"trace-scaled"`, `"optimal Kronecker"`, `"exact
            blocks"`; or functions by name, which take the risk and settings and return an operator with KFAC's blocks.
        max_size: Layers with more parameters than this are left out.
        **settings: Settings of `KFAC`: `fisher`, `sharing` and so on.

    Returns:
        Relative errors in two norms, bytes and costs.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> data = torch.rand(20, 3, dtype=torch.float64), torch.randint(2, (20,))
        >>> comparison = compare(EmpiricalRisk(model.double(), torch.nn.CrossEntropyLoss(), data), ["KFAC", "EKFAC"])
        >>> errors = {(row.layer, row.structure): row.frobenius for row in comparison.rows}
        >>> errors["0", "EKFAC"] < errors["0", "KFAC"]
        True
    """
    check_risk(risk)
    with risk.ranks.agreed("kfs.compare", is_short=True):
        makers = _makers(structures)
    K = KFAC(risk, **settings)
    sizes = {name: sum(K.domain.sizes[n] for n in block.layout.params) for name, block in K.blocks.items()}
    small = {name for name, size in sizes.items() if size <= max_size}
    if not small:
        raise ModelError(
            f"All layers have more than {max_size} parameters.", "Choose smaller ones with params=, or raise max_size=."
        )
    left_out = tuple(name for name in sizes if name not in small)
    if left_out:
        makers.pop("exact blocks", None)
    found: dict[str, dict[str, Structure]] = {}
    costs: dict[str, float] = {}
    with show_progress("comparison", len(makers) + 1, risk.progress, "structure") as line:
        # The unit of costs is the time of one gradient.
        exact = exact_matrices(K, risk, small)
        unit = _seconds(risk.gradient)[1]
        for name, make in makers.items():
            line.advance(note=name)
            operator, seconds = _seconds(partial(make, risk, **settings))
            found[name] = operator.structures
            costs[name] = seconds / unit
    rows = []
    for layer, block in exact.items():
        C = block.double()
        norms = (torch.linalg.matrix_norm(C), torch.linalg.matrix_norm(C, 2))
        rows += [_row(layer, name, found[name][layer], C, norms) for name in found]
    return Comparison(tuple(rows), costs, left_out)


def _makers(structures: Iterable[str] | Mapping[str, Callable[..., BlockDiagonal]]) -> dict[str, Any]:
    if isinstance(structures, Mapping):
        return dict(structures)
    names = [structures] if isinstance(structures, str) else list(structures)
    unknown = [name for name in names if name not in STRUCTURES]
    if unknown or not names:
        raise ModelError(f"There are no structures {unknown or names}.", suggest(unknown, STRUCTURES))
    return {name: STRUCTURES[name] for name in names}


def _row(layer: str, name: str, structure: Structure, C: Tensor, norms: tuple[Tensor, Tensor]) -> Row:
    """Compare one structure of one layer with its exact block `C`, given the Frobenius and spectral norms of `C`."""
    # Groups of channels are smaller blocks on the diagonal of a layer's matrix.
    difference = torch.block_diag(*structure.to_dense()).to(C) - C
    errors = (torch.linalg.matrix_norm(difference), torch.linalg.matrix_norm(difference, 2))
    frobenius, spectral = (
        float(error / size if size > 0 else error) for error, size in zip(errors, norms, strict=True)
    )
    return Row(layer, name, frobenius, spectral, structure.nbytes)


def _seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its time in seconds."""
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():  # pragma: no cover (kernels may still be running)
        torch.cuda.synchronize()
    return result, time.perf_counter() - start
