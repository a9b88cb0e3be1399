"""Notebooks have the code of pages and definitions, which other tests run, and run from top to bottom."""

import ast
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from nbformat import v4

from docs import blocks, notebooks
from docs.modules import read_module
from kfs.tour.run import chapters, definitions

ROOT = Path(notebooks.__file__).parent.parent


def test_prose_code_and_output() -> None:
    text = (
        "# Title\n\nSee [this](other.md#part).\n\n```python\nprint(1)\n```\nBetween.\n\n```python nowhere\nx\n```\n"
        "```python\ny = 2\n```\n"
    )
    notebook = notebooks.from_page(text, ["1\n", None, ""])
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds == ["markdown", "code", "markdown", "markdown", "code"]
    assert "[this](other.html#part)" in notebook.cells[0].source
    assert notebook.cells[1].outputs[0].text == "1\n"
    assert "This needs nowhere" in notebook.cells[3].source
    assert notebook == notebooks.from_page(text, ["1\n", None, ""])  # the same in every build
    code = [cell.source for cell in notebooks.from_page(text).cells if cell.cell_type == "code"]
    assert code == ["print(1)", "x", "y = 2"]


def test_pictures_are_part_of_it() -> None:
    """Figures drawn by code are below the code, and pictures of the book are within the prose."""
    text = (
        '```python\ndraw("a.svg")\n```\n\n![A curve\nthat falls](figures/a.svg)\n\nSee:\n\n'
        "![A chart](assets/at_a_glance.png)\n\n```python\npass\n```\n"
    )
    first, prose, last = notebooks.from_page(text, ["", ""], {"a.svg": "<svg/>"}).cells
    assert first.outputs[0].data == {"image/svg+xml": "<svg/>", "text/plain": "A curve\nthat falls"}
    assert prose.source == "See:\n\n![A chart](attachment:at_a_glance.png)"
    assert prose.attachments["at_a_glance.png"]["image/png"].startswith("iVBOR")
    assert last.outputs == []


def test_directives_become_their_titles() -> None:
    text = "Why?\n\n:::{dropdown} Solution\n:open:\nBecause.\n\n```python\na = 1\n```\n:::\n\nNext.\n"
    before, _, after = notebooks.from_page(text).cells
    assert before.source == "Why?\n\n**Solution**\n\nBecause."
    assert after.source == "Next."


def test_code_of_a_page_is_all_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n```python\na = 1\n```\nMore.\n```python\nb = a\n```\n", encoding="utf-8")
    notebook = notebooks.from_page(page.read_text(encoding="utf-8"))
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code == [block.code.rstrip("\n") for block in blocks.blocks(page)]


def test_how_tos_and_exercises_are_notebooks() -> None:
    names = {page.stem for page in notebooks.pages()}
    howtos = {"howto_train", "howto_hugging_face", "howto_language_model", "howto_cnn", "howto_pinn", "howto_spectra"}
    assert {"exercises"} | howtos <= names
    assert all(page.is_file() for page in notebooks.pages())


def test_the_tour_has_all_definitions() -> None:
    cells = notebooks.tour(chapters(), ROOT).cells
    headings = [cell.source.splitlines()[0] for cell in cells if cell.cell_type == "markdown"]
    assert [heading for heading in headings if heading.startswith("## ")] == [f"## {title}" for title in chapters()]
    assert len([heading for heading in headings if heading.startswith("### ")]) == len(definitions())


@pytest.mark.parametrize("file", definitions(), ids=lambda file: file.stem)
def test_code_of_the_tour_is_that_of_definitions(file: Path) -> None:
    """The main program of a file loses its indentation, and nothing else changes."""

    def statements(code: str) -> list[str]:
        nodes: list[ast.stmt] = []
        for node in ast.parse(code).body:
            nodes += node.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) else [node]
        return [ast.dump(node) for node in nodes]

    module = read_module(file.read_text(encoding="utf-8"), file.name)
    parts = notebooks.code_parts(module.code)
    assert statements(module.code) == [line for part in parts for line in statements(part)]
    assert not any(part.startswith(("\n", " ")) for part in parts)


def written(file: Path, *sources: str) -> Path:
    """Write a notebook with a cell of prose and some cells of code."""
    cells = [v4.new_markdown_cell("Prose, not code."), *map(v4.new_code_cell, sources)]
    notebooks.write(v4.new_notebook(cells=cells), file)
    return file


def test_running_one(tmp_path: Path) -> None:
    """Cells share names. Files and the working directory of a run are gone afterwards."""
    file = written(
        tmp_path / "good.ipynb", "open('left.txt', 'w').close()\na = 1", "assert a == 1 and __name__ == '__main__'"
    )
    before = Path.cwd()
    assert notebooks.run(file) >= 0
    assert Path.cwd() == before
    assert not (before / "left.txt").exists()
    assert not (tmp_path / "left.txt").exists()


class InThisProcess:
    """Runs jobs in this process. The number of processes does not matter here, and they take seconds to start."""

    def __init__(self, *_: object, max_tasks_per_child: int) -> None:
        assert max_tasks_per_child == 1

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Any, file: Path) -> "Future[float]":
        future: Future[float] = Future()
        try:
            future.set_result(function(file))
        except RuntimeError as error:
            future.set_exception(error)
        return future


def test_running_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If one notebook fails, the error names it and its cell. All others run."""
    monkeypatch.setattr(notebooks, "ProcessPoolExecutor", InThisProcess)
    written(tmp_path / "good.ipynb", "print('not shown')")
    notebooks.main(tmp_path)
    assert capsys.readouterr().out.startswith("good.ipynb: ")
    written(tmp_path / "bad.ipynb", "pass", "1 / 0")
    with pytest.raises(RuntimeError, match=r"bad.ipynb, [\w-]+: ZeroDivisionError: division by zero"):
        notebooks.main(tmp_path)
    assert "good.ipynb: " in capsys.readouterr().out
