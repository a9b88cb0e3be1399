"""What models return: where predictions are in it, and how its tensors are replaced by others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfs.errors import ModelError


class KeepsPass(torch.autograd.Function):
    """The identity, whose node keeps a pass for as long as somebody can send a gradient back through it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, one: object, alias: bool) -> Tensor:  # noqa: D102
        ctx.one = one
        if t.ndim == 0:
            return t.clone()
        # The same memory but no view, so that operations in place may follow; not if somebody has kept its values.
        return t.detach() if alias else t.view_as(t)

    @staticmethod
    def backward(_: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient on."""
        return g, None, None


def parts_of(output: Any) -> list[Tensor]:
    """Return the tensors in what a model returned: itself, or parts of a sequence, a mapping or an object."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, (tuple, list, Mapping)):
        output = getattr(output, "__dict__", {})
    values = output.values() if isinstance(output, Mapping) else output
    return [t for t in values if isinstance(t, Tensor)]


def prediction_in(output: Any) -> Tensor:
    """Return predictions in what a model returned: its `logits`, or the first tensor that is not a number.

    Raises:
        ModelError: If there is none, or several ones without order.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = [t for t in parts_of(output) if t.ndim > 0]
    ordered = isinstance(output, (Tensor, tuple, list))
    if not found or (len(found) > 1 and not ordered):
        raise ModelError(
            f"The model returned a {type(output).__name__} with {len(found)} tensors, none of them called `logits`.",
            "Return a tensor, an object or mapping with `logits`, or a tuple that starts with the prediction.",
        )
    return found[0]


def with_parts(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what a model returned, with a function applied to the tensors in it."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, (tuple, list)):
        parts: list[Any] = [function(part) if isinstance(part, Tensor) else part for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    items = output if isinstance(output, Mapping) else vars(output)
    for key, value in list(items.items()):
        if isinstance(value, Tensor) and isinstance(output, Mapping):  # Hugging Face's set their attributes, too
            output[key] = function(value)  # type: ignore[index]
        elif isinstance(value, Tensor):
            setattr(output, key, function(value))
    return output
