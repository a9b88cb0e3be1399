"""Blocks that may have owners: which of them this process has, and how results of all processes are put together.

Without owners, every process has all blocks, and nothing here exchanges anything. With owners, each block is on one
rank. All ranks call the same methods. Each of them works on its own blocks, and writes what comes out into zeros. So
the sum over ranks is the result, with the same bits on all of them.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from kfs.distributed import Ranks, add_up
from kfs.distributed.placement import EIGENVALUES, Part, place
from kfs.distributed.states import fetched, joined, write_joined
from kfs.errors import DistributedError, UnknownAttributeError
from kfs.kfac.structures.looking import Listed, VisibleBlocks, kind_of
from kfs.kfac.structures.stack import Stack, check_coverage, stacked
from kfs.operators.space import Space
from kfs.storage import with_tensors


class _Load:
    """Users look for `load` beside `save`. A file says itself which class it has, so that one function reads all."""

    def __get__(self, operator: object, cls: type) -> NoReturn:
        """Say where it is, for a class and for its objects."""
        raise UnknownAttributeError(
            f"{cls.__name__} has no 'load'.", "Use kfs.load(path), which returns an object of the class that was saved."
        )


class OwnedBlocks(VisibleBlocks):
    """An operator whose blocks are on all ranks, or each on the rank that owns it.

    Args:
        space: What it acts on.
        stacks: The blocks of this process. `None` if a subclass makes them later.
        ranks: Those that own blocks. By default, this process has all of them.

    Attributes:
        ranks: As above.
    """

    # Items of `_state` that are lists with something for each block, or for some blocks together.
    _lists: tuple[str, ...] = ("groups",)
    load = _Load()

    def __init__(self, space: Space, stacks: list[Stack] | None, ranks: Ranks | None = None) -> None:
        """Store the blocks, and let all ranks know who has which."""
        super().__init__(space, space)
        self._stacks = stacks
        self.ranks = Ranks() if ranks is None else ranks
        self._of_all_ranks: list[Listed] | None = None
        if stacks is not None:
            self._list_blocks()

    @property
    def _ranks(self) -> Ranks:
        return self.ranks

    @property
    def stacks(self) -> list[Stack]:
        """All blocks, those of one structure and size together.

        Raises:
            DistributedError: If blocks have owners, so that this process does not have all of them.
        """
        if self.ranks.are_several:
            raise DistributedError(
                f"The blocks of {self.formula} are owned by {self.ranks.size} processes, and this needs all of them in "
                "each process.",
                "Call K.gathered() in all processes, which copies all blocks to each of them, or compute K with "
                "placement='replicated'.",
            )
        return self.own_stacks

    @property
    def own_stacks(self) -> list[Stack]:
        """The blocks that this process has: all of them, or those that it owns."""
        assert self._stacks is not None  # noqa: S101 (subclasses that make them later override this)
        return self._stacks

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all blocks are symmetric."""
        if self._of_all_ranks is not None:
            return all(block.symmetric for block in self._of_all_ranks)
        return all(stack.structure.symmetric for stack in self.own_stacks)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, whoever owns them."""
        return sum(block.nbytes for block in self._listed())

    def _listed(self) -> list[Listed]:
        """List all blocks in the order of parameters. Nothing is exchanged."""
        return super()._listed() if self._of_all_ranks is None else self._of_all_ranks

    def _list_blocks(self) -> None:
        """Let all ranks know who has which block."""
        if not self.ranks.are_several:
            return
        mine = []
        for stack in self.own_stacks:
            for layout, part in stack.slices():
                s = stack.structure[part]
                mine.append(Listed(layout, kind_of(s), s.nbytes, s.symmetric, self.ranks.rank))
        place_of = self._order()
        found = [block for blocks in self.ranks.gather("blocks", mine) for block in blocks]
        self._of_all_ranks = sorted(found, key=lambda block: place_of(block.layout))

    def _check_same(self, **arguments: object) -> None:
        """Refuse arguments that differ between ranks. Otherwise each block would get those of its owner."""
        # As text: NaN differs from itself. The order of a dictionary does not matter.
        texts = {n: sorted(map(repr, v.items())) if isinstance(v, Mapping) else repr(v) for n, v in arguments.items()}
        self.ranks.same(f"The arguments for {self.formula}", texts, "Pass the same arguments in all processes.")

    def _add_up(self, parts: Iterable[Tensor]) -> None:
        """Replace what each rank has computed from its own blocks by the sums over all ranks, in place."""
        add_up(self.ranks, self.formula, parts)

    def _joined(self, values: Tensor) -> Tensor:
        """Return the numbers of all ranks in a row, `[number]`, in the order of ranks."""
        if not self.ranks.are_several:
            return values
        found = self.ranks.gather("numbers of blocks", (len(values), values.dtype))
        sizes = [size for size, _ in found]
        start = sum(sizes[: self.ranks.rank])
        # Who owns no block does not know in which precision others compute.
        result = values.new_zeros(sum(sizes), dtype=reduce(torch.promote_types, [dtype for _, dtype in found]))
        result[start : start + len(values)] = values
        self._add_up([result])
        return result

    def gathered(self) -> Self:
        """Return the same operator with copies of all blocks in every process. All processes call it.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> K = KFAC(risk, placement="owner").gathered()
        """
        if not self.ranks.are_several:
            return self
        # Own blocks are copied as well: what is done to the result in place must not change this operator.
        own = with_tensors(self._state(), Tensor.clone)
        state = fetched(joined(self.ranks, own, self._lists))
        return type(self)._from_state(state, self.domain).called(self._formula, self.of)

    def save(self, path: str | Path) -> None:
        """Write everything to a file that `kfs.load` reads, in the safetensors format.

        A file is written completely or not at all; an older one is replaced at once. Its header is readable text: the
        library's version and the shapes of parameters; for `KFAC` and `EKFAC` also loss, kind of Fisher, sharing,
        number of data and seed. If blocks have owners, all processes call this. Rank 0 writes one file, and holds one
        tensor of the others at a time.

        Args:
            path: Name of the file, such as `"k.safetensors"`.

        Raises:
            StorageError: If the file cannot be written.
        """
        kind = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in {"EKFAC", "KFAC", "BlockDiagonal"})
        shapes = [[name, list(shape)] for name, shape in self.domain.shapes.items()]
        space = {"shapes": shapes, "dtype": str(self.dtype).removeprefix("torch.")}
        with self.ranks.agreed("save"):
            state = joined(self.ranks, self._state(), self._lists, root=0)
            write_joined(self.ranks, path, {"kind": kind} | self._about(), state | {"space": space})

    def _about(self) -> dict[str, Any]:
        """Return what people want to see in a file's header."""
        return {"parameters": {name: list(shape) for name, shape in self.domain.shapes.items()}}

    def _state(self) -> dict[str, Any]:
        """Return everything but the space, for a file; of blocks, those of this process."""
        return {"groups": [stack.state() for stack in self.own_stacks]}

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        """Undo `_state`. If there are ranks, they own blocks, and each has its own ones only."""
        # In files, stacks are called groups.
        stacks = [Stack.from_state(part) for part in state["groups"]]
        check_coverage([layout for stack in stacks for layout in stack.layouts], space)
        if ranks is None or not ranks.are_several:
            return cls(space, stacks)
        parts = [
            Part(layout.name, EIGENVALUES, stack.structure[part].nbytes, diagonal=(True,), itemsize=1, eigen=True)
            for stack in stacks
            for layout, part in stack.slices()
        ]
        owners = {block: rank for (block, _), rank in place(parts, ranks.size).owners.items()}
        return cls(space, of_owner(stacks, owners, ranks), ranks)


def of_owner(stacks: list[Stack], owners: Mapping[str, int], ranks: Ranks) -> list[Stack]:
    """Return the blocks that this process owns: all of them, if it is alone. Rank 0 has those that nobody owns."""
    if not ranks.are_several:
        return stacks
    parts = [(layout, stack.structure[part]) for stack in stacks for layout, part in stack.slices()]
    return stacked([(layout, one) for layout, one in parts if owners.get(layout.name, 0) == ranks.rank])
