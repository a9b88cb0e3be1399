"""Every definition file is listed and documented, runs, checks itself, and can be imported without side effects."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kfs import basics
from kfs.tour.run import definitions
from tests.definitions import report_of

FOLDER = Path(basics.__file__).parent
ROOT = FOLDER.parent.parent
WIDTH = 88  # of the column of code in the book
FILES = sorted(file for file in FOLDER.glob("*.py") if not file.name.startswith("_"))
IDS = [file.stem for file in FILES]


def test_the_contents_list_every_file_once() -> None:
    assert sorted(file for file in definitions() if file.parent == FOLDER) == FILES


@pytest.mark.parametrize("file", definitions(), ids=lambda file: file.stem)
def test_it_runs_and_verifies_something(file: Path) -> None:
    report = report_of(file)
    assert report.failure is None
    assert report.checks


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_importing_it_has_no_side_effects(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    runpy.run_path(str(file), run_name="imported")
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_docstrings_name_the_place_in_the_paper(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert "\nImplements: " in docstring
    assert "$" in docstring, "a definition states its formula"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_its_lines_fit_the_column_of_the_book(file: Path) -> None:
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    assert [number for number, line in lines if len(line) > WIDTH] == []


def test_it_runs_from_the_root_as_the_document_says() -> None:
    command = [sys.executable, "kfs/basics/exact_fishers.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "[ok] the type-II Fisher is the GGN [CrossEntropyLoss(), cvec] (largest error" in result.stdout
    assert result.stderr == ""
