import runpy
import shlex
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kfs import __version__
from kfs.cli import app
from kfs.tour import run as tour

GOOD = """
import torch
from kfs.verification import verify, verify_that
if __name__ == "__main__":
    torch.manual_seed(5)
    for size in (1, 2):
        verify("ones are ones", torch.ones(size), torch.ones(size), case=f"{size} entries")
    verify_that("[/brackets] are text", True)
"""
WRONG = GOOD + '    verify_that("a lie", False)\n'
BROKEN = GOOD + "    raise KeyError('boom')\n"
LAZY = 'if __name__ == "__main__":\n    print("I verify nothing")\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Replace the definitions by four small files."""
    sources = {"good": GOOD, "wrong": WRONG, "broken": BROKEN, "lazy": LAZY}
    paths = {name: tmp_path / f"{name}.py" for name in sources}
    for name, path in paths.items():
        path.write_text(sources[name], encoding="utf-8")
    monkeypatch.setattr(tour, "definitions", lambda: list(paths.values()))
    return paths


def test_reports(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    reports = {name: tour.run_definition(path) for name, path in files.items()}
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out == ""

    assert reports["good"].failure is None
    assert [check.case for check in reports["good"].checks] == ["1 entries", "2 entries", ""]
    assert (reports["wrong"].failure or "").startswith("False: a lie.")
    assert reports["broken"].failure == "KeyError: 'boom'"
    assert "verified nothing" in (reports["lazy"].failure or "")
    assert len(reports["wrong"].checks) == 3


@pytest.mark.usefixtures("files")
def test_table_and_verdict() -> None:
    out = StringIO()
    tour.run_tour(Console(file=out, width=120))
    text = out.getvalue()
    assert "ones are ones (2 cases)" in text
    assert "[/brackets] are text" in text
    for name in ("wrong", "broken", "lazy"):
        assert f"FAILED {name}: " in text
    assert "4 definitions, 9 verified claims" in text
    assert text.rstrip().endswith("3 failed.")


def test_the_hint_is_a_command_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names this interpreter and an installed file, with the shortest path from the current folder."""
    package = Path(tour.__file__).parent.parent
    monkeypatch.setattr("sys.executable", str(package.parent / "some bin" / "python"))
    monkeypatch.chdir(package.parent)
    assert tour._command() == "'some bin/python' kfs/basics/ggns.py"
    monkeypatch.chdir(tmp_path)
    interpreter, file = shlex.split(tour._command())
    assert interpreter == sys.executable
    assert Path(file).is_absolute()
    assert tour.run_definition(Path(file)).failure is None


def test_one_thread() -> None:
    torch.set_num_threads(2)
    try:
        with tour.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)  # as in conftest.py


def test_quick_leaves_out_slow_parts(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(tour, "SLOW", ("wrong", "broken", "lazy"))
    (report,) = tour.run_tour(Console(file=out, width=120), quick=True)
    assert report.name == "good"
    assert "Left out by --quick: wrong, broken, lazy.\n" in out.getvalue()
    assert len(tour.run_tour(Console(file=out), quick=False)) == len(files)


def test_slow_files_are_definitions() -> None:
    assert set(tour.SLOW) < {file.stem for file in tour.definitions()}


def test_command_line(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner, opened = CliRunner(), list[str]()

    def written(out: Path, *args: Any) -> Path:
        args[-1]("figures")
        return out / "report.html"

    monkeypatch.setattr("kfs.cli.write_report", written)
    monkeypatch.setattr("kfs.cli.left_out", lambda: ["Left out: [figures]."])
    monkeypatch.setattr("typer.launch", opened.append)
    assert runner.invoke(app, ["tour"]).exit_code == 1
    monkeypatch.setattr(tour, "definitions", lambda: [files["good"]])
    result = runner.invoke(app, ["tour", "--out", str(tmp_path), "--quick", "--open"])
    assert result.exit_code == 0
    assert "all as they should be" in result.output
    assert f"Report: {tmp_path / 'report.html'}\nLeft out: [figures].\n" in result.output
    assert opened == [str(tmp_path / "report.html")]
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"kfs {__version__}\n")
    assert "tour" in runner.invoke(app, ["--help"]).output


@pytest.mark.parametrize("module", ["kfs", "kfs.cli"])
def test_python_dash_m(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["kfs", "--version"])
    monkeypatch.delitem(sys.modules, "kfs.cli")  # as in a new process
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kfs {__version__}\n"
