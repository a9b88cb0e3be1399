"""The tests of `make test`: the tier of each file, and a covering part of all combinations of parameters."""

from collections.abc import Sequence
from itertools import combinations as combinations_of
from pathlib import Path
from typing import Any

# Tiers, by the beginning of a path relative to the repository; the longest one decides. All other tests notice errors
# in the library: `make test` runs these, and `make test-all` runs everything.
TIERS = {
    "tests/docs/": "book",
    "tests/test_readme.py": "book",
    "tests/benchmarks/": "tools",
    "tests/display/test_charts.py": "tools",
    "tests/conformance/test_wrong_kfacs.py": "tools",
    "tests/mutants/": "tools",
    "tests/optim/test_frameworks.py": "tools",
    "tests/test_planning.py": "tools",
    "tests/plots/": "tools",
    "tests/referee/": "tools",
    "tests/tour/": "tools",
    "tests/test_project.py": "tools",
    "tests/trainers/": "trainers",
    "tests/distributed/": "ranks",
    "tests/distributed/test_factors.py": "library",
}
ROOT = Path(__file__).parents[1]
# If there are at most this many combinations, all are run: each may be the only one that notices a mistake.
FEW = 16


def tier_of(path: Path) -> str:
    """Return the tier of a test file, or of all files in a folder; "" if a folder has several."""
    name = path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
    if path.is_dir() and any(start.startswith(name) and start != name for start in TIERS):
        return ""
    return TIERS[max(found, key=len)] if (found := [start for start in TIERS if name.startswith(start)]) else "library"


def covering(combinations: Sequence[tuple[object, ...]]) -> set[int]:
    """Choose combinations of the values of several parameters that contain all combinations of all parameters but one.

    With three parameters, these are all pairs of values; with two, all values. Greedy: most new pairs first.

    Example:
        >>> len(covering([(i, j) for i in range(5) for j in range(4)]))
        5
    """
    parameters = len(combinations[0])
    if parameters < 2 or len(combinations) <= FEW:
        return set(range(len(combinations)))
    meetings = [set(combinations_of(enumerate(row), parameters - 1)) for row in combinations]
    chosen, missing = set[int](), set[Any]().union(*meetings)
    while missing:
        best = max(range(len(meetings)), key=lambda place: (len(meetings[place] & missing), -place))
        chosen.add(best)
        missing -= meetings[best]
    return chosen
