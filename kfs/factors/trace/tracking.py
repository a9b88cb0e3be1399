"""Tracking: which tensors are (views of) parameters, and which depend on the data of a batch.

A tensor that lives in a parameter's storage belongs to it, whatever view of it it is.

Parameters are recognized by the identity of their storage and by their place in it, never by an address alone: memory
that was freed is used again.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.problem.whole_parameters import is_sharded

# Operations whose result does not depend on the values of their tensors, or only on those of the first one.
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
SHAPES_ONLY = {getattr(torch, name) for name in _LIKE} | {getattr(Tensor, name) for name in _NEW}
FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow")} | {"__setitem__"}


@dataclass(eq=False)
class Tracked:
    """A tensor that is tracked: a parameter, a copy of one, or a derived parameter."""

    name: str  # the parameter's
    tensor: Tensor  # kept, so that its storage stays its own
    token: Any  # what identifies it in plans; the same for every batch
    derived: "Derived | None" = None  # how gradients of a derived parameter are taken
    also: frozenset[str] = frozenset()  # further parameters that a derived one was computed from
    start: int = field(init=False)  # half-open range of bytes in the storage
    stop: int = field(init=False)

    @property
    def names(self) -> set[str]:
        """All parameters that it was computed from."""
        return {self.name, *self.also}

    def __post_init__(self) -> None:
        """Note which bytes of the storage it has."""
        t = self.tensor
        reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        self.start = int(t.storage_offset()) * t.element_size()
        self.stop = self.start + (reach + 1) * t.element_size()


class Derived:
    """How gradients of a *derived parameter* are taken: of what is computed from parameters and constants alone.

    Args:
        add_use: Takes note of the use, and returns what takes gradients `[columns, N, *shape]`.
    """

    def __init__(self, add_use: Callable[[], Callable[[Tensor], None]]) -> None:
        self._add_use = add_use
        self._receive: Callable[[Tensor], None] | None = None
        self._arrived: list[Tensor] = []

    def collector(self) -> Callable[[Tensor], None]:
        """Return what collects gradients `[columns, N, *shape]` of one of several operations that use it."""
        if self._receive is None:
            self._receive = self._add_use()
        return self._arrived.append

    def pass_on(self) -> None:
        """After a backward pass: pass on the sum of what was collected."""
        if self._receive is not None and self._arrived:
            total = self._arrived[0] if len(self._arrived) == 1 else torch.stack(self._arrived).sum(0)
            self._receive(total)
            self._arrived.clear()


class Tracker:
    """All tensors that are tracked, by the storage that they live in.

    Args:
        params: The parameters, by name.
        model: What they belong to. It is needed if `fully_shard` has sharded them, and the model runs as it is.
    """

    def __init__(self, params: Mapping[str, Tensor], model: Module | None = None) -> None:
        self.params = dict(params)
        self.model = model
        self._by_storage: dict[int, list[Tracked]] = {}
        self._added: set[int] = set()
        self._register()

    def leaves(self) -> dict[str, Tensor]:
        """Return parameters as they are in computation graphs, by name: whole ones in place of sharded ones."""
        found = {
            one.name: one.tensor for some in self._by_storage.values() for one in some if one.name in self._sharded
        }
        return {**self.params, **found} if found else self.params

    def forget_batch(self) -> None:
        """Forget tensors that only a batch had: they may be large."""
        for storage in self._added:
            del self._by_storage[storage]
        self._added.clear()

    def has_moved(self) -> bool:
        """Look where parameters are now, and return whether they have other storages than before."""
        if [_place(p) for name, p in self.params.items() if name not in self._sharded] == self._places:
            return False
        self._register()
        return True

    def add(self, tracked: Tracked) -> None:
        """Track another tensor with a storage of its own, for this batch."""
        storage = _storage(tracked.tensor)
        self._by_storage[storage] = [tracked]
        self._added.add(storage)

    def find(self, t: Tensor) -> Tracked | None:
        """Return what a tensor is a view of; `None` also if it was detached from a trainable parameter."""
        if t.layout is not torch.strided:
            return None
        try:
            inside = self._by_storage.get(t.untyped_storage()._cdata)
        except NotImplementedError:  # what torch.func.vjp keeps has no storage
            return None
        if inside is None and self._sharded:
            inside = self._unsharded(t)
        if inside is None:
            return None
        at = t.storage_offset() * t.element_size()
        for tracked in inside:
            if tracked.start <= at < tracked.stop and (t.requires_grad or not tracked.tensor.requires_grad):
                return tracked
        return None

    def get(self, t: Tensor) -> Tracked:
        """Return what a tensor is a view of; it must be tracked."""
        tracked = self.find(t)
        assert tracked is not None  # noqa: S101 (whoever asks has found it before)
        return tracked

    def as_other_numbers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of some tensors reads the memory of a parameter as other numbers, such as complex ones."""
        return any((found := self.find(t)) is not None and found.tensor.dtype != t.dtype for t in tensors)

    def _register(self) -> None:
        """Note where parameters are. Those that are sharded are nowhere until they are used."""
        self._by_storage.clear()
        self._sharded = {name for name, p in self.params.items() if is_sharded(p)}
        own = {name: p for name, p in self.params.items() if name not in self._sharded}
        self._places = [_place(p) for p in own.values()]
        for name, p in own.items():
            if p.numel():
                self._by_storage.setdefault(_storage(p), []).append(Tracked(name, p, name))

    def _unsharded(self, t: Tensor) -> list[Tracked] | None:
        """Track whole parameters that `fully_shard` has put into the places of sharded ones while the model runs.

        Their storages are the same in all passes. In between they are empty, and others get their memory, so that
        addresses tell nothing. Those that are whole at the same time are tracked together: a custom function may use
        some of them, and does not show it.
        """
        if not isinstance(t, Parameter) or self.model is None:
            return None
        for name, p in self.model.named_parameters():
            if name in self._sharded and not is_sharded(p):
                self._by_storage.setdefault(_storage(p), [Tracked(name, p, name)])
        return self._by_storage.get(_storage(t))


def _storage(t: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    identity: int = t.untyped_storage()._cdata
    return identity


def _place(t: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is, and how it is read."""
    return t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype


class Marks:
    """Knows of the tensors of one pass whether they depend on data.

    Args:
        tracker: Knows parameters, which do not.
        num_data: Number of examples in the batch.
        batch_axis: Where the batch axis is in inputs, if not first.
        constants: Which inputs are the same for all data, by their number.
        known: Whether each of the first inputs is data.

    Attributes:
        inputs: Shape of every input, and whether it is taken for data.
    """

    def __init__(
        self,
        tracker: Tracker,
        num_data: int,
        batch_axis: int | None = None,
        constants: Collection[int] = (),
        known: Sequence[bool] = (),
    ) -> None:
        self.inputs: list[tuple[tuple[int, ...], bool]] = []
        self.tracker = tracker
        self.num_data = num_data
        self.batch_axis = batch_axis
        self._constants = constants
        self._known = known
        self._marked: list[weakref.ref[Tensor]] = []

    def is_data(self, t: Tensor) -> bool:
        """Whether a tensor depends on the data. One that comes from code that this mode does not see may do so."""
        marked: bool | None = getattr(t, "_kfs_data", None)
        if marked is not None:
            return marked
        computed = t.requires_grad and not t.is_leaf
        return computed and (not t._is_view() or self.tracker.find(t) is None)

    def mark_data(self, t: Tensor) -> Tensor:
        """Return a batch's input such that what is computed from it is known to depend on data.

        An input without batch axis, such as positions `[1, T]`, is the same for all data.
        """
        axis = self.batch_axis or 0
        first = t.shape[axis] if t.ndim > axis else 1
        divides = first > 1 and (first % self.num_data == 0 or self.num_data % first == 0)
        elsewhere = self.num_data in t.shape and (t.shape[0] > 1 or self.num_data == 1)
        nodes = first > 1 and t.is_floating_point()  # graphs of different size have any number of nodes
        data = divides or elsewhere or nodes or self.num_data == first
        place = len(self.inputs)
        if place < len(self._known):  # an audit found out
            data = self._known[place]
        data = data and place not in self._constants
        self.inputs.append((tuple(t.shape), data))
        return self.as_data(t, data)

    def as_data(self, t: Tensor, data: bool = True) -> Tensor:
        """Return a tensor such that what is computed from it is known to depend on data (or not)."""
        alias = t.view_as(t) if t.layout is torch.strided else t.detach()  # sparse tensors have no views
        self.mark(alias, data)
        return alias

    def mark(self, t: Tensor, data: bool = True) -> Tensor:
        """Mark a tensor, and return it."""
        if getattr(t, "_kfs_data", None) is None:
            self._marked.append(weakref.ref(t))
        t._kfs_data = data  # type: ignore[attr-defined]
        return t

    def note(self, func: Any, inputs: list[Tensor], args: Any, result: Any) -> None:
        """Mark results by whether they depend on data, and what data were written into.

        Most results need no mark: what was computed with a graph is taken for data.
        """
        data = False
        if func not in SHAPES_ONLY:
            for t in inputs[:1] if func in FIRST_ONLY else inputs:
                if self.is_data(t):
                    data = True
                    break
        for t in (result,) if isinstance(result, Tensor) else tensors_of([result]):
            if getattr(t, "_kfs_data", None):  # whoever marked it knows better: it has a row for every example
                continue
            if self.is_data(t) is not data and (data or all(t is not before for before in inputs)):
                self.mark(t, data)
        if not data or not is_in_place(func) or not args or not isinstance(args[0], Tensor):
            return
        if func is Tensor.__setitem__:
            self.mark(args[0], True)
        base = args[0]._base
        if base is not None and not base.requires_grad:
            self.mark(base, True)  # data were written into a part of it

    def forget(self) -> None:
        """Take marks off tensors that a model has kept."""
        for reference in self._marked:
            t = reference()
            if t is not None:
                del t._kfs_data  # type: ignore[attr-defined]
        self._marked.clear()


def tensors_of(parts: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among arguments, also in lists and tuples."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += tensors_of(part)
    return found


def is_in_place(func: Any) -> bool:
    """Whether an operation changes its first argument, judging by its name."""
    name: str = getattr(func, "__name__", "")
    return name in _IN_PLACE if name.startswith("__") else name.endswith("_")
