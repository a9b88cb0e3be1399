"""Flags on an accelerator: which data cannot be used, noted there, and read once at the end.

A check that asks an accelerator for its result waits for all that it has to do before. So in a pass over data, checks
of values only remember the first datum that fails. Who finds one at the end looks at that datum again, and says what is
wrong with it. On a CPU there is nothing to wait for, and checks are made at once.
"""

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.waiting import counting, numbers

# Larger than the index of any datum, and exact in float64.
_NONE = 2**52


class Flags:
    """Remembers the first datum that failed a check.

    Args:
        device: Where checks are made.

    Example:
        >>> flags = Flags(torch.device("cpu"))
        >>> flags.note(torch.tensor([False, True, True]), first=10)
        >>> flags.first_bad()
        11
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), _NONE, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Forget all of them. They stay where a recorded computation finds them."""
        self._first.fill_(_NONE)

    def note(self, bad: Tensor | None, first: int | Tensor) -> None:
        """Take note of data that failed a check.

        Args:
            bad: Booleans, `[N]`; `None` if none of them can.
            first: Index of the first of these data; a tensor if the computation is recorded.
        """
        if bad is None:
            return
        index = counting(len(bad), bad.device) + first
        found = torch.where(bad, index, _NONE).amin()
        torch.minimum(self._first, found.to(self._first.device), out=self._first)

    def first_bad(self) -> int | None:
        """Return the index of the first datum that failed a check; `None` if there is none. This waits."""
        (first,) = numbers([self._first])
        return None if first == _NONE else int(first)


def refuse_not_finite(f: Tensor, first: int) -> None:
    """Refuse predictions `[N, ...]` with NaN or positive infinity, at once.

    Args:
        f: Predictions.
        first: Index of the first datum.

    Raises:
        DataError: If there is one.
    """
    if f.numel() == 0 or f.amax().isfinite():
        return
    bad = not_finite(f).nonzero()
    if len(bad):
        raise DataError(
            f"The prediction for datum {first + int(bad[0, 0])} is not finite.",
            "Look for NaN or infinity in the data or the parameters.",
        )


def not_finite(f: Tensor) -> Tensor:
    """Return which predictions `[N, ...]` have NaN or positive infinity (negative infinity masks a class), `[N]`.

    Example:
        >>> not_finite(torch.tensor([[0.0, -torch.inf], [torch.nan, 1.0]])).tolist()
        [False, True]
    """
    if f[:1].numel() == 0:
        return torch.zeros(len(f), dtype=torch.bool, device=f.device)
    largest = f.amax(tuple(range(1, f.ndim))) if f.ndim > 1 else f
    return (largest < torch.inf).logical_not_()
