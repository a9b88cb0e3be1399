"""Try mutants: `python -m tests.mutants [names or numbers] [--tests PATH ...] [--hints]`.

A copy of the repository gets one mistake at a time, and its tests are run: first those that are most likely to notice
it, then all others. A mutant that no test notices survives. The exit code is 1 if fewer than 90 % are noticed.

It takes minutes per surviving mutant, and hours for all mutants, so it is run by hand.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tests.mutants.mutants import MUTANTS, ROOT, Mutant

Outcome = Literal["noticed", "SURVIVED"]
ENOUGH = 0.9
# Tests of mutants would notice every mutant, because the quoted line no longer exists.
PYTEST = (
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--no-header",
    "--ignore=tests/mutants",
    "--tier=library",
    "--products=covering",
)
# A mistake may cause an endless loop. The whole suite takes less than half of this on one core.
SECONDS = 3600
# Exit codes of pytest: all passed, some failed, error during collection.
PASSED, FAILED, INTERRUPTED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Try some mutants, and report which of them were noticed. Return the exit code."""
    options = _parser().parse_args(arguments)
    mutants = chosen(options.mutants)
    if options.list:
        for mutant in mutants:
            print(f"{MUTANTS.index(mutant) + 1:4}  {mutant.name:20}  {mutant.file}: {mutant.error}")
        return 0
    outcomes: dict[Mutant, Outcome] = {}
    with copy_of_repository() as root:
        if not options.no_baseline:
            _check_that_tests_pass(root, mutants, options)
        for mutant in mutants:
            began = time.perf_counter()
            with applied(mutant, root):
                outcomes[mutant] = "noticed" if _is_noticed(mutant, root, options) else "SURVIVED"
            seconds = time.perf_counter() - began
            print(
                f"{outcomes[mutant]:8}  {seconds:5.0f} s  {mutant.name:20}  {mutant.file}: {mutant.error}", flush=True
            )
    _print_table(outcomes)
    return 0 if list(outcomes.values()).count("noticed") >= ENOUGH * len(outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("mutants", nargs="*", help="names, numbers or rooms (with - for blanks); all if none is given")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="run these tests only, for all mutants")
    parser.add_argument("--hints", action="store_true", help="run only the tests that are most likely to notice each")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--no-baseline", action="store_true", help="do not check first that the tests pass without any")
    return parser


def chosen(wanted: Sequence[str]) -> list[Mutant]:
    """Return mutants by name, number (starting at one) or room; all of them without arguments.

    Raises:
        SystemExit: If there is no such mutant.
    """
    if not wanted:
        return list(MUTANTS)
    found: list[Mutant] = []
    for word in wanted:
        some = [
            mutant
            for number, mutant in enumerate(MUTANTS, start=1)
            if word in {mutant.name, str(number), mutant.room, mutant.room.replace(" ", "-")}
        ]
        if not some:
            rooms = ", ".join(dict.fromkeys(mutant.room.replace(" ", "-") for mutant in MUTANTS))
            raise SystemExit(
                f"There is no mutant {word!r}. Choose a number from 1 to {len(MUTANTS)}, a name such as "
                f"{MUTANTS[0].name}, or a room: {rooms}."
            )
        found += some
    return list(dict.fromkeys(found))


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Copy all files that git tracks or would track to a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    with tempfile.TemporaryDirectory(prefix="kfs-mutants-") as folder:
        root = Path(folder)
        for name in filter(None, listed.stdout.split("\0")):
            source, target = ROOT / name, root / name
            if source.is_file():  # it may have been deleted since the last commit
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield root


@contextmanager
def applied(mutant: Mutant, root: Path) -> Iterator[None]:
    """Apply a mutant, and undo it afterwards."""
    path, text = mutant.apply(root)
    before = path.read_text(encoding="utf-8")
    _write(path, text)
    try:
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    """Write a file with a new modification time: Python recognizes compiled files by size and second."""
    later = path.stat().st_mtime + 2
    path.write_text(text, encoding="utf-8")
    os.utime(path, (later, later))


def _check_that_tests_pass(root: Path, mutants: Sequence[Mutant], options: argparse.Namespace) -> None:
    """Run all hinted tests without a mutant: tests that fail anyway would notice every mutant."""
    tests = options.tests or list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    if _run(root, tests) != PASSED:
        raise SystemExit("Tests fail without any mutant. Mend them first.")


def _is_noticed(mutant: Mutant, root: Path, options: argparse.Namespace) -> bool:
    """Run tests until one fails."""
    if options.tests:
        return _fails(root, options.tests)
    if _fails(root, mutant.tests):
        return True
    return not options.hints and _fails(root, ())


def _fails(root: Path, tests: Sequence[str]) -> bool:
    """Whether a test fails, cannot be collected, or does not end in time."""
    code = _run(root, tests)
    if code not in {PASSED, FAILED, INTERRUPTED, None}:
        raise SystemExit(f"pytest could not run {' '.join(tests) or 'all tests'}: its exit code is {code}.")
    return code != PASSED


def _run(root: Path, tests: Sequence[str]) -> int | None:
    """Run the named tests, or all tests. Return the exit code, or `None` after a timeout."""
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that child processes of tests can be killed, too
    )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def _print_table(outcomes: dict[Mutant, Outcome]) -> None:
    """Print the number of noticed mutants per room, and all survivors."""
    rooms = dict.fromkeys(mutant.room for mutant in outcomes)
    print(f"\n{'room':18}noticed")
    for room in (*rooms, "all"):
        found = [outcome for mutant, outcome in outcomes.items() if room in {mutant.room, "all"}]
        print(f"{room:18}{found.count('noticed'):4} of {len(found)}")
    for mutant, outcome in outcomes.items():
        if outcome == "SURVIVED":
            print(f"SURVIVED  {mutant.name}  {mutant.file}: {mutant.error}\n  - {mutant.old}\n  + {mutant.new}")


if __name__ == "__main__":
    sys.exit(main())
