"""How block-diagonal operators show themselves: a table of their blocks, and their eigenvalues block by block."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from kfs.charts import draw_spectra
from kfs.describing import Description, Table, counted, number, readable_size, times
from kfs.errors import ModelError, UnknownNameError
from kfs.kfac.layout import Layout
from kfs.kfac.structures.congruence import Congruence
from kfs.kfac.structures.damping import Damping, Relative, damping_by_name
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.kronecker_sum import IterativeInverse, KroneckerSum
from kfs.kfac.structures.stack import Stack
from kfs.kfac.structures.structure import Structure
from kfs.names import ByName, near
from kfs.operators.formulas import bracketed
from kfs.operators.interface import LinearOperator

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Listed(NamedTuple):
    """What is said about a block, also if another process owns it."""

    layout: Layout
    kind: str
    nbytes: int
    symmetric: bool
    rank: int | None = None  # that owns it; `None` if all processes have it


class VisibleBlocks(LinearOperator):
    """An operator with blocks that can be looked at: in a table, and by their eigenvalues."""

    _formula = ""
    _of = ""

    @property
    @abstractmethod
    def stacks(self) -> list[Stack]:
        """The blocks, those of one structure and size together."""

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, by name. With groups of channels, it is a stack of one block per group."""
        return ByName({layout.name: structure for layout, structure in self._blocks_in_order()}, "block")

    def _blocks_in_order(self) -> list[tuple[Layout, Structure]]:
        """Return all blocks in the order of parameters."""
        found = [(layout, stack.structure[part]) for stack in self.stacks for layout, part in stack.slices()]
        place_of = self._order()
        return sorted(found, key=lambda block: place_of(block[0]))

    def _order(self) -> Callable[[Layout], tuple[int, tuple[int, int]]]:
        """Return what blocks are sorted by: the place of their parameters, and rows."""
        order = {name: place for place, name in enumerate(self.domain.shapes)}
        return lambda layout: (order[layout.weight], layout.rows)

    def _listed(self) -> list[Listed]:
        """List all blocks in the order of parameters. Nothing is exchanged."""
        return [
            Listed(layout, kind_of(structure), structure.nbytes, structure.symmetric)
            for layout, structure in self._blocks_in_order()
        ]

    @property
    def formula(self) -> str:
        """How it was made, such as `"KFAC.inverse(0.001)"`."""
        return self._formula or type(self).__name__

    @property
    def of(self) -> str:
        """Model and loss in a few words; empty if they are not known."""
        return self._of

    def describe(self) -> Description:
        """Describe all blocks. Only their sizes are looked at."""
        rows = []
        listed = self._listed()
        for block in listed:
            shape = block.layout.matrix_shape
            size = times(shape if block.layout.groups > 1 else shape[1:])
            rank = "" if block.rank is None else str(block.rank)
            rows.append((block.layout.name, size, block.kind, readable_size(block.nbytes), rank))
        facts = (f"{counted(len(rows), 'block')}, {readable_size(sum(block.nbytes for block in listed))}",)
        table = Table("blocks", ("block", "matrix", "structure", "bytes", "rank"), rows, ("bytes", "rank"))
        return Description(self.about, facts, (table,))

    def plot_spectrum(
        self, names: Iterable[str] | None = None, *, damping: Damping = 1e-3, axes: "Axes | None" = None
    ) -> "Axes":
        """Draw the eigenvalues of every block on a log axis, and what damping makes of them.

        Args:
            names: Blocks to draw; all by default.
            damping: What is added to eigenvalues (dashed lines): one number (or `kfs.Relative`), or one for every
                block, by name.
            axes: Where to draw; by default in a new figure.

        Returns:
            Axes of matplotlib.
        """
        if not self.symmetric:
            raise ModelError("The operator is not symmetric, so it has no real spectrum.", "Plot it before a product.")
        structures = self.structures
        dampings = damping_by_name(damping, set(structures))
        spectra = {}
        added = {}
        for name in chosen(names, structures):
            values = structures[name].eigenvalues().flatten().cpu()
            spectra[name] = values.sort(descending=True).values
            d = dampings[name]
            added[name] = d.fraction * max(float(values.mean()), 0.0) if isinstance(d, Relative) else d
        return draw_spectra(spectra, added, axes)

    def made_of(self, one: LinearOperator, sign: str, other: LinearOperator) -> Self:
        """Say that it is a sum or a product, for `repr`; returns the operator itself."""
        left, right = (one.formula, other.formula) if sign == "+" else (bracketed(one), bracketed(other))
        both = dict.fromkeys(part for part in (one.of, other.of) if part)  # two models, or one
        return self.called(f"{left} {sign} {right}", " and ".join(both))

    def called(self, formula: str, of: str | None = None) -> Self:
        """Say how it was made, and of what model and loss, for `repr`; returns the operator itself."""
        self._formula = formula
        self._of = self._of if of is None else of
        return self


def kind_of(structure: Structure) -> str:
    """Name a structure, and its factors.

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
    """Describe a factor of one block of a stack."""
    return kind_and_size(factor.kind, factor.size)


def kind_and_size(kind: str, size: int, groups: int = 1) -> str:
    """Describe a factor, such as `"dense 4x4"` or `"diagonal 4"`; `"dense 2x4x4"` for two groups."""
    shape = [groups] * (groups > 1) + [size] * (2 if kind == "dense" else 1)
    return f"{kind} {'x'.join(map(str, shape))}"


def shown(damping: object) -> str:
    """Show a damping in a formula."""
    return "damping of each block" if isinstance(damping, Mapping) else number(damping)


def chosen(names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return the blocks that are asked for, or all of them.

    Raises:
        UnknownNameError: If there is no such block.
    """
    known = list(known)
    if names is None:
        return known
    asked = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UnknownNameError(f"There are no blocks {unknown}.", near(unknown, known))
    return asked
