"""Damped inverses of all blocks: how they are computed and stored, and products with them.

On an accelerator, blocks of one size are inverted and multiplied together, without synchronization: an inverse that
could not be computed does not replace the previous one, and is reported later. Inverses keep their memory addresses, so
that recordings of updates find them there.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.factors.blocks import Factor, Kronecker, Method, Stack, Structure, checking_later, stacked
from kfs.factors.layout import Layout
from kfs.optim.averages import Average, Inverted, Unit, inverted
from kfs.optim.update_rule import Scalar, limited, total_size
from kfs.runtime import sync
from kfs.runtime.cuda_graphs import SHARE, Guard, Replayer, RunKey
from kfs.runtime.sync import allow_sync

log = logging.getLogger("kfs.optim")
# The optimizer's parameter groups, by parameter name.
Groups = Mapping[str, Mapping[str, Any]]
# At most this many blocks are inverted together, and at most this many numbers of their factors, if there are several.
# More would not be faster, but one step could take long. Intermediate results take about nine times as much memory.
_TOGETHER = 16
_NUMBERS = 2**25
# At most this many groups of blocks have a recording of their inverses. Larger inverses than the second number are not
# recorded: launching their operations takes less time than computing them, and recordings keep memory for them.
_MOST_RECORDED = 256
_LARGEST_RECORDED = 1024
# Tensor cores need rows that start at multiples of 8 numbers. Multiples of 32 fit their tiles better.
_ALIGNED = 32
# On a CPU, products of matrices that are larger than this are faster with aligned rows.
_LARGE = 512


@dataclass(frozen=True, eq=False)
class Stacked:
    """Inverses that are multiplied together, and the sizes of layer inputs for the trust region."""

    stack: Stack
    input_size: Tensor  # root mean squares, `[stack]`, changed in place
    by_column: bool  # whether `A` is diagonal, so that each column is limited on its own


class _Group(NamedTuple):
    """Results for blocks that are inverted together repeatedly, in memory that recordings write, `[stack]`."""

    good: Tensor  # which inverses could be computed
    damping: Tensor


@dataclass(eq=False)
class Inverses:
    """Damped inverses of the blocks of some averages."""

    method: Method  # how damping is split between factors
    unit: Unit  # unit of damping
    eigen: bool  # whether eigenvalues are corrected
    replay: bool = False  # whether inversions are recorded on a GPU
    _stacks: list[Stacked] | None = None  # `None` after a change of blocks
    # By id of an average, which lives as long as the stacks: the stack with its inverse, and the position there.
    _places: dict[int, tuple[Stacked, slice]] = field(default_factory=dict)
    # Blocks that were inverted together, and which of these inverses are valid, `[stack]`; flags not read yet.
    _unseen: list[tuple[Sequence[Average], sync.Message]] = field(default_factory=list)
    # Limits of trust regions that are not the same for all blocks of a stack, `[stack, 1, 1, 1]`.
    _limits: dict[tuple[float, ...], Tensor] = field(default_factory=dict)
    _groups: dict[int, _Group] = field(default_factory=dict)  # by memory address of their inverses
    _replayer: Replayer | None = None

    def forget(self) -> None:
        """Discard stacks and recordings, after blocks were added or removed."""
        self._stacks = None
        if self._replayer is not None:
            self._replayer.close()
        self._groups.clear()
        self._limits.clear()

    def forget_failures(self) -> None:
        """Discard unread flags, after all blocks were replaced."""
        self._unseen.clear()

    def invert(self, averages: Sequence[Average], damping: Sequence[float]) -> None:
        """Compute and store the inverses of blocks of one size.

        Raises:
            Exception: If an inverse could not be computed. Then nothing has changed.
        """
        known = all(a.inverse is not None and not a.failed for a in averages)
        # The first inverse must succeed, or raise. Eigendecompositions synchronize anyway.
        if (
            not sync.is_asynchronous(averages[0].factors.like.device)
            or not known
            or self.eigen
            or self.method == "exact"
        ):
            self.keep(averages, self.computed(averages, damping))
            return
        place = self._last(averages)
        # Other structures come from a saved state with other settings.
        if place is not None and isinstance(place[0], Kronecker):
            good = self._invert_in_place(averages, damping, *place)
        else:
            with checking_later() as checks:
                result = self._inverted(averages, _per_group(averages, damping))
            good = torch.stack(checks).all(0)
            self.keep(averages, result, good)
        self._unseen.append((averages, sync.Message(good)))

    def _invert_in_place(
        self, averages: Sequence[Average], damping: Sequence[float], inverse: Structure, input_size: Tensor
    ) -> Tensor:
        """Overwrite inverses where the new ones are valid, and return which ones are. This is recorded on a GPU."""
        first = inverse.like.data_ptr()
        group = self._groups.get(first)
        if group is None or len(group.good) != len(input_size):
            good = torch.ones_like(input_size, dtype=torch.bool)
            group = self._groups[first] = _Group(good, torch.zeros_like(input_size))
        good, added = group

        def update(_: object, dampings: Sequence[Scalar]) -> None:
            with checking_later() as checks:
                result = self._inverted(averages, dampings)
            good.copy_(torch.stack(checks).all(0))
            inverse.overwrite(result.inverse, good)
            _overwrite(input_size, result.input_size, good)
            added.copy_(result.damping)

        stored = [t for a in averages for f in (a.factors.A, a.factors.B) for t in (f.values, f.scale)]
        stored += [t for a in averages for t in (a.weight, a.uses)]
        if self._replayer is None:
            self._replayer = Replayer("Inverses", log, good.device, self.replay, share=SHARE, most=_MOST_RECORDED)
        place = tuple(t.data_ptr() for t in (*stored, inverse.like, input_size, good))
        is_small = max(averages[0].factors.A.size, averages[0].factors.B.size) <= _LARGEST_RECORDED
        key = RunKey(first) if is_small else None
        self._replayer.run(key, update, (), Guard(place=place), _per_group(averages, damping))
        for a, part in _parts(averages):
            a.damping = added[part]
        return good

    def _inverted(self, averages: Sequence[Average], damping: Sequence[Scalar]) -> Inverted:
        """Return inverses, given the damping of each block of the stack."""
        on_device = _on_device(damping, averages[0].factors.like.device)
        return inverted(averages, on_device, self.unit, self.method, self.eigen)

    def computed(self, averages: Sequence[Average], damping: Sequence[float]) -> Inverted:
        """Return the inverses of blocks of one size. This synchronizes, so that failures raise.

        Raises:
            Exception: If an inverse could not be computed.
        """
        with allow_sync():
            return self._inverted(averages, _per_group(averages, damping))

    def failures(self) -> list[Average]:
        """Return blocks with a failed inverse that was not reported yet. This synchronizes with the latest inverses."""
        failed: dict[Average, None] = {}  # in order, each once
        for averages, message in self._unseen:
            owners = [a for a in averages for _ in range(a.layout.groups)]
            failed |= {a: None for a, good in zip(owners, message.read(), strict=True) if not good}
        self._unseen.clear()
        return list(failed)

    def keep(self, averages: Sequence[Average], result: Inverted, good: Tensor | None = None) -> None:
        """Store inverses in place of the previous ones; if `good` is given, only where it is true."""
        for a, part in _parts(averages):
            a.damping = result.damping[part]
            a.eigen = None if result.eigen is None else result.eigen[part]
        last = self._last(averages)
        if last is not None and last[0].key == result.inverse.key:
            last[0].overwrite(result.inverse, good)
            _overwrite(last[1], result.input_size, good)
            return
        for a, part in _parts(averages):
            inverse, size = result.inverse[part], result.input_size[part]
            if a.inverse is not None and a.input_size is not None and a.inverse.key == inverse.key:
                which = None if good is None else good[part]
                a.inverse.overwrite(inverse, which)
                _overwrite(a.input_size, size, which)
            else:
                a.inverse = inverse
                a.input_size = size
                self._stacks = None

    def _last(self, averages: Sequence[Average]) -> tuple[Structure, Tensor] | None:
        """Return the previous inverses of some blocks, and sizes of inputs, if they are adjacent in one stack."""
        places = [self._places.get(id(a)) for a in averages] if self._stacks is not None else [None]
        first, last = places[0], places[-1]
        if first is None or last is None or any(p is None or p[0] is not first[0] for p in places):
            return None
        if any(p[1].stop != q[1].start for p, q in pairwise(places) if p and q):
            return None
        part = slice(first[1].start, last[1].stop)
        return first[0].stack.structure[part], first[0].input_size[part]

    def stacks(self, averages: Iterable[Average]) -> list[Stacked]:
        """Return all inverses, stacked by size."""
        if self._stacks is None:
            owners = {a.layout: a for a in averages if a.has_inverse}
            self._stacks = list(_stacked(owners))
            self._places.clear()
            for one in self._stacks:
                for layout, part in one.stack.slices():
                    self._places[id(owners[layout])] = one, part
        return self._stacks

    def multiply(
        self,
        averages: Iterable[Average],
        u: Mapping[str, Tensor],
        groups: Groups,
        limit: bool,
        taken: Tensor | None = None,
        half: bool = False,
    ) -> dict[str, Tensor]:
        """Multiply by the inverses of all blocks. If `limit`, keep each block's step in its trust region.

        Args:
            averages: Averages of all blocks.
            u: Vectors by parameter, for all parameters of blocks that have an inverse.
            groups: Parameter groups, which contain the trust regions.
            limit: Whether to apply trust regions.
            taken: A flag on the device that becomes false, in place, if steps are not finite.
            half: Whether gradients were computed in half precision, so that limits need no more digits.

        Returns:
            Steps, by parameter.
        """
        columns = {name: t.unsqueeze(0) for name, t in u.items()}
        stacks = self.stacks(averages)
        products = [self._product_of(one, columns, groups, limit, half) for one in stacks]
        if taken is not None and products:
            # There are fewer stacks than parameters, so this takes few operations.
            taken.logical_and_(total_size(products).isfinite())
        steps: dict[str, Tensor] = {}
        for one, product in zip(stacks, products, strict=True):
            stack = one.stack
            # Products with aligned sizes are faster. Their margins are cut off here.
            D = product[..., : stack.structure.rows, : stack.structure.columns]
            if all(layout.is_plain for layout in stack.layouts):
                # Weight and bias are views of the result, and need not be copied.
                for layout, part in stack.slices():
                    M = D[part].squeeze(0)
                    width = layout.column_size
                    steps |= dict(zip(layout.params, (M[..., :width], M[..., width:]), strict=False))
                continue
            for name in (name for layout in stack.layouts for name in layout.params if name not in steps):
                steps[name] = torch.zeros_like(columns[name])
            stack.write(D, steps)
        return {name: steps[name].reshape(t.shape).to(t.dtype) for name, t in u.items()}

    def _product_of(
        self, one: Stacked, columns: Mapping[str, Tensor], groups: Groups, limit: bool, half: bool
    ) -> Tensor:
        """Return the steps of a stack, `[stack, 1, d_B, d_A]`, in their trust regions if `limit`, with margins."""
        stack = one.stack
        like = stack.structure.like
        D = _product(stack, columns, like.dtype)
        trusts = [groups[layout.weight]["trust"] for layout in stack.layouts for _ in range(layout.groups)]
        limits = tuple(trust if limit and trust is not None else torch.inf for trust in trusts)
        shape = stack.structure.rows, stack.structure.columns
        sizes = one.input_size.reshape(-1, 1, 1, 1)
        return limited(D, self._limits_of(limits, like), sizes, one.by_column, shape, half)

    def _limits_of(self, limits: tuple[float, ...], like: Tensor) -> float | Tensor:
        """Return the limits of a stack: a number if they are equal, which is the usual case, otherwise a tensor."""
        if len(set(limits)) == 1:
            return limits[0]
        if limits not in self._limits:
            self._limits[limits] = like.new_tensor(limits).reshape(-1, 1, 1, 1)
        return self._limits[limits]


def _per_group(averages: Sequence[Average], damping: Sequence[float]) -> list[float]:
    """Return the damping of each block of a stack, given that of each average."""
    return [number for a, number in zip(averages, damping, strict=True) for _ in range(a.layout.groups)]


def _parts(averages: Sequence[Average]) -> Iterator[tuple[Average, slice]]:
    """Yield averages, each with its slice of a stack of all of them."""
    starts = accumulate((a.layout.groups for a in averages), initial=0)
    yield from zip(averages, (slice(start, stop) for start, stop in pairwise(starts)), strict=True)


def _on_device(numbers: Sequence[Scalar], device: torch.device) -> Tensor:
    """Return numbers as a tensor: from the host, or from tensors that a recording reads on the device."""
    found = [number for number in numbers if isinstance(number, Tensor)]
    # The copy from the host is asynchronous.
    return torch.stack(found) if found else torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)


def inverted_together(averages: Iterable[Average]) -> list[list[Average]]:
    """Divide blocks into groups that are inverted together: one by one on a CPU, by size on an accelerator."""
    by_key: dict[Any, list[Average]] = {}
    for a in averages:
        alone = not sync.is_asynchronous(a.factors.like.device) or a.failed
        key = id(a) if alone else (a.size, a.eigen is None, a.inverse is None)
        by_key.setdefault(key, []).append(a)
    found = []
    for same in by_key.values():
        numbers = sum(f.values.numel() for f in (same[0].factors.A, same[0].factors.B))
        most = max(1, min(_TOGETHER, _NUMBERS // max(numbers, 1)))
        found += [same[i : i + most] for i in range(0, len(same), most)]
    return found


def _stacked(owners: Mapping[Layout, Average]) -> Iterator[Stacked]:
    """Stack inverses of equal size."""
    parts = [(layout, a.inverse) for layout, a in owners.items() if a.inverse is not None]
    if any(sync.is_asynchronous(inverse.like.device) for _, inverse in parts):
        stacks = [replace(stack, structure=_aligned(stack.structure)) for stack in stacked(parts)]
    else:
        # On a CPU, a few large operations are not faster than many small ones.
        stacks = [Stack((layout,), _aligned(inverse) if _is_slow(inverse) else inverse) for layout, inverse in parts]
    for stack in stacks:
        mine = [owners[layout] for layout in stack.layouts]
        sizes = torch.cat([a.input_size for a in mine if a.input_size is not None])
        for layout, part in stack.slices():
            # Views: everything is stored once.
            owners[layout].inverse = stack.structure[part]
            owners[layout].input_size = sizes[part]
        diagonal = mine[0].factors.A.kind == "diagonal"
        yield Stacked(stack, sizes, diagonal and stack.structure.columns > 1)


def _overwrite(old: Tensor, new: Tensor, where: Tensor | None) -> None:
    """Overwrite numbers `[stack]`, all of them or where a mask is true."""
    old.copy_(new if where is None else torch.where(where, new, old))


def _aligned(structure: Structure) -> Structure:
    """Return inverses as views of memory with rows of aligned length. The memory outside of the views is zero."""
    if not isinstance(structure, Kronecker):
        return structure
    return Kronecker(_aligned_factor(structure.A), _aligned_factor(structure.B))


def _aligned_factor(factor: Factor) -> Factor:
    if factor.kind != "dense":
        return factor
    size = factor.size
    memory = factor.values.new_zeros(len(factor.values), *(2 * [size + -size % _ALIGNED]))
    memory[:, :size, :size] = factor.to_dense()
    return replace(factor, values=memory[:, :size, :size], scale=torch.ones_like(factor.scale))


def _product(stack: Stack, columns: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply a stack with its parts of `columns`, `[stack, 1, d_B, d_A]`. The result has margins."""
    K = stack.structure
    if not isinstance(K, Kronecker) or not (_has_margin(K.A) or _has_margin(K.B)):
        return K.multiply(stack.read(columns).to(dtype))
    # Margins of zeros are multiplied as well.
    A, B = _with_margin(K.A), _with_margin(K.B)
    M = K.like.new_zeros(len(K), 1, B.size, A.size)
    for layout, part in stack.slices():
        if layout.is_plain:
            W, b = layout.views(columns)
            M[part, :, : K.rows, : layout.column_size] = W.reshape(1, 1, K.rows, layout.column_size)
            if b is not None:
                M[part, :, : K.rows, layout.column_size] = b.reshape(1, 1, K.rows)
        else:
            M[part, :, : K.rows, : K.columns] = layout.matrix(columns).transpose(0, 1)
    if A.kind == B.kind == "dense":
        # Dense factors have a scale of one after damping.
        return B.left(A.right(M))
    return Kronecker(A, B).multiply(M)


def _is_slow(K: Structure) -> bool:
    """Whether products on a CPU are much faster with margins: for large matrices with unaligned sizes."""
    if not isinstance(K, Kronecker) or not K.A.kind == K.B.kind == "dense":
        return False
    return min(K.rows, K.columns) > _LARGE and bool(K.rows % _ALIGNED or K.columns % _ALIGNED)


def _has_margin(factor: Factor) -> bool:
    return factor.kind == "dense" and factor.values.stride(1) > factor.size


def _with_margin(factor: Factor) -> Factor:
    """Return the aligned memory that contains a factor, as a factor."""
    if not _has_margin(factor):
        return factor
    size, values = factor.values.stride(1), factor.values
    shape, strides = (len(values), size, size), (size * size, size, 1)
    return replace(factor, values=values.as_strided(shape, strides, values.storage_offset()))
