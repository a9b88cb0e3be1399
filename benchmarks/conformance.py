"""The conformance matrix: what each installed library gets right, from its answers to all checks.

`python -m benchmarks.conformance` prints it and writes it to benchmarks/results; with `--write`, it also replaces the
table in docs/test_your_kfac.md, which the README counts. A library that cannot be imported is left out, and said so.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import track

from benchmarks.report import RESULTS
from kfs import __version__
from kfs.conformance import Adapter, Result, built_in, checks, find, run_one
from kfs.errors import KfsError

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "test_your_kfac.md",)
BEGIN, END = "<!-- conformance matrix: begin -->", "<!-- conformance matrix: end -->"
WORDS = {
    "silently wrong": "**wrong**",
    "unreadable": "unreadable",
    "failed": "error",
    "passed": "yes",
    "not supported": "-",
}


def installed(names: Iterable[str]) -> list[Adapter]:
    """Return the adapters whose libraries can be imported, ours first."""
    found = []
    for name in sorted(names, key=lambda n: (n != "kfs", n)):
        try:
            found.append(find(name))
        except KfsError as error:
            print(f"Left out: {error}")
    return found


def topic(check: str) -> str:
    """Return what a row of the matrix is about: the case or the relation."""
    kind, _, rest = check.partition(": ")
    name = re.sub(r"(, (mse|ce)\b.*|, (type-2|mc|empirical)\b.*)$", "", rest)
    return {"draws": "Monte Carlo draws", "state": "user state untouched"}.get(kind, name)


def matrix(results: dict[str, list[Result]]) -> str:
    """Return a Markdown table, topics by libraries: the worst that happened to the checks of a topic."""
    libraries = list(results)
    topics = list(dict.fromkeys(topic(result.check) for result in results[libraries[0]]))
    lines = ["| | " + " | ".join(libraries) + " |", "|---" * (len(libraries) + 1) + "|"]
    for row in topics:
        cells = []
        for library in libraries:
            seen = {result.outcome for result in results[library] if topic(result.check) == row}
            cells.append(next(word for status, word in WORDS.items() if status in seen))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replaced(text: str, table: str) -> str:
    """Put a table between the marks of a page."""
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{table}\n{text[stop:]}"


def main(arguments: list[str], results: Path = RESULTS, pages: Iterable[Path] = PAGES) -> None:
    """Ask all libraries, print the matrix and write it."""
    adapters, everything = installed(built_in()), checks()
    answers = {
        f"{adapter.name} {adapter.version}": [
            run_one(adapter, check) for check in track(everything, adapter.name, transient=True)
        ]
        for adapter in adapters
    }
    table = matrix(answers)
    print(table)
    results.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": {"kfs": __version__, "torch": torch.__version__},
        "results": {library: [asdict(result) for result in found] for library, found in answers.items()},
    }
    (results / "conformance.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (results / "conformance.md").write_text(table + "\n", encoding="utf-8")
    if "--write" in arguments:
        for page in pages:
            page.write_text(replaced(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
