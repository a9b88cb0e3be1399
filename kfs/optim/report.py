"""What an optimizer covers and does: a table in a terminal, HTML in a notebook."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kfs.display.charts import draw_training
from kfs.display.describe import Described, DescribedByTables, Description, Table, number, readable_size
from kfs.factors.audit import Audit
from kfs.factors.blocks import describe_factor
from kfs.factors.settings import Settings
from kfs.losses import Loss
from kfs.optim.apply import PendingChecks
from kfs.optim.averages import Average
from kfs.optim.costs import PARTS, Cost, Part
from kfs.optim.curvature import Curvature, Events
from kfs.optim.last_good_step import LossTrend, PastStep
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic_model import QuadraticModel
from kfs.optim.step_scale import StepScale
from kfs.optim.watch import Watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OF_BLOCK = ("block", "matrix", "A", "B", "bytes", "damping added", "inverse of step")
_OF_COST = ("in a step", "count", "operations", "ms")
_NUMBERS = ("bytes", "damping added", "inverse of step", "count", "operations", "ms")


@dataclass(frozen=True)
class BlockRow:
    """One block of the curvature.

    Attributes:
        block: Its name.
        params: Names of its parameters.
        matrix: Shape of the matrix that they make, `[groups, d_B, d_A]`.
        A: Structure and size of the input-based factor.
        B: Structure and size of the gradient-based factor.
        nbytes: Bytes of factors and inverse.
        damping: What was added to eigenvalues for the inverse, the mean over groups. `None` without inverse.
        updated: The step of the last attempt to invert.
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
    """What an optimizer covers and does; printing it shows it.

    Attributes:
        summary: A few lines about model, loss and settings, as `repr` shows them.
        blocks: One row per block.
        uncovered: Parameters that KFAC does not cover, and why. AdamW trains them.
        adamw: Parameters in groups that AdamW trains.
        waiting: Other parameters without factors: they had no gradient yet.
        costs: What a step cost, on average over the last ones, by part: new `"factors"`, `"inverses"`, `"products"`
            with them, and `"trials"` of steps with a quadratic model. Factors are timed with the vectors that are sent
            back for them. What happens while your own passes run is left out: adding up inputs, and gradients with
            `fisher="empirical"`.
        num_steps: How many steps these averages are over.
        on_host: Whether seconds are those of the host alone, which does not wait for an accelerator.
        events: What went wrong and was handled.
        lr: Learning rate of each group.
        damping: Damping of each group, times `damping_scale`.
        damping_scale: The factor that multiplies all dampings now.
        step_scale: The factor that multiplies learning rates now.
        history: Steps with new factors: their numbers, the losses of their batches, above the smallest that there
            could be, and how much of each was taken. When there are many, every second one is forgotten.
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
        """Draw losses over steps, and how much of each step was taken.

        Args:
            axes: Where to draw; by default in a new figure.

        Returns:
            Axes of matplotlib.
        """
        steps = [past.step for past in self.history]
        losses = [past.loss for past in self.history]
        scales = [past.scale for past in self.history]
        return draw_training(steps, losses, scales, f"scale of steps: {self.step_scale:.3g}", axes)

    def describe(self) -> Description:
        """Describe all of it."""
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
        of_blocks = Table(f"{len(self.blocks)} blocks, {nbytes}", _OF_BLOCK, blocks, _NUMBERS)
        return of_blocks, Table(title, _OF_COST, costs, _NUMBERS)

    def _lines(self) -> list[str]:
        """Return sentences about what tables do not show."""
        lines = [f"AdamW trains {name!r}: {why}" for name, why in self.uncovered.items()]
        if self.adamw:
            lines.append(f"AdamW trains, as asked for: {', '.join(self.adamw)}.")
        if self.waiting:
            lines.append(f"No factors yet: {', '.join(self.waiting)}.")
        return lines


class Reported(Described):
    """Gives an optimizer its report, and a `repr` of a few lines."""

    steps: int
    uncovered: dict[str, str]
    param_groups: list[dict[str, Any]]
    _model: nn.Module
    _loss: Loss
    _settings: Settings
    _params: Parameters
    _curvature: Curvature
    _quadratic: QuadraticModel | None
    _pending: PendingChecks
    _trend: LossTrend
    _scale: StepScale | None
    _watch: Watch
    state: Any

    @property
    def events(self) -> Events:
        """How often something went wrong and was handled: skipped steps, refused statistics, failed inverses.

        A GPU is waited for.
        """
        self._pending.settle(self.state)
        return self._curvature.events

    @property
    def audit(self) -> Audit | None:
        """What was checked for the last watched pass, and how closely; `None` if nothing was."""
        return self._watch.audit

    @property
    def damping_scale(self) -> float:
        """The factor that multiplies all dampings now."""
        return self._curvature.damping_scale

    @property
    def step_scale(self) -> float:
        """The factor that multiplies learning rates now: how much of each step is taken. A GPU is waited for."""
        return 1.0 if self._scale is None else self._scale.value()

    def report(self) -> Report:
        """Return what is covered by what, what the last steps cost, and what went wrong; `print` shows it as a table.

        Example:
            >>> from kfs.optim import KFAC
            >>> report = KFAC(nn.Linear(3, 2), nn.CrossEntropyLoss()).report()
            >>> report.waiting  # until the first step
            ('weight', 'bias')
            >>> KFAC(nn.Linear(3, 2), nn.CrossEntropyLoss(), lr=0.1)
            KFAC for Linear (2 parameters, 8 numbers), CrossEntropyLoss
              lr=0.1, damping=0.003, momentum=0.9, weight_decay=0, trust=0.03
              fisher='mc', eigen=False, quadratic_model=False
              steps=0, blocks=0, not covered=0, step_scale=1, damping_scale=1, events: none
        """
        self._pending.settle(self.state)
        curvature = self._curvature
        place = {name: i for i, name in enumerate(self._params.tensors)}
        averages = sorted(curvature.averages.values(), key=lambda a: (place[a.layout.weight], a.layout.rows))
        blocks = tuple(map(_row, averages))
        covered = {name for row in blocks for name in row.params}
        adamw = [n for n, group in self._params.groups.items() if group["method"] == "adamw"]
        rest = [n for n in self._params.tensors if n not in {*covered, *adamw, *self.uncovered}]
        return Report(
            summary=repr(self),
            blocks=blocks,
            uncovered=dict(self.uncovered),
            adamw=tuple(adamw),
            waiting=tuple(rest),
            costs={part: curvature.costs.mean(part) for part in PARTS},
            num_steps=len(curvature.costs.last),
            on_host=any(p.device.type != "cpu" for p in self._params.tensors.values()),
            events=Events(**asdict(curvature.events)),
            lr=tuple(float(group["lr"]) for group in self.param_groups),
            damping=tuple(float(group["damping"]) * curvature.damping_scale for group in self.param_groups),
            damping_scale=curvature.damping_scale,
            step_scale=self.step_scale,
            history=tuple(self._trend.history),
        )

    def describe(self) -> Description:
        """Describe model, loss, settings, and how far training is."""
        tensors, curvature = self._params.tensors.values(), self._curvature
        size = sum(p.numel() for p in tensors)
        names = ("lr", "damping", "momentum", "weight_decay", "trust")
        groups = "; ".join(", ".join(f"{n}={number(g[n])}" for n in names) for g in self.param_groups)
        kind = f"fisher={self._settings.fisher!r}, eigen={curvature.inverses.eigen}"
        kind += f", quadratic_model={self._quadratic is not None}"
        happened = ", ".join(f"{name} {count}" for name, count in asdict(curvature.events).items() if count)
        progress = (
            f"steps={self.steps}, blocks={len(curvature.averages)}, not covered={len(self.uncovered)}, "
            f"step_scale={self.step_scale:.3g}, damping_scale={curvature.damping_scale:.3g}, "
            f"events: {happened or 'none'}"
        )
        title = (
            f"KFAC for {type(self._model).__name__} ({len(tensors)} parameters, {size:,} numbers), {self._loss.name}"
        )
        return Description(title, (groups, kind, progress))


def _row(average: Average) -> BlockRow:
    layout, K = average.layout, average.factors
    nbytes = sum(
        structure.nbytes
        for structure in (K, average.inverse if average.has_inverse else None, average.eigen)
        if structure is not None
    )
    damping = None if average.damping is None else float(average.damping.mean())
    A, B = describe_factor(K.A), describe_factor(K.B)
    return BlockRow(layout.name, layout.params, layout.matrix_shape, A, B, nbytes, damping, average.updated)
