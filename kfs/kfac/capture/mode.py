"""Capture: seeing every operation of a forward pass that uses a tracked parameter, whoever calls it.

A `TorchFunctionMode` recognises parameters, and views of them, by their storage. A rule for the operation (see
`operations`) says what multiplies the parameter and how to read gradients; the operation's output passes through a
tap, an identity with a zero-size second input. Differentiating the predictions with respect to this input sends
vectors back to all taps: no weight gradient is computed, and a gradient is used where it arises and never stored.

Where a parameter meets no data yet (an embedding of positions `0, ..., T - 1` without batch axis), the result is a
*virtual parameter*: it is followed like a parameter until it is broadcast over the batch, where gradients are still
per datum.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from kfs.errors import ModelError
from kfs.exact_derivatives import refuse_reentrant_checkpoint
from kfs.kfac.capture.parameters import Source, Sources, Virtual
from kfs.kfac.capture.uses import Use, Uses
from kfs.kfac.layout import Layout, Side
from kfs.kfac.sums.batch_axis import BatchAxis
from kfs.kfac.sums.inputs import Input

# Reads the gradients of some columns, [columns, *shape of the output], as [columns, *leading axes, (groups,) features].
Read = Callable[[Tensor], Tensor]


# Takes the gradients of some columns, [columns, *shape of the output].
Receiver = Callable[[Tensor], None]


class Tap(torch.autograd.Function):
    """The identity, with a backward pass that shows gradients to a receiver."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        z: Tensor,
        handle: Tensor,  # noqa: ARG004 (gives the graph an edge)
        capture: "Capture",
        receive: Receiver,
    ) -> Tensor:
        ctx.capture, ctx.receive = capture, receive
        # The same memory, but no view: operations in place may follow, and cost nothing extra in the backward pass.
        # Nobody else uses z any more, and no operation that has a rule keeps its output for the backward pass.
        return z.new_empty(0).set_(z.untyped_storage(), z.storage_offset(), z.shape, z.stride())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        """Show the gradients; nothing needs to be computed for the second input."""
        if ctx.capture.finished or ctx.receive is None:  # somebody differentiates what the model has kept, or again
            return g, None, None, None
        if ctx.capture.running:
            raise ModelError(
                "The model differentiates its own predictions (torch.autograd.grad in its forward pass).",
                "Leave the parameters behind that derivative out with params=; KFAC is not defined for them here.",
            )
        if (
            g.is_cuda
        ):  # pragma: no cover (the thread's first operation may be a product, for which cuBLAS wants a context)
            torch.cuda.set_device(g.device)
        if ctx.capture.together:
            Show.apply(g, ctx.receive)  # type: ignore[no-untyped-call]
        else:
            ctx.receive(g.unsqueeze(0))
        if not ctx.capture.keep_graph:
            ctx.receive = None  # it may hold activations
        return g, None, None, None


class Show(torch.autograd.Function):
    """Passes gradients of columns that are sent back together, by `vmap`, to a receiver: `[columns, ...]`."""

    @staticmethod
    def forward(g: Tensor, receive: Receiver) -> Tensor:  # noqa: ARG004 (columns do not differ here, so that g is zero)
        """Show nothing."""
        return g.new_empty(0)  # pragma: no cover (whether this happens depends on PyTorch's backward formulas)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(_: Any, in_dims: Any, g: Tensor, receive: Receiver) -> tuple[Tensor, None]:
        """Show all columns."""
        receive(g.movedim(in_dims[0], 0))
        return g.new_empty(0), None


# Operations whose result does not depend on the values of their tensors, or only on those of the first one.
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
_SHAPES_ONLY = {getattr(torch, name) for name in _LIKE} | {getattr(Tensor, name) for name in _NEW}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow")} | {"__setitem__"}
_FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
# Questions, which are asked so often that it pays not to look at their arguments.
_PROPERTIES = ("dtype", "shape", "device", "ndim", "is_nested", "is_cuda", "is_sparse", "layout")
_METHODS = ("dim", "size", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__")
_QUESTIONS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}


class Capture(TorchFunctionMode):
    """Watches the forward pass of one batch.

    Args:
        params: The tracked parameters, by name.
        num_data: Number of data in the batch.
        uses: Takes note of uses.
        rules: By operation, what to do if it uses a tracked tensor. A rule takes this object, the operation and its
            arguments, and returns the result, or `NotImplemented`.
        otherwise: What to do if there is no rule or it gave up: takes this object, the operation, `args` and `kwargs`.
        batch_axis: Where the batch axis is in activations, if not first.

    Attributes:
        batch: Where the batch axis is.
        handle: The zero-size second input of all taps; nothing if there is no tap.
        running: Whether the forward pass is still running.
        finished: Whether gradients are of no interest any more.
        keep_graph: Whether further backward passes will follow.
        together: Whether a backward pass is for several columns, by `vmap`.
        unexplained: `(parameter, operation)` of uses that no rule explains and that influence the predictions, or
            may do so. It is complete after a backward pass.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        num_data: int,
        uses: Uses,
        rules: Mapping[Any, Callable[..., Any]],
        otherwise: Callable[..., Any],
        batch_axis: int | None = None,
    ) -> None:
        """Start without any tap."""
        super().__init__()
        self.sources = Sources(params)
        self.num_data, self.uses, self.batch = num_data, uses, BatchAxis(num_data, batch_axis)
        self.rules, self.otherwise = rules, otherwise
        self.handle: Tensor | None = None
        self.keep_graph, self.together, self.running, self.finished = True, False, True, False
        self.unexplained: set[tuple[str, str]] = set()
        self._marked: list[weakref.ref[Tensor]] = []
        self._virtual: list[Virtual] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, by a rule if it has one and uses a tracked parameter."""
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        inputs = tensors_of((*args, *kwargs.values()))
        result = NotImplemented
        if not torch.is_grad_enabled():  # what has no gradient is no use
            refuse_reentrant_checkpoint()
            result = func(*args, **kwargs)
        elif any(map(is_functorch_wrapped_tensor, inputs)):
            result = func(*args, **kwargs)
            plain = [t for t in inputs if not is_functorch_wrapped_tensor(t)]
            found = [source for t in plain if (source := self.sources.find(t)) is not None]
            self.unexplained.update((source.name, f"{func.__name__} inside of torch.func") for source in found)
        elif any(self.sources.find(t) is not None for t in inputs):
            rule = self.rules.get(func)
            result = NotImplemented if rule is None else rule(self, func, *args, **kwargs)
            if result is NotImplemented:
                result = self.otherwise(self, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._mark(func, inputs, args, result)
        return result

    def tap(self, z: Tensor, receive: Receiver) -> Tensor:
        """Return `z` such that gradients with respect to it are shown to a receiver."""
        if self.handle is None:
            self.handle = torch.empty(0, requires_grad=True)
        result: Tensor = Tap.apply(z, self.handle, self, receive)  # type: ignore[no-untyped-call]
        return result

    def record(
        self, out: Tensor, operation: str, layout: Layout, vectors: Input, read: Read, ones: bool, side: Side = "A"
    ) -> Tensor:
        """Take note of a use, and return its output with a tap.

        Args:
            out: What the operation returned.
            operation: What to call it.
            layout: The block that the parameters belong to.
            vectors: What multiplies the parameter.
            read: Reads the output's gradients.
            ones: Whether the bias was used.
            side: On which side of the block inputs are.
        """
        return self.tap(out, self.uses.record(Use(self.batch, operation, layout, vectors, read, out, ones, side)))

    def record_virtual(self, out: Tensor, name: str, record: Callable[[bool], Receiver]) -> Tensor:
        """Follow the output of an operation that has met no data yet; `record` is that of `Virtual`."""
        out = out.contiguous()
        virtual = Virtual(record)
        self._virtual.append(virtual)
        self.sources.add(Source(name, out, virtual))
        return out

    def pass_virtual(self) -> None:
        """After a backward pass: pass on what arrived at virtual parameters, the latest ones first."""
        for virtual in reversed(self._virtual):
            virtual.pass_on()

    def is_data(self, t: Tensor) -> bool:
        """Whether a tensor depends on the data. One that comes from code that this mode does not see may do so."""
        marked: bool | None = getattr(t, "_kfs_data", None)
        if marked is not None:
            return marked
        return t.grad_fn is not None and self.sources.find(t) is None

    @contextmanager
    def with_batch_axis(self, axis: int | None) -> Iterator[None]:
        """Know better where the batch axis is, in this context."""
        before = self.batch
        self.batch = before if axis is None else BatchAxis(self.num_data, axis)
        try:
            yield
        finally:
            self.batch = before

    @contextmanager
    def attentive(self) -> Iterator[None]:
        """Take note of gradients in this context, and of none afterwards."""
        try:
            yield
        finally:
            self.finished = True

    def mark_data(self, t: Tensor) -> Tensor:
        """Return a batch's input such that what is computed from it is known to depend on data.

        An input without batch axis, such as positions `[1, T]`, is the same for all data.
        """
        axis = self.batch.axis or 0
        first = t.shape[axis] if t.ndim > axis else 1
        divides = first > 1 and (first % self.num_data == 0 or self.num_data % first == 0)
        elsewhere = self.num_data in t.shape and (t.shape[0] > 1 or self.num_data == 1)
        return self.as_data(t, divides or elsewhere or self.num_data == first)

    def as_data(self, t: Tensor, data: bool = True) -> Tensor:
        """Return a tensor such that what is computed from it is known to depend on data (or not)."""
        alias = t.view_as(t)
        self._set_mark(alias, data)
        return alias

    def forget_marks(self) -> None:
        """Leave nothing behind on tensors that a model has kept."""
        for reference in self._marked:
            t = reference()
            if t is not None:
                del t._kfs_data  # type: ignore[attr-defined]
        self._marked.clear()

    def _set_mark(self, t: Tensor, data: bool) -> None:
        if getattr(t, "_kfs_data", None) is None:
            self._marked.append(weakref.ref(t))
        t._kfs_data = data  # type: ignore[attr-defined]

    def _mark(self, func: Any, inputs: list[Tensor], args: Any, result: Any) -> None:
        """Mark results by whether they depend on data, and what data were written into."""
        if func in _SHAPES_ONLY:
            data = False
        else:  # the second argument of `to` gives its type only
            data = any(self.is_data(t) for t in (inputs[:1] if func in _FIRST_ONLY else inputs))
        for t in tensors_of([result]):
            if data or all(t is not before for before in inputs):
                self._set_mark(t, data)
        if not data or not is_in_place(func) or not args or not isinstance(args[0], Tensor):
            return
        if func is Tensor.__setitem__:
            self._set_mark(args[0], True)
        base = args[0]._base
        if base is not None and not base.requires_grad:
            self._set_mark(base, True)  # data were written into a part of it


def is_in_place(func: Any) -> bool:
    """Whether an operation changes its first argument, judging by its name."""
    name: str = getattr(func, "__name__", "")
    return name in _IN_PLACE if name.startswith("__") else name.endswith("_")


def tensors_of(parts: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among arguments, also in lists and tuples."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += tensors_of(part)
    return found
