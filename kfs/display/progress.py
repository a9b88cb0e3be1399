r"""Shows the progress of an algorithm in one line, for iterations, products or batches.

The outermost algorithm owns the line. Loops inside of it, such as the batches of a product, appear as a part of its
current step. The line is written to the standard error stream of a terminal or a notebook only. It appears after two
seconds by default, or at once if requested. It is removed at the end.

Nothing here starts a thread, since data loaders fork processes while a line is shown.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from time import perf_counter
from typing import TextIO, TypeVar

Item = TypeVar("Item")
# `None` shows algorithms that take longer than two seconds, `True` shows all of them, `False` shows none.
Wanted = bool | None
_PATIENCE = 2.0  # seconds before a line is shown
_INTERVAL = 0.1  # minimum seconds between two updates
_BAR = 10  # width of the bar in characters


class _Open(threading.local):
    """The progress lines of the algorithms that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.lines: list[Line] = []


_open = _Open()


class Line:
    """The progress of an algorithm.

    Args:
        task: Name of the algorithm.
        total: Number of steps, if it is known.
        wanted: Whether to show the line: `None` after two seconds, `True` always, `False` never.
        unit: Name of a step.

    Attributes:
        done: Number of completed steps.
        share: Completed share of the work, from 0 to 1, if the number of steps does not determine it.
        at_least: Lower bound on the number of steps, if only a bound is known.
        note: Additional text, such as a residual.
        inner: Progress of a loop in the current step.
        outer: Progress of the algorithm that contains this one.

    Example:
        >>> line = Line("conjugate gradients", total=100, unit="iteration")
        >>> line.advance(25, note="residual 1e-02")
        >>> line.text(seconds=30)
        'conjugate gradients  [##........]  25%  00:30, about 01:30 left  iteration 25/100  residual 1e-02'

        If the number of steps is unknown, only a bound or the time per step is shown:

        >>> line = Line("eigenvalues", unit="product")
        >>> line.at_least = 20
        >>> line.advance(10)
        >>> line.text(seconds=4)
        'eigenvalues  00:04, at least 00:04 left  product 10'
        >>> line.advance(20)
        >>> line.text(seconds=12)
        'eigenvalues  00:12, 0.4 s per product  product 30'
    """

    def __init__(self, task: str, total: int | None = None, wanted: Wanted = None, unit: str = "") -> None:
        self.task = task
        self.total = total
        self.wanted = wanted
        self.unit = unit
        self.done = 0
        self.share: float | None = None
        self.at_least = 0
        self.note = ""
        self.inner: Line | None = None
        self.outer: Line | None = None
        self._start = perf_counter()
        self._shown = -_INTERVAL  # time of the last update, in seconds since the start
        self._width = 0  # width of the text on the screen

    def advance(self, steps: int = 1, *, note: str = "", share: float | None = None) -> None:
        """Count steps, set the note and the share, and update the outermost line."""
        self.done += steps
        self.note = note
        self.share = share
        # Write the outermost line if it is wanted and the update interval has passed.
        top = self
        while top.outer is not None:
            top = top.outer
        now = perf_counter() - top._start
        if top.wanted is False or now - top._shown < _INTERVAL or (top.wanted is None and now < _PATIENCE):
            return
        stream = _screen()
        if stream is None:
            return
        top._shown = now
        text = top.text(now)[: get_terminal_size().columns - 1]
        stream.write("\r" + text.ljust(top._width))
        stream.flush()
        top._width = len(text)

    def inside(self, outer: "Line") -> None:
        """Show this line as a part of `outer`. If the outermost line has `wanted=None`, it takes this line's value."""
        self.outer = outer
        outer.inner = self
        top = outer
        while top.outer is not None:
            top = top.outer
        if top.wanted is None:
            top.wanted = self.wanted
        if top.wanted is False and top._width:
            top.clear()

    def end(self) -> None:
        """Remove the line from its outer line and from the screen."""
        if self.outer is not None and self.outer.inner is self:
            self.outer.inner = None
        if self._width:
            self.clear()

    def clear(self) -> None:
        """Remove the text of the line from the screen."""
        stream = _screen()
        if stream is not None:
            stream.write("\r" + " " * self._width + "\r")
            stream.flush()
        self._width = 0

    def text(self, seconds: float) -> str:
        """Return the text of the line, given the seconds since the start."""
        share = self.part_done()
        parts = [self.task]
        if share is not None:
            filled = int(share * _BAR)
            parts.append(f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%}")
        parts.append(_clock(seconds) + self._left(seconds, share))
        line: Line | None = self
        while line is not None:
            parts += [part for part in (line.steps(), line.note) if part]
            line = line.inner
        return "  ".join(parts)

    def _left(self, seconds: float, share: float | None) -> str:
        """Return an estimate or a lower bound of the remaining time, or else the time per step."""
        if share:
            return f", about {_clock(seconds * (1 - share) / share)} left"
        if share is not None or not self.done:
            return ""
        pace = seconds / self.done
        if self.done < self.at_least:
            return f", at least {_clock(pace * (self.at_least - self.done))} left"
        return f", {pace:.2g} s per {self.unit or 'step'}"

    def steps(self) -> str:
        """Return the number of completed steps as text."""
        number = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.unit} {number}".lstrip()

    def part_done(self) -> float | None:
        """Return the completed share, from 0 to 1, including the current step; `None` if it is unknown."""
        if self.share is not None:
            return min(max(self.share, 0.0), 1.0)
        if not self.total:
            return None
        part = None if self.inner is None else self.inner.part_done()
        return min((self.done + (part or 0.0)) / self.total, 1.0)


@contextmanager
def show_progress(task: str, total: int | None = None, wanted: Wanted = None, unit: str = "") -> Iterator[Line]:
    """Show the progress of an algorithm in this context.

    Args:
        task: Name of the algorithm.
        total: Number of steps, if it is known.
        wanted: `None` shows the line after two seconds, `True` at once, `False` never. If the outermost algorithm has
            `None`, a loop inside of it, such as the batches of a risk, decides for it.
        unit: Name of a step.

    Yields:
        The progress line, which counts steps.
    """
    line = Line(task, total, wanted, unit)
    if _open.lines:
        line.inside(_open.lines[-1])
    _open.lines.append(line)
    try:
        yield line
    finally:
        _open.lines.remove(line)
        line.end()


def tracked(items: Iterable[Item], task: str, total: int | None, wanted: Wanted, unit: str) -> Iterator[Item]:
    """Iterate over items and show the progress.

    This line never becomes the outer line of another one: after an error in the body of the loop, a traceback may keep
    the generator alive, and its line would stay open.
    """
    line = Line(task, total, wanted, unit)
    if _open.lines:
        line.inside(_open.lines[-1])
    try:
        for item in items:
            yield item
            line.advance()
    finally:
        line.end()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _screen() -> TextIO | None:
    """Return the error stream if it is a terminal or a notebook; otherwise `None`."""
    stream = sys.stderr
    if stream is None:
        return None
    # The streams of a notebook are not terminals, but they support overwriting a line.
    is_notebook = type(stream).__module__.startswith("ipykernel")
    return stream if is_notebook or stream.isatty() else None
