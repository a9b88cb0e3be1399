"""Functions for nested containers of tensors: tuples, lists, named tuples and mappings of any type.

Containers keep their types. The definition of a batch lives in `kfs.problem.data`.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def mapped(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested container with a function applied to all its tensors."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return with_values(x, {key: mapped(value, function) for key, value in x.items()})
    if type(x) in {tuple, list}:
        return type(x)(mapped(value, function) for value in x)
    return type(x)(*(mapped(value, function) for value in x)) if is_named_tuple(x) else x


def with_values(x: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type and with the same attributes as `x`, but with the given items.

    Args:
        x: A mapping of any type. It is not changed.
        values: The items of the result. Keys of `x` that are missing here are left out.

    Returns:
        The new mapping, or the dictionary `values` itself if no mapping of this type can be created.
    """
    if type(x) is dict:
        return values
    # Construct a new one if the type is immutable, or cannot be copied.
    for make in (_refilled, lambda x, values: type(x)(values)):
        try:
            new = make(x, values)
            if type(new) is type(x) and set(new) == set(values) and all(new[key] is values[key] for key in values):
                return new
        except Exception:  # noqa: BLE001 (the user's class may raise any exception; try the next method)
            continue
    return values


def plain(x: Any) -> Any:
    """Return a nested container as dictionaries and tuples, with an empty tensor in place of each tensor."""
    if isinstance(x, Mapping):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(map(plain, x))
    return torch.empty(0) if isinstance(x, Tensor) else x


def tensors_in(x: Any) -> list[Tensor]:
    """Return all tensors in a nested container."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return [x] if isinstance(x, Tensor) else [t for part in parts for t in tensors_in(part)]


def without_tensors(x: Any) -> Any:
    """Return a hashable value that identifies all parts of a nested container except its tensors."""
    if isinstance(x, Tensor):
        return Tensor  # distinct from `None`, which is a possible argument
    if isinstance(x, Mapping):
        return tuple((key, without_tensors(value)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(map(without_tensors, x))
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x


def is_named_tuple(x: Any) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _refilled(x: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Copy a mapping, and replace its items."""
    new = _copied(x, values)
    for key in x:
        if key not in values and key in new:
            del new[key]
    for key, value in values.items():
        if new[key] is not value:
            new[key] = value
    # Some mappings store their items also as attributes.
    attributes = getattr(new, "__dict__", {})
    for name in [name for name, part in attributes.items() if name in values and part is x[name]]:
        attributes[name] = values[name]
    if getattr(x, "__dict__", None) is x:  # the items are stored only as attributes
        new.__dict__ = new
    return new


def _copied(x: Any, values: dict[Any, Any]) -> Any:
    """Copy a mapping so that changes of the copy do not affect the original."""
    if isinstance(x, (dict, UserDict)) or hasattr(type(x), "__copy__"):
        return copy.copy(x)
    if hasattr(x, "copy"):
        return x.copy()
    # `copy.copy` shares the attributes. Replace the attribute that contains the items.
    new = copy.copy(x)
    (holder,) = [name for name, part in vars(x).items() if type(part) is dict and _are_items_of(part, x)]
    vars(new)[holder] = dict(values)
    return new


def _are_items_of(part: dict[Any, Any], x: Mapping[Any, Any]) -> bool:
    return part.keys() == x.keys() and all(part[key] is x[key] for key in x)
