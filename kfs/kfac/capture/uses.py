"""Uses of parameters: which block a use belongs to, and where its inputs and gradients go.

With `expand`, inputs are added to their factor at once, in the forward pass, and gradients where they arise. With
`reduce`, the sums over shared positions of all uses of a parameter are collected for one batch, and added when they
are complete.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.blocks import Block, Pair
from kfs.kfac.layout import Key, Layout, Side
from kfs.kfac.settings import Settings
from kfs.kfac.sums.batch_axis import BatchAxis
from kfs.kfac.sums.inputs import Input
from kfs.kfac.sums.outer_products import Moment


@dataclass
class Sums:
    """Per-datum sums over the shared positions of all uses in one batch."""

    inputs: Tensor
    counts: Tensor
    gradients: Tensor | None = None


@dataclass(slots=True)
class Use:
    """One use of a parameter by an operation.

    Attributes:
        batch: Where the batch axis is.
        operation: What to call it.
        layout: The block that the parameters belong to.
        vectors: What multiplies the parameter.
        read: Reads the output's gradients.
        like: The output; has device and dtype.
        ones: Whether the bias was used.
        side: On which side of the block inputs are.
    """

    batch: BatchAxis
    operation: str
    layout: Layout
    vectors: Input
    read: Callable[[Tensor], Tensor]
    like: Tensor
    ones: bool
    side: Side


@dataclass
class Uses:
    """All uses of tracked parameters.

    Attributes:
        settings: What was asked for.
        dry: Whether to take note of uses only, and to compute nothing.
        mixing: Whether data of a batch may influence each other, as by batch normalisation in training.
        blocks: The blocks, by the weight's name and its rows.
        conflicts: Parameters that are used in ways that do not fit together, and by which operation.
    """

    settings: Settings
    dry: bool = False
    mixing: bool = False
    blocks: dict[Key, Block] = field(default_factory=dict)
    conflicts: set[tuple[str, str]] = field(default_factory=set)
    _sums: dict[tuple[Key, Side], Sums] = field(default_factory=dict)
    _owners: dict[str, list[Block]] = field(default_factory=dict)

    def place(self, layout: Layout, bias: str | None = None) -> tuple[Layout, Side]:
        """Return the layout of a weight's block, and on which side of it inputs are.

        The bias joins if that is wanted and does not contradict earlier uses. A weight that was used the other way
        round before (an embedding whose transpose computes the logits) has its inputs on the side of the gradients.
        """
        block = self.blocks.get(layout.key)
        if block is not None:
            there = block.layout
            turned = there.order == layout.order[layout.split :] + layout.order[: layout.split]
            if there.order != layout.order and turned and there.bias is None:
                return there, "B"
            return replace(layout, bias=there.bias), "A"
        if bias is None or not self.settings.joint_bias:
            return layout, "A"
        taken = any(owner.layout.weight != layout.weight for owner in self._owners.get(bias, ()))
        return layout if taken else replace(layout, bias=bias), "A"

    def record(self, use: Use) -> Callable[[Tensor], None]:
        """Take note of a use, add its inputs, and return what receives its gradients, `[columns, ...]`."""
        batch, operation, layout = use.batch, use.operation, use.layout
        vectors, like, side = use.vectors, use.like, use.side
        block = self._block(layout, operation)
        if block is None:
            return lambda _: self.conflicts.add((layout.weight, operation))
        key = layout.key
        pair = self._pair(block, vectors, like, side)
        if pair.input.diagonal and not vectors.sparse and not self.settings.is_diagonal(pair.input.size):
            self.conflicts.add((layout.weight, operation))  # unit vectors came first, and made the factor diagonal
        if self.dry:
            return lambda _: None
        kind = like.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with full_precision(like.device):
            if block.sharing == "expand":
                moment = pair.input.near(like.device)
                vectors.add_to(moment, use.ones)
                pair.input.absorb(moment)
                pair.terms += vectors.positions
            else:
                self._collect((key, side), batch, vectors, pair.input.bias, use.ones)

        def receive(g: Tensor) -> None:
            if self.settings.fisher == "forward-only":
                return
            with full_precision(like.device):
                g = use.read(g.detach())
                if block.sharing == "expand":
                    g = g.to(narrow) if narrow is not None and g.dtype == torch.float32 else g  # as autocast multiplies
                    moment = pair.gradient.near(g.device)
                    moment.add_inner(_three_axes(g, vectors.groups))
                    pair.gradient.absorb(moment)
                else:
                    self._collect_gradients((key, side), batch, g, vectors.groups)

        return receive

    def finish_forward(self) -> None:
        """Add the sums of inputs, after a batch's forward pass."""
        for (key, side), sums in self._sums.items():
            pair = self.blocks[key].pairs[side]
            with full_precision(sums.inputs.device):
                moment = pair.input.near(sums.inputs.device)
                moment.add_whole(sums.inputs.unsqueeze(1))
                pair.input.absorb(moment)
            pair.terms += len(sums.inputs)

    def finish_backward(self) -> None:
        """Add the sums of gradients, after a backward pass."""
        for (key, side), sums in self._sums.items():
            if sums.gradients is not None:
                counts = sums.counts.clamp(min=1).reshape(-1, *[1] * (sums.gradients.ndim - 2))
                with full_precision(counts.device):
                    total = self.blocks[key].pairs[side].gradient
                    moment = total.near(counts.device)
                    moment.add_inner((sums.gradients / counts).flatten(0, 1).unsqueeze(1))
                    total.absorb(moment)
                sums.gradients = None

    def finish_batch(self) -> None:
        """Forget the batch."""
        self._sums.clear()

    def state(self) -> dict[str, Any]:
        """Return all sums, between two batches, for a file."""
        blocks = [block.state() for block in self.blocks.values()]
        return {"blocks": blocks, "conflicts": [list(conflict) for conflict in sorted(self.conflicts)]}

    def restore(self, state: Any) -> None:
        """Undo `state`."""
        self.conflicts = {(str(name), str(operation)) for name, operation in state["conflicts"]}
        for block in map(Block.from_state, state["blocks"]):
            self._own(block)

    def _block(self, layout: Layout, operation: str) -> Block | None:
        """Return the block of a use; nothing if another block has its parameters in a way that does not fit."""
        key = layout.key
        if key not in self.blocks:
            for other in (owner.layout for name in layout.params for owner in self._owners.get(name, ())):
                overlap = other.rows[0] < layout.rows[1] and layout.rows[0] < other.rows[1]
                if layout.weight != other.weight or overlap:
                    return None
            sharing = self.settings.sharing_of(layout.weight)
            self._own(Block(layout, sharing, self.settings.fisher == "forward-only"))
        block = self.blocks[key]
        if block.layout != layout:
            return None
        block.operations.add(operation)
        return block

    def _own(self, block: Block) -> None:
        """Take note of a new block."""
        self.blocks[block.layout.key] = block
        for name in block.layout.params:
            self._owners.setdefault(name, []).append(block)

    def _pair(self, block: Block, vectors: Input, like: Tensor, side: Side) -> Pair:
        """Return the sums of a use's role, new ones for its first use."""
        if side not in block.pairs:
            groups, rows = block.layout.groups, block.layout.row_size
            columns = block.layout.column_size
            sizes = (columns, rows) if side == "A" else (rows, columns)
            bias = block.layout.bias is not None and side == "A"
            wide = [self.settings.is_diagonal(size) for size in (sizes[0] + bias, sizes[1])]
            kind = self.settings.factor_dtype or like.dtype, self._device(like)
            block.pairs[side] = Pair(
                Moment.zeros(sizes[0], groups, vectors.sparse or wide[0], bias, *kind),
                Moment.zeros(sizes[1], groups, block.forward_only or wide[1], False, *kind),
            )
        return block.pairs[side]

    def _device(self, like: Tensor) -> torch.device | str:
        """Return where factors live."""
        return "meta" if self.dry else self.settings.factor_device or like.device

    def _collect(self, key: tuple[Key, Side], batch: BatchAxis, vectors: Input, bias: bool, ones: bool) -> None:
        """Add a use's sums over shared positions."""
        inputs, counts = vectors.sums(batch.canonical)
        if bias:
            last = (counts if ones else torch.zeros_like(counts)).reshape(-1, *[1] * (inputs.ndim - 1))
            inputs = torch.cat([inputs, last.expand(*inputs.shape[:-1], 1)], dim=-1)
        if key in self._sums:
            inputs, counts = inputs + self._sums[key].inputs, counts + self._sums[key].counts
        self._sums[key] = Sums(inputs, counts)

    def _collect_gradients(self, key: tuple[Key, Side], batch: BatchAxis, g: Tensor, groups: int) -> None:
        """Add a use's gradients, summed over shared positions: `[columns, N, D]` (or `[columns, N, G, D]`)."""
        features = 2 if groups > 1 else 1
        dtype = torch.promote_types(g.dtype, torch.float32)
        parts = [batch.canonical(column, column.ndim - features).sum(1, dtype=dtype) for column in g]
        sums, g = self._sums[key], torch.stack(parts)
        sums.gradients = g if sums.gradients is None else sums.gradients + g


def _three_axes(g: Tensor, groups: int) -> Tensor:
    """Bring `[columns, *leading, D]` into the form `[N, P, D]` (or `[N, P, G, D]`), if possible without a copy."""
    features = 2 if groups > 1 else 1
    if g.ndim == features + 1:
        return g.unsqueeze(0)
    return g.flatten(0, -2 - features)


class full_precision:  # noqa: N801 (used like a function; a generator would take several times as long)
    """Compute factors without graph, and in the precision that they are stored in, whatever `autocast` says."""

    def __init__(self, device: torch.device) -> None:
        """Remember the kind of device."""
        self.kind = device.type

    def __enter__(self) -> None:
        """Switch both off."""
        self.autocast, self.grad = torch.is_autocast_enabled(self.kind), torch.is_grad_enabled()
        torch.set_autocast_enabled(self.kind, False)
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        """Leave both as they were."""
        torch.set_autocast_enabled(self.kind, self.autocast)
        torch._C._set_grad_enabled(self.grad)
