"""Parameters that accelerate has offloaded to the memory of the CPU, or to a disk.

Between forward passes, such parameters are on the meta device, and hooks of their modules load them for each pass.
Frozen parameters need nothing else. Parameters of a risk are loaded here, once, and the hooks leave them alone.
Nothing here imports accelerate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kfs.problem.parameters import Params

# A hook, and the name of a parameter in its map of values.
_Place = tuple[Any, str]


class Offloaded:
    """The considered parameters of a model that hooks of accelerate load.

    Args:
        model: A module, or a function, which has none.
        params: The considered parameters, by name.

    Attributes:
        params: The considered parameters, with values in place of tensors on the meta device.
    """

    def __init__(self, model: object, params: Params) -> None:
        away = isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters())
        places = dict(_places(model)) if away else {}
        self._hooks = [hook for name, (hook, _) in places.items() if name in params]
        # Other parameters of the same hooks are loaded with them. Those of other hooks have no values here.
        self._others = {n: place for n, place in places.items() if place[0] in self._hooks and n not in params}
        self._without_values = places.keys() - params.keys() - self._others.keys()
        self.params = {
            name: _value(*places[name]).requires_grad_(p.requires_grad) if p.is_meta and name in places else p
            for name, p in params.items()
        }

    @contextmanager
    def left_alone(self, params: Params) -> Iterator[Params]:
        """Context in which hooks do not replace the considered parameters.

        Args:
            params: The values with which the model is called, by name.

        Yields:
            These, and the values of other parameters of the same hooks.
        """
        for hook in self._hooks:
            hook.offload = False
        try:
            given = {name: p for name, p in params.items() if name not in self._without_values}
            yield given | {name: _value(*place) for name, place in self._others.items()}
        finally:
            for hook in self._hooks:
                hook.offload = True


def _places(model: Any) -> Iterator[tuple[str, _Place]]:
    """Generate the names of all parameters that are offloaded, with their hooks."""
    for path, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False) and one.weights_map is not None:
                for name, _ in module.named_parameters(recurse=one.place_submodules):
                    yield (f"{path}.{name}" if path else name), (one, name)


def _value(hook: Any, name: str) -> Tensor:
    """Return the value of a parameter on the device that it is used on."""
    value: Tensor = hook.weights_map[name].detach()
    return value if hook.execution_device is None else value.to(hook.execution_device)
