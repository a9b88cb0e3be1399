"""The report of a compression: sizes per layer and in total, operations, and predicted changes of the loss."""

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
_SAME_SIZE = ("unchanged", "masked", "one layer")  # forms that store as many numbers as the layer did
_NUMBERS = ("before", "kept", "share", "bases", "loss")


@dataclass(frozen=True)
class LayerRow:
    """The compression of one layer.

    Attributes:
        layer: Name of the layer.
        before: Number of entries of its matrix before.
        kept: Number of entries that describe it now, without zeros and bases.
        bases: Number of entries of fixed bases; zero in the basis of parameters.
        matrix: Remaining rows and columns, or the rank.
        form: The new form: `"unchanged"`, `"masked"`, `"smaller"`, `"one layer"` (of the same size as before),
            `"two layers"` or `"three layers"`.
        increase: Increase of the loss caused by this layer, according to the quadratic model without damping.
    """

    layer: str
    before: int
    kept: int
    bases: int
    matrix: str
    form: str
    increase: float


def unchanged(layer: Layer) -> LayerRow:
    """Return the row of a layer that was not changed."""
    return LayerRow(layer.name, layer.size, layer.size, 0, layer.shape, "unchanged", 0.0)


@dataclass(frozen=True, repr=False)
class Report(Described):
    """The report of a compression.

    Attributes:
        method: The method in a few words.
        rows: One row per layer that could be compressed.
        parameters_before: Number of parameters of the model.
        parameters_after: Number of parameters that describe the new model, without zeros; with bases if `count_bases`.
        stored_after: Number of parameters of the new model, with zeros and bases.
        count_bases: Whether bases count in `parameters_after` and for `keep`.
        flops_before: Floating-point operations of a forward pass over the sample; `None` without sample.
        flops_after: The same for the new model, including multiplications with zeros.
        damping: Damping of the curvature.
        losses: If damping was chosen by training loss, the loss for each candidate, on `loss_data` examples.
        loss_before: The same loss for the original model.
        loss_data: Number of examples that losses were computed on; zero if damping was not chosen by training loss.
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
        """Total number of entries of fixed bases."""
        return sum(row.bases for row in self.rows)

    @property
    def kept_share(self) -> float:
        """The share of entries in the compressed layers that is kept, with bases if they count."""
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
    """A compressed model and the report of its compression.

    Attributes:
        model: A new model of plain `torch.nn` modules.
        report: The compression of every layer.
    """

    model: nn.Module
    report: Report

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error that points to `model`."""
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
    """Return the report, after counting parameters and operations. `damping` has its fields about damping."""
    num_before, num_after = (sum(p.numel() for p in model.parameters()) for model in (before, after))
    # Parameters of the new model outside of these layers. A BatchNorm between pruned layers is smaller, too.
    stored = [row.before if row.form in _SAME_SIZE else row.kept + row.bases for row in rows]
    untouched = num_after - sum(stored)
    kept = sum(row.kept + count_bases * row.bases for row in rows)
    flops = [None, None] if sample is None else [_flops(model, sample) for model in (before, after)]
    counts = num_before, untouched + kept, num_after
    return Report(method, tuple(rows), *counts, count_bases, flops[0], flops[1], **damping)


def _flops(model: nn.Module, sample: Any) -> int:
    """Count the operations of products and convolutions in a forward pass, in a copy of the model."""
    model = deepcopy(model).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*sample) if isinstance(sample, tuple) else model(sample)
    return int(counter.get_total_flops())
