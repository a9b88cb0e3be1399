"""Capture: seeing every operation of a forward pass that uses a tracked parameter, whoever calls it.

A `TorchFunctionMode` recognises parameters, and views of them, by their storage. A rule for the operation (see
`operations`) says what multiplies the parameter and how to read gradients; the operation's output passes through a
tap, an identity with a zero-size second input. Differentiating the predictions with respect to these inputs sends
vectors back to all taps: no weight gradient is computed, and a gradient is used where it arises and never stored.

Where a parameter meets no data yet (an embedding of positions `0, ..., T - 1` without batch axis), the result is a
*virtual parameter*: it is followed like a parameter until it is broadcast over the batch, where gradients are still
per datum.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfs.exact_derivatives import refuse_reentrant_checkpoint
from kfs.kfac.batch_axis import BatchAxis
from kfs.kfac.blocks import Layout, Side
from kfs.kfac.inputs import Input
from kfs.kfac.uses import Uses
from kfs.kfac.views import Source, Sources, Virtual

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
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Show the gradients; nothing needs to be computed for the second input."""
        if ctx.capture.together:
            Show.apply(g, ctx.receive)  # type: ignore[no-untyped-call]
        else:
            ctx.receive(g.unsqueeze(0))
        if not ctx.capture.keep_graph:
            ctx.receive = None  # it may hold activations
        return g, g.new_empty(0), None, None


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
_FIRST_ONLY = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


class Capture(TorchFunctionMode):
    """Watches the forward pass of one batch.

    Args:
        params: The tracked parameters, by name.
        constants: Other tensors that do not depend on the data, such as buffers.
        num_data: Number of data in the batch.
        uses: Takes note of uses.
        rules: By operation, what to do if it uses a tracked tensor. A rule takes this object, the operation and its
            arguments, and returns the result, or `NotImplemented`.
        otherwise: What to do if there is no rule or it gave up: takes this object, the operation, `args` and `kwargs`.
        batch_axis: Where the batch axis is in activations, if not first.

    Attributes:
        batch: Where the batch axis is.
        handles: The taps' zero-size inputs.
        keep_graph: Whether further backward passes will follow.
        together: Whether a backward pass is for several columns, by `vmap`.
        unexplained: `(parameter, operation)` of uses that no rule explains and that influence the predictions. It is
            filled in by the backward pass.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        constants: Iterable[Tensor],
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
        self.handles: list[Tensor] = []
        self.keep_graph, self.together = True, False
        self.unexplained: set[tuple[str, str]] = set()
        self._constants = {id(t) for t in (*params.values(), *constants)}
        self._virtual: list[Virtual] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, by a rule if it has one and uses a tracked parameter."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():  # what has no gradient is constant
            refuse_reentrant_checkpoint()
            return func(*args, **kwargs)
        inputs = tensors_of((*args, *kwargs.values()))
        result = NotImplemented
        if any(self.sources.find(t) is not None for t in inputs):
            rule = self.rules.get(func)
            result = NotImplemented if rule is None else rule(self, func, *args, **kwargs)
            if result is NotImplemented:
                result = self.otherwise(self, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._note_constants(func, inputs, args, result)
        return result

    def tap(self, z: Tensor, receive: Receiver) -> Tensor:
        """Return `z` such that gradients with respect to it are shown to a receiver."""
        handle = torch.empty(0, dtype=z.dtype, device=z.device, requires_grad=True)
        self.handles.append(handle)
        result: Tensor = Tap.apply(z, handle, self, receive)  # type: ignore[no-untyped-call]
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
        return self.tap(out, self.uses.record(self.batch, operation, layout, vectors, read, out, ones, side))

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

    def constant(self, t: Tensor) -> bool:
        """Whether a tensor does not depend on the data, as far as one can see."""
        return id(t) in self._constants or getattr(t, "_kfs_constant", False)

    def batched(self, t: Tensor) -> Tensor | None:
        """Return an input with its batch axis, expanded if its first axis has length one; nothing if it has none."""
        if not self.constant(t):
            return t
        return t.expand(self.num_data, *t.shape[1:]) if t.ndim > 1 and t.shape[0] == 1 else None

    @contextmanager
    def with_batch_axis(self, axis: int | None) -> Iterator[None]:
        """Know better where the batch axis is, in this context."""
        before = self.batch
        self.batch = before if axis is None else BatchAxis(self.num_data, axis)
        try:
            yield
        finally:
            self.batch = before

    def _note_constants(self, func: Any, inputs: list[Tensor], args: Any, result: Any) -> None:
        """Mark results that do not depend on the data, and unmark what data were written into."""
        if func in _SHAPES_ONLY:
            constant = True
        else:  # the second argument of `to` gives its type only
            constant = all(map(self.constant, inputs[:1] if func in _FIRST_ONLY else inputs))
        before = {id(t) for t in inputs}
        for t in tensors_of([result]):
            if constant and id(t) not in before:
                t._kfs_constant = True  # type: ignore[attr-defined]
            elif not constant and id(t) in before and getattr(t, "_kfs_constant", False):
                t._kfs_constant = False  # type: ignore[attr-defined]
        if func is Tensor.__setitem__ and not constant and getattr(args[0], "_kfs_constant", False):
            args[0]._kfs_constant = False


def tensors_of(parts: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among arguments, also in lists and tuples."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += tensors_of(part)
    return found
