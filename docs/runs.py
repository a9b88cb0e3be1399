"""Jobs that run before the book is written: definitions, code on pages, figures, data of interactive figures.

Each job runs in a separate process, and its result is a JSON file in `docs/.runs`, from which pages are made. It is
reused until the library or the page changes. Pictures go to `docs/figures`.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from docs import blocks, drawings, results

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / ".runs"
PICTURES = DOCS / "figures"


class Job(NamedTuple):
    """A program to run.

    Attributes:
        kind: `"page"`, `"plot"`, `"benchmark"`, `"play"` or `"definition"`.
        name: Name of the page, plot or benchmark, or path of the definition.
    """

    kind: str
    name: str

    @property
    def file(self) -> Path:
        """The file of its result."""
        return RESULTS / f"{self.kind}-{self.name.replace('/', '.')}.json"

    @property
    def drawn(self) -> list[Path]:
        """The pictures that it draws."""
        names: list[str] = []
        if self.kind == "page":
            names = blocks.pictures(page_file(self.name))
        if self.kind == "plot":
            names = [f"{f.name}.svg" for f in drawings.FIGURES if f.plot == drawings.file_of(self.name)]
        if self.kind == "benchmark":
            names = [results.picture_name(self.name)]
        return [PICTURES / name for name in names]


def page_file(name: str) -> Path:
    """Return the file of a page of prose."""
    return DOCS / f"{name}.md"


def definition_job(path: str) -> Job:
    """Return the job that runs a definition, a path in the repository."""
    return Job("definition", path)


def all_jobs() -> list[Job]:
    """Return all jobs, long ones first, so that processes end together."""
    from kfs.tour.run import definitions  # noqa: PLC0415 (imports PyTorch, which stored results do not need)

    pages = [page.stem for page in sorted(DOCS.glob("*.md")) if blocks.blocks(page)]
    jobs = [Job("page", name) for name in pages]
    jobs += [Job("plot", name) for name in drawings.plots()]
    jobs += [Job("benchmark", name) for name in results.drawn()]
    jobs += [definition_job(file.relative_to(ROOT).as_posix()) for file in definitions()]
    return [*jobs, Job("play", "data")]


def digest(job: Job) -> str:
    """Return a fingerprint of everything that the result of a job depends on."""
    own = {"page": page_file(job.name), "benchmark": results.RESULTS / f"{job.name}.json"}.get(job.kind)
    # Files that draw bars and curves.
    drawn_by = [Path(results.__file__), ROOT / "benchmarks" / "report.py"] if job.kind == "benchmark" else []
    files = [*([own] if own else []), *drawn_by]
    return hashlib.sha256(_library() + b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _library() -> bytes:
    modules = [file for folder in ("kfs", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    files = [*modules, ROOT / "docs" / "blocks.py", ROOT / "docs" / "drawings.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def perform(job: Job) -> Any:
    """Run a job and return its result, ready for JSON. Pictures are written into their folder."""
    return _KINDS[job.kind](job)


def _run_page(job: Job) -> list[str | None]:
    """Run a page, in a folder of its own, and return what its blocks print."""
    file = page_file(job.name)
    # Log messages of the library are for users, not for the book.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, blocks.inside(Path(folder)), quiet:
        outputs = blocks.run(file, blocks.installed(file)).outputs
        for picture in job.drawn:
            shutil.copy(picture.name, picture)
    return outputs


def _run_plot(job: Job) -> None:
    drawings.draw(job.name, PICTURES)


def _run_benchmark(job: Job) -> None:
    results.draw(job.name, PICTURES)


def _run_definition(job: Job) -> list[tuple[str, str, float | None]]:
    """Run a definition and return its checks.

    Raises:
        RuntimeError: If it fails: the book shows only verified claims.
    """
    from kfs.tour.run import run_definition  # noqa: PLC0415

    report = run_definition(ROOT / job.name)
    if report.failure is not None:
        raise RuntimeError(f"{job.name} failed: {report.failure} Mend it first; `make tour` shows all definitions.")
    return [(check.claim, check.case, check.error) for check in report.checks]


def _play_data(_: Job) -> Any:
    from kfs.tour import play  # noqa: PLC0415

    return play.play_data()


_KINDS: dict[str, Callable[[Job], Any]] = {
    "page": _run_page,
    "plot": _run_plot,
    "benchmark": _run_benchmark,
    "definition": _run_definition,
    "play": _play_data,
}


def save(job: Job, result: Any) -> None:
    """Write the result of a job."""
    RESULTS.mkdir(exist_ok=True)
    content = {"digest": digest(job), "result": result}
    job.file.write_text(json.dumps(content), encoding="utf-8")


def current(job: Job) -> bool:
    """Whether the result of a job is up to date."""
    if not job.file.is_file() or not all(picture.is_file() for picture in job.drawn):
        return False
    return bool(json.loads(job.file.read_text(encoding="utf-8"))["digest"] == digest(job))


def result(job: Job) -> Any:
    """Return the result of a job."""
    return json.loads(job.file.read_text(encoding="utf-8"))["result"]


def start_process() -> None:
    """Set a process up: no display, and one thread, since there is one process per core."""
    os.environ["MPLBACKEND"] = "agg"
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


def _perform_and_save(job: Job) -> str:
    try:
        save(job, perform(job))
    except Exception as error:  # noqa: BLE001 (the other jobs must run)
        return f"{job.kind} {job.name}: {type(error).__name__}: {error}"
    return ""


def run_all(jobs: Iterable[Job]) -> None:
    """Run all jobs that are not current.

    RuntimeError: If some fail. The message names them, with the reasons.
        RuntimeError: If some fail. Says which, and why.
    """
    waiting = [job for job in jobs if not current(job)]
    if not waiting:
        return
    PICTURES.mkdir(exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), start_process) as pool:
        problems = [problem for problem in pool.map(_perform_and_save, waiting) if problem]
    if problems:
        raise RuntimeError("The book shows only what runs, and this does not:\n" + "\n".join(problems))
