"""Iterates, unpacks and moves the data of users: pairs, loaders and mappings.

The evaluation of a model and a loss on a batch lives in `kfs.problem.risk`.

`RepeatabilityCheck` checks that data are the same in every pass over them. Each process counts its own data.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isclose
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.distributed import Ranks
from kfs.errors import DataError
from kfs.runtime import sync
from kfs.runtime.nested import is_named_tuple, mapped, tensors_in, with_values
from kfs.runtime.sync import number

# Number of entries of each tensor that a fingerprint includes. A prime number, so that the entries of a matrix are not
# all in one column.
_SAMPLE = 1021


# Specifies the mask of a batch: a key, or a function of the inputs.
Mask = str | Callable[[Any], Tensor] | None
_DEFAULT_MASK = "attention_mask"


class Batch(NamedTuple):
    """Consecutive examples of a data set.

    Attributes:
        x: Input of the model: a tensor, a tuple of arguments or a mapping; see `arguments`.
        y: Targets, `[N, ...]`.
        first: Index of the first example within the data set.
        counted: Divisor of a mean over the targets; a zero-dimensional tensor if it was computed on an accelerator.
        recorded: For a batch of a CUDA graph: the index of the first example as a zero-dimensional tensor, since it
            changes between replays. Otherwise `None`.
    """

    x: Any
    y: Tensor
    first: int
    counted: float | Tensor = 0.0
    recorded: Tensor | None = None

    @property
    def start(self) -> int | Tensor:
        """Index of the first example: `recorded` if it is given, else `first`."""
        return self.first if self.recorded is None else self.recorded


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
            "Pass list(data), or an object that restarts at every iteration, such as a DataLoader.",
        )
    return data


def default_unpack(batch: Any) -> tuple[Any, Tensor]:
    """Split a pair, or a mapping at its key `"labels"`, into inputs and targets."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"A batch is a mapping with the keys {list(batch)}, none of which is 'labels'.",
                "Specify how to split it: unpack=lambda batch: (x, y).",
            )
        rest = {key: value for key, value in batch.items() if key != "labels"}
        return with_values(batch, rest), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"A batch is a {type(batch).__name__}, expected a pair (x, y) or a mapping.",
        "Specify how to split it: unpack=lambda batch: (x, y).",
    )


def unpacked(unpack: Callable[[Any], Any], batch: Any) -> tuple[Any, Tensor]:
    """Split a batch with the user's function, and raise an error if the result is not a pair of inputs and targets."""
    pair = unpack(batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(
            f"unpack= returned a {type(pair).__name__}, expected a pair (x, y).",
            "Return both: unpack=lambda batch: (x, y).",
        )
    x, y = pair
    if not isinstance(y, Tensor) or y.ndim == 0:
        raise DataError(
            f"The targets of a batch are {y!r:.80}, expected a tensor [N, ...].",
            "Pass batches (x, y), or specify how to split a batch with unpack=.",
        )
    return x, y


def arguments(x: Any, model: Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a module for a batch's input.

    A tuple or a list contains the positional arguments. A mapping contains the keyword arguments if `forward` accepts
    them; otherwise it is the only argument. Any other input, including a named tuple, is one argument.

    Args:
        x: The input.
        model: The module; the signature of its `forward` decides how a mapping is passed.

    Raises:
        DataError: If `forward` accepts a mapping in neither way.
    """
    if not isinstance(x, Mapping):
        return (tuple(x), {}) if type(x) in {tuple, list} else ((x,), {})
    forward = _signature(model)
    if forward is None:
        return (), dict(x)
    try:
        forward.bind(**x)
    except TypeError as error:
        # If a key is the name of an argument after the first one, the user meant keyword arguments.
        further = list(forward.parameters)[1:]
        if any(key in further for key in x) or not _takes_one_argument(forward):
            raise DataError(
                f"A batch is a mapping with the keys {list(x)}, but the model has forward{forward}: it takes neither "
                f"these as keyword arguments ({error}), nor the mapping as its only argument.",
                "Rename the keys to the arguments of forward, or let unpack= return a tuple of arguments: "
                "unpack=lambda batch: ((a, b), y).",
            ) from error
        return (x,), {}
    return (), dict(x)


def cut(x: Any, num_data: int, chosen: Sequence[int], batch_axis: int | None = None) -> Any:
    """Return the inputs of the chosen examples, in the given order, by indexing tensors along their batch axis."""

    def some(t: Tensor) -> Tensor:
        axis = axis_to_cut(t.shape, num_data, batch_axis)
        return t if axis is None else t.index_select(axis, torch.tensor(chosen, device=t.device))

    return mapped(x, some)


def can_be_cut(x: Any, num_data: int, few: int, batch_axis: int | None = None) -> bool:
    """Return whether it is safe to take the first `few` examples out of a batch.

    At least one tensor must have a batch axis. No other tensor may contain indices of examples, such as the graph that
    each node of a batch belongs to: on an accelerator, an index beyond the first few examples aborts the process.
    """
    found = [t for t in tensors_in(x) if t.layout is torch.strided]
    if all(axis_to_cut(t.shape, num_data, batch_axis) is None for t in found):
        return False
    integers = [t for t in found if t.dtype != torch.bool and not (t.is_floating_point() or t.is_complex())]
    # Token ids `[N, T]` may be as small as indices of examples. On a CPU, a wrong index only raises an exception.
    integers = [t for t in integers if t.ndim < 2 or not t.is_cpu or axis_to_cut(t.shape, num_data, batch_axis) is None]
    largest = [int(t.max()) for t in integers if t.numel() and len(found) > 1]
    return not any(few <= number < num_data for number in largest)


def axis_to_cut(shape: Sequence[int], num_data: int, batch_axis: int | None) -> int | None:
    """Return the batch axis of an input by its length, `None` if it is ambiguous; the audit verifies this guess."""
    axes = [axis for axis, length in enumerate(shape) if length == num_data]
    preferred = [axis for axis in (batch_axis, 0) if axis in axes]
    if not preferred and len(axes) != 1:
        return None
    return (preferred or axes)[0]


@lru_cache(maxsize=32)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Return evenly spaced positions in a large tensor, as one index tensor for each axis."""
    flat = torch.arange(_SAMPLE, device=device) * shape.numel() // _SAMPLE
    return torch.unravel_index(flat, shape)


class Fingerprint(NamedTuple):
    """Identifies a batch without a copy of it.

    Attributes:
        tensors: Dtype and shape of each tensor.
        digest: Digest of some or all entries of each tensor. NaN equals NaN.
    """

    tensors: tuple[str, ...]
    digest: str


def fingerprint(x: Any, y: Tensor, *, complete: bool = False) -> Fingerprint:
    """Return the fingerprint of a batch. It is cheap and depends on tensors only.

    Values of sparse, nested and quantized tensors and of tensors on `meta` are not included. Each device that holds
    data is synchronized once.

    Args:
        x: Input of the model.
        y: Targets.
        complete: Whether to include all entries instead of a sample of each tensor.
    """
    found = [t.detach() for t in (*tensors_in(x), y) if not t.is_nested]
    samples: dict[torch.device, list[Tensor]] = {}
    for t in found:
        if t.layout is torch.strided and not t.is_quantized and not t.is_meta:
            chosen = t if complete or t.numel() <= _SAMPLE else t[_places(t.shape, t.device)]
            numbers = chosen.resolve_conj().resolve_neg().contiguous().reshape(-1)
            samples.setdefault(t.device, []).append(numbers.view(torch.uint8))
    hashed = hashlib.blake2b(digest_size=16)
    for on_device in samples.values():
        with sync.allow_sync():
            hashed.update(torch.cat(on_device).cpu().numpy().tobytes())
    return Fingerprint(tuple([f"{t.dtype} {list(t.shape)}" for t in found]), hashed.hexdigest())


def values_digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of parameter values, rounded to float32; an empty string if a tensor is special or on `meta`."""
    samples = []
    for t in tensors:
        if type(t) not in {Tensor, Parameter} or t.is_meta:
            return ""
        chosen = t.detach() if t.numel() <= _SAMPLE else t.detach()[_places(t.shape, t.device)]
        samples.append(chosen.float())
    return fingerprint(samples, torch.empty(0)).digest


def repeatably(data: Iterable[Any]) -> Iterator[Any]:
    """Iterate with reproducible random numbers for shuffling and augmentation; random state outside is unaffected."""
    # The random generators of PyTorch, of a loader and of its samplers.
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    own = [getattr(owner, "generator", None) for owner in owners]
    generators = [torch.default_generator, *[one for one in own if isinstance(one, torch.Generator)]]
    iterator, position = None, 0
    while True:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(position)
            iterator = iter(data) if iterator is None else iterator
            raw = next(iterator)
        except StopIteration:
            return
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        yield raw
        position += 1


def _signature(model: Module) -> inspect.Signature | None:
    """Return the signature of a module's `forward`; `None` if it is unknown, as for traced modules."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return None
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if all(parameter.kind in anything for parameter in signature.parameters.values()):
        for name in ("_orig_mod", "module"):  # a wrapper for compilation or data parallelism: use the inner module
            inside = getattr(model, name, None)
            if isinstance(inside, Module):
                return _signature(inside)
    return signature


def _takes_one_argument(forward: inspect.Signature) -> bool:
    """Return whether `forward` accepts a single positional argument."""
    try:
        forward.bind(None)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class MaskSource:
    """Finds the padding mask of a batch, which tells real positions of the inputs from padding.

    Attributes:
        mask: A key of a batch that is a mapping, or a function of the inputs. If `None`, the key `attention_mask` is
            used, provided that it is a tensor `[N, S]` of booleans or integers.
    """

    mask: Mask = None

    @property
    def name(self) -> str:
        """The name of the mask for error messages."""
        return self.mask if isinstance(self.mask, str) else _DEFAULT_MASK if self.mask is None else "mask="

    def find(self, x: Any, num_data: int) -> Tensor | None:
        """Return the mask of a batch's inputs, booleans `[N, S]`; `None` if there is none.

        Raises:
            DataError: If the requested mask is missing or has the wrong shape.
        """
        if self.mask is None and isinstance(x, Tensor):
            return None
        given = self.mask(x) if callable(self.mask) else _named(x, self.name)
        if self.mask is None:
            if given is None or given.ndim != 2 or len(given) != num_data or given.is_floating_point():
                return None
            return given != 0 if given.layout is torch.strided else None
        if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != num_data:
            found = f"has shape {list(given.shape)}" if isinstance(given, Tensor) else f"is {given!r}"
            raise DataError(
                f"The mask of a batch of {num_data} examples ({self.name!r}) {found}.",
                "Set mask= to the name of a tensor [N, S] in the batch, or to a function that returns one, with 1 or "
                "True at real positions and 0 or False at padding.",
            )
        return given != 0

    def replaced(self, x: Any, mask: Tensor) -> Any:
        """Return the inputs with their mask replaced; `None` if the mask is not a tensor in the inputs."""
        found = None if callable(self.mask) else _named(x, self.name)
        return None if found is None else mapped(x, lambda t: mask.to(t) if t is found else t)


def _named(x: Any, name: str) -> Tensor | None:
    """Return the tensor with the given name in a mapping or in nested arguments; `None` if there is none."""
    if isinstance(x, Mapping):
        found = x.get(name)
        return found if isinstance(found, Tensor) else None
    if type(x) in {tuple, list}:
        inside = (_named(part, name) for part in x if isinstance(part, (Mapping, tuple, list)))
        return next((found for found in inside if found is not None), None)
    return None


def to_device(x: Any, device: torch.device) -> Any:
    """Move all tensors in a batch's input to a device.

    Raises:
        DataError: If a tensor is on the meta device and has no values.
    """
    if isinstance(x, Mapping):
        return with_values(x, {key: to_device(value, device) for key, value in x.items()})
    if type(x) in {tuple, list}:
        return type(x)(to_device(value, device) for value in x)
    if isinstance(x, Tensor):
        if x.is_meta and device.type != "meta":
            raise DataError(
                "A batch is on the meta device, where tensors have shapes but no values.",
                f"Pass data with values: the model is on {device}.",
            )
        # A copy to a GPU may be asynchronous; see `last_copies`. A copy from a GPU must be complete before it is read.
        return x.to(device, non_blocking=x.is_cpu and device.type == "cuda")
    if hasattr(x, "to"):  # packed sequences
        return x.to(device)
    return type(x)(*(to_device(value, device) for value in x)) if is_named_tuple(x) else x


def last_copies(  # pragma: no cover (tested on a GPU)
    x: Any, y: Tensor, gpus: Iterable[torch.device]
) -> list[torch.cuda.Event]:
    """Return an event for each GPU, after the asynchronous copies of a batch, if its memory is pinned."""
    if not any(t.is_pinned() for t in (*tensors_in(x), y)):
        return []
    return [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]


class RepeatabilityCheck:
    """Records the first complete pass over the data, and raises an error if a later pass differs.

    Args:
        declared: Number of examples, if the user declares it.
        is_mean: Whether the loss is a mean over the data.
        ranks: The processes that share the data.
        start: Index of this process's first example among all data; `None` if all processes have to count first.

    Attributes:
        counted: Number of examples, and the divisor of a mean over them; `None` before the first complete pass.
        counted_by_all: The same for all processes together; `None` before `count_all`.
        start: See the argument `start`.

    Raises:
        DataError: If `declared` is not a positive integer.
    """

    def __init__(self, declared: int | None, is_mean: bool, ranks: Ranks, start: int | None) -> None:
        if declared is not None and (type(declared) is not int or declared < 1):
            raise DataError(f"num_data is {declared!r}.", "Pass a positive integer, or leave it out.")
        self._declared = declared
        self._is_mean = is_mean
        self.counted: tuple[int, float] | None = None
        self.counted_by_all: tuple[int, float] | None = None
        self.start = start
        self._ranks = ranks
        self._first_batch: Fingerprint | None = None

    @property
    def known_number(self) -> int | None:
        """Number of examples, counted or declared; `None` if it is unknown."""
        if self.counted_by_all is not None:
            return self.counted_by_all[0]
        if self._ranks.are_several:
            return None
        return self._declared if self.counted is None else self.counted[0]

    def count_all(self) -> tuple[int, float]:
        """Add up the counts of all processes, and set `start` to the index of this process's first example.

        Returns:
            Number of examples of all processes, and the divisor of a mean over them.

        Raises:
            DataError: If there are no data, all targets have weight zero in a mean, or a shard starts at the wrong
                example.
        """
        every = self._ranks.gather("counting", (*cast("tuple[int, float]", self.counted), self.start))
        start = 0
        for rank, (num_data, _, declared) in enumerate(every):
            if declared not in {None, start}:
                raise DataError(
                    f"The ranks before rank {rank} have {start} examples, but its shard starts at example {declared}.",
                    "Pass data to kfs.shard that give the same batches every time.",
                )
            if rank == self._ranks.rank:
                self.start = start
            start += num_data
        count = float(sum(count for _, count, _ in every))
        self._refuse_empty(start, count)
        self.counted_by_all = start, count
        return self.counted_by_all

    def extrapolate(self, batch: Batch) -> bool:
        """Extrapolate the divisor of a mean from the first batch, if the number of examples was declared.

        Complete passes check it later. Returns whether `counted` was set: it is not if all targets have weight zero.
        """
        if self._declared is None or batch.first > 0:
            return False
        per_example = number(batch.counted) / len(batch.y)
        if per_example != 0:
            self.counted = self._declared, self._declared * per_example
        return per_example != 0

    def check_first_batch(self, seen: Fingerprint) -> None:
        """Raise an error if the first batch differs from the first batch of the last complete pass.

        Raises:
            DataError: If it differs.
        """
        before = self._first_batch
        if before is None or seen == before:
            return
        cause = "The first batch has different values than in the first pass over the data."
        if seen.tensors != before.tensors:
            cause = (
                f"The first batch had the tensors {', '.join(before.tensors)}, and has {', '.join(seen.tensors)} now."
            )
        raise DataError(
            cause,
            "Pass data that give the same batches in the same order every time: draw random numbers for them with "
            "PyTorch, not NumPy, or pass list(data). After changing data on purpose, make a new EmpiricalRisk.",
        )

    def check_count(self, num_data: int, count: float | Tensor, first_batch: Fingerprint | None) -> None:
        """Record the counts of a complete pass over the data; raise an error if data are empty or have changed.

        Args:
            num_data: Number of examples.
            count: Divisor of a mean over them.
            first_batch: Fingerprint of the first batch.

        Raises:
            DataError: If there are no data, or if the counts differ from the declared or earlier ones.
        """
        count = number(count)
        # With several processes, the shard of one rank may be empty; `count_all` checks the total.
        if not self._ranks.are_several:
            self._refuse_empty(num_data, count)

        # The number of examples must match the declared number and the earlier passes.
        if self._declared not in {None, num_data}:
            raise DataError(
                f"num_data is {self._declared}, but the data have {num_data} targets.",
                "Pass the number of examples in all batches together, or leave it out.",
            )
        if self.counted is None:
            self.counted = (num_data, count)
        if num_data != self.counted[0]:
            raise DataError(
                f"The data had {self.counted[0]} targets at first, and {num_data} now.",
                "Pass data that can be iterated repeatedly with the same result.",
            )

        # The divisor of the mean must match, too. Weights are summed in floating point: the order of the data changes
        # the last digits.
        if self._is_mean and not isclose(count, self.counted[1], rel_tol=1e-6):
            if self._declared:
                raise DataError(
                    f"A mean over all data divides by {count:g}, but by {self.counted[1]:g} when extrapolated from the "
                    "first batch: some targets are ignored, or weighted, or longer.",
                    "Leave num_data out, so that all targets are counted first.",
                )
            raise DataError(
                f"The mean was over {self.counted[1]:g} targets at first, and is over {count:g} now: targets or "
                "weights have changed.",
                "Make a new EmpiricalRisk after such a change.",
            )
        self._first_batch = first_batch

    def _refuse_empty(self, num_data: int, count: float) -> None:
        """Raise an error if there are no data, or if all targets have weight zero in a mean."""
        if num_data == 0:
            raise DataError("The data set is empty.", "Pass at least one batch with at least one example.")
        if self._is_mean and count == 0:
            raise DataError(
                "No target counts: all of them are ignored or have weight zero, so that their mean is 0/0.",
                "Pass data with targets that count, or use reduction='sum'.",
            )
