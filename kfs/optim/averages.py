"""Moving averages of Kronecker factors, one per block, and the damped inverses that were last computed from them.

Averages are per example: they do not depend on the batch size, nor on the loss's reduction. They start at zero, and the
bias that comes from this start is corrected when an inverse is computed.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.data import mapped
from kfs.kfac.block import Block
from kfs.kfac.layout import Layout, Side
from kfs.kfac.structures import Eigenbasis, Factor, Kronecker, Method, Stack, Structure, damped_inverse
from kfs.kfac.sums import Squares

Unit = Literal["relative", "absolute"]
# The smallest damping. It makes blocks without any curvature, which have no gradient either, invertible.
_LEAST_DAMPING = 1e-20


@dataclass
class Average:
    """The curvature of one block, averaged over steps."""

    layout: Layout  # how the block's parameters become a matrix
    factors: Kronecker  # average of both factors, times `weight` each
    weight: float = 0.0  # share of the average that does not come from its start at zero
    changed: bool = True  # whether factors or damping have changed since the last attempt to invert
    inverse: Structure | None = None  # the last damped inverse that could be computed
    damping: Tensor | None = None  # what was added to eigenvalues for this inverse, `[groups]`
    updated: int = -1  # step of the last attempt to invert
    eigen: Eigenbasis | None = None  # average of corrected eigenvalues; it starts with those of the factors
    uses: float = 1.0  # average number of inputs of the layer per example, such as positions of a convolution
    input_size: Tensor | None = None  # root mean square of inputs at the last inverse, `[groups]`; a bias counts as one

    @classmethod
    def zeros_like(cls, block: Block) -> "Average":
        """Start at zero, with factors stored like those of a block."""
        K = block.structure()
        return cls(block.layout, Kronecker(_zeros_like(K.A), _zeros_like(K.B)))

    def add(self, block: Block, decay: float) -> None:
        """Add a block's factors, which are scaled per example, and keep `decay` of the average."""
        K = block.structure()
        self.weight = decay * self.weight + 1 - decay
        sides: list[tuple[Factor, Factor, Side]] = [(self.factors.A, K.A, "A"), (self.factors.B, K.B, "B")]
        for average, new, side in sides:
            if average.kind == "identity":
                # Numbers of positions may differ between steps. This is an average without the bias of its start.
                average.scale.lerp_(new.scale, (1 - decay) / self.weight)
            else:
                average.values.mul_(decay).add_(new.values, alpha=(1 - decay) * block.scale(side))
        # The average without the bias of its start. A factor has sums over uses; sizes of inputs are means.
        uses = block.sums.terms * block.reduction_factor
        self.uses += (uses - self.uses) * (1 - decay) / self.weight
        self.changed = True

    @property
    def cost(self) -> float:
        """The work that an inverse takes, up to a constant."""
        dense = [f.size**3 for f in (self.factors.A, self.factors.B) if f.kind == "dense"]
        return float(self.layout.groups * sum(dense)) + self.factors.rows * self.factors.columns

    def new_squares(self) -> Squares | None:
        """Return a sum of squared gradients in the eigenbasis that starts at zero, or `None` without eigenbasis."""
        if self.eigen is None:
            return None
        Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in (self.eigen.Q_A, self.eigen.Q_B))
        return Squares(torch.zeros_like(self.eigen.values), Q_A, Q_B)

    def invert(self, damping: float, unit: Unit, method: Method, eigen: bool) -> None:
        """Recompute the damped inverse, with corrected eigenvalues if `eigen`; on an error, change nothing."""
        K = Kronecker(_without_bias(self.factors.A, self.weight), _without_bias(self.factors.B, self.weight))
        corrected = self._in_eigenbasis_of(K) if eigen else None
        structure: Structure = K if corrected is None else corrected
        size = structure.rows * structure.columns
        mean = structure.trace() / size if unit == "relative" else torch.ones_like(K.A.scale)
        delta = (damping * mean).clamp(min=_LEAST_DAMPING)
        self.inverse = damped_inverse(structure, delta, "exact" if eigen else method)
        self.damping = delta
        self.input_size = (K.A.trace() / (K.A.size * self.uses)).clamp(min=0).sqrt()
        self.eigen = corrected

    def _in_eigenbasis_of(self, K: Kronecker) -> Eigenbasis:
        """Return the averaged eigenvalues in a new basis: the diagonal of the matrix that they stand for."""
        basis = K.eigenbasis()
        if self.eigen is None:
            return basis
        turn_A = _squared(basis.Q_A.T.compose(self.eigen.Q_A))
        turn_B = _squared(basis.Q_B.T.compose(self.eigen.Q_B))
        values = turn_B.left(turn_A.right(self.eigen.values.unsqueeze(1))).squeeze(1)
        return replace(basis, values=values, noise=torch.zeros_like(basis.noise))

    def state(self) -> dict[str, Any]:
        """Return all attributes, for a file."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in state.items():
            if isinstance(value, Structure):
                state[name] = Stack((self.layout,), value).state()
        return state | {"layout": asdict(self.layout)}

    @classmethod
    def from_state(cls, state: Any, device: torch.device) -> "Average":
        """Undo `state`, with copies of tensors on a device."""
        loaded = copied_to(device, state)
        for name in ("factors", "inverse", "eigen"):
            if loaded[name] is not None:
                loaded[name] = Stack.from_state(loaded[name]).structure
        return cls(**loaded | {"layout": Layout.from_state(loaded["layout"])})


def copied_to(device: torch.device, state: Any) -> Any:
    """Return a state with copies of its tensors on a device."""
    return mapped(state, lambda t: t.to(device, copy=True))


def _zeros_like(factor: Factor) -> Factor:
    """Return zeros with a scale of one. An identity stays as it is: the first average of its scale replaces it."""
    if factor.kind == "identity":
        return factor
    return replace(factor, values=torch.zeros_like(factor.values), scale=torch.ones_like(factor.scale))


def _without_bias(factor: Factor, weight: float) -> Factor:
    """Correct the bias of an average that started at zero. That of an identity's scale has none."""
    return factor if factor.kind == "identity" else factor.scaled(1 / weight)


def _squared(factor: Factor) -> Factor:
    return replace(factor, values=factor.values.square())
