"""What was removed: numbers per layer and in all, operations, and how the loss should have changed."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kfs.compress.layers import Layer
from kfs.display.describe import Described, Description, Table, counted, number, readable_count
from kfs.errors import DtypeError
from kfs.factors import Relative

_COLUMNS = ("layer", "before", "kept", "share", "bases", "matrix", "form", "loss")
_SAME_SIZE = ("unchanged", "masked", "one layer")  # forms that have all numbers that the layer had
_NUMBERS = ("before", "kept", "share", "bases", "loss")


@dataclass(frozen=True)
class LayerRow:
    """What became of one layer.

    Attributes:
        layer: Its name.
        before: How many numbers its matrix had.
        kept: How many numbers describe it now, without bases. Zeros do not count.
        bases: How many numbers fixed bases have; zero in the basis of parameters.
        matrix: Rows and columns that are left, or the rank.
        form: What the layer is now: `"unchanged"`, `"masked"`, `"smaller"`, `"one layer"` (of the size that it had),
            `"two layers"` or `"three layers"`.
        increase: By how much the loss grows according to the quadratic model, without damping, through this layer.
    """

    layer: str
    before: int
    kept: int
    bases: int
    matrix: str
    form: str
    increase: float


def unchanged(layer: Layer) -> LayerRow:
    """Return the row of a layer of which nothing was removed."""
    return LayerRow(layer.name, layer.size, layer.size, 0, layer.shape, "unchanged", 0.0)


@dataclass(frozen=True, repr=False)
class Report(Described):
    """What a compression removed.

    Attributes:
        method: What was done.
        rows: One row per layer that could be compressed.
        parameters_before: Numbers in the model.
        parameters_after: Numbers that describe the new model: zeros do not count, and bases do if `count_bases`.
        stored_after: Numbers in all parameters of the new model, with zeros and bases.
        count_bases: Whether bases count in `parameters_after`, and counted for `keep`.
        flops_before: Floating-point operations of a forward pass over the sample; `None` without sample.
        flops_after: The same for the new model. Zeros are multiplied, too.
        damping: What was added to the curvature.
        losses: If damping was chosen by training loss: the losses for all that were tried, on `loss_data` data.
        loss_before: The same loss of the model that was given.
        loss_data: From how many examples losses were computed; zero if damping was not chosen.
    """

    method: str
    rows: Sequence[LayerRow]
    parameters_before: int
    parameters_after: int
    stored_after: int
    count_bases: bool
    flops_before: int | None
    flops_after: int | None
    damping: float | Relative = 0.0
    losses: Mapping[Relative, float] = field(default_factory=dict)
    loss_before: float | None = None
    loss_data: int = 0

    @property
    def bases(self) -> int:
        """How many numbers all fixed bases have."""
        return sum(row.bases for row in self.rows)

    @property
    def kept_share(self) -> float:
        """The share of the compressed layers' numbers that is kept, with bases if they count."""
        kept = sum(row.kept + self.count_bases * row.bases for row in self.rows)
        return kept / sum(row.before for row in self.rows)

    def describe(self) -> Description:
        """Describe totals, and every layer in a table."""
        facts = [
            f"{self.kept_share:.1%} of {sum(row.before for row in self.rows):,} numbers in "
            f"{counted(len(self.rows), 'layer')}; all parameters: {self.parameters_before:,} before, "
            f"{self.parameters_after:,} after, {self.stored_after:,} stored"
        ]
        if self.bases:
            facts.append(f"{self.bases:,} numbers of fixed bases are {'' if self.count_bases else 'not '}counted")
        if self.losses:
            tried = ", ".join(f"{number(loss)} with {damping.fraction:g}" for damping, loss in self.losses.items())
            facts.append(
                f"damping {self.damping}, chosen by the training loss of {self.loss_data:,} examples: "
                f"{number(self.loss_before or 0.0)} before, {tried}"
            )
        else:
            facts.append(f"damping {self.damping}, not chosen by training loss")
        if self.flops_before is not None and self.flops_after is not None:
            before, after = readable_count(self.flops_before), readable_count(self.flops_after)
            share = self.flops_after / self.flops_before
            facts.append(f"floating-point operations of the sample: {before} before, {after} after ({share:.0%})")
        rows = [
            (
                row.layer,
                f"{row.before:,}",
                f"{row.kept:,}",
                f"{row.kept / row.before:.1%}",
                f"{row.bases:,}" if row.bases else "",
                row.matrix,
                row.form,
                f"+{number(row.increase)}",
            )
            for row in self.rows
        ]
        table = Table("layers", _COLUMNS, rows, _NUMBERS)
        note = "loss: its increase through each layer alone, by the quadratic model"
        return Description(self.method, tuple(facts), (table,), (note,))


class Compressed(NamedTuple):
    """A compressed model and what was removed.

    Attributes:
        model: A new model of plain `torch.nn` modules.
        report: What became of every layer.
    """

    model: nn.Module
    report: Report

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: the model is a part of this."""
        raise DtypeError(
            "This is a Compressed, the result of a compression: a model and a report. It cannot be called.",
            "Call its model: small, report = prune(...), or prune(...).model.",
        )

    def __repr__(self) -> str:
        return f"Compressed {type(self.model).__name__}\n{self.report!r}"


def make_report(
    method: str,
    rows: Sequence[LayerRow],
    before: nn.Module,
    after: nn.Module,
    count_bases: bool,
    sample: Any,
    **damping: Any,
) -> Report:
    """Count parameters and operations.

    Args:
        method: What was done.
        rows: One per layer.
        before: The model that was given.
        after: The new one.
        count_bases: Whether bases count.
        sample: Input of a forward pass, or `None`.
        damping: What the report says about damping: its fields from `damping` on.
    """
    num_before, num_after = (sum(p.numel() for p in model.parameters()) for model in (before, after))
    # What else there is: the rest of the new model, where a BatchNorm between channels is smaller, too.
    stored = [row.before if row.form in _SAME_SIZE else row.kept + row.bases for row in rows]
    untouched = num_after - sum(stored)
    kept = sum(row.kept + count_bases * row.bases for row in rows)
    flops = [None, None] if sample is None else [_flops(model, sample) for model in (before, after)]
    counts = num_before, untouched + kept, num_after
    return Report(method, tuple(rows), *counts, count_bases, flops[0], flops[1], **damping)


def _flops(model: nn.Module, sample: Any) -> int:
    """Count the operations of products and convolutions in a forward pass; the model stays as it is."""
    model = deepcopy(model).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*sample) if isinstance(sample, tuple) else model(sample)
    return int(counter.get_total_flops())
