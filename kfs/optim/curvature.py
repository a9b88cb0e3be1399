"""All blocks' curvature: what of a batch's statistics enters the averages, which inverses are due, and their use.

Nothing that is not finite enters an average, and an inverse that cannot be computed leaves the last one in place. Such
events are counted and logged; after some in a row damping rises.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kfs.errors import KfsError
from kfs.kfac.layout import Key, Layout
from kfs.kfac.live_pass import Bases, Record
from kfs.kfac.structures.damping import Method
from kfs.kfac.structures.decompositions import BlockError
from kfs.kfac.structures.stack import Stack, stacked
from kfs.kfac.structures.structure import Structure
from kfs.kfac.sums.per_datum import Squares
from kfs.optim.averages import Average, Unit
from kfs.optim.rule import limited

log = logging.getLogger("kfs.optim")
Interval = int | Callable[[int], int]
_RISE = 10.0
_RECOVERY = 20  # times patience: so many good updates in a row undo one rise


@dataclass
class Events:
    """How often something went wrong.

    Attributes:
        skipped_steps: Gradients were not finite: no parameter was changed.
        refused_statistics: Factors were not finite: averages were not changed.
        failed_inverses: A decomposition failed: the last inverse stayed.
        raised_damping: Several of these came in a row.
    """

    skipped_steps: int = 0
    refused_statistics: int = 0
    failed_inverses: int = 0
    raised_damping: int = 0


class Curvature:
    """Averages and inverses of all blocks.

    Args:
        decay: How much of an average is kept when new factors enter.
        method: How damping is split between factors.
        unit: What damping is measured in.
        eigen: Whether eigenvalues are corrected.
        every: How many steps an inverse is used for.
        patience: After how many events in a row damping rises; it falls again after many good updates.

    Attributes:
        averages: By block.
        damping_scale: Multiplies all dampings; it changes if something goes wrong, or by Levenberg-Marquardt.
        events: What went wrong so far.
    """

    def __init__(self, decay: float, method: Method, unit: Unit, eigen: bool, every: Interval, patience: int) -> None:
        """Start without blocks."""
        self._decay, self._method, self._unit, self._eigen = decay, method, unit, eigen
        self._every, self._patience = every, patience
        self.averages: dict[Key, Average] = {}
        self.damping_scale, self.events = 1.0, Events()
        self._in_a_row, self._good, self._raised, self._credit = 0, 0, 0, 0.0
        self._stacks: list[tuple[Stack, bool]] | None = None

    @property
    def covered(self) -> set[str]:
        """Names of parameters that have an inverse."""
        return {n for a in self.averages.values() if a.inverse is not None for n in a.layout.params}

    def bases(self) -> Bases:
        """Return what sums up squared gradients, for blocks that have an eigenbasis."""
        found: dict[Key, tuple[Layout, Squares]] = {}
        for key, average in self.averages.items():
            squares = average.squares()
            if squares is not None:
                found[key] = (average.layout, squares)
        return found

    def commit(self, record: Record, without: Iterable[str]) -> bool:
        """Let statistics enter the averages, if they are finite.

        Args:
            record: From one step's passes.
            without: Parameters that have no curvature here.

        Returns:
            Whether they did.
        """
        without = set(without)
        blocks = {key: block for key, block in record.blocks.items() if not without & set(block.layout.params)}
        totals = [m.total for b in blocks.values() for p in b.pairs.values() for m in (p.input, p.gradient)]
        totals += list(record.squares.values())
        if not record.finite or (totals and not torch.nn.utils.get_total_norm(totals, 1.0).isfinite()):
            self.events.refused_statistics += 1
            self.trouble("statistics of a batch are not finite, and were not used")
            return False
        for key, block in blocks.items():
            block.reduction_factor = 1 / record.examples
            average = self.averages.get(key)
            if average is None or average.layout != block.layout:
                self.averages[key] = Average.start(block, self._decay)
                continue
            if key in record.squares and average.eigen is not None:
                average.add_squares(record.squares[key], record.examples, self._decay)
            average.add(block, self._decay)
        self.forget(without)
        return True

    def refresh(self, step: int, damping: Callable[[Layout], float], force: bool = False) -> None:
        """Compute inverses that are due: all of them if `force`, otherwise the oldest ones, a share of all work.

        Shares are such that every inverse is computed once in an interval. It is one step at first and grows as
        training goes on, up to what was asked for, since curvature changes most at the beginning.
        """
        every = self._every(step) if callable(self._every) else self._every
        every = max(1, min(every, 1 + step // 2))
        total = sum(average.cost for average in self.averages.values())
        self._credit = min(self._credit + total / every, total)
        due = [a for a in self.averages.values() if a.changed or a.inverse is None or force]
        for average in sorted(due, key=lambda a: a.updated):
            wait = self._credit < (1 - 1e-9) * average.cost
            if wait and average.inverse is not None and not force:
                break
            self._credit = max(0.0, self._credit - average.cost)
            self._invert(average, step, damping(average.layout))

    def precondition(self, u: Mapping[str, Tensor], trust: Callable[[Layout], float | None]) -> dict[str, Tensor]:
        """Multiply with the inverses of all blocks, and keep each block's step in the trust region."""
        if self._stacks is None:
            self._stacks = self._stacked()
        columns = {name: t.unsqueeze(0) for name, t in u.items()}
        steps: dict[str, Tensor] = {}
        for stack, single in self._stacks:
            like = stack.structure.like
            limits = [trust(layout) for layout in stack.layouts for _ in range(layout.groups)]
            numbers = [torch.inf if limit is None else limit for limit in limits]
            same = len(set(numbers)) == 1
            D = stack.structure.multiply(stack.read(columns).to(like.dtype))
            D = limited(D, numbers[0] if same else like.new_tensor(numbers).reshape(-1, 1, 1, 1), single)
            layout = stack.layouts[0]
            if len(stack.layouts) == 1 and layout.is_plain:  # parts of the result need not be copied
                width = layout.column_size
                steps |= dict(zip(layout.params, (D[..., :width], D[..., width:]), strict=False))
                continue
            for name in (name for layout in stack.layouts for name in layout.params if name not in steps):
                steps[name] = torch.zeros_like(columns[name])
            stack.write(D, steps)
        return {name: steps[name].reshape(t.shape).to(t.dtype) for name, t in u.items()}

    def dampings(self) -> dict[str, Tensor]:
        """Return what was added to the eigenvalues of each parameter's block."""
        return {n: a.damping.mean() for a in self.averages.values() if a.damping is not None for n in a.layout.params}

    def trouble(self, what: str) -> None:
        """Log an event, and raise damping after some in a row."""
        self._in_a_row, self._good = self._in_a_row + 1, 0
        log.warning("kfs.optim: %s.", what)
        if self._in_a_row >= self._patience:
            self._in_a_row, self._raised = 0, self._raised + 1
            self.events.raised_damping += 1
            self.scale_damping(_RISE)
            text = "kfs.optim: damping rises to %g times its value, after %d such events."
            log.warning(text, self.damping_scale, self._patience)

    def no_trouble(self) -> None:
        """Take note that statistics entered; after many in a row, damping is what it was before it rose."""
        self._in_a_row, self._good = 0, self._good + 1
        if self._raised and self._good >= _RECOVERY * self._patience:
            self._good, self._raised = 0, self._raised - 1
            self.scale_damping(1 / _RISE)

    def forget(self, names: Iterable[str]) -> None:
        """Forget blocks of parameters that have other names now, or are gone."""
        gone = set(names)
        for key in [k for k, a in self.averages.items() if gone & set(a.layout.params)]:
            del self.averages[key]
            self._stacks = None

    def scale_damping(self, factor: float) -> None:
        """Change all dampings; inverses follow when they are due."""
        self.damping_scale *= factor
        for average in self.averages.values():
            average.changed = True

    def _invert(self, average: Average, step: int, damping: float) -> None:
        """Compute a block's inverse, or keep the last one."""
        try:
            average.invert(damping * self.damping_scale, self._unit, self._method, self._eigen)
        except (BlockError, KfsError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            self.events.failed_inverses += 1
            self.trouble(f"the inverse of block {average.layout.name!r} failed ({error}), and the last one stays")
        average.updated, average.changed = step, False  # a block that fails does not take the others' share of work
        self._stacks = None

    def _stacked(self) -> list[tuple[Stack, bool]]:
        """Put blocks of one size together; also say which have unit vectors as inputs."""
        parts: list[tuple[Layout, Structure]] = []
        owners: dict[Layout, Average] = {}
        for average in self.averages.values():
            if average.inverse is not None:
                parts.append((average.layout, average.inverse))
                owners[average.layout] = average
        result = []
        for stack in _together(parts):
            for layout, part in stack.slices():
                owners[layout].inverse = stack.structure[part]  # stored once
            single = owners[stack.layouts[0]].factors.A.kind == "diagonal" and stack.structure.columns > 1
            result.append((stack, single))
        return result

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "averages": [average.state() for average in self.averages.values()],
            "damping_scale": self.damping_scale,
            "events": asdict(self.events),
            "in_a_row": [self._in_a_row, self._good, self._raised],
            "credit": self._credit,
        }

    def restore(self, state: Any, device: torch.device) -> None:
        """Undo `state`."""
        averages = [Average.from_state(s, device) for s in state["averages"]]
        self.averages = {a.layout.key: a for a in averages}
        self.damping_scale, self._credit = float(state["damping_scale"]), float(state["credit"])
        self._in_a_row, self._good, self._raised = map(int, state["in_a_row"])
        self.events, self._stacks = Events(**state["events"]), None


def _together(parts: list[tuple[Layout, Structure]]) -> list[Stack]:
    """Process blocks of one size together where few large operations are faster than many small ones."""
    if all(structure.like.device.type == "cpu" for _, structure in parts):
        return [Stack((layout,), structure) for layout, structure in parts]
    return stacked(parts)  # pragma: no cover (tested on a GPU)
