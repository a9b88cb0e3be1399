"""The report of an optimizer: blocks, costs and events, as tables in a terminal or HTML in a notebook."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfs.display.charts import draw_training
from kfs.display.describe import DescribedByTables, Description, Table, counted, readable_size
from kfs.factors.blocks import describe_factor
from kfs.optim.averages import Average
from kfs.optim.costs import Cost, Part
from kfs.optim.curvature import Events
from kfs.optim.last_good_step import PastStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OF_BLOCK = ("block", "matrix", "A", "B", "bytes", "damping added", "inverse of step")
_OF_COST = ("in a step", "count", "operations", "ms")
_NUMBERS = ("bytes", "damping added", "inverse of step", "count", "operations", "ms")


@dataclass(frozen=True)
class BlockRow:
    """A block of the curvature, as a row of the report.

    Attributes:
        block: Name of the block.
        params: Names of its parameters.
        matrix: Shape of the matrix that contains these parameters, `[groups, d_B, d_A]`.
        A: Structure and size of the input-based factor.
        B: Structure and size of the gradient-based factor.
        nbytes: Bytes of factors and inverse.
        damping: Damping that was added to eigenvalues for the inverse, averaged over groups. `None` without inverse.
        updated: Step of the last attempt to invert.
    """

    block: str
    params: tuple[str, ...]
    matrix: tuple[int, int, int]
    A: str
    B: str
    nbytes: int
    damping: float | None
    updated: int


@dataclass(frozen=True, repr=False)
class Report(DescribedByTables):
    """What an optimizer covers and what its steps cost; printing it shows tables.

    Attributes:
        summary: A few lines about model, loss and settings, as `repr` shows them.
        blocks: One row per block.
        uncovered: Parameters that KFAC does not cover, with reasons. AdamW trains them.
        adamw: Parameters in groups that AdamW trains.
        waiting: Other parameters without factors, because they had no gradient yet.
        costs: Average cost of the last steps, by part: new `"factors"`, `"inverses"`, `"products"` with them, and
            `"trials"` of steps with a quadratic model. The time for factors includes the vectors that are sent back for
            them. Work during your own passes is not included: summing inputs, and gradients with `fisher="empirical"`.
        num_steps: Number of steps in these averages.
        on_host: Whether seconds are measured on the host alone, which does not wait for an accelerator.
        events: Problems that were handled.
        lr: Learning rate of each group.
        damping: Damping of each group, times `damping_scale`.
        damping_scale: The factor that currently multiplies all dampings.
        step_scale: The factor that currently multiplies learning rates.
        history: Steps with new factors: their numbers, the losses of their batches above the smallest possible loss,
            and the scales of the steps. If there are many, every second one is dropped.
    """

    summary: str
    blocks: tuple[BlockRow, ...]
    uncovered: dict[str, str]
    adamw: tuple[str, ...]
    waiting: tuple[str, ...]
    costs: dict[Part, Cost]
    num_steps: int
    on_host: bool
    events: Events
    lr: tuple[float, ...]
    damping: tuple[float, ...]
    damping_scale: float
    step_scale: float
    history: tuple[PastStep, ...]

    def plot(self, *, axes: "Axes | None" = None) -> "Axes":
        """Plot losses and scales of steps over steps.

        Args:
            axes: Matplotlib axes to draw in; by default in a new figure.

        Returns:
            The axes.
        """
        steps = [past.step for past in self.history]
        losses = [past.loss for past in self.history]
        scales = [past.scale for past in self.history]
        return draw_training(steps, losses, scales, f"scale of steps: {self.step_scale:.3g}", axes)

    def describe(self) -> Description:
        """Describe the report, with its tables."""
        title, *facts = (line.strip() for line in self.summary.splitlines())
        return Description(title, tuple(facts), self._tables(), tuple(self._lines()))

    def _tables(self) -> tuple[Table, Table]:
        """Return the tables of blocks and of costs."""
        blocks = [
            (
                row.block,
                "x".join(map(str, row.matrix if row.matrix[0] > 1 else row.matrix[1:])),
                row.A,
                row.B,
                readable_size(row.nbytes),
                "" if row.damping is None else f"{row.damping:.2g}",
                "" if row.damping is None else str(row.updated),
            )
            for row in self.blocks
        ]
        nbytes = readable_size(sum(row.nbytes for row in self.blocks))
        costs = [
            (part, f"{cost.count:.3g}", f"{cost.operations:.2g}", f"{1e3 * cost.seconds:.3g}")
            for part, cost in self.costs.items()
            if cost.count
        ]
        where = " of the host, which does not wait for the accelerator" if self.on_host else ""
        title = f"mean of the last {self.num_steps} steps; time{where} without what is added up during your passes"
        of_blocks = Table(f"{counted(len(self.blocks), 'block')}, {nbytes}", _OF_BLOCK, blocks, _NUMBERS)
        return of_blocks, Table(title, _OF_COST, costs, _NUMBERS)

    def _lines(self) -> list[str]:
        """Return sentences about facts that the tables do not show."""
        lines = [f"AdamW trains {name!r}: {why}" for name, why in self.uncovered.items()]
        if self.adamw:
            lines.append(f"AdamW trains, as asked for: {', '.join(self.adamw)}.")
        if self.waiting:
            lines.append(f"No factors yet: {', '.join(self.waiting)}.")
        return lines


def block_row(average: Average) -> BlockRow:
    """Return the row of a block in the report."""
    layout, K = average.layout, average.factors
    nbytes = sum(
        structure.nbytes
        for structure in (K, average.inverse if average.has_inverse else None, average.eigen)
        if structure is not None
    )
    damping = None if average.damping is None else float(average.damping.mean())
    A, B = describe_factor(K.A), describe_factor(K.B)
    return BlockRow(layout.name, layout.params, layout.matrix_shape, A, B, nbytes, damping, average.updated)
