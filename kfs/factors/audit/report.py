"""The report of an audit: what was checked, and to which precision."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kfs.display.describe import counted


@dataclass(frozen=True)
class AuditedUse:
    """One use of a parameter.

    Attributes:
        parameter: Its name.
        operation: The operation that used it.
        rows: The order of rows of the operation's inputs, and which rows count if not all do.
        mixing: The largest relative distance of a row's gradients from those of a row that belongs to one example.
    """

    parameter: str
    operation: str
    rows: str
    mixing: float


@dataclass(frozen=True, repr=False)
class Audit:
    """The report of an audit: what was checked, and to which precision.

    Attributes:
        num_data: Number of audited examples.
        predictions: Relative difference of predictions with and without capture, the latter for some of the examples.
        gradients: By parameter, the relative difference between the sum over its uses and its gradient by autograd.
        uses: All uses, in order.
        tolerance: The largest relative difference up to which predictions and gradients count as equal.
        shapes: Number of audited shapes of inputs. Other numbers are the maxima over them.
        missed: Parameters of which a use was missed or misread. They are not covered.
        unused: Parameters that predictions do not depend on. Their curvature is zero.
        mask: The name of the mask that marks padding of inputs; empty if there is none.
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
        """Return the merged audit for the shapes of both; `self` if they are equal."""
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
        right = [difference for name, difference in self.gradients.items() if name not in self.missed]
        lines = [
            f"audit of {counted(len(self.gradients), 'parameter')} on {counted(self.num_data, 'example')}, "
            f"{counted(self.shapes, 'shape')} of inputs",
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
    """Return the merged audit for the shapes of both; `None` if one is missing."""
    return None if one is None or other is None else one.merged(other)


def percent(difference: float) -> str:
    """Format a relative difference for a message."""
    if not difference < 10:  # the denominator was nearly zero
        return "more than 1000%"
    return f"{100 * difference:.2g}%" if difference < 0.995 else f"{difference:.0%}"
