"""What the passes of one step give: sums for factors, squares of gradients in eigenbases, and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kfs.factors.accumulate import Adder, BlockSums, FactorSums, PerDatumSums, PlannedUse, Receiver, Squares
from kfs.factors.layout import Key, Layout
from kfs.factors.rows import RowMap
from kfs.factors.settings import Settings

# By block: its layout, and a sum of its squared gradients that starts at zero.
Bases = Mapping[Key, tuple[Layout, Squares]]


@dataclass
class StepSums:
    """What the passes of one step give."""

    num_data: int
    examples: float = 0.0  # what an average over examples divides by
    count: float = 0.0  # what a mean over targets divides by
    finite: bool = True  # whether predictions, and gradients of the loss with respect to them, were finite
    mismatch: float = 0.0  # relative distance between gradients of the loss and those of the declared loss
    other: str = ""  # name of another loss, which gradients are those of
    # For each pass: how many times the sum of criteria the loss is (`None` if not known), and `count`.
    scales: list[tuple[float | None, float]] = field(default_factory=list)
    in_model: bool = False  # whether a model was given labels, so that it computes the loss itself
    square: float = 0.0  # squared length of the loss's gradients
    deviance: float = 0.0  # sum over data; NaN if targets are not known
    blocks: dict[Key, BlockSums] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)  # squared per-example gradients, in given bases
    uncovered: dict[str, str] = field(default_factory=dict)  # parameters without usable block, and why
    inputs: list[tuple[Any, Any, Tensor]] = field(default_factory=list)  # args, kwargs and targets, if kept

    def merge(self, other: "StepSums") -> None:
        """Add what another pass has given."""
        # A parameter that one pass does not use may have a block in the other pass, and is covered then. But if a pass
        # has a block for it and still reports it, the block lacks a use.
        both = self.uncovered.keys() & other.uncovered.keys()
        reasons = [(one, name, why) for one in (self, other) for name, why in one.uncovered.items()]
        self.uncovered = {name: why for one, name, why in reasons if name in both or name in one.covered}
        for key in self.blocks.keys() & other.blocks.keys():
            self.blocks[key] = self.blocks[key].plus(other.blocks[key])
        self.blocks |= {key: block for key, block in other.blocks.items() if key not in self.blocks}
        for key, squares in other.squares.items():
            self.squares[key] = self.squares.get(key, 0) + squares
        self.num_data += other.num_data
        self.examples += other.examples
        self.count += other.count
        self.finite = self.finite and other.finite
        self.mismatch = max(self.mismatch, other.mismatch)
        self.other = self.other or other.other
        self.scales += other.scales
        self.in_model = self.in_model or other.in_model
        self.square += other.square
        self.deviance += other.deviance
        self.inputs += other.inputs

    @property
    def has_factors(self) -> bool:
        """Whether there is something to add to averages, or to refuse. Otherwise, examples were counted at most."""
        return bool(self.blocks or self.uncovered) or not self.finite

    @property
    def covered(self) -> set[str]:
        """The parameters that have blocks."""
        return {name for block in self.blocks.values() for name in block.layout.params}


class FactorAndSquareSums(FactorSums):
    """Adds inputs and gradients to factors, and per-example gradients to squares, in one pass."""

    def __init__(self, settings: Settings, bases: Bases) -> None:
        super().__init__(settings)
        layouts = {key: layout for key, (layout, _) in bases.items()}
        squares = {key: squares for key, (_, squares) in bases.items()}
        self._squares = PerDatumSums(settings, layouts, squares)
        self.by_datum = True

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return what adds the uses of a plan to both sums."""
        return _Both(super().adder_of(plan), self._squares.adder_of(plan))

    def finish_backward(self) -> None:
        """Add what had to wait for the end of a backward pass."""
        super().finish_backward()
        self._squares.finish_backward()

    def finish_batch(self) -> None:
        """Forget the batch."""
        super().finish_batch()
        self._squares.finish_batch()


@dataclass
class _Both(Adder):
    """Adds a use to two sums."""

    first: Adder
    second: Adder

    def add(self, x: Tensor | None, owners: RowMap | None = None) -> Receiver:
        first, second = self.first.add(x, owners), self.second.add(x, owners)

        def receive(g: Tensor) -> None:
            first(g)
            second(g)

        return receive
