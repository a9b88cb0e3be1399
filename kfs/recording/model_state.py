"""What a recorded computation takes for granted of a model, and whether that still holds."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import nn
from torch.nn import Module

# What all modules have: parameters, buffers, children and modes, which others look at, and hooks.
_KNOWN = frozenset(nn.Module().__dict__)
# Values of these types are compared, all others by what they are. A list of something else counts with its elements.
_PLAIN = {bool, int, float, complex, str, bytes}
# Larger or deeper containers, such as a vocabulary, are no settings. To look at them would take too long.
_LARGEST, _DEEPEST = 1000, 3
_CHANGED = "attributes of the model change between its passes"


class ModelState:
    """The attributes of a model's modules: settings such as a temperature, tensors that are not buffers, methods.

    Containers count with what is in them. What is in other objects, such as a configuration, may change unnoticed.

    Args:
        model: The model.
        settings: What else counts, such as attributes of a loss.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> None:
        """Hold all attributes, so that no other object can get the id of one of them."""
        self._before = _contents(model, settings)

    def difference(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
        """Return what is different now; an empty text if nothing is."""
        before = self._before
        now = _contents(model, settings)
        if len(before) != len(now):
            return _CHANGED
        # The first comparison is fast, and nearly always enough.
        same = all(map(is_, before, now)) or all(map(_is_same, before, now))
        return "" if same else _CHANGED


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Hashable]:
    """Return what identifies the attributes of a model's modules, by the place of a module and the attribute's name.

    It holds none of them, so that it may be kept for longer than the model; another object may get the id of one.
    """
    result: dict[tuple[int, str], Hashable] = {}
    for place, module in enumerate(model.modules()):
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result[place, name] = tuple(v if type(v) in _PLAIN else id(v) for v in _leaves(value))
    return result


def has_hooks(model: nn.Module) -> bool:
    """Whether somebody wants to be told about passes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)


def _contents(model: nn.Module, settings: Mapping[str, Any] | None) -> list[Any]:
    """Return settings, all modules, and names and values of their attributes, one after the other."""
    result = list(_leaves(settings))
    for module in model.modules():
        result.append(module)
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result.append(name)
                if isinstance(value, (dict, list, tuple)):
                    result += _leaves(value)
                else:
                    result.append(value)
    return result


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what is in a container, and in the containers in it."""
    yield type(value)
    if not isinstance(value, (dict, list, tuple)) or len(value) > _LARGEST or depth > _DEEPEST:
        yield value
        return
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value:
        yield from _leaves(part, depth + 1)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)


@contextmanager
def unchanged_attributes(model: Module) -> Iterator[None]:
    """Restore what a model's modules keep in attributes, such as the last state of a recurrent network.

    What is changed in place, such as a list, is not restored.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
