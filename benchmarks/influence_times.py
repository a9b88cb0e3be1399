"""Times of factors, scores of all pairs and self-scores. `benchmarks/influence.py` explains the measurements.

Kronfluence runs a garbage collection after every stage, for any size of the model. A user has to wait for it, so it is
included.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.influence_digits import Recipe, Sizes, digits, trained
from benchmarks.influence_methods import timed
from benchmarks.influence_quality import verdict

MOST_TIME = {"factors": 0.1, "pairwise": 0.4, "self": 0.01}  # in units of Kronfluence's
HEADER = "| program | method | library | CPU seconds | / Kronfluence | target |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class TimeRow:
    """Times of one method.

    Attributes:
        program: The program.
        method: The approximation.
        library: The library.
        seconds: CPU time; `None` if the library is not installed, or has no such program.
        ratio: The time in units of Kronfluence's; `None` without it.
        target: The target, or `None`.
    """

    program: str
    method: str
    library: str
    seconds: float | None
    ratio: float | None = None
    target: float | None = None

    def line(self) -> str:
        """Return a line of a Markdown table."""
        seconds = "not installed" if self.seconds is None else f"{self.seconds:.3f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.4f}"
        target = verdict(self.target, self.ratio, least=False)
        return f"| {self.program} | {self.method} | {self.library} | {seconds} | {ratio} | {target} |"


def times(sizes: Sizes) -> Iterator[TimeRow]:
    """Time all programs in turn, and compare the smallest times."""
    data, queries = digits(0, *sizes.timed)
    model = trained(data, Recipe((64, 256, 256, 10), 60), seed=0)
    methods = timed()
    found: dict[tuple[str, int], list[float]] = {}
    for repeat in range(sizes.repeats):
        for place, method in enumerate(methods):
            if method.fit is None:
                continue
            copied = copy.deepcopy(model)
            fitted, seconds = clocked(partial(method.fit, copied, data, repeat))
            found.setdefault(("factors", place), []).append(seconds)
            _, seconds = clocked(partial(fitted.pairwise, queries))
            found.setdefault(("pairwise", place), []).append(seconds)
            if method.has_own:
                _, seconds = clocked(fitted.own)
                found.setdefault(("self", place), []).append(seconds)
    theirs = next(place for place, method in enumerate(methods) if method.library == "kronfluence")
    for program, target in MOST_TIME.items():
        unit = found.get((program, theirs))
        for place, method in enumerate(methods):
            mine = found.get((program, place))
            row = TimeRow(program, method.name, method.library, None if mine is None else min(mine))
            if mine is not None and unit is not None:
                row = replace(row, ratio=min(mine) / min(unit), target=target if method.library == "kfs" else None)
            if mine is not None or method.fit is None:
                yield row


def clocked(program: Callable[[], Any]) -> tuple[Any, float]:
    """Return a program's result, and its CPU seconds."""
    start = time.process_time()
    result = program()
    return result, time.process_time() - start
