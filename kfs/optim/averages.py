"""Sums from the passes of one step, and moving averages of Kronecker factors, with the last inverses of these.

Averages are per example: they depend neither on the batch size nor on the loss's reduction. They start at zero, and the
resulting bias is corrected when an inverse is computed.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kfs.factors.accumulate import BlockSums, Squares
from kfs.factors.block import Block
from kfs.factors.blocks import (
    Eigenbasis,
    Factor,
    Kronecker,
    Method,
    Stack,
    Structure,
    computable,
    damped_inverse,
)
from kfs.factors.layout import Key, Layout, Side
from kfs.runtime.nested import mapped

Unit = Literal["relative", "absolute"]
# The smallest damping. It makes blocks without any curvature invertible; their gradients vanish, too.
_LEAST_DAMPING = 1e-20


# By block: its layout, and a sum of squared gradients in its eigenbasis that starts at zero.
Bases = Mapping[Key, tuple[Layout, Squares]]


# A sum of a step: its block, its side (empty for squared gradients), and its kind.
SumKey = tuple[Key, str, str]


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
    norms: dict[SumKey, float] | None = None  # the largest norms of sums over all processes, if hosts exchanged them

    def norms_of(self, blocks: Mapping[Key, BlockSums]) -> tuple[list[SumKey], Tensor]:
        """Return the sums of some blocks and of all squared gradients, and their 1-norms, `[n]`."""
        totals: dict[SumKey, Tensor] = {
            (key, side, kind): s.total
            for key, block in blocks.items()
            for side, role in block.roles.items()
            for kind, s in (("inputs", role.input), ("gradients", role.gradient))
        }
        totals |= {(key, "", "squares"): squares for key, squares in self.squares.items()}
        norms = torch._foreach_norm(list(totals.values()), 1.0) if totals else ()
        return list(totals), torch.stack(norms) if norms else torch.zeros(0)

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


@dataclass(eq=False)
class Average:
    """The curvature of one block, averaged over steps.

    An accelerator decides whether factors of a step are added. So all numbers that depend on it are tensors there,
    which change in place.
    """

    layout: Layout  # how the block's parameters become a matrix
    factors: Kronecker  # moving averages of both factors, each still times `weight`
    weight: Tensor  # fraction of the average that does not come from its start at zero; a scalar in float64
    uses: Tensor  # average number of inputs of the layer per example, such as positions; squared with `reduce`
    changed: bool = True  # whether factors or damping have changed since the last attempt to invert
    inverse: Structure | None = None  # the last damped inverse that could be computed
    damping: Tensor | None = None  # damping that was added to eigenvalues for this inverse, `[groups]`
    updated: int = -1  # step of the last attempt to invert
    failed: bool = False  # whether this attempt has failed
    eigen: Eigenbasis | None = None  # average of corrected eigenvalues; initialized from the factors
    input_size: Tensor | None = None  # root mean square of inputs at the last inverse, `[groups]`; a bias counts as one
    owner: int | None = None  # only rank with factors and inverse; `None` if all have them
    is_elsewhere: bool = False  # whether another rank is the owner: factors are zeros without memory

    @classmethod
    def zeros_like(cls, block: Block, at_owner: bool = False) -> "Average":
        """Return an average that starts at zero, with factors stored like those of a block; nowhere if `at_owner`."""
        K = block.structure()
        weight = torch.zeros((), dtype=torch.float64, device=K.like.device)
        factors = Kronecker(_zeros_like(K.A, not at_owner), _zeros_like(K.B, not at_owner))
        return cls(block.layout, factors, weight, torch.ones_like(weight), is_elsewhere=at_owner)

    def fits(self, sums: BlockSums) -> bool:
        """Whether layout and kinds of factors are those of a block, so that its factors can be added."""
        kind_A, kind_B = ("diagonal" if sums.is_diagonal(side) else "dense" for side in ("A", "B"))
        kinds = (kind_A, "identity" if sums.forward_only else kind_B)
        return self.layout == sums.layout and kinds == (self.factors.A.kind, self.factors.B.kind)

    @cached_property
    def size(self) -> Hashable:
        """Key of blocks that can be inverted together: kinds, sizes and device of their factors."""
        return self.factors.key

    @cached_property
    def cost(self) -> float:
        """The work for an inverse, up to a constant."""
        dense = [f.size**3 for f in (self.factors.A, self.factors.B) if f.kind == "dense"]
        return float(self.layout.groups * sum(dense)) + self.factors.rows * self.factors.columns

    @property
    def has_inverse(self) -> bool:
        """Whether this process has an inverse to multiply with."""
        return self.inverse is not None and not self.inverse.like.is_meta

    def leave_to(self, owner: int, is_mine: bool) -> None:
        """Keep factors and inverse on a single rank."""
        self.owner = owner
        if is_mine == self.is_elsewhere:
            A, B = (_zeros_like(factor, stored=is_mine) for factor in (self.factors.A, self.factors.B))
            self.factors = Kronecker(A, B)
            self.is_elsewhere = not is_mine
        if self.inverse is not None and not is_mine:
            self.inverse = self.inverse.to("meta")
            self.input_size = None

    def new_squares(self) -> Squares | None:
        """Return a zero-initialized sum of squared gradients in the eigenbasis; `None` without eigenbasis."""
        if self.eigen is None:
            return None
        Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in (self.eigen.Q_A, self.eigen.Q_B))
        return Squares(torch.zeros_like(self.eigen.values), Q_A, Q_B)

    @classmethod
    def stored(cls) -> set[str]:
        """Return the names of all attributes that are saved."""
        return {one.name for one in fields(cls)} - {"owner", "is_elsewhere"}

    def state(self) -> dict[str, Any]:
        """Return all attributes for a checkpoint."""
        state = {name: getattr(self, name) for name in self.stored()}
        for name, value in state.items():
            if isinstance(value, Structure):
                state[name] = Stack((self.layout,), value).state()
        return state | {"layout": asdict(self.layout)}

    @classmethod
    def from_state(cls, state: Any, device: torch.device) -> "Average":
        """Restore an average from `state`, with copies of tensors on a device."""
        loaded = copied_to(device, state)
        for name in ("factors", "inverse", "eigen"):
            if loaded[name] is not None:
                loaded[name] = Stack.from_state(loaded[name]).structure
        return cls(**loaded | {"layout": Layout.from_state(loaded["layout"])})


def add_factors(pairs: Sequence[tuple[Average, Block]], decay: float, good: Tensor | None = None) -> None:
    """Add the factors of blocks, scaled per example, to their moving averages, and keep `decay` of the averages.

    All factors are added in a few operations, because each operation takes time to launch on an accelerator.

    Args:
        pairs: Averages, each with the block to add.
        decay: Fraction of an average that is kept.
        good: A flag on the device; if it is false, averages do not change.
    """
    if not pairs:
        return
    _add_numbers(pairs, decay, good)
    kept: list[Tensor] = []
    by_scale: dict[float, tuple[list[Tensor], list[Tensor]]] = {}  # averages and sums
    sides: tuple[Side, Side] = ("A", "B")
    for average, block in pairs:
        average.changed = True
        for side in sides:
            factor: Factor = getattr(average.factors, side)
            if factor.kind == "identity":
                # Numbers of positions may differ between steps. This average is bias-corrected.
                new: Factor = getattr(block.structure(), side)
                scale = new.scale if good is None else torch.where(good, new.scale, factor.scale)
                factor.scale.lerp_(scale, ((1 - decay) / average.weight).to(scale.dtype))
                continue
            if average.is_elsewhere:
                continue
            averages, sums = by_scale.setdefault((1 - decay) * block.scale(side), ([], []))
            averages.append(factor.values)
            sums.append(computable(block.sums.side_total(side)))
            kept.append(factor.values)
    if good is None:
        if kept:
            torch._foreach_mul_(kept, decay)
    else:
        for same in _by_dtype(kept):
            torch._foreach_mul_(same, torch.where(good, same[0].new_full((), decay), 1.0))
    for alpha, (averages, sums) in by_scale.items():
        finite = sums if good is None else [torch.where(good, total, 0.0) for total in sums]
        torch._foreach_add_(averages, finite, alpha=alpha)


def _add_numbers(pairs: Sequence[tuple[Average, Block]], decay: float, good: Tensor | None) -> None:
    """Update weights and numbers of uses, in place and for all averages together."""
    stored = [t for average, _ in pairs for t in (average.weight, average.uses)]
    old = torch.stack(stored).reshape(-1, 2)
    weight = decay * old[:, 0] + 1 - decay
    # A bias-corrected average. Factors are sums over uses, but sizes of inputs are means.
    latest = [block.sums.inputs * block.reduction_factor for _, block in pairs]
    uses = torch.tensor(latest, dtype=torch.float64).to(old.device, non_blocking=True)
    uses = old[:, 1] + (uses - old[:, 1]) * (1 - decay) / weight
    new = torch.stack([weight, uses], 1)
    if good is not None:
        new = torch.where(good, new, old)
    torch._foreach_copy_(stored, list(new.flatten().unbind()))


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype: PyTorch's list operations are slow with a factor of another precision."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())


class Inverted(NamedTuple):
    """Damped inverses of blocks of one size."""

    inverse: Structure
    damping: Tensor  # damping that was added to eigenvalues, `[stack]`
    eigen: Eigenbasis | None  # averages of corrected eigenvalues, in the basis of these inverses
    input_size: Tensor  # root mean squares of inputs, `[stack]`


def inverted(averages: Sequence[Average], damping: Tensor, unit: Unit, method: Method, eigen: bool) -> Inverted:
    """Return damped inverses of averages that have equal keys, with corrected eigenvalues if `eigen`.

    Args:
        averages: Averages of blocks with factors of the same kinds and sizes.
        damping: Damping of each block of the stack, on the device, `[stack]`.
        unit: Unit of damping.
        method: How damping is split between factors.
        eigen: Whether eigenvalues are corrected. If so, damping is exact.
    """
    K = Kronecker.stack([a.factors for a in averages])
    numbers = [number for a in averages for _ in range(a.layout.groups) for number in (a.weight, a.uses)]
    weight, uses = torch.stack(numbers).to(K.like.dtype).reshape(-1, 2).unbind(1)
    damping = damping.to(K.like.dtype)
    K = Kronecker(_without_bias(K.A, weight), _without_bias(K.B, weight))
    corrected = _in_new_eigenbasis(K, [a.eigen for a in averages if a.eigen is not None]) if eigen else None
    structure: Structure = K if corrected is None else corrected
    size = structure.rows * structure.columns
    mean = structure.trace() / size if unit == "relative" else torch.ones_like(K.A.scale)
    added = (damping * mean).clamp(min=_LEAST_DAMPING)
    inputs = K.A.trace() / (K.A.size * uses)
    inverse = damped_inverse(structure, added, "exact" if eigen else method)
    return Inverted(inverse, added, corrected, inputs.clamp(min=0).sqrt())


def _in_new_eigenbasis(K: Kronecker, old: list[Eigenbasis]) -> Eigenbasis:
    """Return averaged eigenvalues in the eigenbasis of new factors: the old matrix's diagonal in this basis."""
    basis = K.eigenbasis()
    if not old:
        return basis
    before = Eigenbasis.stack(old)
    turn_A = _squared(basis.Q_A.T.compose(before.Q_A))
    turn_B = _squared(basis.Q_B.T.compose(before.Q_B))
    values = turn_B.left(turn_A.right(before.values.unsqueeze(1))).squeeze(1)
    return replace(basis, values=values, noise=torch.zeros_like(basis.noise))


def copied_to(device: torch.device, state: Any) -> Any:
    """Return a state with copies of its tensors on a device."""
    return mapped(state, lambda t: t.to(device, copy=True))


def _zeros_like(factor: Factor, stored: bool) -> Factor:
    """Return zeros with a scale of one. An identity is unchanged: the first average replaces its scale."""
    if factor.kind == "identity":
        return factor
    shape = factor.values.shape
    values = factor.values.new_zeros(shape) if stored else unstored(factor.values)
    return replace(factor, values=values, scale=torch.ones_like(factor.scale))


def unstored(t: Tensor) -> Tensor:
    """Return zeros of the same shape that take no memory, and cannot be changed.

    Example:
        >>> unstored(torch.ones(2, 3)).untyped_storage().nbytes()
        4
    """
    return t.new_zeros(()).expand(t.shape)


def _without_bias(factor: Factor, weight: Tensor) -> Factor:
    """Correct the bias of averages that started at zero, by weights `[stack]`. The scale of an identity has none."""
    return factor if factor.kind == "identity" else factor.scaled(1 / weight)


def _squared(factor: Factor) -> Factor:
    return replace(factor, values=factor.values.square())
