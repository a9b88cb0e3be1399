"""The conformance matrix: how each installed library answers the checks of the kit.

`python -m benchmarks.conformance` prints it, and writes the answers to benchmarks/results; `python -m docs.measured
--write` copies it to a page. A library that cannot be imported is left out, with a message.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from rich.progress import track

from benchmarks.report import RESULTS, environment
from kfs.conformance import Adapter, Result, built_in, checks, find, run_one
from kfs.errors import KfsError

WORDS = {
    "silently wrong": "**wrong**",
    "unreadable": "unreadable",
    "failed": "error",
    "passed": "yes",
    "not supported": "-",
}


def installed(names: Iterable[str]) -> list[Adapter]:
    """Return the adapters whose libraries can be imported, kfs first."""
    found = []
    for name in sorted(names, key=lambda n: (n != "kfs", n)):
        try:
            found.append(find(name))
        except KfsError as error:
            print(f"Left out: {error}")
    return found


def topic(check: str) -> str:
    """Return the subject of a row of the matrix: the case or the relation."""
    kind, _, rest = check.partition(": ")
    name = re.sub(r"(, (mse|ce)\b.*|, (type-2|mc|empirical)\b.*)$", "", rest)
    return {"draws": "Monte Carlo draws", "state": "user state untouched"}.get(kind, name)


def matrix(results: dict[str, list[Result]]) -> str:
    """Return a Markdown table, topics by libraries, with the worst status of each topic's checks."""
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


def main(results: Path = RESULTS) -> None:
    """Run all checks for all libraries, print the matrix and write answers."""
    adapters, everything = installed(built_in()), checks()
    answers = {
        f"{adapter.name} {adapter.version}": [
            run_one(adapter, check) for check in track(everything, adapter.name, transient=True)
        ]
        for adapter in adapters
    }
    print(matrix(answers))
    results.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": environment(),
        "results": {library: {result.check: result.outcome for result in found} for library, found in answers.items()},
    }
    (results / "conformance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
