r"""Per-datum gradients: what is needed beyond factors to say how good they are, or to correct them.

The curvature of a block is $C = R \sum_{n,c} \mathrm{vec}(G_{n,c})\, \mathrm{vec}(G_{n,c})^\top$, where
$G_{n,c} = \sum_s g_{n,s,c}\, x_{n,s}^\top$ is the gradient of the parameter that a backpropagated vector of one datum
makes, summed over shared positions and over all uses of the parameter. A `Statistic` is shown these gradients, and
keeps a sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.capture.uses import Use, Uses, full_precision
from kfs.kfac.layout import Key, Layout, Side
from kfs.kfac.settings import Settings
from kfs.kfac.sums.batch_axis import BatchAxis
from kfs.kfac.sums.inputs import Input, add_rotated_squares


class Statistic(ABC):
    """A sum over the gradients of one block.

    Attributes:
        total: The sum, changed in place.
    """

    total: Tensor

    @abstractmethod
    def add(self, gradients: Tensor) -> None:
        """Add gradients, `[n, G, d_B, d_A]`."""

    def add_use(self, vectors: Input, g: Tensor, batch: BatchAxis, ones: bool) -> None:
        """Add the gradients of a parameter's only use, given its inputs and what came back to it."""
        for gradients in vectors.gradients(g, batch.canonical, ones):
            self.add(gradients)


class Squares(Statistic):
    """Sums of squared gradients, seen in other bases.

    Args:
        total: `[G, d_B, d_A]`, changed in place.
        Q_A: Basis of the input side, the columns of `[G, d_A, d_A]`; nothing for the standard basis.
        Q_B: Basis of the gradient side, `[G, d_B, d_B]`.
    """

    def __init__(self, total: Tensor, Q_A: Tensor | None = None, Q_B: Tensor | None = None) -> None:
        """Start with what the total has."""
        self.total, self.Q_A, self.Q_B = total, Q_A, Q_B

    def add(self, gradients: Tensor) -> None:
        """Rotate and square."""
        with self._near(gradients.device) as (total, Q_A, Q_B):
            add_rotated_squares(total, gradients, Q_A, Q_B)

    def add_use(self, vectors: Input, g: Tensor, batch: BatchAxis, ones: bool) -> None:
        """Rotate and square in the way that is cheapest for this kind of inputs."""
        with self._near(g.device) as (total, Q_A, Q_B):
            vectors.add_squares(total, g, batch.canonical, ones, Q_A, Q_B)

    @contextmanager
    def _near(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Return total and bases on the device of the gradients, if they live on another one."""
        if self.total.device == device:  # pragma: no branch
            yield self.total, self.Q_A, self.Q_B
            return
        total = torch.zeros_like(self.total, device=device)  # pragma: no cover (tested on a GPU)
        Q_A, Q_B = (None if Q is None else Q.to(device) for Q in (self.Q_A, self.Q_B))  # pragma: no cover
        yield total, Q_A, Q_B  # pragma: no cover
        self.total += total.to(self.total.device)  # pragma: no cover


class PerDatum(Uses):
    """Shows the per-datum gradients of blocks to statistics, in a second pass over the data.

    Args:
        settings: What was asked for.
        layouts: The blocks of the first pass.
        statistics: By block.
    """

    def __init__(self, settings: Settings, layouts: dict[Key, Layout], statistics: dict[Key, Statistic]) -> None:
        """Know all blocks from the start."""
        super().__init__(settings)
        self._layouts, self._statistics = layouts, statistics
        self._times_used: dict[Key, int] = {}
        self._sums_of_uses: dict[Key, Tensor] = {}
        self._seen: set[Key] = set()
        self._unknown: set[str] = set()

    def check_complete(self, resumed: bool) -> None:
        """Refuse a pass that has seen other blocks than the first one; one that was resumed need not see any.

        Raises:
            ModelError: If a block is new, or was not used.
        """
        missing = [] if resumed else [self._layouts[key].name for key in self._statistics if key not in self._seen]
        new = sorted(self._unknown) if self.settings.uncovered == "error" else []
        if missing or new:
            raise ModelError(
                f"The blocks differ from those of the factors: {missing} are not used, and {new} are new.",
                "Use the same model and parameters, and data that use all of them.",
            )

    def place(self, layout: Layout, bias: str | None = None) -> tuple[Layout, Side]:
        """Return the layout of a weight's block, as it was decided in the first pass."""
        there = self._layouts.get(layout.key)
        if there is None:
            return layout, "A"
        turned = there.order == layout.order[layout.split :] + layout.order[: layout.split]
        return there, "B" if there.order != layout.order and turned else "A"

    def record(self, use: Use) -> Callable[[Tensor], None]:
        """Take note of a use, and return what receives its gradients, `[columns, ...]`."""
        layout, vectors, batch, ones, side = use.layout, use.vectors, use.batch, use.ones, use.side
        key = layout.key
        statistic = self._statistics.get(key)
        self._seen.add(key)
        if statistic is None or self._layouts[key] != layout:
            self._unknown.add(layout.name)
            return _nothing
        self._times_used[key] = self._times_used.get(key, 0) + 1

        def receive(g: Tensor) -> None:
            with full_precision(use.like.device):
                columns = use.read(g.detach())
                if self._times_used[key] == 1 and side == "A":
                    for column in columns:
                        statistic.add_use(vectors, column, batch, ones)
                else:
                    self._collect_uses(key, columns, vectors, batch, ones, side)

        return receive

    def finish_backward(self) -> None:
        """Show the gradients of parameters with several uses."""
        for key, gradients in self._sums_of_uses.items():
            with full_precision(gradients.device):
                self._statistics[key].add(gradients)
        self._sums_of_uses.clear()

    def state(self) -> dict[str, Any]:
        """Return all sums, between two batches, for a file."""
        return {"totals": [statistic.total for statistic in self._statistics.values()]}

    def restore(self, state: Any) -> None:
        """Undo `state`."""
        for statistic, total in zip(self._statistics.values(), state["totals"], strict=True):
            statistic.total.copy_(total)

    def finish_batch(self) -> None:
        """Forget the batch."""
        self._times_used.clear()

    def _collect_uses(
        self, key: Key, columns: Tensor, vectors: Input, batch: BatchAxis, ones: bool, side: Side
    ) -> None:
        """Add one use's gradients, `[columns * N, G, d_B, d_A]`."""
        layout = self._layouts[key]
        parts = [torch.cat(list(vectors.gradients(column, batch.canonical, ones))) for column in columns]
        gradients = torch.cat(parts)
        if side == "B":
            gradients = gradients.transpose(2, 3)
        if gradients.shape[3] < layout.column_size + (layout.bias is not None):
            gradients = torch.nn.functional.pad(gradients, (0, 1))
        before = self._sums_of_uses.get(key)
        self._sums_of_uses[key] = gradients if before is None else before + gradients


def _nothing(_: Tensor) -> None:
    """Ignore gradients."""
