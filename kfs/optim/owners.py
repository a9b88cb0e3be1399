"""Averages and inverses in several processes.

*Averages are summands.* Each rank averages the sums of its own data, divided by counts over all ranks. As averages are
linear, the average of all data is the sum over ranks, and needs to be known only when its inverse is computed. Then it
is added up at one rank, its *owner*; others start again at zero. What an owner was before does not matter.

*The owner inverts.* All ranks get a copy of the inverse, and multiply their gradients with it, which are the same. The
alternative, to let the owner multiply and to send steps, has to send something in every step: as many numbers as there
are parameters. Of a square layer, that is what both triangles of its inverse have, and they are sent once in
`inverses_every` steps. Eigenvectors are not symmetric, and twice as much.

So a block sends the triangles of its averages to its owner, and those of its inverse back, once in `inverses_every`
steps, however often factors are computed.

If parameters are sharded, gradients have to travel in any case. Then inverses stay at their owners, which multiply: see
`at_owners`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kfs.distributed import Ranks, add_up, add_up_at, copy_from
from kfs.distributed.placement import Part, place
from kfs.distributed.summing import fill_lower_triangle, upper_triangle
from kfs.errors import KfsError
from kfs.kfac.layout import Key
from kfs.kfac.structures import BlockError, Eigenbasis, Factor, Kronecker
from kfs.optim.averages import Average, Inverted
from kfs.optim.inverses import Inverses
from kfs.waiting import waiting_allowed

# What a rank tells about a block: its inverse without numbers (on the meta device), or why there is none.
Outcome = Inverted | str


def owners_of(averages: Iterable[Average], eigen: bool, size: int) -> dict[Key, int]:
    """Return the rank that inverts each block, the same on all ranks: work and bytes are balanced.

    Args:
        averages: Of all blocks.
        eigen: Whether eigenvectors are computed, or inverses.
        size: Number of ranks.
    """
    found = list(averages)
    parts = tuple(part for average in found for part in _parts(average, eigen))
    owners = dict(_placed(parts, size))
    # A block that fits nowhere as a whole has two owners. The one with more work inverts all of it.
    largest = {average.layout.key: max(_parts(average, eigen), key=lambda part: part.work) for average in found}
    result = {key: owners[part.key] for key, part in largest.items()}
    # Blocks of the same parameters, such as rows of one weight, stay together: their steps are one tensor.
    first: dict[str, int] = {}
    for average in found:
        key = average.layout.key
        result[key] = first.setdefault(average.layout.weight, result[key])
    return result


@lru_cache(maxsize=4)
def _placed(parts: tuple[Part, ...], size: int) -> Mapping[tuple[str, str], int]:
    return place(parts, size).owners


def _parts(average: Average, eigen: bool) -> list[Part]:
    """Describe the factors of a block."""
    layout, K = average.layout, average.factors
    return [
        Part(layout.name, side, f.size, layout.groups, (f.kind != "dense",), f.values.element_size(), eigen=eigen)
        for side, f in (("A", K.A), ("B", K.B))
    ]


def invert(
    ranks: Ranks,
    inverses: Inverses,
    averages: Iterable[Average],
    together: Iterable[tuple[Sequence[Average], Sequence[float]]],
    at_owners: bool = False,
) -> dict[Key, str]:
    """Compute inverses, each on one rank, and let all ranks have them, or only that one.

    Args:
        ranks: All processes.
        inverses: How inverses are computed and kept.
        averages: Of all blocks.
        together: Blocks of one size that are inverted now, with their dampings, the same on all ranks.
        at_owners: Whether inverses stay at their owners.

    Returns:
        Why some inverses could not be computed. They stay as they were.
    """
    due = list(together)
    owners = owners_of(averages, inverses.eigen or inverses.method == "exact", ranks.size)
    by_owner: dict[int, list[Average]] = {}
    for average in (average for same, _ in due for average in same):
        by_owner.setdefault(owners[average.layout.key], []).append(average)
    for owner, some in by_owner.items():
        collect(ranks, owner, some)
    results: dict[Key, Inverted] = {}
    outcomes: dict[Key, Outcome] = {}
    for same, dampings in due:
        mine = [(a, d) for a, d in zip(same, dampings, strict=True) if owners[a.layout.key] == ranks.rank]
        if mine:
            _invert_own(inverses, mine, results, outcomes)
    told = {key: one for some in ranks.gather("inverses", outcomes) for key, one in some.items()}
    for owner, some in by_owner.items():
        if at_owners:
            _leave(ranks, inverses, owner, some, told, results)
        else:
            _receive(ranks, inverses, owner, some, told, results)
    return {key: why for key, why in told.items() if isinstance(why, str)}


def collect(ranks: Ranks, owner: int, averages: Iterable[Average]) -> None:
    """Let one rank have the averages of all data, and the others zeros."""
    found = list(averages)
    add_up_at(ranks, owner, (part for average in found for part in _travelling(average)))
    if ranks.rank == owner:
        _complete(found)
    else:
        forget_summands(found)


def whole(ranks: Ranks, averages: Iterable[Average]) -> list[Average]:
    """Return averages of all data on all ranks, as copies; everything else is shared."""
    copies = [_with_copied_summands(average) for average in averages]
    for copy in copies:
        if copy.owner is not None:
            _fetch_inverse(ranks, copy)
    add_up(ranks, "averages of factors", (part for average in copies for part in _travelling(average)))
    _complete(copies)
    return copies


def _fetch_inverse(ranks: Ranks, average: Average) -> None:
    """Let all ranks have an inverse that one of them has."""
    owner, inverse = average.owner, average.inverse
    assert owner is not None  # noqa: S101 (whoever asks knows)
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
    average.owner = None


def forget_summands(averages: Iterable[Average]) -> None:
    """Start averages at zero again, on a rank whose summand another rank has."""
    for average in averages:
        for t in _summands(average):
            t.zero_()


def _invert_own(
    inverses: Inverses,
    mine: Sequence[tuple[Average, float]],
    results: dict[Key, Inverted],
    outcomes: dict[Key, Outcome],
) -> None:
    """Compute the inverses of blocks of one size, and note how that went."""
    averages, dampings = zip(*mine, strict=True)
    try:
        computed = inverses.computed(averages, dampings)
    except (BlockError, KfsError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        if len(mine) > 1:  # One of them has failed. The others have nothing to do with it.
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
        # The basis of corrected eigenvalues is that of the inverse, and need not be told.
        with waiting_allowed():
            damping = result.damping.cpu()  # It is small, and all ranks report it.
        outcomes[average.layout.key] = Inverted(result.inverse.to("meta"), damping, None, result.input_size.to("meta"))


def _leave(
    ranks: Ranks,
    inverses: Inverses,
    owner: int,
    averages: Iterable[Average],
    told: Mapping[Key, Outcome],
    results: Mapping[Key, Inverted],
) -> None:
    """Leave inverses at one owner; the others know what they look like."""
    for average in averages:
        outcome = told[average.layout.key]
        if isinstance(outcome, str):
            continue  # The last inverse stays, wherever it is.
        moves = average.has_inverse != (owner == ranks.rank)
        if owner == ranks.rank:
            if moves:
                average.inverse = None  # that of another owner, without numbers
            inverses.keep([average], results[average.layout.key])
        else:
            average.inverse = outcome.inverse
            average.damping = outcome.damping.to(average.factors.like.device)
        average.leave_inverse(owner, owner == ranks.rank)
        if moves:
            inverses.forget()


def _receive(
    ranks: Ranks,
    inverses: Inverses,
    owner: int,
    averages: Iterable[Average],
    told: Mapping[Key, Outcome],
    results: Mapping[Key, Inverted],
) -> None:
    """Take over the inverses of one owner; the owner does so, too, such that all have the same bits and strides."""
    received: list[tuple[Average, Inverted]] = []
    for average in averages:
        key = average.layout.key
        skeleton = told[key]
        if isinstance(skeleton, str):
            continue
        device = average.factors.like.device
        one = Inverted(
            skeleton.inverse.empty_on(device),
            torch.empty_like(skeleton.damping, device=device),
            None,
            torch.empty_like(skeleton.input_size, device=device),
        )
        if key in results:
            one.inverse.overwrite(results[key].inverse)
            one.damping.copy_(results[key].damping)
            one.input_size.copy_(results[key].input_size)
        received.append((average, one))
    sent = [t for _, one in received for t in (*_tensors(one.inverse), one.damping, one.input_size)]
    copy_from(ranks, owner, sent)
    for average, one in received:
        for factor in _symmetric(one.inverse):
            fill_lower_triangle(factor.values)
        result = results.get(average.layout.key)
        eigen = _eigenvalues(one.inverse, None if result is None else result.eigen) if inverses.eigen else None
        inverses.keep([average], one._replace(eigen=eigen))


def _eigenvalues(inverse: Any, own: Eigenbasis | None) -> Eigenbasis:
    """Return corrected eigenvalues, which are summands, in the basis of an inverse: the owner has all of them."""
    values = torch.zeros_like(inverse.values) if own is None else own.values.clone()
    result: Eigenbasis = replace(inverse, values=values, noise=torch.zeros_like(inverse.noise))
    return result


def _summands(average: Average) -> Iterator[Tensor]:
    """Yield tensors that are sums over ranks. Scales of identities depend on counts, which all ranks know."""
    for factor in (average.factors.A, average.factors.B):
        if factor.kind != "identity":
            yield factor.values
    if average.eigen is not None:
        yield average.eigen.values


def _travelling(average: Average) -> Iterator[Tensor]:
    """Yield parts of summands that have to be sent: of symmetric matrices, the upper triangle."""
    dense = {id(factor.values) for factor in _symmetric(average.factors)}
    for t in _summands(average):
        yield from upper_triangle(t) if id(t) in dense else [t]


def _complete(averages: Iterable[Average]) -> None:
    """Mirror triangles that have travelled."""
    for average in averages:
        for factor in _symmetric(average.factors):
            fill_lower_triangle(factor.values)


def _with_copied_summands(average: Average) -> Average:
    """Return an average that can be added up without changing this one."""
    A, B = (
        factor if factor.kind == "identity" else replace(factor, values=factor.values.clone())
        for factor in (average.factors.A, average.factors.B)
    )
    eigen = average.eigen
    if eigen is not None:
        eigen = replace(eigen, values=eigen.values.clone())
    return replace(average, factors=Kronecker(A, B), eigen=eigen)


def _factors(structure: Any) -> Iterator[Factor]:
    """Yield the factors in a structure."""
    for f in fields(structure):
        value = getattr(structure, f.name)
        if isinstance(value, Factor):
            yield value


def _symmetric(structure: Any) -> Iterator[Factor]:
    """Yield factors of which the upper triangle is enough."""
    for factor in _factors(structure):
        if factor.kind == "dense" and factor.symmetric:
            yield factor


def _tensors(structure: Any) -> Iterator[Tensor]:
    """Yield all numbers of a structure, as views; of symmetric matrices, the upper triangle."""
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
