"""Sums over uses of gradients times inputs, which should equal the gradients of all parameters, for the audit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.inputs import Use
from kfs.factors.accumulate.statistic import Adder, PlannedUse, Statistic, in_block
from kfs.factors.layout import Key, Layout
from kfs.factors.rows.row_map import RowMap, StridedRows
from kfs.factors.rows.source import Receiver
from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import numbers

_HALF = {torch.float16, torch.bfloat16}


class GradientSums(Statistic):
    """Sums gradients times inputs over all uses, for one column.

    Attributes:
        operations: The operations that used each parameter, by name.
        conflicts: `(parameter, operation)` of uses that are inconsistent with other uses of the parameter.
        narrow: Names of parameters that are used in half precision.
    """

    needs_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, set[str]] = {}
        self.conflicts: set[tuple[str, str]] = set()
        self.totals: dict[Key, tuple[Layout, Tensor]] = {}
        self.sizes: dict[Key, Tensor] = {}
        self.narrow: set[str] = set()

    def adder_of(self, plan: PlannedUse) -> Adder:
        """Return the adder for the uses of a plan."""
        for name in plan.layout.params:
            self.operations.setdefault(name, set()).add(plan.operation)
            if plan.narrow is not None or plan.dtype in _HALF:
                self.narrow.add(name)
        return _Add(self, plan).add

    def note_conflict(self, plan: PlannedUse) -> None:
        """Record a use that is inconsistent with other uses of its parameter."""
        self.conflicts.add((plan.layout.weight, plan.operation))

    def differences(self, exact: Mapping[str, Tensor]) -> dict[str, tuple[float, float, float]]:
        """Compare sums with gradients by autograd.

        Args:
            exact: The gradients of all parameters that have blocks.

        Returns:
            By name of each parameter with a block: the distance of both, the norm of the gradient by autograd, and the
            size of the terms that it is a sum of.
        """
        names = [name for name in exact if name in self.operations]
        unseen = {name: exact[name].numel() for name in names}
        norms: list[Tensor] = [exact[name].norm() for name in names]
        parts: list[tuple[str, Key]] = []
        for key, (layout, total) in self.totals.items():
            for name, g, found in _parts(layout, exact, total):
                norms.append((found - g.reshape(found.shape).to(found.dtype)).norm())
                parts.append((name, key))
                unseen[name] -= g.numel()
        keys = list(self.sizes)
        norms += [self.sizes[key] for key in keys]
        values = numbers(norms)  # one synchronization
        sizes = dict(zip(names, values, strict=False))
        terms_of = dict(zip(keys, values[len(names) + len(parts) :], strict=True))
        squares, terms = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for (name, key), distance in zip(parts, values[len(names) :], strict=False):
            squares[name] += distance**2
            terms[name] += terms_of[key]
        partly = [name for name in names if unseen[name]]  # entries without block should have no gradient
        for name, rest in zip(partly, numbers([self._rest(name, exact).norm() for name in partly]), strict=True):
            squares[name] += rest**2
        return {name: (squares[name] ** 0.5, sizes[name], terms[name]) for name in names}

    def _rest(self, name: str, exact: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient of a parameter, with zeros at entries that blocks have."""
        rest = {other: g.clone() if other == name else g for other, g in exact.items()}
        for layout, total in self.totals.values():
            for other, g, _ in _parts(layout, rest, total) if name in layout.params else ():
                if other == name:
                    g.zero_()
        return rest[name]


@dataclass
class _Add:
    """Accumulates the uses of one plan."""

    sums: GradientSums
    plan: PlannedUse

    def add(self, x: Any, row_map: RowMap | None) -> Receiver:
        one_datum = StridedRows.batch_first(1, prod(self.plan.inputs.leading(x)))
        key = self.plan.layout.key

        def receive(g: Tensor) -> None:
            g = g[0].to(at_least_float32(g.dtype))
            has_numbers = isinstance(x, Tensor) and x.is_floating_point()
            inputs = x.to(g.dtype) if has_numbers else x
            use = Use(self.plan.inputs, inputs, one_datum, self.plan.ones)
            (total,) = in_block(self.plan, torch.cat(list(use.gradients(g))))
            layout, before = self.sums.totals.get(key, (self.plan.layout, None))
            self.sums.totals[key] = (layout, total if before is None else before.add_(total))
            # Terms may cancel, but rounding errors are proportional to the size of the terms.
            length = inputs.norm() * self.plan.inputs.overlap**0.5 if has_numbers else one_datum.inner**0.5
            self.sums.sizes[key] = length * g.norm() + self.sums.sizes.get(key, 0.0)

        return receive


def _parts(layout: Layout, exact: Mapping[str, Tensor], total: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Generate each parameter of a block: its name, a view of its gradient by autograd, and of the sum."""
    W, b = layout.views({name: exact[name].unsqueeze(0) for name in layout.params})
    inputs = layout.column_size
    yield layout.weight, W, total[..., :inputs]
    if layout.bias is not None and b is not None:
        yield layout.bias, b, total[..., inputs:]
