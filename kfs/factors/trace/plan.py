"""What rules see and what they return: arguments, and plans for them.

A rule is a pure function from a `Call` and descriptions of its arguments to a plan: it looks at shapes, strides and
names, never at values, and runs nothing. It returns

- some `Plan`s and `Broadcast`s, one for each use of a parameter,
- a `Rewrite`, for an operation that consists of others,
- a `Copy`, for an operation whose result stands for the parameter,
- or `None` if it does not know what to do. Then the use is followed, or reported as not covered.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.inputs import Inputs
from kfs.factors.layout import Layout, Side
from kfs.factors.trace.tracking import Tracked, Tracker
from kfs.problem.torch_fixes import refuse_sparse_and_nested

CPU = torch.device("cpu")
# Where an argument is: its position, its keyword, or a position followed by one within a list.
Place = tuple[int | str, ...]
# Reads gradients `[columns, *shape of the output]` as `[columns, *leading, features]`, given what the plan prepared.
Read = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of an operation."""

    func: Any  # the operation
    num_data: int  # in the batch
    narrow: torch.dtype | None = None  # the precision in which `autocast` multiplies, if it is on

    @property
    def name(self) -> str:
        """What the user calls the operation."""
        return str(getattr(self.func, "__name__", self.func))


@dataclass(frozen=True)
class View:
    """Some consecutive rows of a parameter, or one of those tensors that it stacks; a matrix perhaps transposed."""

    name: str
    shape: tuple[int, ...]  # that of the parameter
    rows: tuple[int, int]  # half-open range
    transposed: bool
    stacked: bool = False  # whether it is a single index of the first axis, and does not have this axis any more

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return self.rows == (0, self.shape[0])

    def matrix_layout(self, flip: bool = False) -> Layout:
        """Return the layout of a view with two axes, which is `[out, in]`, or `[in, out]` if `flip`."""
        return self.layout((1, 0) if self.transposed != flip else (0, 1), 1)

    def layout(self, order: tuple[int, ...], split: int) -> Layout:
        """Return the layout of a view, given the order of its axes, and how many of them make the rows."""
        if self.stacked:  # the axis that the view lacks has length one in the block
            order = (0, *(1 + axis for axis in order))
            split += 1
        return Layout(self.name, self.shape, self.rows, order, split)


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of an operation, as rules see it."""

    place: Place
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    data: bool  # whether it depends on the data
    name: str | None = None  # the parameter that it is a view of
    offset: int = 0  # its place in its storage, relative to that of the parameter
    source: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None  # the parameter's shape, strides, dtype
    derived: bool = False  # whether it is a view of a derived parameter

    @classmethod
    def of(cls, place: Place, t: Tensor, tracked: Tracked | None, data: bool) -> "Argument":
        """Describe a tensor."""
        refuse_sparse_and_nested(t)
        one = cls(place, tuple(t.shape), tuple(t.stride()), t.dtype, t.device, data)
        if tracked is None:
            return one
        p = tracked.tensor
        offset = int(t.storage_offset()) - int(p.storage_offset())
        source = (tuple(p.shape), tuple(p.stride()), p.dtype)
        derived = tracked.derived is not None
        return replace(one, name=tracked.name, offset=offset, source=source, derived=derived)

    @cached_property
    def is_positional(self) -> bool:
        """Whether it is a positional argument, and not within a list."""
        return len(self.place) == 1 and isinstance(self.place[0], int)

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return len(self.shape)

    @property
    def tracked(self) -> bool:
        """Whether it is a view of a tracked parameter."""
        return self.name is not None

    @property
    def view(self) -> View | None:
        """Which part of a parameter it is; `None` if it is not such a simple view of a parameter."""
        if self.name is None or self.source is None or self.derived:
            return None
        shape, stride, dtype = self.source
        if self.dtype != dtype or not shape:
            return None
        first, between = divmod(self.offset, max(stride[0], 1))
        if between:  # it starts in the middle of a row
            return None
        candidates = [(self.shape, self.stride, False)]
        if self.ndim == 2:
            candidates.append((self.shape[::-1], self.stride[::-1], True))
        for mine, strides, transposed in candidates:
            if len(mine) == len(shape) and mine[1:] == shape[1:] and strides == stride:
                return View(self.name, shape, (first, first + mine[0]), transposed)
            if mine and mine == shape[1:] and strides == stride[1:]:
                return View(self.name, shape, (first, first + 1), transposed, stacked=True)
        return None

    def part(self, index: int) -> "Argument":
        """Describe what an index of the first axis selects."""
        offset = self.offset + index * self.stride[0]
        return replace(self, shape=self.shape[1:], stride=self.stride[1:], offset=offset)

    @property
    def by_rows(self) -> bool:
        """Whether the parameter that it is a view of is laid out by rows, without gaps."""
        assert self.source is not None  # noqa: S101 (only tracked arguments are asked)
        shape, stride, _ = self.source
        expected = 1
        for n, step in zip(reversed(shape), reversed(stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True

    def entries(self, axes: tuple[int, ...]) -> Tensor | None:
        """Return which entries of the parameter it has along some axes; `None` for all of them in order."""
        assert self.source is not None  # noqa: S101 (only tracked arguments are asked)
        size = prod(self.source[0])
        shape = [self.shape[axis] for axis in axes]
        stride = [self.stride[axis] for axis in axes]
        in_order = self.offset == 0 and prod(shape) == size
        expected = 1
        for n, step in zip(reversed(shape), reversed(stride), strict=True):
            in_order = in_order and (n == 1 or step == expected)
            expected *= n
        return None if in_order else torch.arange(size).as_strided(shape, stride, self.offset).flatten()


@dataclass(eq=False)
class Plan:
    """What is known about a use of a parameter before it runs (again). Nobody changes it."""

    operation: str  # what the user calls the operation
    layout: Layout  # how the parameter becomes a matrix
    inputs: Inputs  # how the vectors that multiply it are read
    arguments: tuple[Argument, ...] = ()  # what `prepare` takes
    prepare: Callable[..., Any] | None = None  # makes what `inputs` reads; by default the first argument as it is
    read: Read | None = None  # reads the output's gradients; by default they are as they should be
    bias: "Plan | None" = None  # the use of a bias by the same operation
    joins: bool = False  # whether the bias is the part of a parameter that may join the weight's block
    follows: bool = False  # whether inputs do not depend on the data: the output is then a derived parameter
    mixes: bool = False  # whether the operation lets data of a batch influence each other

    # What the session decides when it settles the plan.
    side: Side = "A"  # on which side of the block inputs are
    ones: bool = False  # whether the bias of the block is used
    fits: bool = True  # whether the use fits together with the other uses of its parameter
    narrow: torch.dtype | None = None
    dtype: torch.dtype = torch.float32  # that of the operation's output
    device: torch.device = CPU  # that of the operation's output


@dataclass(frozen=True, eq=False)
class Broadcast:
    """A parameter that is expanded to a shape with batch axis, and tapped there, before the operation runs.

    For a derived parameter there is no plan: its gradients are brought back to the parameter, example by example.
    """

    argument: Argument
    shape: tuple[int, ...]
    plan: Plan | None
    spread: Any = None  # for a derived parameter: which entries are where, a `Spread`


@dataclass(frozen=True)
class Rewrite:
    """An operation as others that have rules: `body(capture, *args, **kwargs)` runs them inside of the capture."""

    body: Callable[..., Any]


@dataclass(frozen=True)
class Copy:
    """An operation whose result has all entries of a parameter at the same places, and stands for it."""

    name: str  # the parameter's


Planned = tuple[Plan | Broadcast, ...] | Rewrite | Copy | None


def describe(part: Any, place: Place, tracker: Tracker, is_data: Callable[[Tensor], bool]) -> Any:
    """Return an argument with tensors replaced by descriptions."""
    if isinstance(part, Tensor):
        return Argument.of(place, part, tracker.find(part), is_data(part))
    if type(part) in {tuple, list}:
        return tuple(describe(inner, (*place, i), tracker, is_data) for i, inner in enumerate(part))
    return part


def argument_at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument at a place."""
    first = place[0]
    found = kwargs[first] if isinstance(first, str) else args[first]
    return found if len(place) == 1 else found[place[1]]


def with_argument(
    place: Place, value: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return all arguments with another one at a place."""
    first = place[0]
    if len(place) > 1:
        parts = enumerate(argument_at(place[:1], args, kwargs))
        value = [value if i == place[1] else part for i, part in parts]  # type: ignore[assignment]
    if isinstance(first, str):
        return args, kwargs | {first: value}
    return (*args[:first], value, *args[first + 1 :]), kwargs
