"""Every Python block of every Markdown page runs: in order, in one namespace per page, in a temporary directory.

Blocks that need another library run where it is installed, and are skipped here otherwise; `make bench` runs them.
"""

import re
from pathlib import Path

import pytest

from benchmarks import other_libraries
from docs.blocks import blocks, draw_pictures, installed, libraries, run

DOCS = Path(__file__).parent.parent.parent / "docs"
RUN_ELSEWHERE = {"test_your_kfac", "many_processes_plan"}  # in files of their own, with more to say about the results
PAGES = {file.stem: file for file in sorted(DOCS.glob("*.md")) if blocks(file) and file.stem not in RUN_ELSEWHERE}
PEERS = [(page, name) for page, file in PAGES.items() for name in libraries(file)]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAGES[page])


@pytest.mark.filterwarnings("default")  # what other libraries warn about is their business
@pytest.mark.parametrize(("page", "library"), PEERS)
def test_code_of_other_libraries_runs(page: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library not in installed(PAGES[page]):
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    run(PAGES[page], [library])


def test_pages_with_code_are_found() -> None:
    guides = {
        "howto_natural_gradient",
        "howto_train",
        "howto_compare",
        "howto_looking",
        "howto_compress",
        "howto_merge",
        "coming_from",
    }
    assert {"index", "cheatsheet_kfac", "cheatsheet_shapes"} | guides <= set(PAGES)
    assert [name for _, name in PEERS] == ["curvlinops", "backpack", "laplace", "kronfluence", "laplace"]


def test_no_block_is_forgotten() -> None:
    """Whatever a page shows as `python` runs somewhere; what is only shown is called `py`."""
    for file in DOCS.glob("*.md"):
        fences = re.findall(r"^```python\b", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) == len(blocks(file)), file.name


def test_pictures_are_drawn_by_the_page(tmp_path: Path) -> None:
    page = PAGES["howto_looking"]
    before = Path.cwd()
    draw_pictures(page, tmp_path)
    assert Path.cwd() == before
    shown = re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text(encoding="utf-8"))
    assert len(shown) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shown)


def test_the_program_that_runs_code_of_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n```python math\na += 1\n```\n```python nothing_like_this\n1 / 0\n```\n")
    monkeypatch.setattr(other_libraries, "PAGE", page)
    other_libraries.main()
    assert capsys.readouterr().out == "math: as here\nnothing_like_this: not installed\n"
    assert run(page, ["math"])["a"] == 2
