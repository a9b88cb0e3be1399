r"""One line of progress for an algorithm, whatever it is made of: iterations, products, batches.

The outermost algorithm has the line. Loops inside of it, such as the batches of a product, show there as a part of its
current step. It is written to the standard error stream of a terminal or a notebook, and nowhere else: after two
seconds by default, at once if asked for. It is removed at the end.

Nothing here starts a thread: loaders of data fork processes while a line is shown.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from time import perf_counter
from typing import TextIO, TypeVar

Item = TypeVar("Item")
# `None` shows what takes longer than two seconds, `True` everything, `False` nothing.
Wanted = bool | None
_PATIENCE = 2.0  # seconds before a line is shown
_INTERVAL = 0.1  # seconds between two changes
_BAR = 10  # characters


class _Open(threading.local):
    """The algorithms that run now, in this thread, the outermost one first."""

    def __init__(self) -> None:
        self.lines: list[Line] = []


_open = _Open()


class Line:
    """Where an algorithm is.

    Args:
        task: What it is called.
        total: Number of steps, if it is known.
        wanted: Whether to show it, as above.
        unit: What a step is called.

    Attributes:
        done: Number of steps that are complete.
        share: How much of the work is done, from 0 to 1, if the number of steps does not say it.
        at_least: Smallest number of steps that it can take, if that is all that is known.
        note: Something to say, such as a residual.
        inner: A loop in the current step.
        outer: What this is a step of.

    Example:
        >>> line = Line("conjugate gradients", total=100, unit="iteration")
        >>> line.advance(25, note="residual 1e-02")
        >>> line.text(seconds=30)
        'conjugate gradients  [##........]  25%  00:30, about 01:30 left  iteration 25/100  residual 1e-02'

        Nothing is made up where nobody knows when an algorithm will stop:

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
        self._shown = -_INTERVAL  # when, in seconds since the start
        self._width = 0  # of what is on the screen

    def advance(self, steps: int = 1, *, note: str = "", share: float | None = None) -> None:
        """Count steps, say something about them, and show where the outermost algorithm is."""
        self.done += steps
        self.note = note
        self.share = share
        self.show()

    def show(self) -> None:
        """Write the outermost line, if it is time to."""
        if self.outer is not None:
            self.outer.show()
            return
        now = perf_counter() - self._start
        if self.wanted is False or now - self._shown < _INTERVAL or (self.wanted is None and now < _PATIENCE):
            return
        stream = _screen()
        if stream is None:
            return
        self._shown = now
        text = self.text(now)[: get_terminal_size().columns - 1]
        stream.write("\r" + text.ljust(self._width))
        stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Remove the line."""
        stream = _screen()
        if self._width and stream is not None:
            stream.write("\r" + " " * self._width + "\r")
            stream.flush()
        self._width = 0

    def inside(self, outer: "Line") -> None:
        """Show this as a part of an algorithm. If that one has no opinion whether it is shown, this one's counts."""
        self.outer = outer
        outer.inner = self
        top = outer
        while top.outer is not None:
            top = top.outer
        if top.wanted is None:
            top.wanted = self.wanted
        if top.wanted is False:
            top.clear()

    def text(self, seconds: float) -> str:
        """Return the line, some seconds after the start."""
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
        """Return what is known about the remaining time: an estimate, a bound, or how long a step takes."""
        if share:
            return f", about {_clock(seconds * (1 - share) / share)} left"
        if share is not None or not self.done:
            return ""
        pace = seconds / self.done
        if self.done < self.at_least:
            return f", at least {_clock(pace * (self.at_least - self.done))} left"
        return f", {pace:.2g} s per {self.unit or 'step'}"

    def steps(self) -> str:
        """Return how many steps are done."""
        number = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.unit} {number}".lstrip()

    def part_done(self) -> float | None:
        """Return how much is done, from 0 to 1, with the part of the current step that is done. `None` if unknown."""
        if self.share is not None:
            return min(max(self.share, 0.0), 1.0)
        if not self.total:
            return None
        part = None if self.inner is None else self.inner.part_done()
        return min((self.done + (part or 0.0)) / self.total, 1.0)


@contextmanager
def show_progress(task: str, total: int | None = None, wanted: Wanted = None, unit: str = "") -> Iterator[Line]:
    """Show where an algorithm is while this context lasts.

    Args:
        task: What it is called.
        total: Number of steps, if it is known.
        wanted: `None` shows what takes longer than two seconds, `True` everything, `False` nothing. A loop inside of an
            algorithm that has no opinion, such as the batches of a risk, decides for it.
        unit: What a step is called.

    Yields:
        What counts steps.
    """
    line = Line(task, total, wanted, unit)
    if _open.lines:
        line.inside(_open.lines[-1])
    _open.lines.append(line)
    try:
        yield line
    finally:
        _open.lines.remove(line)
        _end(line)


def tracked(items: Iterable[Item], task: str, total: int | None, wanted: Wanted, unit: str) -> Iterator[Item]:
    """Iterate, and show how far it is.

    Nothing is taken for a part of this loop: after an error in its body, a loop may live on, in a traceback.
    """
    line = Line(task, total, wanted, unit)
    if _open.lines:
        line.inside(_open.lines[-1])
    try:
        for item in items:
            yield item
            line.advance()
    finally:
        _end(line)


def _end(line: Line) -> None:
    if line.outer is not None and line.outer.inner is line:
        line.outer.inner = None
    line.clear()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _screen() -> TextIO | None:
    """Return where to write: the error stream of a terminal or a notebook. `None` if it is a file, or missing."""
    stream = sys.stderr
    if stream is None:
        return None
    # The streams of a notebook are no terminals, but show a line that is written over.
    is_notebook = type(stream).__module__.startswith("ipykernel")
    return stream if is_notebook or stream.isatty() else None
