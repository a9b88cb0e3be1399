"""Suggests similar known names for an unknown name, so that a message need not list all names."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

from kfs.errors import UnknownNameError

Value = TypeVar("Value")
_FEW = 6  # maximum number of names that are listed


class ByName(dict[str, Value]):
    """A dictionary of blocks by name, which suggests similar names in the error for an unknown name.

    Example:
        >>> blocks = ByName({"conv": 1, "head": 2})
        >>> blocks["heat"]
        Traceback (most recent call last):
        kfs.errors.UnknownNameError: There is no block 'heat'. Did you mean 'head'?
        >>> blocks
        2 blocks by name
          'conv': 1
          'head': 2
    """

    def __repr__(self) -> str:
        """Return one line for each item, with the first line of its `repr`."""
        lines = [f"  {name!r}: {repr(value).splitlines()[0]}" for name, value in self.items()]
        return "\n".join([f"{len(self)} block{'' if len(self) == 1 else 's'} by name", *lines])

    def __missing__(self, name: object) -> Value:
        raise UnknownNameError(f"There is no block {name!r}.", suggest([name], self))


def suggest(unknown: Iterable[object], known: Iterable[str]) -> str:
    """Return advice for unknown names: similar known names, or else a list of known names.

    Args:
        unknown: Names that do not exist.
        known: Names that exist.

    Example:
        >>> suggest(["encoder.weigth"], [f"layer{i}" for i in range(40)] + ["encoder.weight"])
        "Did you mean 'encoder.weight'?"
        >>> suggest(["head"], ["fc1", "fc2"])
        "Choose from 'fc1', 'fc2'."
        >>> suggest(["head"], [f"fc{i}" for i in range(40)])
        "There are 40, such as 'fc0', 'fc1', 'fc2', 'fc3', 'fc4', 'fc5'."
    """
    names = list(known)
    listed = f"Choose from {few(names)}." if len(names) <= _FEW else f"There are {few(names)}."
    return guess(unknown, names) or listed


def guess(unknown: Iterable[object], known: Iterable[str]) -> str:
    """Return a question such as `"Did you mean 'KFAC'?"`; an empty string if no known name is similar.

    Example:
        >>> guess(["0.wieght", "5"], ["0.weight", "0.bias"])
        "Did you mean '0.weight'?"
        >>> guess(["kfac"], ["KFAC", "EKFAC", "load"])
        "Did you mean 'KFAC'?"
    """
    names = list(known)
    found = dict.fromkeys(match for name in unknown for match in _close(str(name), names))
    *first, last = map(repr, list(found)[:_FEW] or [""])
    return f"Did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if found else ""


def _close(name: str, names: Sequence[str]) -> list[str]:
    """Return the names that differ only in case, or else similar names, ignoring case if necessary."""
    by_case = [known for known in names if known.lower() == name.lower()]
    if by_case:
        return by_case
    lowered = {known.lower(): known for known in names}
    close = get_close_matches(name, names) or get_close_matches(name.lower(), lowered)
    return [lowered.get(match, match) for match in close]


def few(names: Collection[object]) -> str:
    """List all names if there are few; otherwise, give their number and the first ones.

    Example:
        >>> few(["W", "b"]), few(range(100))
        ("'W', 'b'", '100, such as 0, 1, 2, 3, 4, 5')
    """
    listed = ", ".join(map(repr, list(names)[:_FEW]))
    return f"{len(names)}, such as {listed}" if len(names) > _FEW else listed
