"""Reports of definitions. Each takes seconds, so tests of definitions and of the book share one run."""

from functools import cache
from pathlib import Path

from kfs.tour import run as tour


@cache
def report_of(file: Path) -> tour.Report:
    """Run a definition, or return the report of its earlier run."""
    return tour.run_definition(file)
