"""What an audit says: what was checked, and how closely."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AuditedUse:
    """One use of a parameter.

    Attributes:
        parameter: Its name.
        operation: What used it.
        rows: How rows of the operation's inputs belong to data, and which of them count if not all do.
        mixing: How far a row's gradients are from those of a row that belongs to one example.
    """

    parameter: str
    operation: str
    rows: str
    mixing: float


@dataclass(frozen=True, repr=False)
class Audit:
    """What was checked, and how closely.

    Attributes:
        num_data: Number of examples that were looked at.
        predictions: Relative difference of predictions with and without capture, the latter for a part of the data.
        gradients: By parameter, the relative difference of the sum over its uses from its gradient by autograd.
        uses: All uses, in their order.
        tolerance: Up to which relative difference predictions and gradients count as the same.
        shapes: For how many different shapes of inputs this was done. Numbers are the largest ones.
        missed: Parameters of which a use was missed or misread. They are not covered.
        unused: Parameters that predictions do not depend on. They have no block, and a curvature of zero.
        mask: The name of the mask that says where inputs have padding; empty if there is none.
    """

    num_data: int
    predictions: float
    gradients: Mapping[str, float]
    uses: tuple[AuditedUse, ...]
    tolerance: float
    shapes: int = 1
    missed: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mask: str = ""

    def merged(self, other: "Audit") -> "Audit":
        """Return one audit for the shapes of both; the same one if they are equal."""
        if self == other:
            return self
        names = [*self.gradients, *(name for name in other.gradients if name not in self.gradients)]
        worst = {name: max(self.gradients.get(name, 0.0), other.gradients.get(name, 0.0)) for name in names}
        return replace(
            self,
            predictions=max(self.predictions, other.predictions),
            gradients=worst,
            shapes=self.shapes + other.shapes,
            missed=tuple(name for name in names if name in self.missed or name in other.missed),
            unused=tuple(name for name in self.unused if name in other.unused),
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        uses: dict[tuple[str, str, str], int] = {}
        for use in self.uses:
            what = (use.parameter, use.operation, use.rows)
            uses[what] = uses.get(what, 0) + 1
        shapes = "shape" if self.shapes == 1 else "shapes"
        right = [difference for name, difference in self.gradients.items() if name not in self.missed]
        lines = [
            f"audit of {len(self.gradients)} parameters on {self.num_data} examples, {self.shapes} {shapes} of inputs",
            f"predictions with and without capture differ by {self.predictions:.1e}",
            f"sums over uses and gradients by autograd differ by {max(right, default=0.0):.1e}",
        ]
        if self.mask:
            lines.append(f"{self.mask} says which positions of inputs are there")
        lines += [f"  {name}: not covered, differs by {percent(self.gradients[name])}" for name in self.missed]
        lines += [f"  {name}: not used, as predictions do not depend on it" for name in self.unused]
        for (parameter, operation, rows), times in uses.items():
            repeated = "" if times == 1 else f", {times} times"
            lines.append(f"  {parameter}: {operation}{repeated}; {rows}")
        return "\n".join(lines)


def merge_audits(one: Audit | None, other: Audit | None) -> Audit | None:
    """Return one audit for the shapes of both; `None` if one of them is missing."""
    return None if one is None or other is None else one.merged(other)


def percent(difference: float) -> str:
    """Return a relative difference for a message."""
    if not difference < 10:  # a ratio of anything and nearly nothing
        return "more than 1000%"
    return f"{100 * difference:.2g}%" if difference < 0.995 else f"{difference:.0%}"
