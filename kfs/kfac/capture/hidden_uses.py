"""Hidden uses: parameters that enter a custom `autograd.Function`, which PyTorch does not show to modes."""

from collections.abc import Mapping

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from kfs.kfac.capture.tap import Tap


def hidden_uses(f: Tensor, params: Mapping[str, Tensor]) -> set[tuple[str, str]]:
    """Find parameters that enter a custom `autograd.Function`.

    Args:
        f: Predictions.
        params: Tracked parameters, by name.

    Returns:
        `(parameter, function)` of all such uses.
    """
    names = {id(p): name for name, p in params.items()}
    found: set[tuple[str, str]] = set()
    seen, waiting = set(), [f.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        custom = isinstance(node, BackwardCFunction) and not isinstance(node, Tap._backward_cls)
        for following, _ in node.next_functions:
            if custom:
                name = names.get(id(getattr(following, "variable", None)))
                if name is not None:
                    found.add((name, type(node).__name__.removesuffix("Backward")))
            waiting.append(following)
    return found
