"""What the processes of a training tell each other in a step.

The user's gradients are averages over ranks already: `DistributedDataParallel` or the user's own loop has seen to that.
What this adds: counts and coverage over all ranks, numbers of data for labels that are drawn, flags that are true on
all ranks, losses that are means over ranks, and errors that all ranks raise. How factors and inverses travel lives in
`owners`.

In steps with new factors, ranks compare what they compute steps from: parameters, gradients, buffers that passes do not
change, modes, schedules and options. What differs is an error on all ranks, which names it. Each rank multiplies
gradients with inverses itself. Other hardware, or another number of threads, may round that in another way: where
parameters differ by round-off, ranks take over those of the first one.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from kfs import waiting
from kfs.distributed import Group, Ranks, Same, check_same, checksums, copy_from
from kfs.distributed.summing import digest_of, refuse_different
from kfs.errors import DistributedError, KfsError, ModelError
from kfs.kfac.coverage import not_covered
from kfs.kfac.layout import Key
from kfs.kfac.settings import Products
from kfs.kfac.sums import BlockSums, add_up_totals, agreed_blocks
from kfs.losses import describe
from kfs.names import few
from kfs.optim.averages import Average
from kfs.optim.fully_sharded import group_of
from kfs.optim.step_sums import StepSums
from kfs.sharded import is_sharded, model_to_run
from kfs.state import equal_up_to_round_off

log = logging.getLogger("kfs.optim")
# In so many steps, parameters and gradients are compared also if there are no new factors.
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
    "Buffers": "Copy those of rank 0: for b in model.buffers(): torch.distributed.broadcast(b, 0).",
}
_MADE_WITH = "settings of the optimizer"
_NO_SETTINGS = {"self", "model", "loss", "params", "group"}
P = ParamSpec("P")
R = TypeVar("R")


def agreed(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a method of an optimizer end in the same way on all ranks.

    Args:
        where: What it does, in words.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with cast("Any", args[0])._exchange.ranks.agreed(where):
                return method(*args, **kwargs)

        return run

    return decorate


def made_by_all(init: Callable[P, None]) -> Callable[P, None]:
    """Let an optimizer be made in the same way on all ranks, with the same settings, and with errors of all."""

    @wraps(init)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = dict(zip(("self", "model", "loss"), args, strict=False)) | kwargs
        ranks = Ranks()
        with suppress(KfsError):  # It is raised again below.
            if isinstance(given.get("model"), nn.Module):
                ranks = Exchange.of(given["model"], given.get("group"))[1].ranks
        with ranks.agreed("kfs.optim.KFAC"):
            init(*args, **kwargs)
            bound = signature(init).bind(*args, **kwargs)
            bound.apply_defaults()
            settings = {n: _plain(value) for n, value in bound.arguments.items() if n not in _NO_SETTINGS}
            loss = describe(bound.arguments["loss"]).attributes()
            names = {name: list(p.shape) for name, p in model_to_run(bound.arguments["model"]).named_parameters()}
            facts = {"Settings": settings, "Losses": loss, "Shapes of parameters": names}
            way_out = "Make the optimizer with the same model, loss and settings in all processes."
            exchange: Exchange = given["self"]._exchange
            exchange.made_with = {n: Same(values, way_out) for n, values in facts.items()}
            if ranks.are_several:
                check_same(ranks, _MADE_WITH, exchange.made_with)
                exchange.unchanged_buffers()  # The first step compares those that it has not changed.

    return run


def _plain(value: Any) -> Any:
    """Return a setting, or what a function is called: its values are compared when they are used."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


class _Report(NamedTuple):
    """What a rank tells about a step."""

    facts: bytes  # digest of what must be the same everywhere
    sums: StepSums | None  # without tensors; `None` without a pass
    squares: frozenset[Key]  # blocks with squared gradients
    values: list[int]  # checksums of parameters and gradients, if they are compared
    buffers: dict[str, int]  # checksums of those that passes have not changed


class _Buffer(NamedTuple):
    """What is known about a buffer."""

    tensor: Tensor
    version: int  # PyTorch counts its changes.
    checksum: int | None = None  # It is computed when the buffer has not changed for a while.


@dataclass(eq=False)
class Exchange:
    """What processes tell each other.

    Attributes:
        ranks: Who takes part; one process alone exchanges nothing.
        wrapper: The model that averages gradients, if it is known.
        model: The model that computes predictions. It is not kept alive.
        made_with: What the optimizer was made with, which must be the same on all ranks.
    """

    ranks: Ranks
    wrapper: DistributedDataParallel | None = None
    model: "weakref.ref[nn.Module] | None" = None
    made_with: "dict[str, Same]" = field(default_factory=dict)
    _buffers: "dict[str, _Buffer]" = field(default_factory=dict)
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
            return module, cls(Ranks(group_of(module, group)), model=weakref.ref(module))
        if group is not None:
            raise ModelError(
                "The model is a DistributedDataParallel, which has a group, and group= was given, too.",
                "Leave group= out.",
            )
        return module, cls(Ranks(model.process_group), model, weakref.ref(module))

    def finds_wrapper(self, model: nn.Module) -> bool:
        """Whether a `DistributedDataParallel` model that was made after the optimizer calls the model now.

        Then its processes train together from now on.

        Raises:
            DistributedError: If their optimizers were made in different ways. All of them raise it.
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
        told: Callable[[], Mapping[str, Mapping[str, Any]]],
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        averages: Mapping[Key, Average],
        products: Products,
    ) -> StepSums | None:
        """Return what the passes of all ranks gave: counts over all of them, blocks of all of them, own totals.

        Args:
            sums: What the passes of this rank gave.
            told: Returns what else must be the same on all ranks, by kind and name.
            params: All parameters.
            grads: All gradients; of sharded parameters, this rank's part.
            averages: Averages of known blocks.
            products: Precision in which vectors are multiplied.

        Raises:
            DistributedError: If ranks are not at the same step of the same training.
        """
        if not self._talks:
            return sums
        # Parts of sharded tensors differ, of course.
        everywhere = {n: p for n, p in params.items() if not is_sharded(p)}
        found = {n: g for n, g in grads.items() if n in everywhere}
        facts = {**told(), "Parameters with gradients": {n: list(params[n].shape) for n in sorted(grads)}}
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
        squares = frozenset() if sums is None else frozenset(sums.squares)
        report = _Report(digest_of(same), _without_tensors(sums), squares, values, buffers)
        reports = self.ranks.gather("statistics of a step", report)
        refuse_different(self.ranks, same, [report.facts for report in reports])
        self._compare(reports, everywhere, found)
        of_ranks = [report.sums for report in reports if report.sums is not None]
        if not of_ranks:
            return None
        result = _over_ranks(of_ranks)
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

    def _module(self) -> nn.Module:
        """Return the model, or an empty one if nobody knows it."""
        model = None if self.model is None else self.model()
        return nn.Module() if model is None else model

    def unchanged_buffers(self) -> dict[str, int]:
        """Return checksums of buffers that nobody has changed since the last call; each is computed once.

        Statistics that passes change, such as counts, are those of each rank's data. Nor does a normalization read its
        running statistics in training mode; it changes them without saying so.
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
        """Refuse buffers, gradients and parameters that differ between ranks by more than round-off."""
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
        """Refuse tensors that differ from those of the first rank by more than round-off."""
        first = {name: t.detach().clone() for name, t in tensors.items()}
        copy_from(self.ranks, 0, first.values())
        with waiting.waiting_allowed():
            apart = [name for name, t in tensors.items() if not equal_up_to_round_off(first[name], t.detach())]
        for rank, names in enumerate(self.ranks.gather("differences", apart)):
            if names:
                text = f"{what} differ between processes: {few(names)} of rank {rank} are not as on rank 0."
                raise DistributedError(text, _WAYS_OUT[what])

    def _take_over(self, params: Mapping[str, Tensor]) -> None:
        """Let all ranks have the parameters of the first one."""
        copy_from(self.ranks, 0, params.values())
        if not self._differed:
            log.warning(
                "kfs.optim: parameters differ between processes by round-off, which may have other hardware or numbers "
                "of threads. Those of rank 0 are taken over, now and whenever this happens in a step with new factors."
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


def _without_tensors(sums: StepSums | None) -> StepSums | None:
    """Return what others have to know besides totals."""
    if sums is None:
        return None
    blocks = {key: BlockSums(block.layout, block.sharing) for key, block in sums.blocks.items()}
    return replace(sums, blocks=blocks, squares={}, inputs=[])
