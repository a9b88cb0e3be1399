"""The page of benchmarks, from what `make bench` has written."""

import html
import json
from pathlib import Path
from typing import Any

from docs.sources import ROOT

RESULTS = ROOT / "benchmarks" / "results"
INTRO = """<h1>Benchmarks</h1>
<p>Times are ratios: what a program takes, divided by one forward and backward pass of the same model on the same
data, in the same run. FLOPs are those of the matrix products, in the same unit. <code>make bench</code> writes the
numbers into <code>benchmarks/results</code>, and building the book again shows them here. Which results are right is
another question, and the matrix of <a href="test_your_kfac.html">Test your KFAC</a> answers it.</p>
"""
MISSING = "<p>There are no numbers yet. Run <code>make bench</code>, then <code>make docs</code>.</p>"


def benchmarks_body(results: Path = RESULTS) -> str:
    """Return the body of the page: a table per benchmark, or a sentence that says how to get them."""
    tables = []
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("rows"):
            tables.append(_table(file.stem, content["rows"], content.get("environment", {})))
    return INTRO + ("\n".join(tables) or MISSING)


def _table(name: str, rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Return one benchmark: its environment, and a row per program and library."""
    said = ", ".join(f"{key} {value}" for key, value in environment.items())
    lines, before = [], ("", "")
    counted = any(row.get("flop_ratio") is not None for row in rows)
    ratios = {"ratio": "time ratio"} | ({"flop_ratio": "FLOP ratio"} if counted else {})
    for row in rows:
        problem, program = str(row["problem"]), str(row["program"])
        shown = "" if problem == before[0] else problem, "" if (problem, program) == before else program
        before = problem, program
        numbers = "".join(f"<td class=number>{_number(row.get(key))}</td>" for key in ratios)
        words = "".join(f"<td>{html.escape(word)}</td>" for word in (*shown, str(row["library"])))
        lines.append(f"<tr>{words}{numbers}</tr>")
    columns = ("problem", "program", "library")
    head = "".join(f"<th>{column}</th>" for column in columns) + "".join(
        f"<th class=number>{column}</th>" for column in ratios.values()
    )
    return (
        f'<h2 id="{name}">{name.capitalize()}</h2>\n<p class="about">{html.escape(said)}</p>\n'
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
