"""The unscaled sums of one block: outer products of inputs and of gradients, for each role of its parameter.

The sum of one side of a block lives in `kfs.factors.accumulate.outer_products`. `BlockMap` assigns uses to blocks.

No code here synchronizes with an accelerator while data are added: `RoleSums` keeps counts that depend on data on the
device.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.layout import BlockMap, Key, Layout, Side
from kfs.factors.settings import Products
from kfs.files import UnfitError
from kfs.runtime import sync
from kfs.runtime.precision import at_least_float32

# All sums over the data of a role that are numbers: attributes of `RoleSums`.
COUNTS = ("counted", "positions", "inverse_squares", "ones")


@dataclass
class RoleSums:
    """Sums of one role of a parameter: inputs, gradients, and the number of positions (or examples) in them.

    The number of positions that count may depend on data (a padding index, tokens routed to experts). It is then kept
    on the accelerator until `read_counts`, to avoid synchronizing in every batch.

    Attributes:
        input: Outer products of inputs.
        gradient: Outer products of gradients.
        counted: Number of positions (or examples) counted on the host.
        positions: Number of positions that were summed over, if `counted` counts examples (`reduce`).
        inverse_squares: Sum over examples of `1 / S^2`, where `S` is the number of positions of an example. Used only
            if the identity replaces gradients (forward-only) and sharing is `reduce`. A tensor if it was counted.
        counters: Amounts on the device to be added to counts, by name, in float64. Changed in place.
        counts_are_read: Whether nothing remains to be added from the device.
    """

    input: OuterProductSum
    gradient: OuterProductSum
    counted: float = 0.0
    positions: float = 0.0
    inverse_squares: Tensor | float = 0.0
    counters: dict[str, Tensor] = field(default_factory=dict)
    counts_are_read: bool = True

    @property
    def ones(self) -> float:
        """Number of inputs with a bias coordinate of one that their sum does not include yet."""
        return self.input.ones

    @ones.setter
    def ones(self, ones: float) -> None:
        self.input.ones = ones

    @property
    def counts(self) -> dict[str, Tensor | float]:
        """All counts by name, without those on the device that are not read yet."""
        return {name: getattr(self, name) for name in COUNTS}

    def count(self, g: Tensor) -> None:
        """Count the rows of gradients `[columns, ..., features]`: a receiver that computes no sums."""
        self.counted += prod(g.shape[1:-1])

    def add_count(self, name: str, count: float | Tensor) -> None:
        """Add to a count; a tensor on an accelerator is added there, to avoid synchronizing."""
        if isinstance(count, Tensor) and sync.is_asynchronous(count.device):
            self.counts_are_read = False
            if name not in self.counters:
                self.counters[name] = torch.zeros((), dtype=torch.float64, device=count.device)
            self.counters[name].add_(count)
        else:
            setattr(self, name, getattr(self, name) + float(count))

    def add_positions(self, counts: Tensor) -> None:
        """Add the numbers of positions of some examples, `[batch]`, without synchronizing with the device."""
        # An example without positions contributes nothing: its sum of gradients is zero.
        squares = counts.to(at_least_float32(self.input.total.dtype)).square()
        more = torch.where(squares > 0, 1 / squares, 0.0).sum()
        if not isinstance(self.inverse_squares, Tensor):
            self.inverse_squares = torch.full_like(more, self.inverse_squares)
        self.inverse_squares.add_(more)

    def plus(self, other: "RoleSums") -> "RoleSums":
        """Return the sums over the data of both."""
        result = RoleSums(self.input.plus(other.input), self.gradient.plus(other.gradient))
        for name in COUNTS:
            setattr(result, name, getattr(self, name) + getattr(other, name))
        return result

    def fits(self, other: "RoleSums") -> bool:
        """Whether both sums are stored in the same way."""
        return self.input.fits(other.input) and self.gradient.fits(other.gradient)

    def state(self) -> dict[str, Any]:
        """Return all sums and counts, as the content of a file."""
        return {"input": self.input.state(), "gradient": self.gradient.state(), **self.counts}


@dataclass
class BlockSums:
    """All sums of one block.

    The key of a role is the side of its inputs: `"A"`, and also `"B"` if the parameter is used in a second role. An
    example is an embedding whose transpose computes the logits.
    """

    layout: Layout
    sharing: str  # "expand" or "reduce"; "exact" for the diagonal of a parameter that no rule covers
    forward_only: bool = False  # whether gradients are not used: `B` is a multiple of the identity
    roles: dict[Side, RoleSums] = field(default_factory=dict)
    operations: set[str] = field(default_factory=set)  # operations that use the parameter

    @classmethod
    def of_diagonal(cls, name: str, entries: Tensor) -> "BlockSums":
        """Make the block of a parameter for which only the diagonal of the curvature is known."""
        size = entries.numel()
        one = OuterProductSum(entries.new_ones(1, 1, 1), diagonal=False)
        role = RoleSums(one, OuterProductSum(entries.reshape(1, size), diagonal=True), 1.0)
        return cls(Layout(name, (size,), (0, size), (0,), 1), "exact", roles={"A": role}, operations={"any"})

    @property
    def sums(self) -> list[OuterProductSum]:
        """The sums of inputs and gradients of all roles."""
        return [s for role in self.roles.values() for s in (role.input, role.gradient)]

    @property
    def is_local(self) -> bool:
        """Whether this process stores the sums. If not, another rank owns the block, or nothing was computed."""
        return all(s.device.type != "meta" for s in self.sums)

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(s.total.numel() * s.total.element_size() for s in self.sums)

    @property
    def terms(self) -> float:
        """Number of positions (or examples) over which gradients were summed. It may have to be read from a device."""
        read_counts([self])
        return sum(role.counted for role in self.roles.values())

    @property
    def work(self) -> float:
        """Number of operations for adding outer products to all sums, with one gradient for each position."""
        read_counts([self])
        sizes = {side: role.input.total.numel() + role.gradient.total.numel() for side, role in self.roles.items()}
        return sum(2 * role.counted * sizes[side] for side, role in self.roles.items())

    @property
    def inputs(self) -> float:
        """Effective number of inputs: the trace of `A`'s sum, divided by the squared norm of an average input.

        With `reduce`, the sum over `S` positions of an example counts as `S^2` inputs: it is as large as `S` of them.
        """
        if self.sharing != "reduce" or not self.terms:
            return self.terms
        return sum(role.positions**2 / role.counted for role in self.roles.values() if role.counted)

    @property
    def identity_scale(self) -> Tensor | float:
        """The factor of the identity, if it replaces gradients.

        With `expand`, the gradient at each position is a column of the identity, and `B` is an average over positions.
        With `reduce`, the sum of gradients over the `S` positions is a column of the identity, as if positions were
        averaged. This sum is divided by `S`, so `B` is the average over examples of `1 / S^2`, times the identity.
        """
        if self.sharing == "expand" or not self.terms:
            return 1.0
        return sum(role.inverse_squares for role in self.roles.values()) / self.terms

    def on_side(self, side: Side) -> list[OuterProductSum]:
        """Return the sums on one side of the block: inputs of one role, gradients of the other."""
        return [role.input if place == side else role.gradient for place, role in self.roles.items()]

    def is_diagonal(self, side: Side) -> bool:
        """Whether only the diagonal of one side is stored."""
        return all(s.diagonal for s in self.on_side(side))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Move all sums to a device, or convert them, in place. Sums on the meta device stay there."""
        where = device if self.is_local else None
        for s in self.sums:
            s.convert(where, dtype)

    def complete(self, dtype: torch.dtype | None = None) -> None:
        """Complete all sums, convert them to `dtype` if given, and move counts to the host."""
        for s in self.sums:
            s.complete(dtype)
        read_counts([self])
        for role in self.roles.values():
            role.counters = {}

    def shared(self) -> "BlockSums":
        """Return a copy that shares the tensors. Replacing a tensor in one of them does not change the other."""
        roles = {s: replace(r, input=copy(r.input), gradient=copy(r.gradient)) for s, r in self.roles.items()}
        return replace(self, roles=roles, operations=set(self.operations))

    def without_numbers(self) -> "BlockSums":
        """Return a copy with sums on the meta device, and the counts on the host."""
        result = self.shared()
        result.to("meta")
        for role in result.roles.values():
            role.counters = {}
        return result

    def turned_to(self, layout: Layout) -> "BlockSums":
        """Return the block in the transposed layout if that is `layout`; otherwise return it unchanged.

        The layout of a block depends on the use that came first, and therefore on the data.
        """
        own = self.layout
        if layout == own or layout.bias is not None or layout.groups > 1 or layout != own.turned():
            return self
        other: dict[Side, Side] = {"A": "B", "B": "A"}
        return replace(self, layout=layout, roles={other[side]: role for side, role in self.roles.items()})

    def fits(self, other: "BlockSums") -> bool:
        """Whether the roles that both blocks have are stored in the same way."""
        return all(role.fits(other.roles[side]) for side, role in self.roles.items() if side in other.roles)

    def plus(self, other: "BlockSums") -> "BlockSums":
        """Return the sums over the data of both. The blocks need not have the same roles."""
        read_counts([self, other])
        both = {side: role.plus(other.roles[side]) for side, role in self.roles.items() if side in other.roles}
        return replace(self, roles=other.roles | self.roles | both, operations=self.operations | other.operations)

    def side_total(self, side: Side) -> Tensor:
        """Return the sum on one side of the block, combined over its roles: `[G, d, d]` or `[G, d]`.

        Inputs and gradients have different units. If there are two roles, the second one is therefore rescaled, such
        that the traces of its two sides have the same ratio as in the first. The result scales with the gradients as
        the curvature does.
        """
        if len(self.roles) == 1:
            return self.on_side(side)[0].total
        first, second = self.roles["A"], self.roles["B"]
        inputs = _trace(first.input) * _trace(second.input)
        gradients = _trace(first.gradient) * _trace(second.gradient)
        # Everything stays on the device, to avoid synchronizing.
        ratio = torch.where((inputs > 0) & (gradients > 0), inputs / gradients, 1.0)
        one, other = (first.input, second.gradient) if side == "A" else (first.gradient, second.input)
        if one.diagonal != other.diagonal:
            one, other = one.densified(), other.densified()
        scale = ratio.sqrt() if side == "A" else ratio.rsqrt()
        return one.total + scale * other.total

    def state(self) -> dict[str, Any]:
        """Return the block as the content of a file. Its sums need not be complete."""
        read_counts([self])
        return {
            "layout": asdict(self.layout),
            "sharing": self.sharing,
            "forward_only": self.forward_only,
            "operations": sorted(self.operations),
            "pairs": {side: role.state() for side, role in self.roles.items()},
        }

    @classmethod
    def from_state(cls, state: Any, products: Products = "auto") -> "BlockSums":
        """Load the result of `state`. Further vectors are multiplied in the precision `products`."""
        layout = Layout.from_state(state["layout"])
        block = cls(layout, str(state["sharing"]), bool(state["forward_only"]), operations=set(state["operations"]))
        sizes: dict[Side, int] = {"A": layout.column_size, "B": layout.row_size}
        sides: tuple[tuple[Side, Side], ...] = (("A", "B"), ("B", "A"))  # of inputs, and of gradients
        pairs = state["pairs"]
        if not pairs or set(pairs) - set(sizes):
            raise UnfitError(f"the block {layout.name!r} has no factors")
        for side, other in sides:
            if side in pairs:
                inputs = OuterProductSum.from_state(pairs[side]["input"], sizes[side], layout.groups, products)
                gradients = OuterProductSum.from_state(pairs[side]["gradient"], sizes[other], layout.groups, products)
                block.roles[side] = role = RoleSums(inputs, gradients)
                for name in COUNTS:
                    setattr(role, name, float(pairs[side][name]))
        return block


def read_counts(blocks: Iterable[BlockSums]) -> None:
    """Add the counters on devices to those on the host, with one synchronization.

    The counters on devices are set to zero in place, because a replayed pass continues to add to them.
    """
    unknown = [role for block in blocks for role in block.roles.values() if not role.counts_are_read]
    if not unknown:
        return
    values = iter(sync.numbers([t for role in unknown for t in role.counters.values()]))
    for role in unknown:
        for name, t in role.counters.items():
            role.add_count(name, next(values))
            t.zero_()
        role.counts_are_read = True


def merge(blocks: dict[Key, BlockSums], more: Iterable[BlockSums], block_map: BlockMap) -> set[tuple[str, str]]:
    """Add the sums of more blocks, over other data, to `blocks` with the layouts of `block_map`.

    Returns:
        `(parameter, operation)` of the uses in blocks that were not added, because they contradict others.
    """
    conflicts: set[tuple[str, str]] = set()
    for block in more:
        mine = blocks.get(block.layout.key)
        block = block if mine is None else block.turned_to(mine.layout)  # noqa: PLW2901
        if not block_map.admit(block.layout) or (mine is not None and not mine.fits(block)):
            conflicts |= {(block.layout.weight, operation) for operation in block.operations}
        else:
            blocks[block.layout.key] = block if mine is None else mine.plus(block)
    return conflicts


def _trace(s: OuterProductSum) -> Tensor:
    """Return the trace in float64, in which products of traces do not overflow."""
    return s.entries.sum(dtype=torch.float64)
