"""What tells functions apart: their code, and the values that they use."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import getclosurevars
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.storage.seen_data import bytes_of, text_of


def function_digest(value: object) -> str:
    """Return a digest of a function, or of anything that has functions in it."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in _content(value, None, {}):
        hashed.update(part)
    return hashed.hexdigest()


def _content(value: object, home: str | None, seen: dict[int, object]) -> Iterator[Any]:
    """Yield bytes that tell a value from others.

    Args:
        value: A function, or what one uses.
        home: The module of the function that uses it. Functions of other modules are told apart by their names alone.
        seen: Objects that were visited, by their addresses: functions may use themselves.
    """
    if home is None and isinstance(value, FunctionType):
        home = value.__module__
    parts = _parts(value, home)
    if isinstance(value, Tensor):
        yield text_of((value.shape, value.dtype)).encode()
        yield bytes_of(value)
    elif parts is None:
        yield text_of(value).encode()
    elif id(value) not in seen:
        seen[id(value)] = value  # as long as it is kept, no other object has its address
        yield f"{type(value).__qualname__} of {len(parts)}".encode()
        for part in parts:
            yield from _content(part, home, seen)


def _parts(value: object, home: str | None) -> list[object] | None:
    """Return what a value consists of; `None` if its text tells all."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, *value.co_consts]
    if isinstance(value, torch.nn.Module):
        return [text_of(value), value.state_dict()]
    return _parts_of_function(value, home) if callable(value) else None


def _parts_of_function(value: Callable[..., Any], home: str | None) -> list[object] | None:
    """Return code and values that a function uses; `None` if it is from another module."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType) and value.__module__ == home:
        used = getclosurevars(value)
        named = {name: one for name, one in used.globals.items() if not isinstance(one, ModuleType)}
        return [value.__code__, value.__defaults__, value.__kwdefaults__, dict(used.nonlocals), named]
    # An object with a method `__call__` that somebody wrote.
    call = type(value).__call__
    return [call, vars(value)] if isinstance(call, FunctionType) else None
