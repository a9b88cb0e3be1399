"""What models return: replacing its tensors. Finding predictions in it lives in `kfs.outputs`."""

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Graphs of other models are large. What happens to predictions before the loss is a few operations.
_MOST_OPERATIONS = 50


class KeepsPass(torch.autograd.Function):
    """The identity. Its node in the graph keeps a pass alive as long as a gradient can be sent back through it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, one: object, alias: bool, predicted: bool) -> Tensor:  # noqa: D102
        ctx.one = one
        ctx.predicted = predicted
        if t.ndim == 0:
            return t.clone()
        # An alias has the same memory but is no view, so operations in place may follow. If the operation before has
        # saved its result, these have to be noticed, and only a view does that.
        return t.detach() if alias else t.view_as(t)

    @staticmethod
    def backward(_: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        """Pass the gradient on."""
        return g, None, None, None


def passes_behind(t: Tensor) -> list[Any]:
    """Return the passes that a tensor was computed from the predictions of, in a few operations."""
    found = []
    nodes: list[Any] = [t.grad_fn]
    for node in nodes:
        if hasattr(node, "predicted"):
            found += [node.one] if node.predicted else []
        elif node is not None:
            following = [further for further, _ in node.next_functions if further not in nodes]
            nodes += following[: _MOST_OPERATIONS - len(nodes)]
    return found


def with_parts(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a model's output with a function applied to its tensors."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, (tuple, list)):
        parts: list[Any] = [function(part) if isinstance(part, Tensor) else part for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    items = output if isinstance(output, Mapping) else vars(output)
    # Mappings of Hugging Face also set an attribute when an item is set.
    put = output.__setitem__ if isinstance(output, MutableMapping) else partial(setattr, output)
    for key, value in list(items.items()):
        if isinstance(value, Tensor):
            put(key, function(value))
    return output
