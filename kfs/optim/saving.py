"""The optimizer's state, for a file."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfs.errors import DistributedError, ModelError
from kfs.optim.averages import Average, copied_to
from kfs.optim.curvature import Curvature
from kfs.optim.exchange import Exchange, agreed
from kfs.optim.outstanding import Outstanding
from kfs.optim.owners import whole as over_all_data
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic import QuadraticModel
from kfs.optim.updates import read_state
from kfs.optim.watch import Watch
from kfs.sharded import is_sharded, whole


class Consolidated(NamedTuple):
    """The state of all processes, in each of them.

    Attributes:
        averages: Over the data of all processes.
        tensors: Whole tensors on the CPU, by identity of the ones that are sharded.
    """

    averages: list[Average]
    tensors: dict[int, Tensor]


class Saved(Optimizer):
    """Gives an optimizer its state, and reads it."""

    steps: int
    uncovered: dict[str, str]
    _unit: float
    _tracked: frozenset[str]
    _params: Parameters
    _curvature: Curvature
    _outstanding: Outstanding
    _watch: Watch
    _quadratic: QuadraticModel | None
    _exchange: Exchange
    _whole: Consolidated | None  # what `consolidate_state_dict` has made, until the next step

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continued training needs to equal one that was never stopped.

        In several processes, call `consolidate_state_dict()` first, in all of them. Of a sharded model, tensors are
        whole: the state is that of a plain model in one process.

        Raises:
            DistributedError: If that was not done since the last step.
        """
        averages: Iterable[Average] = self._curvature.averages.values()
        self._outstanding.settle(self.state)
        if self._exchange.ranks.size == 1:
            tensors = self._whole_tensors()
        elif self._whole is not None:
            averages, tensors = self._whole
        elif averages:
            raise DistributedError(
                "Each process has a part of the optimizer's state.",
                "Call consolidate_state_dict() of the optimizer in all processes, then state_dict() in one.",
            )
        else:
            tensors = {}  # Before the first step, there is no state.
        state = super().state_dict()
        state["state"] = {
            i: {name: tensors.get(id(value), value) for name, value in one.items()} for i, one in state["state"].items()
        }
        state["kfac"] = {
            "curvature": self._curvature.state(averages),
            "steps": self.steps,
            "first_datum": self._watch.first_datum,
            "unit": self._unit,
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
            "previous": {} if self._quadratic is None else dict(self._quadratic.previous),
        }
        return state

    @torch.no_grad()
    @agreed("consolidate_state_dict()")
    def consolidate_state_dict(self) -> None:
        """Add up the state of all processes, so that each of them can call `state_dict()` before the next step.

        All processes have to call it. In one process it does nothing. `torch.distributed.optim.ZeroRedundancyOptimizer`
        has a method of the same name.

        Example:
            >>> from kfs.optim import KFAC
            >>> optimizer = KFAC(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss())
            >>> optimizer.consolidate_state_dict()
            >>> state = optimizer.state_dict()
        """
        self._outstanding.settle(self.state)
        averages = over_all_data(self._exchange.ranks, self._curvature.averages.values())
        self._whole = Consolidated(averages, self._whole_tensors())

    def _whole_tensors(self) -> dict[int, Tensor]:
        """Return all that is sharded in the state of parameters, on the CPU, by identity of what is sharded."""
        sharded = [t for one in self.state.values() for t in one.values() if is_sharded(t)]
        return {id(t): whole(t).cpu() for t in sharded}

    def __reduce__(self) -> Any:
        """Refuse copies: two optimizers would watch one model."""
        raise ModelError(
            "An optimizer that watches a model cannot be copied or pickled.",
            "Copy its state: KFAC(other_model, ...).load_state_dict(optimizer.state_dict()).",
        )

    @torch.no_grad()
    @agreed("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`. In several processes, load the same state in all of them.

        Their number need not be that of the processes which have saved it, and the model may be sharded or not. Tensors
        may be sharded themselves, in any way.

        Raises:
            StorageError: If the state is that of another optimizer, or of another model.
        """
        self._params.check_open()
        self._params.check_state(state_dict)
        mine = state_dict["kfac"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
        read_state(self.state, self.param_groups, state_dict)
        device = next(iter(self._params.tensors.values())).device
        self._curvature.restore(mine["curvature"], device)
        self._outstanding.forget()
        self._exchange.start_again()
        self._whole = None
        self.steps = mine["steps"]
        self.uncovered = dict(mine["uncovered"])
        self._watch.first_datum = mine["first_datum"]
        self._unit = mine["unit"]
        self._tracked = frozenset(mine["tracked"])
        if self._quadratic is not None:
            self._quadratic.previous = copied_to(device, mine["previous"])
        self._params.read(self.param_groups)
