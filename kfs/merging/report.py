"""What a merge did: how each block was solved, and what became of everything else in the state dict."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kfs.describing import Described, Description, Table, counted
from kfs.names import few


@dataclass(frozen=True)
class MergedBlock:
    """One linear system: parameters that curvature couples.

    Attributes:
        name: The block's name; `"all parameters"` for operators without blocks.
        params: Names of its parameters.
        closed_form: Whether the system has a closed form.
        iterations: Iterations of conjugate gradients. Zero for a closed form, unless its round-off had to be refined.
        residual: Norm of the residual over that of the right-hand side.
        damping: What was added to the curvature of each model, by its number in `models`: the largest number, if it
            differs within the block. Models with a weight of zero are left out.
    """

    name: str
    params: tuple[str, ...]
    closed_form: bool
    iterations: int
    residual: float
    damping: Mapping[int, float]


@dataclass(frozen=True, repr=False)
class MergeReport(Described):
    """What a merge did; printing it shows all blocks.

    Attributes:
        blocks: Linear systems, in the order of parameters.
        weights: Weight of each model.
        averaged: Parameters that no curvature covers, and that differ between models.
        buffers: What became of buffers (and further entries of state dicts) that differ, by name.
        seconds: How long all of it took.
        method: How curvature was damped.
    """

    blocks: tuple[MergedBlock, ...]
    weights: tuple[float, ...]
    averaged: tuple[str, ...] = ()
    buffers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    method: str = "exact"

    @property
    def iterations(self) -> int:
        """Iterations of conjugate gradients, of all blocks together."""
        return sum(block.iterations for block in self.blocks)

    @property
    def residual(self) -> float:
        """The largest residual of a block."""
        return max(block.residual for block in self.blocks)

    def describe(self) -> Description:
        """Describe how systems were solved, and what was averaged."""
        closed = sum(block.closed_form for block in self.blocks)
        title = f"Merge of {counted(len(self.weights), 'model')}: {counted(len(self.blocks), 'block')}"
        facts = [
            f"{closed} in closed form, {len(self.blocks) - closed} by conjugate gradients "
            f"({counted(self.iterations, 'iteration')}); largest residual {self.residual:.1e}; {self.seconds:.2g} s",
            f"weights: {', '.join(f'{weight:g}' for weight in self.weights)}; damping: {self.method}",
        ]
        if self.averaged:
            facts.append(f"averaged parameters, which no curvature covers: {few(self.averaged)}")
        for how in dict.fromkeys(self.buffers.values()):
            facts.append(f"{how}: {few([name for name, what in self.buffers.items() if what == how])}")
        rows = [
            (
                block.name,
                "closed form" if block.closed_form else "conjugate gradients",
                str(block.iterations),
                f"{block.residual:.1e}",
                ", ".join(f"{number:.2g}" for number in block.damping.values()),
            )
            for block in self.blocks
        ]
        columns = ("block", "solved by", "iterations", "residual", "damping")
        return Description(title, tuple(facts), (Table("blocks", columns, rows, ("iterations", "residual")),))
