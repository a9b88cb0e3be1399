"""What an index belongs to: weights, curvature, settings and data, in a form that can be compared and told apart."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import getclosurevars
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from kfs.data import Batch, Fingerprint, fingerprint, tensors_in
from kfs.kfac.storage.journal import details
from kfs.kfac.storage.seen_data import bytes_of, digest, text_of
from kfs.kfac.structures import BlockDiagonal
from kfs.losses.quantities import Quantity
from kfs.risk import EmpiricalRisk

# Details that people read in a message. Of all others, only that they differ is said.
_READABLE = ("damping", "method", "of_train", "rank", "compression", "dtype", "number of data", "precision")


def identity(
    K: BlockDiagonal, train: EmpiricalRisk, of_train: Quantity, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Describe what an index belongs to.

    Args:
        K: The curvature.
        train: The training data, with model and loss.
        of_train: What is differentiated.
        settings: What else has to be the same, by name.
    """
    name = getattr(train.model, "__qualname__", type(train.model).__name__)
    return {
        "model": repr(train.model) if isinstance(train.model, torch.nn.Module) else name,
        "loss": f"{details(train.loss)}, {_digest(vars(train.loss))}",
        "parameters": {name: list(p.shape) for name, p in train.params.items()},
        "curvature": digest(t for stack in K.stacks for t in tensors_in(stack.state()["blocks"])),
        "of_train": _named(of_train),
        "number of data": train.num_data,
        "precision": f"{train.dtype} on {train.device.type}",
        **{name: str(value) for name, value in settings.items()},
        **weights(train),
    }


def weights(risk: EmpiricalRisk) -> dict[str, str]:
    """Return digests of the values of parameters, and of everything else that a module has."""
    module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
    with risk.untouched():  # with all numbers of parameters that are sharded
        return {
            "values of parameters": digest(risk.params.values()),
            "values of other parameters and buffers": digest([*module.parameters(), *module.buffers()]),
        }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Say what differs, with both values of what people can read."""
    found = []
    for name in mine:
        if theirs.get(name) != mine[name]:
            both = f" ({theirs.get(name)} there, {mine[name]} here)" if name in _READABLE else ""
            found.append(f"{name}{both}")
    return found


def batch_identity(batch: Batch) -> list[str]:
    """Return what tells a batch from others: shapes, and a digest of all numbers.

    A gradient takes a pass through the model, beside which a digest of its input costs little.
    """
    found: Fingerprint = fingerprint(batch.x, batch.y, complete=True)
    return [*found.tensors, found.digest]


def _named(quantity: Quantity) -> str:
    """Return a quantity's name; of a function, also a digest of its code and of the values that it uses."""
    if isinstance(quantity, str):
        return quantity
    name = getattr(quantity, "__qualname__", type(quantity).__name__)
    return f"{name} ({_digest(quantity)})"


def _digest(value: object) -> str:
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
