"""Costs of the last steps, by part: operations, and seconds on the host. Accelerators are not synchronized."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

Part = Literal["factors", "inverses", "products", "trials"]
PARTS: tuple[Part, ...] = ("factors", "inverses", "products", "trials")
_STEPS = 50  # number of steps that are kept
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class Cost:
    """Cost of one part of a step.

    Attributes:
        count: Number of blocks that were processed, or of evaluations of the loss.
        operations: Approximate number of floating-point operations.
        seconds: Seconds on the host. It does not wait for an accelerator, which works in the meantime.
    """

    count: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0


@dataclass
class Costs:
    """Costs of the last steps, by part.

    Example:
        >>> costs = Costs()
        >>> for work in (4.0, 2.0):
        ...     with costs.timed("inverses"):
        ...         costs.add("inverses", work)
        ...     costs.end_step()
        >>> costs.mean("inverses").operations
        3.0
    """

    last: deque[dict[Part, Cost]] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _now: dict[Part, Cost] = field(default_factory=lambda: {part: Cost() for part in PARTS})

    def add(self, part: Part, operations: float) -> None:
        """Add work to a part of the current step."""
        self._now[part].count += 1
        self._now[part].operations += operations

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Add the duration of this context to a part of the current step."""
        start = perf_counter()
        try:
            yield
        finally:
            self._now[part].seconds += perf_counter() - start

    def end_step(self) -> None:
        """Finish the current step, and begin the next one."""
        self.last.append(self._now)
        self._now = {part: Cost() for part in PARTS}

    def mean(self, part: Part) -> Cost:
        """Return the average cost of a part over the last steps."""
        steps = [step[part] for step in self.last]
        total = max(1, len(steps))
        return Cost(
            sum(s.count for s in steps) / total,
            sum(s.operations for s in steps) / total,
            sum(s.seconds for s in steps) / total,
        )


class _HasCosts(Protocol):
    costs: Costs


_Owner = TypeVar("_Owner", bound=_HasCosts)


def timed(
    part: Part,
) -> Callable[[Callable[Concatenate[_Owner, _P], _T]], Callable[Concatenate[_Owner, _P], _T]]:
    """Decorate a method of an object with `costs`: the duration of each call is added to a part."""

    def decorate(method: Callable[Concatenate[_Owner, _P], _T]) -> Callable[Concatenate[_Owner, _P], _T]:
        @wraps(method)
        def run(owner: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            with owner.costs.timed(part):
                return method(owner, *args, **kwargs)

        return run

    return decorate
