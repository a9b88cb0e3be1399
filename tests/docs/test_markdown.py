"""Every Python block of every Markdown page runs: in order, in one namespace per page, in a temporary directory.

Blocks that need another library run where it is installed, and are skipped here otherwise; `make bench` runs them.
"""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import other_libraries
from docs.blocks import blocks, inside, installed, libraries, pictures, run
from tests.docs.pages import DOCS, run_of

PAGES = {file.stem: file for file in sorted(DOCS.glob("*.md")) if blocks(file)}
PEERS = [(page, name) for page, file in PAGES.items() for name in libraries(file)]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str) -> None:
    before = Path.cwd()
    outputs = run_of(page).executed.outputs
    assert Path.cwd() == before
    for block, output in zip(blocks(PAGES[page]), outputs, strict=True):
        assert (output is None) == bool(block.needs)


@pytest.mark.filterwarnings("default")  # warnings of other libraries are not tested here
@pytest.mark.parametrize(("page", "library"), PEERS)
def test_code_of_other_libraries_runs(page: str, library: str, tmp_path: Path) -> None:
    if library not in installed(PAGES[page]):
        pytest.skip(f"{library} is not installed")
    with inside(tmp_path):
        run(PAGES[page], [library])


def test_pages_with_code_are_found() -> None:
    guides = {
        "first_steps",
        "howto_natural_gradient",
        "howto_train",
        "howto_compare",
        "howto_looking",
        "howto_compress",
        "howto_finetune",
        "howto_merge",
        "howto_hugging_face",
        "howto_language_model",
        "howto_cnn",
        "howto_spectra",
        "howto_pinn",
        "which_kfac",
        "exercises",
        "coming_from",
        "test_your_kfac",
    }
    assert {"index", "options_kfac", "symbols", "supported"} | guides <= set(PAGES)
    assert {"curvlinops", "backpack", "laplace", "kronfluence", "trl"} <= {name for _, name in PEERS}


def test_no_block_is_forgotten() -> None:
    """All code that a page marks as `python` runs somewhere; code that is only shown is marked as `py`."""
    for file in DOCS.glob("*.md"):
        fences = re.findall(r"^\s*(?:```|:::)+\s*\{?python\b", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) == len(blocks(file)), file.name


def test_pictures_are_drawn_by_the_page() -> None:
    drawn = run_of("howto_looking").pictures
    assert len(drawn) == len(pictures(PAGES["howto_looking"])) == 8
    assert all(b"<svg" in picture for picture in drawn.values())


def test_outputs_of_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n```python math\nprint(2)\n```\n```python\nx = 3\n```\n```py\n1 / 0\n```\n"
    )
    assert run(page).outputs == ["1\n", None, ""]
    assert run(page, ["math"]).outputs == ["1\n", "2\n", ""]


def test_a_page_chooses_its_dtype(tmp_path: Path) -> None:
    """This is also true if the page fails."""
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch\ntorch.set_default_dtype(torch.float64)\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        run(page)
    assert torch.get_default_dtype() == torch.float32


def test_first_steps_end_in_an_error_with_a_way_out() -> None:
    last = run_of("first_steps").executed.outputs[-1]
    assert last is not None
    assert "Pass the very tensor that entered the computation" in last


def test_exercises_have_solutions() -> None:
    """Each exercise has a folded solution that asserts its own result."""
    text = (DOCS / "exercises.md").read_text(encoding="utf-8")
    exercises = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert [int(exercise.partition(".")[0]) for exercise in exercises] == list(range(1, len(exercises) + 1))
    assert len(exercises) >= 12
    for exercise in exercises:
        question, _, solution = exercise.partition(":::{dropdown} Solution\n")
        assert "?" in question
        assert "```" not in question
        assert "\nassert " in solution.partition("\n:::\n")[0]


def test_the_program_that_runs_code_of_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n```python math\na += 1\n```\n```python nothing_like_this\n1 / 0\n```\n")
    monkeypatch.setattr(other_libraries, "PAGE", page)
    other_libraries.main()
    assert capsys.readouterr().out == "math: as here\nnothing_like_this: not installed\n"
    assert run(page, ["math"]).namespace["a"] == 2
