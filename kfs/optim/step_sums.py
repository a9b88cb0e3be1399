"""Sums from the passes of one step: sums for factors, squares of gradients in eigenbases, and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kfs.factors.accumulate import BlockSums, Squares
from kfs.factors.layout import Key, Layout

# By block: its layout, and a sum of squared gradients in its eigenbasis that starts at zero.
Bases = Mapping[Key, tuple[Layout, Squares]]


@dataclass
class StepSums:
    """Sums and counts from the passes of one step."""

    num_data: int
    examples: float = 0.0  # divisor of an average over examples
    count: float = 0.0  # divisor of a mean over targets
    finite: bool = True  # whether predictions, and gradients of the loss with respect to them, were finite
    mismatch: float = 0.0  # relative distance between gradients of the loss and of the declared loss
    other: str = ""  # name of another loss that the gradients belong to
    smoothing: float = 0.0  # label smoothing that the gradients show, if it is not the declared one
    # For each pass: the factor between the loss and the sum of criteria (`None` if unknown), and `count`.
    scales: list[tuple[float | None, float]] = field(default_factory=list)
    in_model: bool = False  # whether a model was given labels, and computes the loss itself
    square: float = 0.0  # squared length of the loss's gradients
    deviance: float = 0.0  # sum over examples; NaN if targets are unknown
    blocks: dict[Key, BlockSums] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)  # squared per-example gradients, in given bases
    uncovered: dict[str, str] = field(default_factory=dict)  # parameters without a usable block, with reasons
    inputs: list[tuple[Any, Any, Tensor]] = field(default_factory=list)  # args, kwargs and targets, if kept

    def merge(self, other: "StepSums") -> None:
        """Add the sums of another pass."""
        # A parameter that one pass does not use may have a block in the other pass, which covers it. But if a pass has
        # a block for it and still reports it as uncovered, a use is missing in the block.
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
        self.smoothing = self.smoothing or other.smoothing
        self.scales += other.scales
        self.in_model = self.in_model or other.in_model
        self.square += other.square
        self.deviance += other.deviance
        self.inputs += other.inputs

    @property
    def has_factors(self) -> bool:
        """Whether there are factors to add to averages, or to refuse. If not, examples were only counted."""
        return bool(self.blocks or self.uncovered) or not self.finite

    @property
    def covered(self) -> set[str]:
        """Names of the parameters that have blocks."""
        return {name for block in self.blocks.values() for name in block.layout.params}
