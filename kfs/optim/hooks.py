"""Hooks of optimizers on models: they do not keep anything alive, and copies of a model do not have them."""

import weakref
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler


class Hook:
    """Calls a method of a `Watch` that still exists. Copies of a hooked module have hooks that do nothing."""

    def __init__(self, watch: object = None, method: str = "") -> None:
        """Store a reference that does not keep the watch alive."""
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    @_disable_dynamo
    def __call__(self, *args: Any) -> Any:
        """Call the method."""
        watch = None if self._watch is None else self._watch()
        return None if watch is None else getattr(watch, self._method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the watch out."""
        return Hook, ()


def has_other_hooks(model: nn.Module) -> bool:
    """Whether a model has hooks that are not those of an optimizer of this library."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values())
    return not all(isinstance(hook, Hook) for hook in hooks)
