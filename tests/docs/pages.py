"""Results of running pages. Some take seconds, so tests of pages and of the book share one run."""

import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs import blocks

DOCS = Path(__file__).parent.parent.parent / "docs"


class Run(NamedTuple):
    """The result of running a page.

    Attributes:
        executed: Names and outputs.
        pictures: Pictures that it has drawn, by name.
    """

    executed: blocks.Executed
    pictures: dict[str, bytes]


@cache
def run_of(name: str) -> Run:
    """Run a page in an empty folder, or return the result of its earlier run."""
    page = DOCS / f"{name}.md"
    with tempfile.TemporaryDirectory() as folder, blocks.inside(Path(folder)):
        executed = blocks.run(page)
        drawn = {picture: Path(picture).read_bytes() for picture in blocks.pictures(page)}
    return Run(executed, drawn)
