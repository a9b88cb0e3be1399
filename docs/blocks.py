"""Code of Markdown pages: which blocks run, and running them.

A block that starts with "```python" runs, in order with all others, in one namespace per page. One that starts with
"```python NAME" needs the library NAME, and runs where it is installed. Blocks in other languages do not run.
"""

import contextlib
import io
import os
import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """Some lines of code.

    Attributes:
        code: The lines.
        needs: The library that they need; empty if none.
    """

    code: str
    needs: str


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page that run."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python ?(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(code, needs) for needs, code in found]


def libraries(page: Path) -> list[str]:
    """Return all libraries that blocks of a page need, in order."""
    return list(dict.fromkeys(block.needs for block in blocks(page) if block.needs))


def installed(page: Path) -> list[str]:
    """Return those of them that are here."""
    return [name for name in libraries(page) if find_spec(name) is not None]


def run(page: Path, allowed: Collection[str] = ()) -> dict[str, object]:
    """Run the blocks of a page that need nothing, or one of the allowed libraries; return all names afterwards."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for code, needs in blocks(page):
        if not needs or needs in allowed:
            exec(compile(code, page.name, "exec"), namespace)  # pages are ours
    return namespace


def draw_pictures(page: Path, folder: Path) -> None:
    """Run a page, quietly, such that it writes its pictures into a folder."""
    from matplotlib import rc_context  # noqa: PLC0415 (slow to import)

    page = page.resolve()
    with inside(folder), contextlib.redirect_stdout(io.StringIO()), rc_context({"backend": "agg"}):
        run(page)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
