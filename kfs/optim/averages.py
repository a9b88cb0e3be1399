"""Moving averages of Kronecker factors, one per block, and the damped inverses that were last computed from them.

Averages are per example: they do not depend on the batch size, nor on the loss's reduction. They are free of the bias
towards zero that averages starting there have.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.kfac.blocks import Block
from kfs.kfac.layout import Layout
from kfs.kfac.structures.damping import Method, damped_inverse
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.stack import Stack
from kfs.kfac.structures.structure import Structure
from kfs.kfac.sums.per_datum import Squares

Unit = Literal["relative", "absolute"]


@dataclass
class Average:
    """The curvature of one block, averaged over steps.

    Attributes:
        layout: How the block's parameters become a matrix.
        factors: Average of Kronecker factors, times `weight` each.
        weight: How much of the average does not come from its start at zero.
        changed: Whether something has entered since the last attempt to compute an inverse.
        inverse: The last damped inverse that could be computed.
        damping: What was added to eigenvalues there, `[U]`.
        updated: In which step that was.
        eigen: Average of eigenvalues in a basis, which starts with those of the factors; for eigenvalue correction.
    """

    layout: Layout
    factors: Kronecker
    weight: float
    changed: bool = True
    inverse: Structure | None = None
    damping: Tensor | None = None
    updated: int = -1
    eigen: Eigenbasis | None = None

    @classmethod
    def start(cls, block: Block, decay: float) -> "Average":
        """Begin with a block's factors, which are scaled per example."""
        K, scales = block.structure(), block.scales
        A, B = (
            f
            if f.kind == "identity"
            else replace(f, values=(1 - decay) * scale * f.values, scale=torch.ones_like(f.scale))
            for f, scale in ((K.A, scales["A"]), (K.B, scales["B"]))
        )
        return cls(block.layout, Kronecker(A, B), 1 - decay)

    def add(self, block: Block, decay: float) -> None:
        """Let a block's factors enter the averages."""
        K, scales = block.structure(), block.scales
        for mine, theirs, scale in ((self.factors.A, K.A, scales["A"]), (self.factors.B, K.B, scales["B"])):
            if mine.kind != "identity":
                mine.values.mul_(decay).add_(theirs.values, alpha=(1 - decay) * scale)
        self.weight, self.changed = decay * self.weight + 1 - decay, True

    def add_squares(self, squares: Tensor, examples: float, decay: float) -> None:
        """Let eigenvalues enter their average."""
        assert self.eigen is not None  # noqa: S101 (squares are summed up in its basis)
        self.eigen.values.lerp_(squares / examples, 1 - decay)

    @property
    def cost(self) -> float:
        """How much work an inverse is, up to a constant."""
        dense = [f.size**3 for f in (self.factors.A, self.factors.B) if f.kind == "dense"]
        return float(self.layout.groups * sum(dense)) + self.factors.rows * self.factors.columns

    def squares(self) -> Squares | None:
        """Return what sums up squared gradients in the eigenbasis, from zero."""
        if self.eigen is None:
            return None
        Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in (self.eigen.Q_A, self.eigen.Q_B))
        return Squares(torch.zeros_like(self.eigen.values), Q_A, Q_B)

    def invert(self, damping: float, unit: Unit, method: Method, eigen: bool) -> None:
        """Compute the damped inverse anew; if that fails, nothing changes.

        Args:
            damping: What to add to eigenvalues.
            unit: Whether that is in units of the block's mean eigenvalue.
            method: How damping is split between factors.
            eigen: Whether eigenvalues are corrected.
        """
        ones = torch.ones_like(self.factors.A.scale)
        K = Kronecker(_corrected(self.factors.A, self.weight), _corrected(self.factors.B, self.weight))
        corrected = self._rotated(K) if eigen else None
        structure: Structure = K if corrected is None else corrected
        mean = structure.trace() / (structure.rows * structure.columns) if unit == "relative" else ones
        delta = (damping * mean).clamp(min=_LEAST)  # a layer without any curvature has no gradient either
        inverse = damped_inverse(structure, delta, "exact" if eigen else method)
        self.inverse, self.damping = inverse, delta
        self.eigen = corrected

    def _rotated(self, K: Kronecker) -> Eigenbasis:
        """Return the average of eigenvalues in the eigenbasis of new factors: the diagonal that it has there."""
        basis = K.eigenbasis()
        if self.eigen is None:
            return basis
        turn_A, turn_B = (
            _squared(new.T.compose(old)) for new, old in ((basis.Q_A, self.eigen.Q_A), (basis.Q_B, self.eigen.Q_B))
        )
        values = turn_B.left(turn_A.right(self.eigen.values.unsqueeze(1))).squeeze(1)
        return replace(basis, values=values, noise=torch.zeros_like(basis.noise))

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        parts = {"factors": self.factors, "inverse": self.inverse, "eigen": self.eigen}
        return {
            "layout": asdict(self.layout),
            "damping": self.damping,
            **{k: getattr(self, k) for k in ("weight", "changed", "updated")},
            **{k: None if s is None else Stack((self.layout,), s).state() for k, s in parts.items()},
        }

    @classmethod
    def from_state(cls, state: Any, device: torch.device) -> "Average":
        """Undo `state`."""
        parts = {
            k: None if state[k] is None else Stack.from_state(_moved(state[k], device)).structure
            for k in ("factors", "inverse", "eigen")
        }
        rest = {k: state[k] for k in ("weight", "changed", "updated")}
        return cls(Layout.from_state(state["layout"]), damping=_moved(state["damping"], device), **rest, **parts)  # type: ignore[arg-type]


_LEAST = 1e-20


def _corrected(factor: Factor, weight: float) -> Factor:
    return factor if factor.kind == "identity" else factor.scaled(1 / weight)


def _squared(factor: Factor) -> Factor:
    return replace(factor, values=factor.values.square())


def _moved(state: Any, device: torch.device) -> Any:
    """Return a copy of a state with its tensors on a device."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if isinstance(state, dict):
        return {key: _moved(value, device) for key, value in state.items()}
    return [_moved(value, device) for value in state] if isinstance(state, (list, tuple)) else state
