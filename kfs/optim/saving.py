"""The optimizer's state, for a file."""

from typing import Any

import torch
from torch.optim import Optimizer

from kfs.optim.averages import copied_to
from kfs.optim.curvature import Curvature
from kfs.optim.outstanding import Outstanding
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

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continued training needs to equal one that was never stopped."""
        self._outstanding.settle(self.state)
        state = super().state_dict()
        state["kfac"] = {
            "curvature": self._curvature.state(),
            "steps": self.steps,
            "first_datum": self._watch.first_datum,
            "unit": self._unit,
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
            "previous": {} if self._quadratic is None else dict(self._quadratic.previous),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`.

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
        self.steps = mine["steps"]
        self.uncovered = dict(mine["uncovered"])
        self._watch.first_datum = mine["first_datum"]
        self._unit = mine["unit"]
        self._tracked = frozenset(mine["tracked"])
        if self._quadratic is not None:
            self._quadratic.previous = copied_to(device, mine["previous"])
        self._params.read(self.param_groups)
