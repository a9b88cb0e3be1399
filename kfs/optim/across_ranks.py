"""Training in several processes: owners of blocks, exchange of averages, inverses and gradients, and common errors.

The collective operations live in `kfs.distributed.collectives`, the averages in `kfs.optim.averages`.

*Averages are summands.* Each rank averages the sums of its own data, divided by counts over all ranks. Averages are
linear, so the average of all data is the sum over ranks. It is needed only when its inverse is computed. Then it is
added up at one rank, the block's *owner*, and the other ranks start again at zero. It does not matter which rank was
the owner before, so owners are chosen by work alone (`balanced_owners`).

*The owner inverts.* All ranks get a copy of the inverse, and multiply it with their gradients, which are the same.
Alternatively, the owner could multiply and send steps. It would send as many numbers as there are parameters, in every
step. The triangles of a square layer's inverse have as many numbers, but are sent only once in `inverses_every` steps.
Eigenvectors are not symmetric, and have twice as many. So once in `inverses_every` steps, the triangles of a block's
averages are sent to its owner, and the triangles of its inverse are sent back, however often factors are computed.

*Ahead of time.* Averages change only in steps with factors. In such a step, owners compute all inverses that are due
before the next one, at the same time, and send them in the background (`Arrival`). A rank stores an inverse in the step
in which a single process would compute it, so that results do not depend on the number of ranks.

*Sharded parameters.* If parameters are sharded, no process has whole gradients, and gradients have to be sent in any
case. Then averages and inverses stay at their owners, which are chosen by work and memory (`owners_of`). The sums of a
step are added up there. Each process multiplies only with its own inverses (`OwnedInverses`): it sends its parts of
gradients to the owners of blocks, and gets back its parts of steps. In every step, it sends twice as many numbers as it
has, however many processes there are.

*Common errors.* The user's gradients are already averages over ranks, computed by `DistributedDataParallel` or by the
user's own loop. This module adds counts and coverage over all ranks, the largest sizes of gradients and sums, numbers
of examples for labels that are drawn, losses that are means over ranks, and errors that all ranks raise (`Exchange`).
Hosts exchange all of this in one message of a step, except for errors after it: see `Exchange.step`.

In steps with new factors, ranks compare the values that steps depend on: parameters, gradients, buffers that passes do
not change, modes, schedules and options. A difference raises an error on all ranks, which names it. Each rank
multiplies gradients with inverses itself, and different hardware, or a different number of threads, may round
differently. If parameters differ by round-off only, all ranks copy those of rank 0.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, reduce, wraps
from inspect import signature
from math import inf, isfinite, prod
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, promote_types
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from kfs.display.suggestions import few
from kfs.distributed import Group, Ranks, Same, add_up, check_same, checksums, copy_from, largest
from kfs.distributed.assignment import Part, longest_first, place
from kfs.distributed.collectives import (
    Transfers,
    add_up_at_owners,
    digest_of,
    fill_lower_triangle,
    refuse_different,
    start_copies,
    upper_triangle,
)
from kfs.errors import DistributedError, KfsError, ModelError
from kfs.factors.accumulate import BlockSums, OuterProductSum, Total, add_up_totals, joined_blocks, without_numbers
from kfs.factors.blocks import BlockError, Eigenbasis, Factor, Kronecker
from kfs.factors.compute import not_covered
from kfs.factors.layout import Key
from kfs.factors.settings import Products
from kfs.losses import describe
from kfs.optim.averages import Average, Inverted, StepSums, SumKey, unstored
from kfs.optim.fsdp import gathered, group_of, own_parts
from kfs.optim.inverses import Inverses
from kfs.problem.isolation import equal_up_to_round_off
from kfs.problem.whole_parameters import is_sharded, model_to_run
from kfs.runtime import sync
from kfs.runtime.sync import allow_sync

# What a rank sends about a block: its inverse on the meta device, or the reason why there is none.
Outcome = Inverted | str


def owners_of(averages: Iterable[Average], eigen: bool, size: int) -> dict[Key, int]:
    """Return the rank that keeps and inverts each block, the same on all ranks. Work and memory are balanced.

    Blocks that have an owner keep it.

    Args:
        averages: Averages of all blocks.
        eigen: Whether eigenvectors are computed, instead of inverses.
        size: Number of ranks.
    """
    found = list(averages)
    parts = tuple(part for average in found for part in _parts(average, eigen))
    owners = dict(_placed(parts, size))
    # A block that fits nowhere as a whole has two owners. The one with more work inverts all of it.
    largest = {average.layout.key: max(_parts(average, eigen), key=lambda part: part.work) for average in found}
    result = {key: owners[part.key] for key, part in largest.items()}
    # Blocks of the same parameters, such as rows of one weight, stay together: their steps are one tensor.
    first = {average.layout.weight: average.owner for average in found if average.owner is not None}
    for average in found:
        key = average.layout.key
        result[key] = first.setdefault(average.layout.weight, result[key])
    return result


def balanced_owners(averages: Iterable[Average], size: int) -> dict[Key, int]:
    """Return the rank that inverts each block, if all ranks get the inverse. Work is balanced, memory is not."""
    return longest_first({average.layout.key: average.cost for average in averages}, size)


@lru_cache(maxsize=4)
def _placed(parts: tuple[Part, ...], size: int) -> Mapping[tuple[str, str], int]:
    return place(parts, size).owners


def _parts(average: Average, eigen: bool) -> list[Part]:
    """Return the factors of a block, described for their placement."""
    layout, K = average.layout, average.factors
    return [
        Part(layout.name, side, f.size, layout.groups, (f.kind != "dense",), f.values.element_size(), eigen=eigen)
        for side, f in (("A", K.A), ("B", K.B))
    ]


@dataclass(eq=False)
class Arrival:
    """The inverse of a block that its owner has computed, possibly before the step that uses it.

    Attributes:
        average: The average that was inverted.
        damping: Its damping.
        owner: The rank that has inverted it.
        outcome: The shape of the inverse, or the reason why there is none.
        result: The inverse; on other ranks than the owner, `None` if it stays there.
        copies: Copies of it that are under way.
    """

    average: Average
    damping: float
    owner: int
    outcome: Outcome
    result: Inverted | None = None
    copies: Transfers | None = None

    def fits(self, average: Average, damping: float) -> bool:
        """Whether this is still the inverse of an average, with this damping."""
        return self.average is average and self.damping == damping

    def keep(self, inverses: Inverses) -> str | None:
        """Store the inverse; if there is none, return the reason, and the previous one stays."""
        if isinstance(self.outcome, str):
            return self.outcome
        if self.copies is None:
            self._keep_at_owner(inverses, self.outcome)
            return None
        self.copies.wait()
        assert self.result is not None  # noqa: S101 (memory for copies)
        for factor in _symmetric(self.result.inverse):
            fill_lower_triangle(factor.values)
        inverses.keep([self.average], self.result)
        return None

    def _keep_at_owner(self, inverses: Inverses, outcome: Inverted) -> None:
        """Store the inverse on its owner rank; other ranks store only its shape."""
        if self.result is not None:
            inverses.keep([self.average], self.result)
            return
        self.average.inverse = outcome.inverse
        self.average.damping = outcome.damping.to(self.average.factors.like.device)


# Blocks of one size that are inverted together, with their dampings, the same on all ranks.
Together = tuple[Sequence[Average], Sequence[float]]


def invert(
    ranks: Ranks, inverses: Inverses, owners: Mapping[Key, int], steps: Iterable[Iterable[Together]], at_owners: bool
) -> dict[Key, Arrival]:
    """Compute each inverse on its owner rank, and start to send it to all others unless it stays there.

    Args:
        ranks: All processes.
        inverses: How inverses are computed and stored.
        owners: Owner ranks of the blocks.
        steps: Blocks that are inverted for this step and for later ones.
        at_owners: Whether averages and inverses stay at their owners.
    """
    due = [list(step) for step in steps]
    everything = [(a, damping) for step in due for same in step for a, damping in zip(*same, strict=True)]
    # Each owner needs averages over the data of all ranks. A process that has failed says so before.
    if not at_owners:
        ranks.gather("averages", None)
        sum_at_owners(ranks, [(a, owners[a.layout.key]) for a, _ in everything])
    results: dict[Key, Inverted] = {}
    outcomes: dict[Key, Outcome] = {}
    for averages, dampings in (same for step in due for same in step):
        mine = [(a, d) for a, d in zip(averages, dampings, strict=True) if owners[a.layout.key] == ranks.rank]
        if mine:
            _invert_own(inverses, mine, results, outcomes)
    # First, all ranks learn shapes and failures, then inverses are sent.
    reported = {key: one for some in ranks.gather("inverses", outcomes) for key, one in some.items()}
    found = {
        a.layout.key: Arrival(a, d, owners[a.layout.key], reported[a.layout.key], results.get(a.layout.key))
        for a, d in everything
    }
    for step in [] if at_owners else due:
        arrivals = [found[a.layout.key] for averages, _ in step for a in averages]
        for owner in sorted({one.owner for one in arrivals}):
            _send(ranks, owner, inverses.eigen, [one for one in arrivals if one.owner == owner])
    return found


def _send(ranks: Ranks, owner: int, eigen: bool, arrivals: Sequence[Arrival]) -> None:
    """Start to send inverses from their owner. All ranks, the owner included, store the same bits and strides."""
    sent: list[Tensor] = []
    computed = [(one, one.outcome) for one in arrivals if not isinstance(one.outcome, str)]
    for arrival, skeleton in computed:
        device = arrival.average.factors.like.device
        result = arrival.result
        one = Inverted(
            skeleton.inverse.empty_on(device),
            torch.empty_like(skeleton.damping, device=device),
            None,
            torch.empty_like(skeleton.input_size, device=device),
        )
        if result is not None:
            one.inverse.overwrite(result.inverse)
            one.damping.copy_(result.damping)
            one.input_size.copy_(result.input_size)
        sent += [*_tensors(one.inverse), one.damping, one.input_size]
        own = None if result is None else result.eigen
        arrival.result = one._replace(eigen=_eigenvalues(one.inverse, own) if eigen else None)
    copies = start_copies(ranks, owner, sent)
    for arrival, _ in computed:
        arrival.copies = copies


def sum_at_owners(ranks: Ranks, averages: Iterable[tuple[Average, int]]) -> None:
    """Sum averages over all ranks, each at its owner, and set them to zero on the others."""
    by_owner: dict[int, list[Average]] = {}
    for average, owner in averages:
        by_owner.setdefault(owner, []).append(average)
    parts = {owner: [part for a in by_owner[owner] for part in _sent_parts(a)] for owner in sorted(by_owner)}
    add_up_at_owners(ranks, parts)
    for owner, some in by_owner.items():
        if ranks.rank == owner:
            _mirror_triangles(some)
        else:
            forget_summands(some)


def sum_blocks_at_owners(ranks: Ranks, blocks: Iterable[tuple[BlockSums, int]]) -> None:
    """Add up the sums of blocks over all ranks, each at its owner. The other ranks free their memory."""
    by_owner: dict[int, list[OuterProductSum]] = {}
    for block, owner in blocks:
        by_owner.setdefault(owner, []).extend(block.sums)
    parts = {
        owner: [part for s in by_owner[owner] for part in ([s.total] if s.diagonal else upper_triangle(s.total))]
        for owner in sorted(by_owner)
    }
    add_up_at_owners(ranks, parts)
    for owner, sums in by_owner.items():
        for s in sums:
            if ranks.rank != owner:
                s.total = unstored(s.total)
            elif not s.diagonal:
                fill_lower_triangle(s.total)


def sum_over_ranks(ranks: Ranks, averages: Iterable[Average]) -> list[Average]:
    """Return averages over the data of all ranks, on all ranks. Summands are copied; everything else is shared."""
    copies = [_with_copied_summands(average) for average in averages]
    for copy in copies:
        if copy.owner is not None and copy.inverse is not None:
            _fetch_inverse(ranks, copy)
        copy.owner = None
    add_up(ranks, "averages of factors", (part for average in copies for part in _sent_parts(average)))
    _mirror_triangles(copies)
    return copies


def _fetch_inverse(ranks: Ranks, average: Average) -> None:
    """Broadcast an inverse that only one rank has."""
    owner, inverse = average.owner, average.inverse
    assert owner is not None  # noqa: S101 (callers check it)
    assert inverse is not None  # noqa: S101 (otherwise it has no owner)
    device = average.factors.like.device
    if owner != ranks.rank:
        inverse = inverse.empty_on(device)
        average.input_size = torch.empty(average.layout.groups, dtype=inverse.like.dtype, device=device)
    size = average.input_size
    assert size is not None  # noqa: S101 (it comes with the inverse)
    copy_from(ranks, owner, [*_tensors(inverse), size])
    for factor in _symmetric(inverse):
        fill_lower_triangle(factor.values)
    average.inverse = inverse


def forget_summands(averages: Iterable[Average]) -> None:
    """Reset averages to zero, on a rank with a summand that another rank has received."""
    for average in averages:
        for t in _summands(average):
            t.zero_()


def _invert_own(
    inverses: Inverses,
    mine: Sequence[tuple[Average, float]],
    results: dict[Key, Inverted],
    outcomes: dict[Key, Outcome],
) -> None:
    """Compute the inverses of blocks of one size, and store results, or reasons for failures."""
    averages, dampings = zip(*mine, strict=True)
    try:
        computed = inverses.computed(averages, dampings)
    except (BlockError, KfsError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        if len(mine) > 1:  # Invert them one by one, since not all of them fail.
            for one in mine:
                _invert_own(inverses, [one], results, outcomes)
            return
        outcomes[averages[0].layout.key] = str(error)
        return
    start = 0
    for average in averages:
        part = slice(start, start + average.layout.groups)
        start = part.stop
        result = Inverted(*(None if one is None else one[part] for one in computed))  # type: ignore[arg-type]
        results[average.layout.key] = result
        # Corrected eigenvalues have the same basis as the inverse. It need not be sent twice.
        with allow_sync():
            damping = result.damping.cpu()  # It is small, and all ranks report it.
        outcomes[average.layout.key] = Inverted(result.inverse.to("meta"), damping, None, result.input_size.to("meta"))


def _eigenvalues(inverse: Any, own: Eigenbasis | None) -> Eigenbasis:
    """Return corrected eigenvalues in the basis of an inverse, as summands: zeros except at the owner."""
    values = torch.zeros_like(inverse.values) if own is None else own.values.clone()
    result: Eigenbasis = replace(inverse, values=values, noise=torch.zeros_like(inverse.noise))
    return result


def _summands(average: Average) -> Iterator[Tensor]:
    """Yield tensors that are summed over ranks. Scales of identities depend only on counts, which all ranks know."""
    for factor in (average.factors.A, average.factors.B):
        if factor.kind != "identity":
            yield factor.values
    if average.eigen is not None:
        yield average.eigen.values


def _sent_parts(average: Average) -> Iterator[Tensor]:
    """Yield the parts of summands that must be sent: the upper triangles of symmetric matrices."""
    dense = {id(factor.values) for factor in _symmetric(average.factors)}
    for t in _summands(average):
        yield from upper_triangle(t) if id(t) in dense else [t]


def _mirror_triangles(averages: Iterable[Average]) -> None:
    """Mirror triangles that were received."""
    for average in averages:
        for factor in _symmetric(average.factors):
            fill_lower_triangle(factor.values)


def _with_copied_summands(average: Average) -> Average:
    """Return an average that can be summed over ranks in place, without changing this one."""
    A, B = (
        factor if factor.kind == "identity" else replace(factor, values=factor.values.clone())
        for factor in (average.factors.A, average.factors.B)
    )
    eigen = average.eigen
    if eigen is not None:
        eigen = replace(eigen, values=eigen.values.clone())
    weight, uses = average.weight.clone(), average.uses.clone()  # The next step changes them in place.
    factors = Kronecker(A, B)
    return replace(average, factors=factors, weight=weight, uses=uses, eigen=eigen, is_elsewhere=False)


def _factors(structure: Any) -> Iterator[Factor]:
    """Yield the factors of a structure."""
    for f in fields(structure):
        value = getattr(structure, f.name)
        if isinstance(value, Factor):
            yield value


def _symmetric(structure: Any) -> Iterator[Factor]:
    """Yield factors that are determined by their upper triangle."""
    for factor in _factors(structure):
        if factor.kind == "dense" and factor.symmetric:
            yield factor


def _tensors(structure: Any) -> Iterator[Tensor]:
    """Yield views of all tensors in a structure: the upper triangles of symmetric matrices, and everything else."""
    symmetric = {id(factor) for factor in _symmetric(structure)}
    for factor in _factors(structure):
        yield factor.scale
        if id(factor) in symmetric:
            yield from upper_triangle(factor.values)
        elif factor.kind != "identity":
            yield factor.values
    for f in fields(structure):
        value = getattr(structure, f.name)
        if isinstance(value, Tensor):
            yield value


class OwnedPart(NamedTuple):
    """The part of a tensor that a process has."""

    start: tuple[int, ...]  # along each axis
    shape: tuple[int, ...]

    def of(self, t: Tensor) -> Tensor:
        """Return this part of an unsharded tensor, as a view."""
        for axis, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            t = t.narrow(axis, start, length)
        return t

    @classmethod
    def own(cls, t: Tensor) -> "OwnedPart":
        """Return the part that this process has of a tensor; all of it if it is not sharded."""
        if not is_sharded(t):
            return cls((0,) * t.ndim, tuple(t.shape))
        # This import is slow.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

        spec = cast("Any", t)
        shape, start = compute_local_shape_and_global_offset(t.shape, spec.device_mesh, spec.placements)
        # An empty part has offset zero.
        return cls(tuple(0 if prod(shape) == 0 else one for one in start), tuple(shape))


class ReplicatedInverses:
    """Exchanges gradients for inverses that all processes have: each process gathers unsharded tensors.

    Args:
        like: Parameters, sharded or not, by name.
        ranks: The processes.

    Attributes:
        like: These parameters.
        ranks: These processes.
    """

    def __init__(self, like: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.like = like
        self.ranks = ranks
        self._are_sharded = ranks.are_several and any(map(is_sharded, like.values()))

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsharded tensors that this process multiplies, given the parts of all processes.

        Args:
            parts: Parts of this process, by name: the same names in all processes, in the same order.
        """
        return gathered(parts, self.like) if self._are_sharded else dict(parts)

    def scattered(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor], flag: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Invert `gathered`: return the parts of this process, and whether a flag is true on all that multiply.

        Args:
            tensors: Tensors that this process has multiplied.
            parts: The argument of `gathered`.
            flag: A flag about the tensors of this process.
        """
        own = {name: tensors[name] for name in parts}
        return own_parts(own, self.like) if self._are_sharded else own, flag

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all unsharded tensors, given the sum over tensors of this process."""
        return t

    def copies(self, name: str) -> int:
        """Return how many processes hold the same part of a parameter, if parts are summed over processes."""
        if not self._are_sharded:
            return 1
        t = cast("Any", self.like[name])
        if not is_sharded(t):
            return self.ranks.size
        return prod(
            size for size, placed in zip(t.device_mesh.shape, t.placements, strict=True) if not placed.is_shard()
        )

    def sum_of_parts(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all parts of parameters, given the sum over parts of this process."""
        return self._added_up(t) if self._are_sharded else t

    def _added_up(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all processes."""
        result = t.to(self.ranks.device_for(t.device), copy=True)
        dist.all_reduce(result, group=self.ranks.group)
        return result.to(t.device)


class OwnedInverses(ReplicatedInverses):
    """Sends parts of tensors to the owners of inverses, and back. Takes the arguments of `ReplicatedInverses`.

    Attributes:
        owners: Owner ranks by parameter name, the same on all processes.
    """

    def __init__(self, like: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Exchange which parts each process has."""
        super().__init__(like, ranks)
        self.owners: dict[str, int] = {}
        self._parts = ranks.gather("parts of parameters", {name: OwnedPart.own(t) for name, t in like.items()})

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsharded tensors that this process owns."""
        mine, names = self._divided(parts)
        like = self._widest(parts)
        sent = [[parts[name] for name in some] for some in names]
        received = self._exchanged(sent, [[own[name].shape for name in mine] for own in self._parts], like)
        result = {name: like.new_empty(self.like[name].shape) for name in mine}
        for own, tensors in zip(self._parts, received, strict=True):
            for name, t in zip(mine, tensors, strict=True):
                own[name].of(result[name]).copy_(t)
        return result

    def scattered(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor], flag: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Send tensors from owners back to the processes that hold their parts, each message with the owner's flag."""
        mine, names = self._divided(parts)
        sent = [[flag, *(own[name].of(tensors[name]) for name in mine)] for own in self._parts]
        shapes: list[list[Sequence[int]]] = [[(), *(parts[name].shape for name in some)] for some in names]
        received = self._exchanged(sent, shapes, self._widest(parts))
        flags = torch.stack([flag for flag, *_ in received])
        pairs = [pair for some, (_, *ts) in zip(names, received, strict=True) for pair in zip(some, ts, strict=True)]
        found = dict(pairs)
        return {name: found[name].to(part.dtype) for name, part in parts.items()}, flags.bool().all()

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all owners."""
        return self._added_up(t)

    def _divided(self, names: Iterable[str]) -> tuple[list[str], list[list[str]]]:
        """Return the names of tensors that this process owns, and the names by owner."""
        found = [[name for name in names if self.owners[name] == rank] for rank in range(self.ranks.size)]
        return found[self.ranks.rank], found

    @staticmethod
    def _widest(parts: Mapping[str, Tensor]) -> Tensor:
        """Return an empty tensor with the dtype for communication, which can represent all parts."""
        return next(iter(parts.values())).new_empty(0, dtype=reduce(promote_types, (t.dtype for t in parts.values())))

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send tensors to each rank, and return the tensors from each rank, which have these shapes."""
        flat = torch.cat([like, *(t.reshape(-1).to(like.dtype) for some in sent for t in some)])
        lengths = [sum(map(prod, some)) for some in shapes]
        result = like.new_empty(sum(lengths))
        splits = [sum(t.numel() for t in some) for some in sent]
        dist.all_to_all_single(result, flat, lengths, splits, group=self.ranks.group)
        pieces = iter(result.split([prod(shape) for some in shapes for shape in some]))
        return [[next(pieces).reshape(tuple(shape)) for shape in some] for some in shapes]


log = logging.getLogger("kfs.optim")
# In this many steps, parameters and gradients are compared even without new factors.
_STEPS_TO_COMPARE = 3
_PARAMETERS, _GRADIENTS = "Values of parameters", "Gradients"
_WAYS_OUT = {
    "Numbers of steps and data": "Load the same state_dict() in all processes, and call step() equally often.",
    "Options of parameter groups": "Use the same parameter groups and the same schedulers in all processes.",
    "Schedules": "Pass the same factors_every= and inverses_every=, and train the same parameters, in all processes.",
    "Modes of modules": "Call model.train() or model.eval() in all processes.",
    "Parameters with gradients": "Train the same parameters in all processes, and average gradients over them.",
    _GRADIENTS: (
        "Call the DistributedDataParallel model, not its module; or, with group=, average gradients over all "
        "processes between backward() and step()."
    ),
    _PARAMETERS: (
        "Start from the same weights in all processes, as DistributedDataParallel does, and average gradients in every "
        "step: call the DistributedDataParallel model, not its module."
    ),
    "Buffers": "Copy the buffers of rank 0: for b in model.buffers(): torch.distributed.broadcast(b, 0).",
}
_MADE_WITH = "settings of the optimizer"
_STEP = "a step of the optimizer"
_NO_SETTINGS = {"self", "model", "loss", "params", "rest", "group", "_purpose"}
P = ParamSpec("P")
R = TypeVar("R")


def agreed(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method of an optimizer, so that an error on one rank is raised on all ranks.

    Args:
        where: Name of the operation, for messages.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with cast("Any", args[0]).exchange.ranks.agreed(where):
                return method(*args, **kwargs)

        return run

    return decorate


def made_by_all(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the constructor of an optimizer: settings must agree, and errors are raised on all ranks."""

    @wraps(init)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = dict(zip(("self", "model", "loss"), args, strict=False)) | kwargs
        ranks = Ranks()
        with suppress(KfsError):  # It is raised again below.
            if isinstance(given.get("model"), nn.Module):
                ranks = Exchange.of(given["model"], given.get("group"))[1].ranks
        with ranks.agreed(f"kfs.optim.{type(given['self']).__name__}"):
            init(*args, **kwargs)
            bound = signature(init).bind(*args, **kwargs)
            bound.apply_defaults()
            settings = {n: _plain(value) for n, value in bound.arguments.items() if n not in _NO_SETTINGS}
            loss = describe(bound.arguments["loss"]).attributes()
            names = {name: list(p.shape) for name, p in model_to_run(bound.arguments["model"]).named_parameters()}
            facts = {"Settings": settings, "Losses": loss, "Shapes of parameters": names}
            way_out = "Make the optimizer with the same model, loss and settings in all processes."
            exchange: Exchange = given["self"].exchange
            exchange.made_with = {n: Same(values, way_out) for n, values in facts.items()}
            if ranks.are_several:
                check_same(ranks, _MADE_WITH, exchange.made_with)
                exchange.unchanged_buffers()  # The first step compares buffers that have not changed since.

    return run


def _plain(value: Any) -> Any:
    """Return a setting, or the name of a function. Values of functions are compared when they are used."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


class _Report(NamedTuple):
    """The report of a rank about a step."""

    facts: bytes  # digest of what must be the same everywhere
    sums: StepSums | None  # without tensors; `None` without a pass
    blocks: list[BlockSums]  # without numbers
    squares: frozenset[Key]  # blocks with squared gradients
    size: float | None  # of gradients, if the host decides whether it is usual
    norms: dict[SumKey, float]  # of sums, if the host decides
    values: list[int]  # checksums of parameters and gradients, if they are compared
    buffers: dict[str, int]  # checksums of buffers that passes have not changed


class _Buffer(NamedTuple):
    """A buffer, with its version and checksum."""

    tensor: Tensor
    version: int  # PyTorch's counter of in-place changes
    checksum: int | None = None  # computed when the buffer has not changed between two calls


@dataclass(eq=False)
class Exchange:
    """Communication between the processes of a training.

    Attributes:
        ranks: Processes that take part; a single process does not communicate.
        wrapper: The model that averages gradients, if it is known.
        model: Weak reference to the module that computes predictions.
        made_with: Settings and shapes of the optimizer, which must be the same on all ranks.
    """

    ranks: Ranks
    wrapper: DistributedDataParallel | None = None
    model: "weakref.ref[nn.Module] | None" = None
    made_with: "dict[str, Same]" = field(default_factory=dict)
    _buffers: "dict[str, _Buffer]" = field(default_factory=dict)
    _talks: bool = False  # whether the current step communicates
    _is_due: bool = False  # whether the current step has statistics
    _until_message: ExitStack = field(default_factory=ExitStack)  # Within, errors are raised on all ranks.
    _left: int = _STEPS_TO_COMPARE  # number of further steps in which gradients are compared
    _differed: bool = False  # whether parameters have differed

    @classmethod
    def of(cls, model: nn.Module, group: Group | None) -> "tuple[nn.Module, Exchange]":
        """Return the module that computes predictions, and the communication of the processes that train it.

        Raises:
            ModelError: If there are two groups, or if the model is sharded in a way that is not supported.
        """
        module = model_to_run(model)
        if not isinstance(model, DistributedDataParallel):
            return module, cls(Ranks(group_of(module, group)), model=weakref.ref(module))
        if group is not None:
            raise ModelError(
                "The model is a DistributedDataParallel, which has a group, and group= was given, too.",
                "Leave group= out.",
            )
        return module, cls(Ranks(model.process_group), model, weakref.ref(module))

    def finds_wrapper(self, model: nn.Module) -> bool:
        """Whether a `DistributedDataParallel` model that was made after the optimizer calls the model now.

        If so, its processes train together from now on.

        Raises:
            DistributedError: On all ranks, if their optimizers were made with different settings.
        """
        if self.ranks.are_several or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, DistributedDataParallel) and caller.module is model:
                ranks = Ranks(caller.process_group)
                check_same(ranks, _MADE_WITH, self.made_with)
                self.ranks, self.wrapper = ranks, caller
                return True
            frame = frame.f_back
        return False

    def check(self) -> None:
        """Raise if there are several processes, but the optimizer does not know which of them train together."""
        if self.wrapper is not None and self.wrapper._join_config.enable:
            raise ModelError(
                "A DistributedDataParallel model is trained within join(), where processes may end at different steps; "
                "curvature is computed from the data of all of them.",
                "Give all processes the same number of batches; their sizes may differ.",
            )
        if self.ranks.are_several or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1:
            raise ModelError(
                f"There are {dist.get_world_size()} processes, and the optimizer does not know which of them train the "
                "model together.",
                "Pass the DistributedDataParallel model, KFAC(DistributedDataParallel(model), loss), or make the "
                "optimizer after fully_shard(model). Or average gradients yourself, and pass "
                "group=torch.distributed.group.WORLD. For a training in each process, "
                "pass group=torch.distributed.new_subgroups(1)[0].",
            )

    @contextmanager
    def step(self, device: torch.device, is_due: Callable[[], bool]) -> Iterator[None]:
        """Raise errors of a step on all ranks: an error on one rank ends the step on all of them.

        A step with new statistics ends with a message. In other steps, everything that can fail on a single rank has
        failed before: on a CPU, hosts exchange one message in the middle of the step (see `merged`); on an accelerator,
        which messages would synchronize with, they exchange none.

        Args:
            device: Device of the parameters.
            is_due: Returns whether the step has statistics, if there is no error.
        """
        if not self.ranks.are_several:
            yield
            return
        self._is_due = is_due()
        self._talks = self._is_due or not sync.is_asynchronous(device)
        if not self._talks:
            yield
            return
        with ExitStack() as self._until_message:
            self._until_message.enter_context(self.ranks.agreed(_STEP, is_short=not self._is_due))
            yield

    def start_again(self) -> None:
        """Compare parameters again, after a state was loaded."""
        self._left = _STEPS_TO_COMPARE

    def merged(
        self,
        sums: StepSums | None,
        get_facts: Callable[[], Mapping[str, Mapping[str, Any]]],
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        averages: Mapping[Key, Average],
        products: Products,
        size: Tensor,
    ) -> tuple[StepSums | None, Tensor]:
        """Return the sums of a step with counts and blocks of all ranks, but totals of this rank only.

        Hosts exchange a single message. On a CPU, it contains all sizes that decide whether the step is usable.

        Args:
            sums: Sums from the passes of this rank.
            get_facts: Returns further values that must be the same on all ranks, by kind and name.
            params: All parameters.
            grads: All gradients; for sharded parameters, the part of this rank.
            averages: Averages of known blocks.
            products: Precision in which vectors are multiplied.
            size: Size of the gradients of this rank, `[1]`.

        Returns:
            The sums, and the largest size of gradients on any rank.

        Raises:
            DistributedError: If ranks are not at the same step of the same training.
        """
        if not self._talks:
            return sums, largest(self.ranks, size) if self.ranks.are_several else size
        # Sharded tensors are not compared: their parts differ.
        everywhere = {n: p for n, p in params.items() if not is_sharded(p)}
        found = {n: g for n, g in grads.items() if n in everywhere}
        facts = {**get_facts(), "Parameters with gradients": {n: list(params[n].shape) for n in sorted(grads)}}
        values: list[int] = []
        buffers: dict[str, int] = {}
        if self._left or self._is_due:
            self._left = max(self._left - 1, 0)
            values = checksums([list(everywhere.values()), list(found.values())])
            model = self._module()
            modes = {n or "model": "train" if m.training else "eval" for n, m in model.named_modules()}
            facts["Modes of modules"] = modes
            buffers = self.unchanged_buffers()
        same = {what: Same(facts[what], way_out) for what, way_out in _WAYS_OUT.items() if what in facts}
        mine = StepSums(0) if sums is None else sums
        # Own blocks do not change: a recorded pass writes to their totals again, and counts are for this step only.
        blocks = {key: block.shared() for key, block in mine.blocks.items()}
        sent = without_numbers(blocks.values())
        on_host = not sync.is_asynchronous(size.device)
        places, norms = mine.norms_of(blocks) if on_host else ([], torch.zeros(0))
        report = _Report(
            digest_of(same),
            _without_tensors(sums),
            sent,
            frozenset(mine.squares),
            size.item() if on_host else None,
            dict(zip(places, norms.tolist(), strict=True)),
            values,
            buffers,
        )
        reports = self.ranks.gather("statistics of a step", report)
        if not self._is_due:
            self._until_message.close()
        refuse_different(self.ranks, same, [report.facts for report in reports])
        self._compare(reports, everywhere, found)
        largest_size = size.new_tensor([_most([one.size for one in reports])]) if on_host else largest(self.ranks, size)
        of_ranks = [report.sums for report in reports if report.sums is not None]
        if not of_ranks:
            return None, largest_size
        result = _over_ranks(of_ranks)
        result.inputs = mine.inputs
        if result.blocks:
            device = next(iter(params.values())).device
            result.blocks, conflicts = self._blocks(reports, blocks, device, products)
            result.uncovered |= not_covered([], [], set(), conflicts)
        if on_host:
            result.norms = _largest_norms(reports, result.blocks)
        for key in sorted(frozenset().union(*(report.squares for report in reports))):
            eigen = averages[key].eigen
            assert eigen is not None  # noqa: S101 (squares were computed in its basis)
            result.squares[key] = mine.squares.get(key, torch.zeros_like(eigen.values))
        return result, largest_size

    def _module(self) -> nn.Module:
        """Return the model, or an empty module if it is unknown or no longer exists."""
        model = None if self.model is None else self.model()
        return nn.Module() if model is None else model

    def unchanged_buffers(self) -> dict[str, int]:
        """Return checksums of buffers that have not changed since the last call. Each is computed once.

        Buffers that passes change, such as counts, depend on the data of each rank, and are left out. So are the
        running statistics of normalization layers in training mode: they are not read, and change without a new
        version.
        """
        model = self._module()
        owners = [m for m in model.modules() if not (isinstance(m, _NormBase) and m.training)]
        own = {id(b) for m in owners for b in m._buffers.values()}
        now = {n: b for n, b in model.named_buffers() if id(b) in own and not is_sharded(b)}
        before = self._buffers
        self._buffers = {}
        for name, b in now.items():
            known = before.get(name)
            is_same = known is not None and known.tensor is b and known.version == b._version
            self._buffers[name] = known if is_same and known is not None else _Buffer(b, b._version)
        unchanged = [name for name in now if self._buffers[name] is before.get(name)]
        new = [name for name in unchanged if self._buffers[name].checksum is None]
        for name, number in zip(new, checksums([now[name]] for name in new), strict=True):
            self._buffers[name] = self._buffers[name]._replace(checksum=number)
        return {name: cast("int", self._buffers[name].checksum) for name in unchanged}

    def _compare(self, reports: list[_Report], params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Raise if buffers differ between ranks, or if gradients or parameters differ by more than round-off."""
        common = set.intersection(*(set(report.buffers) for report in reports))
        others = [n for n in reports[0].buffers if n in common and len({one.buffers[n] for one in reports}) > 1]
        if others:
            raise DistributedError(f"Buffers differ between processes: {few(others)}.", _WAYS_OUT["Buffers"])
        are_equal = [len(set(each)) == 1 for each in zip(*(report.values for report in reports), strict=True)]
        if not all(are_equal[1:]):
            self._refuse_apart(_GRADIENTS, grads)
        if not all(are_equal[:1]):
            self._refuse_apart(_PARAMETERS, params)
            self._take_over(params)

    def _refuse_apart(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Raise if tensors differ from the tensors of rank 0 by more than round-off."""
        first = {name: t.detach().clone() for name, t in tensors.items()}
        copy_from(self.ranks, 0, first.values())
        with sync.allow_sync():
            apart = [name for name, t in tensors.items() if not equal_up_to_round_off(first[name], t.detach())]
        for rank, names in enumerate(self.ranks.gather("differences", apart)):
            if names:
                text = f"{what} differ between processes: {few(names)} of rank {rank} are not as on rank 0."
                raise DistributedError(text, _WAYS_OUT[what])

    def _take_over(self, params: Mapping[str, Tensor]) -> None:
        """Copy the parameters of rank 0 to all ranks."""
        copy_from(self.ranks, 0, params.values())
        if not self._differed:
            log.warning(
                "kfs.optim: parameters differ between processes by round-off, for example because of different "
                "hardware or numbers of threads. The parameters of rank 0 are copied to all processes, now and "
                "whenever this happens in a step with new factors."
            )
        self._differed = True

    def _blocks(
        self, reports: Iterable[_Report], blocks: Mapping[Key, BlockSums], device: torch.device, products: Products
    ) -> tuple[dict[Key, BlockSums], set[tuple[str, str]]]:
        """Return the blocks of all ranks, with counts over all of them, and totals of this rank."""
        result, conflicts = joined_blocks([report.blocks for report in reports], blocks, device, products)
        # Two roles of a weight are combined depending on their totals over all ranks. Only the last rank keeps these.
        tied = [block for block in result.values() if len(block.roles) > 1]
        if tied:
            add_up_totals(self.ranks, [Total(s.total, not s.diagonal) for block in tied for s in block.sums])
        for s in (s for block in tied for s in block.sums):
            if self.ranks.rank < self.ranks.size - 1:
                s.total = torch.zeros_like(s.total)
        return result, conflicts

    def numbering(self) -> Callable[[int], tuple[int, int]]:
        """Return a function that numbers the data of a forward pass that begins.

        Given the number of examples on this rank, it returns the number of examples on lower ranks, and the number on
        all ranks. It is called in the backward pass. Within `no_sync()`, where ranks do not synchronize, all ranks are
        assumed to have equally many examples.
        """
        synchronizes = self.wrapper is None or self.wrapper.require_backward_grad_sync
        return self._place_of_data if synchronizes else self._place_without_asking

    def _place_of_data(self, num_data: int) -> tuple[int, int]:
        counts = self.ranks.gather("numbers of examples of a pass", num_data)
        return sum(counts[: self.ranks.rank]), sum(counts)

    def _place_without_asking(self, num_data: int) -> tuple[int, int]:
        return self.ranks.rank * num_data, self.ranks.size * num_data

    def mean(self, value: float) -> float:
        """Return the mean of a loss over ranks. Its gradient is the mean of the gradients over ranks."""
        values = self.ranks.gather("losses", value)
        return sum(values) / len(values)

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum over ranks of a small tensor on the CPU."""
        return torch.stack(self.ranks.gather("curvature along a step", t)).sum(0)


def _most(sizes: Iterable[float | None]) -> float:
    """Return the largest size; infinite if one of them is not finite."""
    return max(size if size is not None and isfinite(size) else inf for size in sizes)


def _largest_norms(reports: Iterable[_Report], blocks: Mapping[Key, BlockSums]) -> dict[SumKey, float]:
    """Return the largest norms over ranks. A rank without a block has zeros."""
    found: dict[SumKey, list[float]] = {}
    for report in reports:
        # A rank whose first use of a parameter was on the other side has turned its block.
        layouts = {block.layout.key: block.layout for block in report.blocks}
        for (key, side, kind), norm in report.norms.items():
            is_turned = key in blocks and key in layouts and layouts[key].order != blocks[key].layout.order
            there = {"A": "B", "B": "A"}[side] if is_turned and side else side
            found.setdefault((key, there, kind), []).append(norm)
    return {place: _most(norms) for place, norms in found.items()}


def _over_ranks(reports: list[StepSums]) -> StepSums:
    """Return counts and coverage over all ranks."""
    # A rank without examples has no information about coverage.
    telling = [sums for sums in reports if sums.blocks or sums.uncovered]
    silent = [sums for sums in reports if not (sums.blocks or sums.uncovered)]
    result, *others = telling or [StepSums(0)]
    for other in others:
        result.merge(other)
    for other in silent:
        other.uncovered = dict(result.uncovered)
        result.merge(other)
    return result


def _without_tensors(sums: StepSums | None) -> StepSums | None:
    """Return the counts and coverage of a step, to send them to other ranks. Blocks are sent apart."""
    if sums is None:
        return None
    blocks = {key: BlockSums(block.layout, block.sharing) for key, block in sums.blocks.items()}
    return replace(sums, blocks=blocks, squares={}, inputs=[])
