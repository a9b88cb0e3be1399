"""Jupyter notebooks of the book: one for each how-to, for the exercises, and for the tour through all definitions.

A notebook has the prose and the code of pages, with the output and the figures from building the book. Run all of them
from top to bottom, each in its own process and empty folder: `python -m docs.notebooks docs/site/docs`.
"""

import ast
import base64
import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

from docs.blocks import FENCE, inside
from docs.modules import read_module
from docs.runs import start_process

DOCS = Path(__file__).parent
TOUR = "chapters"  # the page of all definitions
_DIRECTIVE = re.compile(r"^:{3,}\{[\w-]+\} ?(.*)\n(?::[\w-]+:.*\n)*", flags=re.MULTILINE)
_END = re.compile(r"^:{3,}$\n?", flags=re.MULTILINE)
_DRAWN = re.compile(r"^!\[([^\]]+)\]\(figures/([\w.]+)\)$\n?", flags=re.MULTILINE)
_ASSET = re.compile(r"!\[([^\]]+)\]\(assets/([\w.]+)\)")
_LINK = re.compile(r"\]\(([\w/.]+)\.(?:md|py)(#[\w-]+)?\)")
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def pages() -> list[Path]:
    """Return the pages that have a notebook."""
    return [*sorted(DOCS.glob("howto_*.md")), DOCS / "exercises.md"]


def from_page(text: str, outputs: Sequence[str | None] = (), pictures: Mapping[str, str] | None = None) -> NotebookNode:
    """Convert a Markdown page to a notebook.

    Args:
        text: The page. Blocks in `python`, and the text between them, become cells.
        outputs: Output of each block, `None` if it did not run; optional.
        pictures: Figures drawn by the code: the text of SVG files, by name.

    Returns:
        The notebook. Blocks that need another library are shown as text, unless they have output.
    """
    shown = {name: alternative for alternative, name in _DRAWN.findall(text)}
    cells = []
    place = 0
    for number, fence in enumerate(FENCE.finditer(text)):
        cells += _prose(text[place : fence.start()])
        place = fence.end()
        printed = outputs[number] if number < len(outputs) else ""
        if fence[1] and printed is None:
            cells += _prose(f"This needs {fence[1]}:\n\n```py\n{fence[2]}```")
            continue
        cell = v4.new_code_cell(fence[2].rstrip("\n"))
        if printed:
            cell.outputs.append(v4.new_output("stream", name="stdout", text=printed))
        for name, picture in (pictures or {}).items():
            if f'"{name}"' in fence[2]:
                data = {"image/svg+xml": picture, "text/plain": shown[name]}
                cell.outputs.append(v4.new_output("display_data", data=data))
        cells.append(cell)
    cells += _prose(text[place:])
    return _notebook(cells)


def tour(chapters: Mapping[str, Iterable[Path]], root: Path) -> NotebookNode:
    """Make the notebook of all definitions: prose, code and checks, in reading order.

    Args:
        chapters: Files of all definitions, by chapter.
        root: The repository.

    Returns:
        The notebook. Each definition has a cell for its functions and one for its main program.
    """
    cells = _prose(
        "# The tour: all definitions\n\n"
        "Every definition of the book, in reading order, with code that verifies it. Each one imports what it needs "
        "from `kfs`, so you can start anywhere. All of it takes about a minute: *Run all cells*."
    )
    for title, files in chapters.items():
        cells += _prose(f"## {title}")
        for file in files:
            path = file.relative_to(root).as_posix()
            source = file.read_text(encoding="utf-8")
            module = read_module(source, path)
            address = f"../{module.docname}.html"
            cells += _prose(f"### {module.title}\n\n[{path}]({address})\n\n{module.prose}")
            cells += [v4.new_code_cell(part) for part in code_parts(module.code)]
    return _notebook(cells)


def code_parts(code: str) -> list[str]:
    """Split the code of a module into definitions, if any, and its main program, without indentation."""
    tree = ast.parse(code)
    main = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    first = main[0].lineno if main else len(code.splitlines()) + 1
    lines = code.splitlines()
    parts = ["\n".join(lines[: first - 1]), textwrap.dedent("\n".join(lines[first:]))]
    return [part.strip("\n") for part in parts if part.strip()]


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # reproducible
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook: NotebookNode = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.validate(notebook)
    return notebook


def _prose(text: str) -> list[NotebookNode]:
    """Return a cell, if there is any text.

    Links to pages have their addresses in the book. Directives become their titles. Figures drawn by code are shown
    below the code; pictures that are files of the book become part of the notebook.
    """
    plain = _END.sub("", _DIRECTIVE.sub(r"**\1**\n\n", _DRAWN.sub("", text)))
    plain = _LINK.sub(r"](\1.html\2)", plain)
    stripped = _ASSET.sub(r"![\1](attachment:\2)", plain).strip()
    if not stripped:
        return []
    cell = v4.new_markdown_cell(stripped)
    files = {name: DOCS / "assets" / name for _, name in _ASSET.findall(plain)}
    if files:
        cell.attachments = {name: {_TYPES[file.suffix]: _base64(file)} for name, file in files.items()}
    return [cell]


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def write(notebook: NotebookNode, target: Path) -> None:
    """Write a notebook."""
    target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def run(file: Path) -> float:
    """Run the code of a notebook from top to bottom, in an empty folder, and return its time in seconds.

    Raises:
        RuntimeError: If a cell fails. The message names it.
    """
    notebook = nbformat.read(file, as_version=4)
    namespace: dict[str, object] = {"__name__": "__main__"}
    start = time.perf_counter()
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)), quiet:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                try:
                    exec(compile(cell.source, f"{file.name}, {cell.id}", "exec"), namespace)  # notebooks are ours
                except Exception as error:
                    raise RuntimeError(f"{file.name}, {cell.id}: {type(error).__name__}: {error}") from error
    return time.perf_counter() - start


def main(folder: Path) -> None:
    """Run all notebooks in a folder, each in a new process, and print the time of each.

    Raises:
        RuntimeError: If some fail, after all others have run.
    """
    problems = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), start_process, max_tasks_per_child=1) as pool:
        runs = {file: pool.submit(run, file) for file in sorted(folder.glob("*.ipynb"))}
        for file, running in runs.items():
            try:
                print(f"{file.name}: {running.result():.1f} s", flush=True)
            except RuntimeError as error:
                problems.append(str(error))
    if problems:
        raise RuntimeError("These notebooks do not run from top to bottom:\n" + "\n".join(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
