"""Choosing what to remove: the cheapest first, until few enough numbers are left."""

from collections.abc import Callable, Mapping, Sequence

from kfs.compress.layers import Keep, Layer
from kfs.errors import ModelError

# Shares such as 0.29 are no binary fractions: 0.29 * 100 is a little less than 29.
_ROUND_OFF = 1e-9


def allowed(share: float, total: int) -> int:
    """Return how many of some numbers may be kept.

    Example:
        >>> allowed(0.29, 100), allowed(0.5, 5)
        (29, 2)
    """
    return int(share * total + _ROUND_OFF)


def groups(layers: Sequence[Layer], keep: Keep) -> list[tuple[list[Layer], float]]:
    """Return which layers compete with each other, and the share that they keep together."""
    if isinstance(keep, Mapping):
        return [([layer], keep[layer.name]) for layer in layers]
    return [(list(layers), keep)]


def shortest(size: Callable[[int], int], most: int, budget: int, what: str) -> int:
    """Return how many candidates must be removed until a size is within the budget.

    Args:
        size: The size after so many candidates, in the order of their costs; it does not grow.
        most: How many candidates there are.
        budget: The largest size allowed.
        what: What is removed.

    Raises:
        ModelError: If removing all of them does not suffice.

    Example:
        >>> shortest(lambda removed: 10 - 2 * removed, 4, 5, "rows")
        3
    """
    if size(most) > budget:
        raise ModelError(
            f"Without all {what} that can be removed, {size(most):,} numbers are left, more than the {budget:,} that "
            "keep allows.",
            "Keep more.",
        )
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if size(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low
