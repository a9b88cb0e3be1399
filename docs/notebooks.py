"""A page as a Jupyter notebook: prose and code, with what the code printed when the book was built."""

import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

from docs.blocks import FENCE


def from_page(text: str, outputs: Sequence[str | None] = ()) -> NotebookNode:
    """Turn a Markdown page into a notebook.

    Args:
        text: The page. Blocks in `python` become cells, and everything between them, too.
        outputs: What each block printed, `None` if it did not run; may be left out.

    Returns:
        The notebook. Blocks that need another library are shown, not run, unless they have output.
    """
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
            cell.outputs = [v4.new_output("stream", name="stdout", text=printed)]
        cells.append(cell)
    cells += _prose(text[place:])
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same in every build
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook: NotebookNode = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.validate(notebook)
    return notebook


def _prose(text: str) -> list[NotebookNode]:
    """Return a cell, if there is anything to say. Pages are linked as they are called in the book."""
    stripped = re.sub(r"\]\(([\w/.]+)\.(?:md|py)(#[\w-]+)?\)", r"](\1.html\2)", text).strip()
    return [v4.new_markdown_cell(stripped)] if stripped else []


def write(page: Path, outputs: Sequence[str | None], target: Path) -> None:
    """Write the notebook of a page."""
    notebook = from_page(page.read_text(encoding="utf-8"), outputs)
    target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
