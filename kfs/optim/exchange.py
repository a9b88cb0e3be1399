"""What the processes of a training tell each other in a step.

The user's gradients are averages over ranks already: `DistributedDataParallel` or the user's own loop has seen to that.
What this adds: counts and coverage over all ranks, numbers of data for labels that are drawn, flags that are true on
all ranks, losses that are means over ranks, and errors that all ranks raise. How factors and inverses travel lives in
`owners`.

Each rank multiplies gradients with inverses itself. Other hardware, or another number of threads, may round that in
another way. So ranks compare their parameters in steps with new factors, and take over those of the first rank if bits
differ. Gradients are the same on all ranks, so differences add up slowly and are not amplified.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfs import waiting
from kfs.distributed import Group, Ranks, copy_from
from kfs.errors import DistributedError, ModelError
from kfs.kfac.coverage import not_covered
from kfs.kfac.layout import Key
from kfs.kfac.settings import Products
from kfs.kfac.sums import BlockSums, add_up_totals, agreed_blocks
from kfs.optim.averages import Average
from kfs.optim.fully_sharded import group_of
from kfs.optim.step_sums import StepSums
from kfs.sharded import is_sharded, model_to_run

log = logging.getLogger("kfs.optim")
# In so many steps, it is checked that gradients are the same on all ranks: a program does not change.
_STEPS_TO_COMPARE = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_WAYS_OUT = {
    "Numbers of steps and data": "Load the same state_dict() in all processes, and call step() equally often.",
    "Parameters with gradients": "Train the same parameters in all processes, and average gradients over them.",
    "Values of parameters": "Start from the same weights in all processes, as DistributedDataParallel does.",
    "Gradients": (
        "Call the DistributedDataParallel model, not its module; or, with group=, average gradients over all "
        "processes between backward() and step()."
    ),
}


class _Report(NamedTuple):
    """What a rank tells about a step."""

    facts: dict[str, Any]  # what must be the same everywhere
    sums: StepSums | None  # without tensors; `None` without a pass
    squares: frozenset[Key]  # blocks with squared gradients
    values: list[int]  # what tells parameters from others, if they are compared


@dataclass(eq=False)
class Exchange:
    """What processes tell each other.

    Attributes:
        ranks: Who takes part; one process alone exchanges nothing.
        wrapper: The model that averages gradients, if it is known.
    """

    ranks: Ranks
    wrapper: DistributedDataParallel | None = None
    _talks: bool = False  # whether values are exchanged in the step that is running
    _is_due: bool = False  # whether the step that is running has statistics
    _left: int = _STEPS_TO_COMPARE  # in how many further steps gradients are compared
    _differed: bool = False  # whether parameters have differed

    @classmethod
    def of(cls, model: nn.Module, group: Group | None) -> "tuple[nn.Module, Exchange]":
        """Return the module that computes predictions, and who trains it.

        Raises:
            ModelError: If there are two groups, or if the model is sharded in a way that is not supported.
        """
        module = model_to_run(model)
        if not isinstance(model, DistributedDataParallel):
            return module, cls(Ranks(group_of(module, group)))
        if group is not None:
            raise ModelError(
                "The model is a DistributedDataParallel, which has a group, and group= was given, too.",
                "Leave group= out.",
            )
        return module, cls(Ranks(model.process_group), model)

    def finds_wrapper(self, model: nn.Module) -> bool:
        """Whether a `DistributedDataParallel` model that was made after the optimizer calls the model now.

        Then its processes train together from now on.
        """
        if self.ranks.are_several or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, DistributedDataParallel) and caller.module is model:
                self.ranks = Ranks(caller.process_group)
                self.wrapper = caller
                return True
            frame = frame.f_back
        return False

    def check(self) -> None:
        """Refuse processes that would not notice each other."""
        if self.wrapper is not None and self.wrapper._join_config.enable:
            raise ModelError(
                "A DistributedDataParallel model is trained within join(), where processes may end at different steps; "
                "curvature is that of the data of all of them.",
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
        """Let a step end in the same way on all ranks: an error of one rank is one of all.

        An exchange between hosts makes these wait for an accelerator. There, steps without anything new do without:
        what could fail on one rank alone has failed in its backward pass then.

        Args:
            device: That of parameters.
            is_due: Whether the step has statistics, if nothing is wrong.
        """
        if not self.ranks.are_several:
            yield
            return
        self._is_due = is_due()
        self._talks = self._is_due or not waiting.runs_behind(device)
        if not self._talks:
            yield
            return
        with self.ranks.agreed("a step of the optimizer"):
            yield

    def start_again(self) -> None:
        """Compare parameters again, after a state was loaded."""
        self._left = _STEPS_TO_COMPARE

    def merged(
        self,
        sums: StepSums | None,
        numbers: tuple[float, ...],
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        averages: Mapping[Key, Average],
        products: Products,
    ) -> StepSums | None:
        """Return what the passes of all ranks gave: counts over all of them, blocks of all of them, own totals.

        Args:
            sums: What the passes of this rank gave.
            numbers: Numbers of steps, data and so on, which must be the same on all ranks.
            params: All parameters.
            grads: All gradients; of sharded parameters, this rank's part.
            averages: Averages of known blocks.
            products: Precision in which vectors are multiplied.

        Raises:
            DistributedError: If ranks are not at the same step of the same training.
        """
        if not self._talks:
            return sums
        is_first = self._left == _STEPS_TO_COMPARE
        # Parts of sharded tensors differ, of course.
        everywhere = {n: p for n, p in params.items() if not is_sharded(p)}
        values = _bits(everywhere.values()) if is_first or self._is_due else []
        names = hashlib.blake2b(" ".join(sorted(grads)).encode(), digest_size=16).hexdigest()
        facts: dict[str, Any] = {"Numbers of steps and data": numbers, "Parameters with gradients": names}
        if is_first:
            facts["Values of parameters"] = values
        if self._left:
            self._left -= 1
            facts["Gradients"] = _bits(g for n, g in grads.items() if n in everywhere)
        squares = frozenset() if sums is None else frozenset(sums.squares)
        reports = self.ranks.gather("statistics of a step", _Report(facts, _without_tensors(sums), squares, values))
        _compare([report.facts for report in reports])
        if any(report.values != reports[0].values for report in reports):
            self._take_over(everywhere)
        told = [report.sums for report in reports if report.sums is not None]
        if not told:
            return None
        result = _over_ranks(told)
        mine = StepSums(0) if sums is None else sums
        result.inputs = mine.inputs
        if result.blocks:
            device = next(iter(params.values())).device
            result.blocks, conflicts = self._blocks(mine.blocks, device, products)
            result.uncovered |= not_covered([], [], set(), conflicts)
        for key in sorted(frozenset().union(*(report.squares for report in reports))):
            eigen = averages[key].eigen
            assert eigen is not None  # noqa: S101 (its basis is what squares were computed in)
            result.squares[key] = mine.squares.get(key, torch.zeros_like(eigen.values))
        return result

    def _take_over(self, params: Mapping[str, Tensor]) -> None:
        """Let all ranks have the parameters of the first one."""
        copy_from(self.ranks, 0, params.values())
        if not self._differed:
            log.warning(
                "kfs.optim: parameters differ between processes, which may have other hardware or numbers of threads. "
                "Those of rank 0 are taken over, now and whenever this happens in a step with new factors."
            )
        self._differed = True

    def _blocks(
        self, mine: Mapping[Key, BlockSums], device: torch.device, products: Products
    ) -> tuple[dict[Key, BlockSums], set[tuple[str, str]]]:
        """Return the blocks of all ranks, with counts over all of them, and totals of this one."""
        # A recorded pass writes to its own totals again. Counts are for this step alone.
        blocks = {key: block.shared() for key, block in mine.items()}
        result, conflicts = agreed_blocks(self.ranks, blocks, device, products)
        # How two roles of a weight are combined depends on their totals. They are not summands: the last rank has all.
        tied = [block for block in result.values() if len(block.roles) > 1]
        if tied:
            add_up_totals(self.ranks, tied)
        for s in (s for block in tied for s in block.sums):
            if self.ranks.rank < self.ranks.size - 1:
                s.total = torch.zeros_like(s.total)
        return result, conflicts

    def numbering(self) -> Callable[[int], tuple[int, int]]:
        """Return what numbers the data of a forward pass that begins.

        Given how many data this rank has, it returns how many data of other ranks come before them, and how many there
        are on all ranks. It is called in the backward pass. Within `no_sync()`, where ranks do not wait for each other,
        all are taken to have as many data.
        """
        synchronizes = self.wrapper is None or self.wrapper.require_backward_grad_sync
        return self._place_of_data if synchronizes else self._place_without_asking

    def _place_of_data(self, num_data: int) -> tuple[int, int]:
        counts = self.ranks.gather("numbers of data of a pass", num_data)
        return sum(counts[: self.ranks.rank]), sum(counts)

    def _place_without_asking(self, num_data: int) -> tuple[int, int]:
        return self.ranks.rank * num_data, self.ranks.size * num_data

    def mean(self, value: float) -> float:
        """Return the mean over ranks of a loss. Its gradient is the mean over ranks of gradients."""
        values = self.ranks.gather("losses", value)
        return sum(values) / len(values)

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum over ranks of a small tensor on the CPU."""
        return torch.stack(self.ranks.gather("curvature along a step", t)).sum(0)


def _over_ranks(told: list[StepSums]) -> StepSums:
    """Return counts and coverage over all ranks."""
    # A rank without examples says nothing about coverage.
    telling = [sums for sums in told if sums.blocks or sums.uncovered]
    silent = [sums for sums in told if not (sums.blocks or sums.uncovered)]
    result, *others = telling or [StepSums(0)]
    for other in others:
        result.merge(other)
    for other in silent:
        other.uncovered = dict(result.uncovered)
        result.merge(other)
    return result


def _compare(facts: list[dict[str, Any]]) -> None:
    """Refuse ranks that differ."""
    for what, way_out in _WAYS_OUT.items():
        first = facts[0].get(what)
        other = next((rank for rank, one in enumerate(facts) if one.get(what) != first), None)
        if other is not None:
            raise DistributedError(f"{what} differ between the processes of ranks 0 and {other}.", way_out)


def _bits(tensors: Iterable[Tensor]) -> list[int]:
    """Return sums over the bits of tensors, read as integers; the device is asked once."""
    sums = [
        t.detach().contiguous().view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64).reshape(1) for t in tensors
    ]
    with waiting.waiting_allowed():
        result: list[int] = torch.cat([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return result


def _without_tensors(sums: StepSums | None) -> StepSums | None:
    """Return what others have to know besides totals."""
    if sums is None:
        return None
    blocks = {key: BlockSums(block.layout, block.sharing) for key, block in sums.blocks.items()}
    return replace(sums, blocks=blocks, squares={}, inputs=[])
