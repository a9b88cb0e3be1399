r"""A block: the factors of one parameter (with its bias), and how they act on it.

In its own frame, a block's parameter is a matrix with rows on the gradient side and columns on the input side, $M$ of
shape `[d_B, d_A]`, and the block maps it to $B M A$. A `Layout` says how the parameter becomes that matrix: which
rows of it, in which order of axes, in how many groups, and with which bias as last column.
"""

from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.layout import Layout, Side
from kfs.kfac.structures.decompositions import computable
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.sums.outer_products import Moment
from kfs.storage import UnfitError


@dataclass
class Pair:
    """Raw sums of one kind of use: inputs, gradients, and over how many positions (or data) they were taken."""

    input: Moment
    gradient: Moment
    terms: float = 0.0

    def merge(self, other: "Pair") -> "Pair":
        """Return the sums over both."""
        return Pair(self.input.merge(other.input), self.gradient.merge(other.gradient), self.terms + other.terms)

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {"input": self.input.state(), "gradient": self.gradient.state(), "terms": self.terms}


@dataclass
class Block:
    """The Kronecker factors of one parameter, joint with its bias.

    Attributes:
        layout: How the parameter becomes a matrix.
        sharing: `"expand"` or `"reduce"`.
        forward_only: Whether gradients are left out: `B` is the identity.
        pairs: Raw sums, by the side that inputs are on: `"A"`, and also `"B"` for a parameter that is used in a second
            role, such as an embedding whose transpose computes the logits.
        operations: What used the parameter.
        reduction_factor: `R`, for all data seen.
    """

    layout: Layout
    sharing: str
    forward_only: bool = False
    pairs: dict[Side, Pair] = field(default_factory=dict)
    operations: set[str] = field(default_factory=set)
    reduction_factor: float = 1.0

    @property
    def name(self) -> str:
        """The block's name."""
        return self.layout.name

    @property
    def A(self) -> Tensor:  # noqa: N802 (the document's symbol)
        """The input-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        return self.reduction_factor * self._raw("A")

    @property
    def B(self) -> Tensor:  # noqa: N802
        """The gradient-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        if self.forward_only:
            ones = torch.ones_like(self._raw("B"))
            return ones if self.diagonal["B"] else torch.diag_embed(ones.diagonal(dim1=-2, dim2=-1))
        return self._B_scale * self._raw("B")

    @property
    def _B_scale(self) -> float:  # noqa: N802
        terms = sum(pair.terms for pair in self.pairs.values())
        return 1.0 if self.forward_only or not terms else 1 / terms

    @property
    def diagonal(self) -> dict[Side, bool]:
        """Which factors are stored by their diagonals."""
        mixed = {
            "A": [p.input if side == "A" else p.gradient for side, p in self.pairs.items()],
            "B": [p.gradient if side == "A" else p.input for side, p in self.pairs.items()],
        }
        return {side: all(m.diagonal for m in moments) for side, moments in mixed.items()}  # type: ignore[misc]

    def shared(self) -> "Block":
        """Return a block with the same tensors, for another owner: what one replaces, the other keeps."""
        pairs = {side: Pair(copy(p.input), copy(p.gradient), p.terms) for side, p in self.pairs.items()}
        return replace(self, pairs=pairs, operations=set(self.operations))

    def state(self) -> dict[str, Any]:
        """Return everything, also of sums that are not finished, for a file."""
        return {
            "layout": asdict(self.layout),
            "sharing": self.sharing,
            "forward_only": self.forward_only,
            "operations": sorted(self.operations),
            "pairs": {side: pair.state() for side, pair in self.pairs.items()},
        }

    @classmethod
    def from_state(cls, state: Any) -> "Block":
        """Undo `state`."""
        layout = Layout.from_state(state["layout"])
        block = cls(layout, str(state["sharing"]), bool(state["forward_only"]), operations=set(state["operations"]))
        sizes: dict[Side, int] = {"A": layout.column_size, "B": layout.row_size}
        sides: tuple[tuple[Side, Side], ...] = (("A", "B"), ("B", "A"))
        for side, other in sides:
            if side in state["pairs"]:
                pair = state["pairs"][side]
                block.pairs[side] = Pair(
                    Moment.from_state(pair["input"], sizes[side], layout.groups),
                    Moment.from_state(pair["gradient"], sizes[other], layout.groups),
                    float(pair["terms"]),
                )
        if not block.pairs or set(state["pairs"]) - {"A", "B"}:
            raise UnfitError(f"the block {block.name!r} has no factors")
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of the raw sums."""
        moments = [m for pair in self.pairs.values() for m in (pair.input, pair.gradient)]
        return sum(m.total.numel() * m.total.element_size() for m in moments)

    @property
    def scales(self) -> dict[Side, float]:
        """What raw sums are multiplied with."""
        return {"A": self.reduction_factor, "B": self._B_scale}

    def structure(self) -> Kronecker:
        """Return the block as a Kronecker product; factors are not copied."""
        factors = []
        for side, scale in self.scales.items():
            raw = computable(self._raw(side))
            values = raw if self.layout.groups > 1 else raw.unsqueeze(0)
            scales = values.new_full((len(values),), scale)
            if side == "B" and self.forward_only:
                factors.append(Factor.identity(values.shape[-1], scales))
            else:
                eps = torch.finfo(self._raw(side).dtype).eps
                factors.append(Factor(values, scales, "diagonal" if self.diagonal[side] else "dense", eps=eps))
        return Kronecker(*factors)

    def _raw(self, side: Side) -> Tensor:
        """Combine the sums on one side, over both roles that a parameter may have.

        Inputs and gradients have different units, so one role's are rescaled, such that both roles have the same
        ratio of the traces of their two sides. The result scales with the gradients as the curvature does.
        """
        if set(self.pairs) == {"A"}:
            pair = self.pairs["A"]
            return pair.input.total if side == "A" else pair.gradient.total
        first, second = self.pairs["A"], self.pairs["B"]
        traces = [_trace(m) for m in (first.input, second.input, first.gradient, second.gradient)]
        ratio = traces[0] * traces[1] / (traces[2] * traces[3]) if traces[2] * traces[3] > 0 else 1.0
        one, other = (first.input, second.gradient) if side == "A" else (first.gradient, second.input)
        scale: float = ratio**0.5 if side == "A" else ratio**-0.5
        if one.diagonal != other.diagonal:
            one, other = _dense(one), _dense(other)
        return one.total + scale * other.total


def _trace(moment: Moment) -> float:
    return float((moment.total if moment.diagonal else moment.total.diagonal(dim1=-2, dim2=-1)).sum())


def _dense(moment: Moment) -> Moment:
    return Moment(torch.diag_embed(moment.total), False, moment.bias) if moment.diagonal else moment
