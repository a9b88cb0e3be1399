"""Hidden uses: parameters that enter a custom `autograd.Function`, which PyTorch does not show to modes.

And parameters that predictions depend on in any way: the others are not used.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from kfs.kfac.capture.tap import Tap


def hidden_uses(f: Tensor, params: Mapping[str, Tensor]) -> tuple[set[tuple[str, str]], set[str]]:
    """Find parameters that enter a custom `autograd.Function`, as they are or as a view or copy.

    Args:
        f: Predictions.
        params: Tracked parameters, by name.

    Returns:
        `(parameter, function)` of all such uses, and all parameters that predictions depend on.
    """
    names = {id(p): name for name, p in params.items()}
    found: set[tuple[str, str]] = set()
    reached: set[str] = set()
    # Nodes, with the custom function that they were reached from, if there is no tap in between.
    waiting: list[tuple[Any, str | None]] = [(f.grad_fn, None)]
    seen = set()
    while waiting:
        node, function = waiting.pop()
        if node is None or (node, function) in seen:
            continue
        seen.add((node, function))
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            reached.add(name)
            if function is not None:
                found.add((name, function))
        if isinstance(node, Tap._backward_cls):
            function = None
        elif isinstance(node, BackwardCFunction) and not _waits_for_gradients(node):
            function = type(node).__name__.removesuffix("Backward")
        waiting += [(following, function) for following, _ in node.next_functions]
    return found, reached


def _waits_for_gradients(node: Any) -> bool:
    """Whether a function is the one that `fully_shard` puts around modules. It returns what it is given."""
    return str(type(node)._forward_cls.__module__).startswith("torch.distributed.fsdp.")
