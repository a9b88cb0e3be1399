"""The parameters of an optimizer: their names in the model, their groups, and their exclusive ownership."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from kfs.errors import KfsWarning, ModelError, StorageError
from kfs.factors.layout import Layout
from kfs.optim.fsdp import reshard
from kfs.optim.options import check_groups
from kfs.optim.report import user_stacklevel
from kfs.problem.parameters import refuse_scripted
from kfs.problem.whole_parameters import is_sharded

# By parameter: a weak reference to the `Parameters` that it belongs to.
_OWNERS: Any = WeakIdKeyDictionary()


class Parameters:
    """The parameters of an optimizer.

    Args:
        model: The model that contains them.
        groups: The optimizer's parameter groups.
        close: A method that closes the optimizer. It is called when another optimizer takes the model over. Only a weak
            reference to it is stored.
        kind: The name of its kind, for messages.

    Attributes:
        tensors: Parameters by name.
        groups: Parameter groups by name of the parameter.
        closed: Whether the optimizer was closed, so that other optimizers may own the parameters.
        close: Weak reference to the method that closes the optimizer.
    """

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], close: Callable[[], None], kind: str) -> None:
        """Look up names, and take the parameters over from an earlier optimizer of the same model."""
        refuse_scripted(model, [("", model)])  # scripted parts of a model are trained by AdamW
        self.closed = False
        self.kind = kind
        self._taken_over = False
        self._model = model
        self.close = weakref.WeakMethod(close)
        self.read(groups, take_over=True)

    def read(self, groups: list[dict[str, Any]], take_over: bool = False) -> None:
        """Look up names, after groups have changed.

        Args:
            groups: The optimizer's parameter groups.
            take_over: Whether to close another optimizer of the same model that owns some of the parameters.

        Raises:
            ModelError: If a parameter does not belong to the model, another optimizer owns it, or a group has an
                invalid setting.
        """
        reshard(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        found = [(p, group) for group in groups for p in group["params"]]
        strange = [list(p.shape) for p, _ in found if id(p) not in names]
        if strange:
            raise ModelError(
                f"Parameters of shapes {strange} are not parameters of the model.",
                "Pass parameters of the model itself, not of a copy: its forward pass is watched.",
            )
        check_groups(groups)
        if len({group.get("momentum") for group in groups}) > 1:
            raise ModelError(
                "Parameter groups differ in their momentum, but weights and biases are averaged together.",
                "Give all groups the same momentum.",
            )
        self._claim([p for p, _ in found], take_over)
        self.tensors: dict[str, Tensor] = {names[id(p)]: p for p, _ in found}
        self.groups: dict[str, dict[str, Any]] = {names[id(p)]: group for p, group in found}
        self._shapes = self._shapes_now()
        # Modules with their children and parameters, to compare quickly. They stay alive, so their ids stay unique.
        self._parts = [(m, list(m._modules.values()), list(m._parameters.values())) for m in self._model.modules()]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.tensors.values())).device

    def ordered(self, groups: list[dict[str, Any]]) -> list[str]:
        """Return parameter names in the order of groups."""
        names = {id(p): name for name, p in self.tensors.items()}
        return [names[id(p)] for group in groups for p in group["params"]]

    def check_open(self) -> None:
        """Raise if the optimizer was closed."""
        if self._taken_over:
            raise ModelError(
                f"The model of this {self.kind} was taken over by another KFAC optimizer, which was made later for the "
                "same model and watches its passes now.",
                "Use the new optimizer, or make one again and use only that.",
            )
        if self.closed:
            raise ModelError(f"This {self.kind} was closed.", f"Make a new {self.kind}.")

    def trainable(self) -> dict[str, Tensor]:
        """Return parameters in groups for KFAC that require gradients, by name."""
        return {n: p for n, p in self.tensors.items() if p.requires_grad and self.groups[n]["method"] == "kfac"}

    def are_the_models(self) -> bool:
        """Whether the model still has the same parameters. `functional_call` replaces them while it runs."""
        for module, children, params in self._parts:
            now = list(module._parameters.values())
            same = len(now) == len(params) and all(map(_is_same, now, params))
            if not same or list(module._modules.values()) != children:
                return False
        return all(p.shape == self._shapes[id(p)] for _, _, params in self._parts for p in params if p is not None)

    def check_model(self) -> None:
        """Raise if parameters of the model were replaced, added, removed or reshaped."""
        reshard(self._model)
        if self.are_the_models():
            return
        changed = [name for name, p in self._model.named_parameters() if self._shapes.get(id(p)) != p.shape]
        what = f"parameters {changed} are new" if changed else "parameters were removed"
        raise ModelError(
            f"The model has changed since the optimizer was made: {what}.",
            "Make a new optimizer (close() the old one first), or add_param_group() for parameters that were added.",
        )

    def check_device(self, device: torch.device) -> None:
        """Raise if the model was moved away from the device of the optimizer's state."""
        where = {p.device for p in self.tensors.values()}
        if device not in where:
            raise ModelError(
                f"The model is on {', '.join(sorted(map(str, where)))}, but the optimizer's state is on {device}.",
                "Move the model first, then make the optimizer; load_state_dict() takes over a state.",
            )

    def check_blocks(self, averages: Iterable[Mapping[str, Any]]) -> None:
        """Raise if the averages of a state belong to another model."""
        layouts = [Layout.from_state(average["layout"]) for average in averages]
        sizes = {n: p.numel() for n, p in self.tensors.items()}
        strange = [x.name for x in layouts if sizes.get(x.weight) != prod(x.shape) or (x.bias or x.weight) not in sizes]
        if strange:
            raise StorageError(
                f"The state has blocks {strange}, which this model does not have.",
                "Load it for the model that it was saved for.",
            )

    def _shapes_now(self) -> dict[int, torch.Size]:
        return {id(p): p.shape for p in self._model.parameters()}

    def _claim(self, params: list[Tensor], take_over: bool) -> None:
        """Register these parameters as owned by this optimizer."""
        if self._other_owners(params):
            gc.collect()  # The other optimizer may be unreachable.
        others = self._other_owners(params)
        if others and not (take_over and all(other._model is self._model for other in others)):
            raise ModelError(
                "Another KFAC optimizer has parameters of this model; both would watch its passes.",
                "Call close() of the other one first, or give them different parameters with params=.",
            )
        if others:
            text = "A KFAC optimizer for this model exists already. The new one takes the model over, and the first "
            text += "one's step() raises from now on. To avoid this warning, call close() of the first one before."
            warnings.warn(text, KfsWarning, stacklevel=user_stacklevel())
        for other, close in others.items():
            close()
            other._taken_over = True
        for p in params:
            _OWNERS[p] = weakref.ref(self)

    def _other_owners(self, params: list[Tensor]) -> dict["Parameters", Callable[[], None]]:
        """Return other open optimizers that own some of these parameters, and the method that closes each of them."""
        owners = {owner() for p in params if (owner := _OWNERS.get(p)) is not None} - {None, self}
        open_ones = [owner for owner in owners if not owner.closed]
        return {owner: close for owner in open_ones if (close := owner.close()) is not None}


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether this is the same parameter object, or its unsharded copy."""
    if now is before:
        return True
    is_whole = isinstance(now, nn.Parameter) and not is_sharded(now)
    return is_whole and is_sharded(before) and before is not None and now is not None and now.shape == before.shape
