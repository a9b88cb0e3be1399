"""Gradients on the way to inverses, and steps on the way back.

If parameters are sharded, no process has whole gradients. So each of them sends its parts to the processes that own the
blocks, and gets back its parts of steps. It sends twice as many numbers as it has, in every step, however many
processes there are. Inverses stay where they were computed, and nobody multiplies with those of others.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, promote_types

from kfs.distributed import Ranks, all_true
from kfs.optim.fully_sharded import gathered, own_parts
from kfs.sharded import is_sharded


class Part(NamedTuple):
    """Which part of a tensor a process has."""

    start: tuple[int, ...]  # along each axis
    shape: tuple[int, ...]

    def of(self, t: Tensor) -> Tensor:
        """Return this part of a whole tensor, as a view."""
        for axis, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            t = t.narrow(axis, start, length)
        return t

    @classmethod
    def own(cls, t: Tensor) -> "Part":
        """Return the part that this process has of a tensor; all of it if it is not sharded."""
        if not is_sharded(t):
            return cls((0,) * t.ndim, tuple(t.shape))
        # It takes long to import.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

        spec = cast("Any", t)
        shape, start = compute_local_shape_and_global_offset(t.shape, spec.device_mesh, spec.placements)
        # A process without any row has no place either.
        return cls(tuple(0 if prod(shape) == 0 else one for one in start), tuple(shape))


class Everywhere:
    """Lets all processes have whole tensors: each has all inverses.

    Args:
        like: Parameters, sharded or not, by name.
        ranks: The processes.

    Attributes:
        like: The same.
    """

    def __init__(self, like: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.like = like
        self._ranks = ranks
        self._are_sharded = ranks.are_several and any(map(is_sharded, like.values()))

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors that this process multiplies, given the parts of all processes.

        Args:
            parts: Those of this process, by name: the same names in all processes, in the same order.
        """
        return gathered(parts, self.like)

    def scattered(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `gathered`: return the parts of this process.

        Args:
            tensors: What this process has multiplied.
            parts: What `gathered` was called with.
        """
        return own_parts({name: tensors[name] for name in parts}, self.like)

    def all_true(self, flag: Tensor) -> Tensor:
        """Return whether a flag about whole tensors is true wherever there are some."""
        return flag

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all whole tensors, given that over those of this process."""
        return t

    def copies(self, name: str) -> int:
        """Return how many processes have the same part of a parameter as this one, where parts are added up."""
        if not self._are_sharded:
            return 1
        t = cast("Any", self.like[name])
        if not is_sharded(t):
            return self._ranks.size
        return prod(
            size for size, placed in zip(t.device_mesh.shape, t.placements, strict=True) if not placed.is_shard()
        )

    def sum_of_parts(self, t: Tensor) -> Tensor:
        """Return the sum of a number over all parts of parameters, given that over those of this process."""
        return self._added_up(t) if self._are_sharded else t

    def _added_up(self, t: Tensor) -> Tensor:
        """Return the sum over all processes of a number."""
        result = t.to(self._ranks.device_for(t.device), copy=True)
        dist.all_reduce(result, group=self._ranks.group)
        return result.to(t.device)


class AtOwners(Everywhere):
    """Sends parts of tensors to owners, and back. Arguments are those of `Everywhere`.

    Attributes:
        owners: By name. All processes know them.
    """

    def __init__(self, like: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Let all processes know which parts each of them has."""
        super().__init__(like, ranks)
        self.owners: dict[str, int] = {}
        self._parts = ranks.gather("parts of parameters", {name: Part.own(t) for name, t in like.items()})

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors that this process owns."""
        mine, names = self._divided(parts)
        like = self._widest(parts)
        sent = [[parts[name] for name in some] for some in names]
        received = self._exchanged(sent, [[own[name].shape for name in mine] for own in self._parts], like)
        result = {name: like.new_empty(self.like[name].shape) for name in mine}
        for own, tensors in zip(self._parts, received, strict=True):
            for name, t in zip(mine, tensors, strict=True):
                own[name].of(result[name]).copy_(t)
        return result

    def scattered(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send owners' tensors back."""
        mine, names = self._divided(parts)
        sent = [[own[name].of(tensors[name]) for name in mine] for own in self._parts]
        shapes = [[parts[name].shape for name in some] for some in names]
        received = self._exchanged(sent, shapes, self._widest(parts))
        found = {name: t for some, ts in zip(names, received, strict=True) for name, t in zip(some, ts, strict=True)}
        return {name: found[name].to(part.dtype) for name, part in parts.items()}

    def all_true(self, flag: Tensor) -> Tensor:
        """Return whether a flag is true at all owners."""
        return all_true(self._ranks, flag)

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum over all owners of a number."""
        return self._added_up(t)

    def _divided(self, names: Iterable[str]) -> tuple[list[str], list[list[str]]]:
        """Return the names of what this process owns, and of what each of them owns."""
        found = [[name for name in names if self.owners[name] == rank] for rank in range(self._ranks.size)]
        return found[self._ranks.rank], found

    @staticmethod
    def _widest(parts: Mapping[str, Tensor]) -> Tensor:
        """Return an empty tensor in the precision that everything travels in."""
        return next(iter(parts.values())).new_empty(0, dtype=reduce(promote_types, (t.dtype for t in parts.values())))

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send tensors to each rank, and return those that came from each, which have these shapes."""
        flat = torch.cat([like, *(t.reshape(-1).to(like.dtype) for some in sent for t in some)])
        lengths = [sum(map(prod, some)) for some in shapes]
        result = like.new_empty(sum(lengths))
        splits = [sum(t.numel() for t in some) for some in sent]
        dist.all_to_all_single(result, flat, lengths, splits, group=self._ranks.group)
        pieces = iter(result.split([prod(shape) for some in shapes for shape in some]))
        return [[next(pieces).reshape(*shape) for shape in some] for some in shapes]
