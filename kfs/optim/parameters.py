"""Which parameters an optimizer has: their names in the model, their groups, and that no other optimizer has them."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from kfs.errors import ModelError

_OWNERS: Any = WeakIdKeyDictionary()  # by parameter: a weak reference to the parameters of the optimizer that has it


class Parameters:
    """The parameters of an optimizer.

    Args:
        model: The model that they belong to.
        groups: The optimizer's parameter groups.

    Attributes:
        tensors: By name.
        groups: The group of each, by name.
        closed: Whether other optimizers may have them.

    Raises:
        ModelError: If a parameter is not one of the model, or another optimizer has it.
    """

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]]) -> None:
        """Find names."""
        self._model = model
        self.closed = False
        self.tensors: dict[str, Tensor] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.read(groups)

    def read(self, groups: list[dict[str, Any]]) -> None:
        """Find names, after groups have changed."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        found = [(p, group) for group in groups for p in group["params"]]
        strange = [list(p.shape) for p, _ in found if id(p) not in names]
        if strange:
            raise ModelError(
                f"Parameters of shapes {strange} are not parameters of the model.",
                "Pass those of the model itself, not of a copy: its forward pass is what is watched.",
            )
        methods = {str(group["method"]) for group in groups} - {"kfac", "adamw"}
        if methods:
            raise ModelError(f"A group has the method {methods.pop()!r}.", "Choose 'kfac' or 'adamw'.")
        if len({group["momentum"] for group in groups}) > 1:
            raise ModelError(
                "Parameter groups differ in their momentum, but weights and biases are averaged together.",
                "Give all groups the same momentum.",
            )
        self._claim([p for p, _ in found])
        self.tensors = {names[id(p)]: p for p, _ in found}
        self.groups = {names[id(p)]: group for p, group in found}
        self._known = [(p, tuple(p.shape)) for p in self._model.parameters()]

    def trainable(self) -> dict[str, Tensor]:
        """Return those that KFAC is meant for and that require gradients."""
        return {n: p for n, p in self.tensors.items() if p.requires_grad and self.groups[n]["method"] == "kfac"}

    def are_the_models(self) -> bool:
        """Whether the model has the parameters that it had; while `functional_call` runs it, it has not."""
        now = list(self._model.parameters())
        return len(now) == len(self._known) and all(
            p is q and p.shape == shape for p, (q, shape) in zip(now, self._known, strict=True)
        )

    def check_model(self) -> None:
        """Refuse a model that has other parameters than before.

        Raises:
            ModelError: If parameters were replaced, added, removed or reshaped.
        """
        if self.are_the_models():
            return
        now = list(self._model.named_parameters())
        known = {id(q): shape for q, shape in self._known}
        changed = [name for name, p in now if known.get(id(p)) != tuple(p.shape)]
        what = f"parameters {changed} are new" if changed else "parameters were removed"
        raise ModelError(
            f"The model has changed since the optimizer was made: {what}.",
            "Make a new optimizer (close() the old one first), or add_param_group() for parameters that were added.",
        )

    def check_device(self, device: torch.device) -> None:
        """Refuse a model that was moved away from its statistics."""
        where = {p.device for p in self.tensors.values()}
        if device not in where:
            raise ModelError(
                f"The model is on {', '.join(sorted(map(str, where)))}, but the optimizer's state is on {device}.",
                "Move the model first and make the optimizer then; a state can be taken over with load_state_dict().",
            )

    def _claim(self, params: list[Tensor]) -> None:
        """Make sure that nobody else has these parameters."""
        if self._others(params):
            gc.collect()  # one that nobody can reach any more
        if self._others(params):
            raise ModelError(
                "Another KFAC optimizer has parameters of this model; both would watch its passes.",
                "Call close() of the other one first, or give them different parameters with params=.",
            )
        for p in params:
            _OWNERS[p] = weakref.ref(self)

    def _others(self, params: list[Tensor]) -> bool:
        owners = [owner() for p in params if (owner := _OWNERS.get(p)) is not None]
        return any(owner is not None and owner is not self and not owner.closed for owner in owners)


def check_one_process() -> None:
    """Refuse training in several processes: each would see its own data, and take other steps than the others.

    Raises:
        ModelError: If there are several.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        raise ModelError(
            f"There are {torch.distributed.get_world_size()} processes, and curvature is not exchanged between them.",
            "Train in one process; more GPUs' worth of data fit through accumulated gradients.",
        )
