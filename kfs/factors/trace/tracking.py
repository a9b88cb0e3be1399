"""Tracking: which tensors are (views of) parameters, and which depend on the data of a batch.

A tensor that lives in a parameter's storage is a view of it, however it was made. Parameters are recognized by the
identity of their storage and by the offset in it, never by an address alone, because freed memory is reused.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.factors.rows.row_map import AuditResult
from kfs.problem.whole_parameters import is_sharded

# Operations whose result depends on no tensor's values, or only on those of the first tensor.
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
SHAPES_ONLY = {getattr(torch, name) for name in _LIKE} | {getattr(Tensor, name) for name in _NEW}
FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow")} | {"__setitem__"}


@dataclass(eq=False)
class Tracked:
    """A tensor that is tracked: a parameter, a copy of one, or a derived parameter."""

    name: str  # of the parameter
    tensor: Tensor  # kept alive, so that its storage is not reused
    token: Any  # identifies it in the keys of plans; the same for every batch
    derived: "Derived | None" = None  # collects the gradients of a derived parameter
    also: frozenset[str] = frozenset()  # further parameters that a derived one was computed from
    rows: tuple[int, ...] = ()  # if the tensor is a table of which the parameter has replaced rows: these rows
    start: int = field(init=False)  # half-open range of bytes in the storage
    stop: int = field(init=False)

    @property
    def names(self) -> set[str]:
        """All parameters that it was computed from."""
        return {self.name, *self.also}

    def __post_init__(self) -> None:
        """Compute the range of bytes that the tensor occupies in its storage."""
        t = self.tensor
        reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        self.start = int(t.storage_offset()) * t.element_size()
        self.stop = self.start + (reach + 1) * t.element_size()


class Derived:
    """Collects gradients of a *derived parameter*, a tensor computed from parameters and constants alone.

    Args:
        add_use: Records the use, and returns the callback for gradients `[columns, N, *shape]`.
    """

    def __init__(self, add_use: Callable[[], Callable[[Tensor], None]]) -> None:
        self._add_use = add_use
        self._receive: Callable[[Tensor], None] | None = None
        self._arrived: list[Tensor] = []

    def collector(self) -> Callable[[Tensor], None]:
        """Return the gradient callback, `[columns, N, *shape]`, for one operation that uses the derived parameter."""
        if self._receive is None:
            self._receive = self._add_use()
        return self._arrived.append

    def pass_on(self) -> None:
        """Pass on the sum of the collected gradients, after a backward pass."""
        if self._receive is not None and self._arrived:
            total = self._arrived[0] if len(self._arrived) == 1 else torch.stack(self._arrived).sum(0)
            self._receive(total)
            self._arrived.clear()


class Tracker:
    """All tracked tensors, by their storage.

    Args:
        params: The parameters, by name.
        model: The model that they belong to. Needed if `fully_shard` has sharded it and the model itself is run.
    """

    def __init__(self, params: Mapping[str, Tensor], model: Module | None = None) -> None:
        self.params = dict(params)
        self.model = model
        self._by_storage: dict[int, list[Tracked]] = {}
        self._added: set[int] = set()
        self._register()

    def leaves(self) -> dict[str, Tensor]:
        """Return parameters as they occur in computation graphs, by name: unsharded ones in place of sharded ones."""
        found = {
            one.name: one.tensor for some in self._by_storage.values() for one in some if one.name in self._sharded
        }
        return {**self.params, **found} if found else self.params

    def forget_batch(self) -> None:
        """Drop the tensors that were tracked for one batch only: they may be large."""
        for storage in self._added:
            del self._by_storage[storage]
        self._added.clear()

    def has_moved(self) -> bool:
        """Return whether any parameter's storage has changed, and update the records if so."""
        if _places_of(self._own) == self._places:
            return False
        self._register()
        return True

    def add(self, tracked: Tracked) -> None:
        """Track another tensor with a storage of its own, for this batch."""
        storage = tracked.tensor.untyped_storage()._cdata
        self._by_storage[storage] = [tracked]
        self._added.add(storage)

    def find(self, t: Tensor) -> Tracked | None:
        """Return the tracked tensor that `t` is a view of; `None` if there is none, or if `t` was detached from it."""
        if t.layout is not torch.strided:
            return None
        try:
            inside = self._by_storage.get(t.untyped_storage()._cdata)
        except NotImplementedError:  # tensors saved by torch.func.vjp have no storage
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
        """Return the tracked tensor that `t` is a view of; there must be one."""
        tracked = self.find(t)
        assert tracked is not None  # noqa: S101 (callers have checked)
        return tracked

    def as_other_numbers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any tensor reinterprets the memory of a parameter in another dtype, such as a complex one."""
        return any((found := self.find(t)) is not None and found.tensor.dtype != t.dtype for t in tensors)

    def _register(self) -> None:
        """Record the storages of all parameters; sharded ones have none until they are used."""
        self._by_storage.clear()
        self._sharded = {name for name, p in self.params.items() if is_sharded(p)}
        own = {name: p for name, p in self.params.items() if name not in self._sharded}
        self._own = list(own.values())
        self._places = _places_of(self._own)
        for name, p in own.items():
            if p.numel():
                self._by_storage.setdefault(p.untyped_storage()._cdata, []).append(Tracked(name, p, name))

    def _unsharded(self, t: Tensor) -> list[Tracked] | None:
        """Track the unsharded parameters that `fully_shard` substitutes for sharded ones while the model runs.

        Their storages are the same in all passes. Between passes these are empty and their memory is reused, so
        addresses identify nothing. Parameters that are unsharded at the same time are tracked together, because a
        custom function may use several of them without showing it.
        """
        if not isinstance(t, Parameter) or self.model is None:
            return None
        for name, p in self.model.named_parameters():
            if name in self._sharded and not is_sharded(p):
                self._by_storage.setdefault(p.untyped_storage()._cdata, [Tracked(name, p, name)])
        return self._by_storage.get(t.untyped_storage()._cdata)


def _places_of(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return the storage, address, shape, strides and dtype of each tensor."""
    return [(t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


class Marks:
    """Records which tensors of one pass depend on data.

    Args:
        tracker: Has the parameters, which do not depend on data.
        num_data: Number of examples in the batch.
        batch_axis: Position of the batch axis in inputs, if not the first.
        known: Result of an audit, if there was one.

    Attributes:
        inputs: Shape of every input, and whether it is treated as data.
    """

    def __init__(
        self,
        tracker: Tracker,
        num_data: int,
        batch_axis: int | None = None,
        known: AuditResult | None = None,
    ) -> None:
        self.inputs: list[tuple[tuple[int, ...], bool]] = []
        self.tracker = tracker
        self.num_data = num_data
        self.batch_axis = batch_axis
        self._known = known
        self._marked: list[weakref.ref[Tensor]] = []

    def is_data(self, t: Tensor) -> bool:
        """Whether a tensor depends on the data; assumed for results of code that this mode does not see."""
        marked: bool | None = getattr(t, "_kfs_data", None)
        if marked is not None:
            return marked
        computed = t.requires_grad and not t.is_leaf
        return computed and (not t._is_view() or self.tracker.find(t) is None)

    def mark_data(self, t: Tensor) -> Tensor:
        """Return an alias of a batch's input, marked by whether it is data; results computed from it inherit the mark.

        An input without a batch axis, such as positions `[1, T]`, is the same for all examples.
        """
        axis = self.batch_axis or 0
        first = t.shape[axis] if t.ndim > axis else 1
        divides = first > 1 and (first % self.num_data == 0 or self.num_data % first == 0)
        elsewhere = self.num_data in t.shape and (t.shape[0] > 1 or self.num_data == 1)
        nodes = first > 1 and t.is_floating_point()  # a batch of graphs has any number of nodes
        data = divides or elsewhere or nodes or self.num_data == first
        place = len(self.inputs)
        if self._known is not None:
            if place < len(self._known.inputs):
                data = self._known.inputs[place]
            data = data and place not in self._known.constants
        self.inputs.append((tuple(t.shape), data))
        return self.as_data(t, data)

    def as_data(self, t: Tensor, data: bool = True) -> Tensor:
        """Return an alias of a tensor that is marked as data, or as not data."""
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
        """Mark the results of an operation, and tensors that data were written into.

        Most results need no mark: a tensor with a graph counts as data anyway.
        """
        data = False
        if func not in SHAPES_ONLY:
            for t in inputs[:1] if func in FIRST_ONLY else inputs:
                if self.is_data(t):
                    data = True
                    break
        for t in (result,) if isinstance(result, Tensor) else tensors_of([result]):
            if getattr(t, "_kfs_data", None):  # marked before: it has a row for every example
                continue
            if self.is_data(t) is not data and (data or all(t is not before for before in inputs)):
                self.mark(t, data)
        if not data or not is_in_place(func) or not args or not isinstance(args[0], Tensor):
            return
        if func is Tensor.__setitem__:
            self.mark(args[0], True)
        base = args[0]._base
        if base is not None and not base.requires_grad:
            self.mark(base, True)  # data were written into a view of it

    def forget(self) -> None:
        """Remove the marks from tensors that the model has kept."""
        for reference in self._marked:
            t = reference()
            if t is not None:
                del t._kfs_data  # type: ignore[attr-defined]
        self._marked.clear()


def tensors_of(parts: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among arguments, including those in nested lists and tuples."""
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
