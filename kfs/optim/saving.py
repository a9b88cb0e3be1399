"""The optimizer's state, for a file."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from kfs.errors import DistributedError, ModelError
from kfs.optim.averages import Average, copied_to
from kfs.optim.curvature import Curvature
from kfs.optim.exchange import Exchange
from kfs.optim.outstanding import Outstanding
from kfs.optim.owners import whole
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic import QuadraticModel
from kfs.optim.updates import read_state
from kfs.optim.watch import Watch


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
    _whole: list[Average] | None  # averages over the data of all processes, until the next step

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continued training needs to equal one that was never stopped.

        In several processes, call `consolidate_state_dict()` first, in all of them.

        Raises:
            DistributedError: If that was not done since the last step.
        """
        averages: Iterable[Average] = self._curvature.averages.values()
        if self._exchange.ranks.size > 1 and averages:
            if self._whole is None:
                raise DistributedError(
                    "Each process has a part of the optimizer's state.",
                    "Call consolidate_state_dict() of the optimizer in all processes, then state_dict() in one.",
                )
            averages = self._whole
        self._outstanding.settle(self.state)
        state = super().state_dict()
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
        self._whole = whole(self._exchange.ranks, self._curvature.averages.values())

    def __reduce__(self) -> Any:
        """Refuse copies: two optimizers would watch one model."""
        raise ModelError(
            "An optimizer that watches a model cannot be copied or pickled.",
            "Copy its state: KFAC(other_model, ...).load_state_dict(optimizer.state_dict()).",
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`. In several processes, load the same state in all of them.

        Their number need not be that of the processes which have saved it.

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
