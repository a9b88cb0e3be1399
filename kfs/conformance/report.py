"""Reports of results: a table for the terminal, JSON, and a self-contained HTML page."""

import html
import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.table import Table
from rich.text import Text

from kfs.conformance.adapter import Adapter
from kfs.conformance.runner import Result, script
from kfs.version import __version__

_STYLE = {
    "passed": "green",
    "not supported": "dim",
    "failed": "bold red",
    "silently wrong": "bold red",
    "unreadable": "bold yellow",
    "expected failure": "yellow",
    "unexpected pass": "bold magenta",
}
WRONG = {"failed", "silently wrong", "unreadable"}
_CSS = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; } tr { border-top: 1px solid #ddd; }
td, th { text-align: left; padding: .3rem .6rem; vertical-align: top; }
.bad { color: #b00020; font-weight: 600; } .good { color: #1b7f3b; } .other { color: #777; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; } summary { cursor: pointer; } .hint { color: #555; }
"""


def table(adapter: Adapter, results: Sequence[Result], verbose: bool = False) -> Table:
    """Return a table with one row per bad result or expected failure; with `verbose`, one row per check."""
    found = Table(title=f"{adapter.name} {adapter.version}".strip())
    for name in ("check", "status", "what is wrong, and why"):
        found.add_column(name, overflow="fold")
    for result in results:
        if verbose or result.bad or result.status == "expected failure":
            words = f"{result.message}\n{result.bug}" if result.bad else result.message
            found.add_row(Text(result.check), Text(result.status, style=_STYLE[result.status]), Text(words))
    return found


def progress(results: Sequence[Result], total: int, current: str) -> Table:
    """Return a small table for a live display: the number of checks by kind and status."""
    found = Table(title=f"{len(results)} of {total}: {current}", title_justify="left", title_style="")
    found.add_column("kind")
    for status, style in _STYLE.items():
        found.add_column(status, justify="right", style=style)
    kinds = dict.fromkeys(result.check.partition(":")[0] for result in results)
    for kind in kinds:
        counts = Counter(result.status for result in results if result.check.partition(":")[0] == kind)
        found.add_row(kind, *(str(counts[status]) if counts[status] else "" for status in _STYLE))  # type: ignore[index]
    return found


def summary(results: Sequence[Result]) -> str:
    """Return the number of checks by status as text: `139 checks: 137 passed, 2 silently wrong`."""
    counts = Counter(result.status for result in results)
    return f"{len(results)} checks: " + ", ".join(f"{n} {status}" for status, n in counts.items())


def to_json(adapter: Adapter, results: Sequence[Result]) -> str:
    """Return all results and the environment as JSON."""
    content = {
        "implementation": {"name": adapter.name, "version": adapter.version},
        "environment": {"kfs": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "summary": summary(results),
        "results": [asdict(result) for result in results],
    }
    return json.dumps(content, indent=2)


def to_html(adapter: Adapter, target: str, results: Sequence[Result]) -> str:
    """Return a self-contained HTML page with a summary and all checks, failures first, with programs to repeat them."""
    first = sorted(results, key=lambda result: (not result.bad, result.outcome not in WRONG))
    rows = "\n".join(_row(target, result) for result in first)
    title = html.escape(f"{adapter.name} {adapter.version}".strip())
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: conformance</title><style>{_CSS}</style></head>
<body>
<h1>{title}</h1>
<p>{html.escape(summary(results))}. kfs {__version__}, PyTorch {torch.__version__}.</p>
<table><thead><tr><th>check</th><th>status</th><th>what is wrong, and why</th></tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""


def _row(target: str, result: Result) -> str:
    kind = "bad" if result.bad else "good" if result.status == "passed" else "other"
    words = html.escape(result.message)
    if result.outcome in WRONG:
        program = html.escape(script(target, result.check))
        words += (
            f'<p class="hint">{html.escape(result.bug)}</p><details><summary>repeat it</summary><pre>{program}</pre>'
        )
        words += "</details>"
    return f'<tr><td>{html.escape(result.check)}</td><td class="{kind}">{result.status}</td><td>{words}</td></tr>'
