"""Text and plots of operators with blocks: tables of structures and sizes, formulas, spectra.

These are functions of an operator, which has methods of the same names for users.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kfs.display.charts import draw_spectra
from kfs.display.describe import Description, Table, counted, readable_size, times
from kfs.display.suggestions import suggest
from kfs.errors import UnknownNameError
from kfs.factors.blocks.congruence import Congruence
from kfs.factors.blocks.damping import Damping, Relative, damping_by_name
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import IterativeInverse, KroneckerSum
from kfs.factors.blocks.structure import Structure
from kfs.factors.layout import Layout
from kfs.operators.linear_operator import LinearOperator, bracketed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Listed(NamedTuple):
    """Metadata of a block, known to all ranks."""

    layout: Layout
    kind: str
    nbytes: int
    symmetric: bool
    rank: int | None = None  # the owner rank; `None` if all ranks have the block


def describe_blocks(about: str, listed: Iterable[Listed]) -> Description:
    """Describe the blocks of an operator, without reading their numbers."""
    rows = []
    nbytes = 0
    for block in listed:
        shape = block.layout.matrix_shape
        size = times(shape if block.layout.groups > 1 else shape[1:])
        rank = "" if block.rank is None else str(block.rank)
        rows.append((block.layout.name, size, block.kind, readable_size(block.nbytes), rank))
        nbytes += block.nbytes
    facts = (f"{counted(len(rows), 'block')}, {readable_size(nbytes)}",)
    table = Table("blocks", ("block", "matrix", "structure", "bytes", "rank"), rows, ("bytes", "rank"))
    return Description(about, facts, (table,))


def plot_spectra(
    structures: Mapping[str, Structure], names: Iterable[str] | None, damping: Damping, axes: "Axes | None"
) -> "Axes":
    """Plot the eigenvalues of symmetric blocks, given by name; see `BlockDiagonal.plot_spectrum`."""
    dampings = damping_by_name(damping, set(structures))
    spectra = {}
    added = {}
    for name in chosen(names, structures):
        values = structures[name].eigenvalues().flatten().cpu()
        spectra[name] = values.sort(descending=True).values
        d = dampings[name]
        added[name] = d.fraction * max(float(values.mean()), 0.0) if isinstance(d, Relative) else d
    return draw_spectra(spectra, added, axes)


def kind_of(structure: Structure) -> str:
    """Return the name of a structure and its factors, for tables.

    Example:
        >>> import torch
        >>> from kfs import KFAC, EmpiricalRisk
        >>> model = torch.nn.Linear(3, 2)
        >>> X, y = torch.rand(2, 9, 3), torch.rand(2, 9, 2)
        >>> K1, K2 = (KFAC(EmpiricalRisk(model, torch.nn.MSELoss(), data), "empirical") for data in zip(X, y))
        >>> print(K1 + K2)
        KFAC + KFAC of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
          1 block, 160 B
        blocks
        block   matrix  structure                    bytes
        ------  ------  ---------------------------  -----
        weight  2 x 4   sum of 2 Kronecker products  160 B
        >>> kind_of((K1 + K2).inverse(0.1, "factored").structures["weight"])
        'diagonal in a common basis'
        >>> kind_of((K1 + K2).inverse(0.1).structures["weight"])
        'inverse of a sum of 3 Kronecker products, by conjugate gradients'
    """
    if isinstance(structure, Kronecker):
        return f"Kronecker, A {describe_factor(structure.A)}, B {describe_factor(structure.B)}"
    if isinstance(structure, KroneckerSum):
        return f"sum of {len(structure.terms)} Kronecker products"
    if isinstance(structure, IterativeInverse):
        return f"inverse of a {kind_of(structure.total)}, by conjugate gradients"
    if isinstance(structure, Congruence):
        return "diagonal in a common basis"
    if isinstance(structure, Eigenbasis):
        trivial = structure.Q_A.kind == structure.Q_B.kind == "identity"
        return "diagonal" if trivial else "eigenvalues and eigenvectors"
    return type(structure).__name__.lower()


def describe_factor(factor: Factor) -> str:
    """Return kind and size of a factor, such as `"dense 4x4"`."""
    return kind_and_size(factor.kind, factor.size)


def kind_and_size(kind: str, size: int, groups: int = 1) -> str:
    """Return kind and size of a factor, such as `"dense 4x4"` or `"diagonal 4"`; `"dense 2x4x4"` for two groups."""
    shape = [groups] * (groups > 1) + [size] * (2 if kind == "dense" else 1)
    return f"{kind} {'x'.join(map(str, shape))}"


def formula_of_both(one: LinearOperator, sign: str, other: LinearOperator) -> tuple[str, str]:
    """Return the formula of a sum or product, and the text of one or two models."""
    left, right = (one.formula, other.formula) if sign == "+" else (bracketed(one), bracketed(other))
    both = dict.fromkeys(part for part in (one.of, other.of) if part)
    return f"{left} {sign} {right}", " and ".join(both)


def chosen(names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names of the given blocks; all names by default.

    Raises:
        UnknownNameError: If there is no block of that name.
    """
    known = list(known)
    if names is None:
        return known
    asked = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UnknownNameError(f"There are no blocks {unknown}.", suggest(unknown, known))
    return asked
