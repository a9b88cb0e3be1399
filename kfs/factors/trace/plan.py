"""The input and output types of rules: descriptions of arguments, and plans.

A rule is a pure function that maps a `Call` and descriptions of its arguments to a plan. It reads shapes, strides and
names, never values, and it runs nothing. It returns

- `Plan`s and `Broadcast`s, one for each use of a parameter,
- a `Rewrite`, for an operation that is composed of other operations,
- a `Copy`, for an operation whose result replaces the parameter,
- or `None` if the rule does not cover the arguments. The fallback then follows the result as a derived parameter or
  reports the use as not covered.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kfs.factors.accumulate.inputs import Inputs
from kfs.factors.layout import Layout, Side
from kfs.factors.trace.tracking import Tracked, Tracker
from kfs.problem.torch_fixes import stored_otherwise

CPU = torch.device("cpu")
# Position of an argument: its index, its keyword, or an index followed by an index into a list.
Place = tuple[int | str, ...]
# Converts gradients `[columns, *shape of the output]` to `[columns, *leading, features]`, given the prepared input.
Read = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of an operation."""

    func: Any  # the operation
    num_data: int  # number of examples in the batch
    narrow: torch.dtype | None = None  # the precision in which `autocast` multiplies, if it is on

    @property
    def name(self) -> str:
        """The operation's name, as the user knows it."""
        return str(getattr(self.func, "__name__", self.func))


@dataclass(frozen=True)
class View:
    """Consecutive rows of a parameter, or one index of its first axis; a matrix may be transposed."""

    name: str
    shape: tuple[int, ...]  # shape of the parameter
    rows: tuple[int, int]  # half-open range
    transposed: bool
    stacked: bool = False  # whether it is a single index of the first axis, with this axis removed

    @property
    def is_whole(self) -> bool:
        """Whether the view has all rows of the parameter."""
        return self.rows == (0, self.shape[0])

    def matrix_layout(self, flip: bool = False) -> Layout:
        """Return the layout of a view with two axes: `[out, in]`, or `[in, out]` if `flip`."""
        return self.layout((1, 0) if self.transposed != flip else (0, 1), 1)

    def layout(self, order: tuple[int, ...], split: int) -> Layout:
        """Return the layout of a view, given the order of its axes and the number of axes that form the matrix rows."""
        if self.stacked:  # the removed axis has length one in the block
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
    offset: int = 0  # storage offset, relative to the parameter's
    source: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None  # the parameter's shape, strides, dtype
    derived: bool = False  # whether it is a view of a derived parameter
    # If the parameter has replaced rows of a constant table, which this argument is: these rows; none for a part of it.
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, place: Place, t: Tensor, tracked: Tracked | None, data: bool) -> "Argument":
        """Describe a tensor."""
        if t.is_nested or t.layout is not torch.strided:
            raise stored_otherwise("nested" if t.is_nested else "sparse", "it is combined with a parameter")
        one = cls(place, tuple(t.shape), tuple(t.stride()), t.dtype, t.device, data)
        if tracked is None:
            return one
        p = tracked.tensor
        if tracked.rows:
            rows = tracked.rows if (t.shape, t.stride()) == (p.shape, p.stride()) else ()
            return replace(one, name=tracked.name, rows=rows)
        offset = int(t.storage_offset()) - int(p.storage_offset())
        source = (tuple(p.shape), tuple(p.stride()), p.dtype)
        derived = tracked.derived is not None
        return replace(one, name=tracked.name, offset=offset, source=source, derived=derived)

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
        """The part of a parameter that this argument is; `None` if it is not a simple view of a parameter."""
        if self.name is None or self.source is None or self.derived:
            return None
        shape, stride, dtype = self.source
        if self.dtype != dtype or not shape:
            return None
        first, between = divmod(self.offset, max(stride[0], 1))
        if between:  # it starts in the middle of a row
            return None
        candidates = [(self.shape, self.stride, False)]
        if len(self.shape) == 2:
            candidates.append((self.shape[::-1], self.stride[::-1], True))
        for own_shape, strides, transposed in candidates:
            if len(own_shape) == len(shape) and own_shape[1:] == shape[1:] and strides == stride:
                return View(self.name, shape, (first, first + own_shape[0]), transposed)
            if own_shape and own_shape == shape[1:] and strides == stride[1:]:
                return View(self.name, shape, (first, first + 1), transposed, stacked=True)
        return None

    def part(self, index: int) -> "Argument":
        """Return the description of `t[index]`."""
        offset = self.offset + index * self.stride[0]
        return replace(self, shape=self.shape[1:], stride=self.stride[1:], offset=offset)

    def layout_of_rows(self) -> Layout:
        """Return the layout of a parameter that has replaced `rows` of a table."""
        assert self.name is not None  # noqa: S101 (it is tracked)
        return Layout(self.name, (len(self.rows), self.shape[1]), (0, len(self.rows)), (0, 1), 1)

    @property
    def by_rows(self) -> bool:
        """Whether the viewed parameter is contiguous in row-major order."""
        if self.source is None:  # it has replaced rows of a table
            return False
        shape, stride, _ = self.source
        expected = 1
        for n, step in zip(reversed(shape), reversed(stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True

    def entries(self, axes: tuple[int, ...]) -> Tensor | None:
        """Return the indices of the parameter's entries along some axes; `None` if these are all entries in order."""
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
    """Everything that is known about a use of a parameter before the operation runs. Plans are never mutated."""

    operation: str  # the operation's name
    layout: Layout  # how the parameter becomes a matrix
    inputs: Inputs  # how the vectors that multiply it are read
    arguments: tuple[Argument, ...] = ()  # arguments of `prepare`
    prepare: Callable[..., Any] | None = None  # computes what `inputs` reads; by default, the first argument
    read: Read | None = None  # converts the output's gradients; `None` to use them unchanged
    bias: "Plan | None" = None  # plan for the bias of the same operation
    joins: bool = False  # whether the bias may join the weight's block
    follows: bool = False  # whether inputs do not depend on the data: the output is then a derived parameter
    mixes: bool = False  # whether examples of a batch influence each other in the operation

    # Set by the trace when it settles the plan.
    side: Side = "A"  # on which side of the block inputs are
    ones: bool = False  # whether inputs get a one appended for the block's bias
    fits: bool = True  # whether the use is consistent with the other uses of its parameter
    narrow: torch.dtype | None = None
    dtype: torch.dtype = torch.float32  # of the operation's output
    device: torch.device = CPU  # of the operation's output

    def __post_init__(self) -> None:
        """Find out whether the input is a positional argument as it is: its index, or `None`."""
        place = self.arguments[0].place if self.prepare is None and len(self.arguments) == 1 else ()
        self.plain_input: Any = place[0] if len(place) == 1 and isinstance(place[0], int) else None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """A parameter that is expanded to a shape with a batch axis and tapped there, before the operation runs.

    A derived parameter has no plan: its per-example gradients are mapped back to the parameter.
    """

    argument: Argument
    shape: tuple[int, ...]
    plan: Plan | None
    spread: Any = None  # for a derived parameter: the `Spread` that maps positions to entries


@dataclass(frozen=True)
class Rewrite:
    """An operation replaced by operations with rules: `body(one, *args, **kwargs)` runs them within the pass `one`."""

    body: Callable[..., Any]


@dataclass(frozen=True)
class Copy:
    """An operation whose result has the entries of a parameter at the same positions, and replaces it."""

    name: str  # of the parameter


Planned = tuple[Plan | Broadcast, ...] | Rewrite | Copy | None


def describe(part: Any, place: Place, tracker: Tracker, is_data: Callable[[Tensor], bool]) -> Any:
    """Return an argument with its tensors replaced by descriptions."""
    if isinstance(part, Tensor):
        return Argument.of(place, part, tracker.find(part), is_data(part))
    if type(part) in {tuple, list}:
        return tuple(describe(inner, (*place, i), tracker, is_data) for i, inner in enumerate(part))
    return part


def argument_at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument at a position."""
    first = place[0]
    found = kwargs[first] if isinstance(first, str) else args[first]
    return found if len(place) == 1 else found[place[1]]


def with_argument(
    place: Place, value: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the one at a position replaced."""
    first = place[0]
    if len(place) > 1:
        parts = enumerate(argument_at(place[:1], args, kwargs))
        value = [value if i == place[1] else part for i, part in parts]  # type: ignore[assignment]
    if isinstance(first, str):
        return args, kwargs | {first: value}
    return (*args[:first], value, *args[first + 1 :]), kwargs
