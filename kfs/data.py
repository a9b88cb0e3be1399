"""Data as users have them: pairs, loaders, mappings. How they are iterated, taken apart and moved.

What a batch means to a model and a loss lives in `kfs.risk`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfs.errors import DataError

# How many numbers of each tensor a fingerprint looks at. A prime, so that they are not all in one column of a table.
_SAMPLE = 1021


class Batch(NamedTuple):
    """Some consecutive data.

    Attributes:
        x: What the model takes: a tensor, a tuple of arguments or a dictionary of keyword arguments.
        y: Targets, `[N, ...]`.
        first: Index of the first datum within the data set.
    """

    x: Any
    y: Tensor
    first: int


def as_batches(data: object) -> Iterable[Any]:
    """Return an iterable of raw batches that can be iterated more than once."""
    pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)
    if pair or isinstance(data, Mapping):
        return [data]
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise DataError(
            f"data is a {type(data).__name__}.",
            "Pass (X, y), an iterable of batches (a list, a DataLoader), or a mapping.",
        )
    if isinstance(data, Iterator):
        raise DataError(
            f"data is a {type(data).__name__}, which can be iterated only once, but curvature needs several passes.",
            "Pass list(data), or an object that starts anew at every iteration, such as a DataLoader.",
        )
    return data


def default_unpack(batch: Any) -> tuple[Any, Tensor]:
    """Split a pair, or a mapping at its labels."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"A batch is a mapping with the keys {list(batch)}, none of which is 'labels'.",
                "Say how to split it: unpack=lambda batch: (x, y).",
            )
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"A batch is a {type(batch).__name__}, expected a pair (x, y) or a mapping.",
        "Say how to split it: unpack=lambda batch: (x, y).",
    )


def unpacked(unpack: Callable[[Any], Any], batch: Any) -> tuple[Any, Tensor]:
    """Split a batch with the user's function, and refuse what is not a pair of inputs and targets."""
    pair = unpack(batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(
            f"unpack= returned a {type(pair).__name__}, expected a pair (x, y).",
            "Let it return both: unpack=lambda batch: (x, y).",
        )
    x, y = pair
    if not isinstance(y, Tensor) or y.ndim == 0:
        raise DataError(
            f"The targets of a batch are {y!r:.80}, expected a tensor [N, ...].",
            "Pass batches (x, y), or say how they are split with unpack=.",
        )
    return x, y


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a module for a batch's input."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if type(x) in {tuple, list} else ((x,), {})


def move(x: Any, device: torch.device) -> Any:
    """Move all tensors in a batch's input to a device."""
    if isinstance(x, Mapping):
        return {key: move(value, device) for key, value in x.items()}
    if type(x) in {tuple, list}:
        return tuple(move(value, device) for value in x)
    return x.to(device) if hasattr(x, "to") else x  # tensors, packed sequences


def mapped(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors in a batch's input."""
    if isinstance(x, Mapping):
        return {key: mapped(value, function) for key, value in x.items()}
    if type(x) in {tuple, list}:
        return tuple(mapped(value, function) for value in x)
    return function(x) if isinstance(x, Tensor) else x


def cut(x: Any, num_data: int, few: int, batch_axis: int | None = None) -> Any:
    """Return the inputs of the first few data: tensors that have a batch axis are cut there."""
    if few == num_data:
        return x

    def first(t: Tensor) -> Tensor:
        axis = axis_to_cut(t.shape, num_data, batch_axis)
        return t if axis is None else t.narrow(axis, 0, few)

    return mapped(x, first)


def axis_to_cut(shape: Sequence[int], num_data: int, batch_axis: int | None) -> int | None:
    """Return which axis of an input is the batch axis, by its length; whether that is right shows in the audit."""
    axes = [axis for axis, length in enumerate(shape) if length == num_data]
    preferred = [axis for axis in (batch_axis, 0) if axis in axes]
    if not preferred and len(axes) != 1:
        return None
    return (preferred or axes)[0]


def tensors_in(x: Any) -> list[Tensor]:
    """Return all tensors in a batch's input."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return [x] if isinstance(x, Tensor) else [t for part in parts for t in tensors_in(part)]


def without_tensors(x: Any) -> Any:
    """Return what identifies all arguments that are not tensors, such that it can be hashed."""
    if isinstance(x, Tensor):
        return None
    if isinstance(x, Mapping):
        return tuple((key, without_tensors(value)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(map(without_tensors, x))
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x


@lru_cache(maxsize=32)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Return places in a large tensor, all over it, as one index for each axis."""
    flat = torch.arange(_SAMPLE, device=device) * shape.numel() // _SAMPLE
    return torch.unravel_index(flat, shape)


class Fingerprint(NamedTuple):
    """What tells a batch from others, without a copy of it.

    Attributes:
        tensors: Dtype and shape of each tensor.
        digest: Of some numbers of each tensor. NaN equals NaN.
    """

    tensors: tuple[str, ...]
    digest: str


def fingerprint(x: Any, y: Tensor) -> Fingerprint:
    """Return what tells a batch from others. It is cheap, and looks at tensors alone.

    Values of sparse, nested and quantized tensors are not looked at. An accelerator that has data is asked once.
    """
    found = [t.detach() for t in (*tensors_in(x), y) if not t.is_nested]
    samples: dict[torch.device, list[Tensor]] = {}
    for t in found:
        if t.layout is torch.strided and not t.is_quantized:
            samples.setdefault(t.device, []).append(_sample(t))
    hashed = hashlib.blake2b(digest_size=16)
    for on_device in samples.values():
        hashed.update(torch.cat(on_device).cpu().numpy().tobytes())
    return Fingerprint(tuple(f"{t.dtype} {list(t.shape)}" for t in found), hashed.hexdigest())


def _sample(t: Tensor) -> Tensor:
    """Return all numbers of a small tensor, or some of a large one, as bytes."""
    if t.numel() > _SAMPLE:
        t = t[_places(t.shape, t.device)]
    return t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def repeatably(data: Iterable[Any]) -> Iterator[Any]:
    """Iterate such that random numbers used for it (shuffling, augmentation) are the same every time, and no others."""
    generators = [torch.default_generator, *_own_generators(data)]
    iterator, position = None, 0
    while True:
        with _seeded(generators, position):
            iterator = iter(data) if iterator is None else iterator
            try:
                raw = next(iterator)
            except StopIteration:
                return
        yield raw
        position += 1


def _own_generators(loader: object) -> list[torch.Generator]:
    """Return the random generators that a loader and its samplers were given."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seed generators in this context, and leave them as before."""
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
