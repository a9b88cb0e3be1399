"""The optimizer's state, for a file.

Functions of `torch.distributed.checkpoint` know states by parameter alone, and take those of a new optimizer as a
pattern of what to read. All ranks call them, so averages are added up there and then. The pattern of a new optimizer,
which has not seen the model run, has all entries that a later state has: momentum by parameter, and one number at the
first parameter that carries everything else.
"""

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfs.errors import DistributedError, ModelError, StorageError
from kfs.nested import mapped
from kfs.optim.averages import Average, copied_to
from kfs.optim.curvature import Curvature
from kfs.optim.divergence import LossTrend, UsualSizes
from kfs.optim.exchange import Exchange, agreed
from kfs.optim.fully_sharded import part_of
from kfs.optim.outstanding import Outstanding
from kfs.optim.owners import whole as over_all_data
from kfs.optim.parameters import Parameters
from kfs.optim.quadratic import QuadraticModel
from kfs.optim.step_scale import StepScale
from kfs.optim.updates import keep_mean_step, read_state, state_of
from kfs.optim.watch import Watch
from kfs.sharded import is_sharded, whole

# The entry of the first parameter's state that carries all that does not belong to one parameter.
_CARRIER = "kfac"


class Carrier(int):
    """A zero that carries a state: checkpoints let tensors and numbers through, and tensors only of known shapes."""

    carried: Any

    def __new__(cls, carried: Any = None) -> "Carrier":
        """Take a state along."""
        result = super().__new__(cls, 0)
        result.carried = carried
        return result

    def __reduce__(self) -> Any:
        """Copy the state, too."""
        return Carrier, (self.carried,)


torch.serialization.add_safe_globals([Carrier])


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
    _gradient_sizes: UsualSizes
    _trend: LossTrend
    _scale: StepScale | None
    _whole: Consolidated | None  # what `consolidate_state_dict` has made, until the next step

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a continued training needs to equal one that was never stopped.

        In several processes, call `consolidate_state_dict()` first, in all of them. Of a sharded model, tensors are
        whole: the state is that of a plain model in one process. `get_optimizer_state_dict` and others of
        `torch.distributed.checkpoint` need no call before, and leave tensors sharded.

        Raises:
            DistributedError: If that was not done since the last step.
        """
        if _is_for_checkpoint():
            return self._state_by_parameter()
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
            i: {name: tensors.get(id(value), value) for name, value in one.items() if name != _CARRIER}
            for i, one in state["state"].items()
        }
        state["kfac"] = self._own_state(averages)
        return state

    def _own_state(self, averages: Iterable[Average]) -> dict[str, Any]:
        """Return all that is not the state of one parameter, given averages over the data of all processes."""
        return {
            "curvature": self._curvature.state(averages),
            "steps": self.steps,
            "first_datum": self._watch.first_datum,
            "unit": self._unit,
            "gradient_sizes": self._gradient_sizes.state(),
            "losses": self._trend.state(),
            "step_scale": None if self._scale is None else self._scale.state(),
            "uncovered": dict(self.uncovered),
            "tracked": sorted(self._tracked),
            "previous": {} if self._quadratic is None else dict(self._quadratic.previous),
        }

    def _is_first_step_of_checkpoint(self) -> bool:
        """Whether a step is there to make a state: the first one, without pass, with gradients and rates of zero."""
        if self.state or self.steps or self._watch.has_passes or any(group["lr"] for group in self.param_groups):
            return False
        grads = [part_of(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(bool(g.any()) for g in grads)

    def _fill_state(self) -> None:
        """Make the state of all parameters that are trained, where there is none yet, with a place for the carrier."""
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p, group in trained:
            adamw = group["method"] == "adamw" or "exp_avg" in self.state[p]
            state_of(self.state, p, adamw)
            if self._scale is not None and not adamw:
                keep_mean_step(self.state, p)
        self._keep_place_for_carrier()

    def _keep_place_for_carrier(self) -> None:
        """Let the state of the first trained parameter have an entry for the carrier: others are not read again."""
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        for p in islice(trained, 1):
            self.state[p].setdefault(_CARRIER, Carrier())

    def _state_by_parameter(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which all ranks ask for. Tensors of sharded parameters are sharded."""
        self._outstanding.settle(self.state)
        self._fill_state()
        averages = over_all_data(self._exchange.ranks, self._curvature.averages.values())
        state = super().state_dict()
        adamw: dict[str, Any] = {}  # states of parameters that were to have curvature, and turned out not to be covered
        packed = [i for group in state["param_groups"] for i in group["params"]]
        for i, name in zip(packed, self._params.ordered(self.param_groups), strict=True):
            mine = dict(state["state"].get(i, {}))
            if "exp_avg" in mine and self._params.groups[name]["method"] == "kfac":
                adamw[name] = {key: mine[key] for key in ("exp_avg", "exp_avg_sq", "age")}
                # What a new optimizer has at this place.
                mine = {key: value for key, value in mine.items() if key == _CARRIER}
                names = ("average",) if self._scale is None else ("average", "mean_step")
                mine |= {"age": 0} | {key: torch.zeros_like(adamw[name]["exp_avg"]) for key in names}
            if mine:
                state["state"][i] = mine
        carried = {"kfac": self._own_state(averages), "adamw": mapped(adamw, whole)}
        carriers = (one for one in state["state"].values() if _CARRIER in one)
        for one in islice(carriers, 1):
            one[_CARRIER] = Carrier(copied_to(torch.device("cpu"), carried))  # A file may be written later.
        return state

    def _from_checkpoint(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Undo `_state_by_parameter`; other states are returned as they are."""
        found = [one[_CARRIER] for one in state.get("state", {}).values() if _CARRIER in one]
        carried = next((one.carried for one in found if isinstance(one, Carrier) and one.carried), None)
        if "kfac" in state or carried is None:
            return dict(state)
        result: dict[Any, Any] = {}
        packed = [i for group in state["param_groups"] for i in group["params"]]
        for i, name in zip(packed, self._params.ordered(self.param_groups), strict=False):
            mine = carried["adamw"].get(name, state["state"].get(i, {}))
            result[i] = {key: value for key, value in mine.items() if key != _CARRIER}
        return {**state, "state": result, "kfac": carried["kfac"]}

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

    def _check_complete(self, mine: Mapping[str, Any]) -> None:
        """Refuse a state that lacks something, before anything is changed."""
        own = self._own_state(())
        missing = (own.keys() - mine.keys()) | (own["curvature"].keys() - mine["curvature"].keys())
        for average in mine["curvature"]["averages"]:
            missing |= Average.stored() - average.keys()
        if missing:
            raise StorageError(
                f"The state has no {', '.join(sorted(missing))}: another version of kfs has written it.",
                "Load it with that version, or train on without it: averages are known again after a few steps.",
            )

    @torch.no_grad()
    @agreed("load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`. In several processes, load the same state in all of them.

        Their number need not be that of the processes which have saved it, and the model may be sharded or not. Tensors
        may be sharded themselves, in any way.

        Raises:
            StorageError: If the state is that of another optimizer, of another model, or of another version of kfs.
        """
        self._params.check_open()
        state_dict = self._from_checkpoint(state_dict)
        self._params.check_state(state_dict)
        mine = state_dict["kfac"]
        self._check_complete(mine)
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
        self._gradient_sizes.restore(mine["gradient_sizes"])
        self._trend = LossTrend.from_state(mine["losses"])
        if self._scale is not None and mine["step_scale"] is not None:
            self._scale.restore(mine["step_scale"])
        self._tracked = frozenset(mine["tracked"])
        if self._quadratic is not None:
            self._quadratic.previous = copied_to(device, mine["previous"])
        self._params.read(self.param_groups)
        if self.state:
            self._keep_place_for_carrier()


def _is_for_checkpoint() -> bool:
    """Whether a function of `torch.distributed.checkpoint` asks for a state; maybe by another optimizer around it."""
    frame = sys._getframe()
    for _ in range(5):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
    return False
