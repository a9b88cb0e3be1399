"""Code of Markdown pages: blocks that run, and running them.

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

FENCE = re.compile(r"^```python ?(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]+\]\(figures/([\w.]+)\)")


class Block(NamedTuple):
    """Some lines of code.

    Attributes:
        code: The lines.
        needs: The library that they need; empty if none.
    """

    code: str
    needs: str


class Executed(NamedTuple):
    """Results of running a page.

    Attributes:
        namespace: All names afterwards.
        outputs: What each block printed, or `None` if it did not run.
    """

    namespace: dict[str, object]
    outputs: list[str | None]


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page that run."""
    text = page.read_text(encoding="utf-8")
    return [Block(code, needs) for needs, code in FENCE.findall(text)]


def libraries(page: Path) -> list[str]:
    """Return all libraries that blocks of a page need, in order."""
    return list(dict.fromkeys(block.needs for block in blocks(page) if block.needs))


def installed(page: Path) -> list[str]:
    """Return the libraries that are installed."""
    return [name for name in libraries(page) if find_spec(name) is not None]


def pictures(page: Path) -> list[str]:
    """Return the names of pictures that the code of a page draws, and that it shows as `![...](figures/NAME)`."""
    return PICTURE.findall(page.read_text(encoding="utf-8"))


def run(page: Path, allowed: Collection[str] = ()) -> Executed:
    """Run the blocks of a page that need no library, or one of the allowed libraries.

    A page may change the default dtype; it is restored afterwards.
    """
    with _same_dtype():
        return _run(page, allowed)


def _run(page: Path, allowed: Collection[str]) -> Executed:
    namespace: dict[str, object] = {"__name__": page.stem}
    outputs: list[str | None] = []
    for code, needs in blocks(page):
        if needs and needs not in allowed:
            outputs.append(None)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), namespace)  # pages are part of the repository
        outputs.append(printed.getvalue())
    return Executed(namespace, outputs)


@contextlib.contextmanager
def _same_dtype() -> Iterator[None]:
    """Restore PyTorch's default dtype."""
    import torch  # noqa: PLC0415 (slow to import, and needed only by runs)

    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Change the working directory to a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
