"""The book, built once for all of its tests, in a copy of the repository, so that no file is left in this one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import runs
from kfs.tour import play
from tests.definitions import report_of
from tests.docs.pages import run_of

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 3"></svg>'
ROOT = Path(runs.__file__).parent.parent
LEFT_OUT = (".*", "__pycache__", "site", "api", "figures", "*.egg-info", "report.html")


def save_results(jobs: list[runs.Job]) -> None:
    """Write results of other tests into the folder that the book reads. Figures are drawn by tests/plots."""
    for job in jobs:
        result: object = None
        for picture in job.drawn:
            picture.write_text(SVG, encoding="utf-8")
        if job.kind == "page":
            run = run_of(job.name)
            result = run.executed.outputs
            for picture in job.drawn:
                picture.write_bytes(run.pictures[picture.name])
        if job.kind == "definition":
            result = [(check.claim, check.case, check.error) for check in report_of(ROOT / job.name).checks]
        if job.kind == "play":
            result = play.play_data(quick=True)
        runs.save(job, result)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site."""
    folder = tmp_path_factory.mktemp("book")
    copy = folder / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RESULTS", copy / "docs" / ".runs")
        patch.setattr(runs, "PICTURES", copy / "docs" / "figures")
        runs.RESULTS.mkdir()
        runs.PICTURES.mkdir()
        save_results(runs.all_jobs())
    build(copy, folder / "site")
    return folder / "site"


def build(repository: Path, site: Path) -> None:
    """Build a book; a warning is an error."""
    options = ("--builder", "html", "--fail-on-warning", "--quiet", "--conf-dir", "docs")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST_"))}
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options,
        "--doctree-dir",
        str(site.with_name("doctrees")),
        ".",
        str(site),
    ]
    done = subprocess.run(
        command,
        cwd=repository,
        env=environment | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
