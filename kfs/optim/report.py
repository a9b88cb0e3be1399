"""Costs of an optimizer, and its report: tables in a terminal, or HTML in a notebook.

Costs are averages over the last steps, by part: operations, and seconds on the host. Accelerators are not synchronized.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Literal

import torch

import kfs
from kfs.display.charts import draw_training
from kfs.display.describe import DescribedByTables, Description, Table, counted, number, readable_size
from kfs.factors.blocks import describe_factor
from kfs.optim.averages import Average
from kfs.optim.safety import Events
from kfs.optim.step_scale import PastStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kfs.optim.preconditioner import Preconditioner

# Files of this library and of PyTorch.
_LIBRARIES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (kfs, torch))


def callers(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield a frame of the interpreter, by default the current one, and its callers."""
    frame = frame or sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the caller warns about the line of the user's program that led to it."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
        level += 1
    return level


Part = Literal["factors", "inverses", "products", "trials"]
PARTS: tuple[Part, ...] = ("factors", "inverses", "products", "trials")
_STEPS = 50  # number of steps that are kept


@dataclass
class Cost:
    """Cost of one part of a step.

    Attributes:
        count: Number of blocks that were processed, or of evaluations of the loss.
        operations: Approximate number of floating-point operations.
        seconds: Seconds on the host. It does not wait for an accelerator, which works in the meantime.
    """

    count: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0


@dataclass
class Costs:
    """Costs of the last steps, by part.

    Example:
        >>> costs = Costs()
        >>> for work in (4.0, 2.0):
        ...     with costs.timed("inverses"):
        ...         costs.add("inverses", work)
        ...     costs.end_step()
        >>> costs.mean("inverses").operations
        3.0
    """

    last: deque[dict[Part, Cost]] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _now: dict[Part, Cost] = field(default_factory=lambda: {part: Cost() for part in PARTS})

    def add(self, part: Part, operations: float) -> None:
        """Add work to a part of the current step."""
        self._now[part].count += 1
        self._now[part].operations += operations

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Add the duration of this context to a part of the current step."""
        start = perf_counter()
        try:
            yield
        finally:
            self._now[part].seconds += perf_counter() - start

    def end_step(self) -> None:
        """Finish the current step, and begin the next one."""
        self.last.append(self._now)
        self._now = {part: Cost() for part in PARTS}

    def mean(self, part: Part) -> Cost:
        """Return the average cost of a part over the last steps."""
        steps = [step[part] for step in self.last]
        total = max(1, len(steps))
        return Cost(
            sum(s.count for s in steps) / total,
            sum(s.operations for s in steps) / total,
            sum(s.seconds for s in steps) / total,
        )


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
        uncovered: Parameters that KFAC does not cover, with reasons.
        adamw: Parameters in groups with `"method": "adamw"`.
        rest: Name of the optimizer that trains these, and uncovered parameters; empty for a `Preconditioner`.
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
    rest: str
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
        trains = f"{self.rest} trains" if self.rest else "Left as they are"
        lines = [f"{trains if self.rest else 'Not covered:'} {name!r}: {why}" for name, why in self.uncovered.items()]
        if self.adamw:
            lines.append(f"{trains}, as asked for: {', '.join(self.adamw)}.")
        if self.waiting:
            lines.append(f"No factors yet: {', '.join(self.waiting)}.")
        return lines


def block_row(average: Average) -> BlockRow:
    """Return the row of a block in the report."""
    layout, K = average.layout, average.factors
    nbytes = sum(
        structure.nbytes
        for structure in (
            None if average.is_elsewhere else K,
            average.inverse if average.has_inverse else None,
            average.eigen,
        )
        if structure is not None
    )
    damping = None if average.damping is None else float(average.damping.mean())
    A, B = describe_factor(K.A), describe_factor(K.B)
    return BlockRow(layout.name, layout.params, layout.matrix_shape, A, B, nbytes, damping, average.updated)


def report_of(preconditioner: "Preconditioner", summary: str, lr: tuple[float, ...] = (), rest: str = "") -> Report:
    """Return the report of a preconditioner, or of the optimizer that it belongs to.

    Args:
        preconditioner: The preconditioner.
        summary: Description of it, or of the optimizer.
        lr: Learning rate of each group.
        rest: Name of the optimizer that trains all other parameters.
    """
    events = preconditioner.events  # reads flags from the device
    curvature, params, uncovered = preconditioner.curvature, preconditioner.params, preconditioner.uncovered
    place = {name: i for i, name in enumerate(params.tensors)}
    averages = sorted(curvature.averages.values(), key=lambda a: (place[a.layout.weight], a.layout.rows))
    blocks = tuple(map(block_row, averages))
    covered = {name for row in blocks for name in row.params}
    adamw = tuple(n for n, group in params.groups.items() if group["method"] == "adamw")
    scale = curvature.damping.scale
    return Report(
        summary=summary,
        blocks=blocks,
        uncovered=dict(uncovered),
        adamw=adamw,
        rest=rest,
        waiting=tuple(n for n in params.tensors if n not in {*covered, *adamw, *uncovered}),
        costs={part: curvature.costs.mean(part) for part in PARTS},
        num_steps=len(curvature.costs.last),
        on_host=any(p.device.type != "cpu" for p in params.tensors.values()),
        events=replace(events),
        lr=lr,
        damping=tuple(float(group["damping"]) * scale for group in preconditioner.param_groups),
        damping_scale=scale,
        step_scale=preconditioner.scale.value(),
        history=tuple(preconditioner.trend.history),
    )


def description_of(
    preconditioner: "Preconditioner", name: str, numbers: Sequence[str], options: str = "", progress: str = ""
) -> Description:
    """Describe model, loss, settings and progress of a preconditioner, or of the optimizer that it belongs to.

    Args:
        preconditioner: The preconditioner.
        name: Its name, or that of the optimizer.
        numbers: Names of numbers in parameter groups.
        options: Further options.
        progress: Further facts about the progress of training.
    """
    curvature, damping = preconditioner.curvature, preconditioner.curvature.damping
    tensors = preconditioner.params.tensors.values()
    size = sum(p.numel() for p in tensors)
    happened = ", ".join(f"{event} {count}" for event, count in asdict(damping.events).items() if count)
    facts = (
        "; ".join(", ".join(f"{n}={number(group[n])}" for n in numbers) for group in preconditioner.param_groups),
        f"fisher={preconditioner.settings.fisher!r}, eigen={curvature.inverses.eigen}{options}",
        f"steps={preconditioner.steps}, blocks={len(curvature.averages)}, "
        f"not covered={len(preconditioner.uncovered)}, {progress}"
        f"damping_scale={damping.scale:.3g}, events: {happened or 'none'}",
    )
    title = f"{name} for {type(preconditioner.model).__name__} ({len(tensors)} parameters, {size:,} numbers)"
    return Description(f"{title}, {preconditioner.loss.name}", facts)
