"""Numbers of pages from files of results: `python -m docs.measured` lists outdated pages, `--write` updates them.

A page marks the position of a table or a number, and its origin, and this module inserts it:

    <!-- measured: costs train_cost_cuda -->
    ...
    <!-- end -->

    A step takes <!-- measured: value train_cost ratio 1 optimizer=kfs problem=MLP -->1.4<!-- end --> times as long.

The words are a function of a module `docs/measured_*.py`, and its arguments. All other numbers on a page that look
measured, with a decimal point or a unit, are settings or quoted: `docs/numbers.toml` lists them, with reasons.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docs import measured_applications, measured_gpu, measured_numbers, measured_training
from docs.modules import ROOT
from docs.results import RESULTS

MODULES = (measured_numbers, measured_training, measured_gpu, measured_applications)
TABLES: dict[str, Callable[..., str]] = {name: made for module in MODULES for name, made in module.TABLES.items()}
MARKED = re.compile(r"(<!-- measured: (?P<words>[^\n]*?) -->)(?P<shown>.*?)(<!-- end -->)", re.DOTALL)
NUMBER = r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"
UNITS = r"(?:ms|µs|us|s|seconds?|minutes?|hours?|KiB|MiB|GiB|kB|MB|GB|TB|TFLOPs?|times (?:as|faster|slower))\b"
MEASURED = re.compile(rf"(?<![\w.§-])(?:\d+\.\d+(?:e[+-]?\d+)?(?![\w.]*\.\d)(?!\w)|{NUMBER} ?(?:%|{UNITS}))")
# Text that is not prose: code, formulas, link targets, and generated text; line numbers do not change.
OTHER = re.compile(
    r"^(?P<fence>`{3,}|~~~|:{3,}\{).*?^\s*(?P=fence)\s*$|(?P<ticks>`+)[^`].*?(?P=ticks)|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)\s]*\)"
    r"|<!-- measured: .*?<!-- end -->|<!--.*?-->"
    r"|\b(?:arXiv|kfs|PyTorch|Python|Llama|BackPACK|curvlinops|Kronfluence|laplace-torch|NNGeometry|SINGD) \d[\d.]*",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Exceptions:
    """The exceptions in `docs/numbers.toml`, each with a reason.

    Attributes:
        pages: Pages that are not checked.
        texts: Passages of a page whose numbers were not measured for it.
        results: Files of results of another version, or of several runs.
    """

    pages: dict[str, str]
    texts: dict[str, dict[str, str]]
    results: dict[str, str]


def exceptions(file: Path = ROOT / "docs" / "numbers.toml") -> Exceptions:
    """Read the file."""
    return Exceptions(**tomllib.loads(file.read_text(encoding="utf-8")))


def pages() -> list[Path]:
    """Return README and the book's pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name_of(page: Path) -> str:
    """Return the name of a page in the exceptions."""
    return page.relative_to(ROOT).as_posix()


def generated(words: str, results: Path = RESULTS) -> str:
    """Return the table or the number of a mark."""
    name, *arguments = shlex.split(words)
    if name not in TABLES:
        raise ValueError(f"There is no table {name}, but {', '.join(TABLES)}.")
    return TABLES[name](results, *arguments)


def written(text: str, results: Path = RESULTS) -> str:
    """Return a page with its marks filled: on separate lines if a mark has its own line, otherwise within the line."""

    def fill(found: re.Match[str]) -> str:
        new = generated(found["words"], results)
        return f"{found[1]}\n{new}\n{found[4]}" if found["shown"].startswith("\n") else f"{found[1]}{new}{found[4]}"

    return MARKED.sub(fill, text)


def unexplained(text: str, allowed: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield numbers that look measured, with their lines, but come neither from a file nor from an exception."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    for piece in allowed:
        text = text.replace(piece, re.sub(r"\d", " ", piece))
    for number, line in enumerate(OTHER.sub(blank, text).splitlines(), start=1):
        for found in MEASURED.finditer(line):
            yield number, found[0]


def main(arguments: list[str]) -> None:
    """Check all pages, or update them."""
    known, problems = exceptions(), []
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), name_of(page)
        new = written(text)
        if new != text and "--write" in arguments:
            page.write_text(new, encoding="utf-8")
            print(f"Written: {name}")
        elif new != text:
            problems.append(f"{name} does not show what was measured")
        if name not in known.pages:
            found = unexplained(new, known.texts.get(name, {}))
            problems += [f"{name}:{line} has {number}, which no file has" for line, number in found]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
