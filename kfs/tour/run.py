"""The tour: runs every definition as a program, shows progress, and prints a table of verified claims.

This module only runs and reports. Each definition contains its claims and verifies them itself.
"""

import runpy
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import get_num_threads, set_num_threads
from torch.random import fork_rng

from kfs import basics, kfac_tests
from kfs.errors import VerificationError
from kfs.verification import Check, by_claim, largest_error, recording

# Files of kfs/kfac that can be run, in reading order.
LISTINGS = (
    "scaffold",
    "sum_of_kronecker_products",
    "backpropagated_vectors",
    "expectation_approximation",
    "expand_Linear",
    "reduce_Linear",
    "expand_Conv",
    "reduce_Conv",
    "ekfac_Linear",
)
ALGEBRA = ("blocks/kronecker", "blocks/damping", "ekfac", "alternatives")
# Files that a quick tour leaves out: half of the time. Most of their claims are about averages and shared weights.
SLOW = ("mc_fisher_convergence", "deep_linear_regression", "weight_sharing_expand", "weight_sharing_reduce")


@dataclass(frozen=True)
class Report:
    """Result of running one definition.

    Attributes:
        name: File name of the definition without ending.
        checks: Verified claims, in order.
        seconds: Duration in seconds.
        failure: Reason of a failure; `None` if there was none.
    """

    name: str
    checks: tuple[Check, ...]
    seconds: float
    failure: str | None


def chapters() -> dict[str, list[Path]]:
    """Return the files of all definitions, by chapter, in reading order."""
    contents = {title: ("basics", names) for title, names in basics.CONTENTS.items()}
    contents["KFAC"] = ("kfac", LISTINGS)
    contents["Kronecker algebra"] = ("factors", ALGEBRA)
    contents["Where KFAC is exact"] = ("kfac_tests", kfac_tests.CONTENTS)
    contents["Natural gradient"] = ("optim", ("update_rule",))
    package = Path(basics.__file__).parent.parent
    return {title: [package / folder / f"{n}.py" for n in names] for title, (folder, names) in contents.items()}


def definitions() -> list[Path]:
    """Return the files of all definitions in reading order."""
    return [file for files in chapters().values() for file in files]


def run_definition(file: Path) -> Report:
    """Run one file as `python FILE` would, in this process. The global random state is restored afterwards.

    A failure is reported, not raised. A file that verifies nothing counts as failed.
    """
    failure = None
    start = time.perf_counter()
    with recording() as checks, redirect_stdout(StringIO()), fork_rng(devices=[]):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except VerificationError as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 (one broken definition must not hide the others)
            failure = f"{type(error).__name__}: {error}"
    if failure is None and not checks:
        failure = "The file verified nothing. Call kfs.verification.verify in its __main__ part."
    return Report(file.stem, tuple(checks), time.perf_counter() - start, failure)


def run_tour(console: Console, quick: bool = False) -> list[Report]:
    """Run all definitions with a live progress display, print the table, and return the reports.

    Args:
        console: Console to print to.
        quick: Whether to leave out slow definitions, and print their names.

    Returns:
        Results of the definitions, in reading order.
    """
    files = definitions()
    left_out = [file.stem for file in files if quick and file.stem in SLOW]
    reports = list(_with_progress([file for file in files if file.stem not in left_out], console))
    console.print(_table(reports))
    num_checks, seconds = sum(len(r.checks) for r in reports), sum(r.seconds for r in reports)
    failed = [r for r in reports if r.failure is not None]
    for report in failed:
        console.print(f"FAILED {report.name}: {report.failure}", style="bold red", markup=False)
    verdict = f"{len(failed)} failed" if failed else "all as they should be"
    console.print(f"{len(reports)} definitions, {num_checks} verified claims, {seconds:.1f} s: {verdict}.")
    if left_out:
        console.print(f"Left out by --quick: {', '.join(left_out)}.", markup=False, highlight=False)
    if not failed:
        console.print(f"Read one and run it yourself: {_command()}", markup=False, highlight=False, soft_wrap=True)
    return reports


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in this context.

    Tensors of the tour are small. On two busy cores, synchronizing threads took five times as long.
    """
    before = get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(before)


def _command() -> str:
    """Return a shell command that runs a definition with this interpreter, relative to the current folder."""
    paths = (Path(sys.executable), Path(basics.__file__).parent / "ggns.py")
    here = Path.cwd()
    return shlex.join(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)


def _with_progress(files: list[Path], console: Console) -> Iterator[Report]:
    """Run the files one by one, and show the current file and the number of finished ones."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(files))
        for file in files:
            progress.update(task, description=file.stem)
            yield run_definition(file)
            progress.advance(task)


def _table(reports: list[Report]) -> Table:
    """Return a table of definitions, claims and largest errors. A claim for several cases is one row."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("definition", no_wrap=True, style="bold")
    table.add_column("what was verified")
    table.add_column("largest error", justify="right", no_wrap=True)
    for report in reports:
        name = report.name
        for claim, checks in by_claim(report.checks).items():
            cases = f" ({len(checks)} cases)" if len(checks) > 1 else ""
            error = largest_error(checks)
            table.add_row(name, escape(claim + cases), "-" if error is None else f"{error:.1e}")
            name = ""
        if report.failure is not None:
            table.add_row(name, escape(report.failure), "FAILED", style="red")
        table.add_section()
    return table
