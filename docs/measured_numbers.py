"""Numbers of files of results, and their format: see `docs/measured.py`."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def content(results: Path, name: str) -> dict[str, Any]:
    """Return the content of a file."""
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(results: Path, name: str, **where: str) -> list[Row]:
    """Return the rows of a file, optionally with given values of fields."""
    found = content(results, name)["rows"]
    return [row for row in found if all(str(row[key]) == value for key, value in where.items())]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; repeated words in the first column are left out."""
    shown, before = [list(head)], ""
    for line in lines:
        shown.append(["" if line[0] == before else line[0], *line[1:]])
        before = line[0]
    written = ["|".join(["", *(f" {cell} " if cell else " " for cell in line), ""]) for line in shown]
    return "\n".join([written[0], "|---" * len(head) + "|", *written[1:]])


def short(value: float | None) -> str:
    """Format a loss: 1.234, 0.0012, 1.2e-8, 0."""
    if value is None:
        return "diverged"
    mantissa, e, exponent = (f"{value:.3f}" if value >= 0.01 else f"{value:.2g}").partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def with_error(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean with its standard error."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else mean


def bold(text: str, best: bool) -> str:
    """Mark the best in bold."""
    return f"**{text}**" if best else text


def least(found: Iterable[Row], field: str) -> float:
    """Return the smallest number; missing ones were not finite."""
    return min(float(row[field]) for row in found if row[field] is not None)


def value(results: Path, name: str, field: str, digits: str, *where: str) -> str:
    """Return a number of a row, or the smallest and the largest one of several rows: `value FILE FIELD DIGITS a=b`.

    Digits are those behind the point; with `ms` or `%` appended, the number is in milliseconds or percent.
    """
    wanted = dict(pair.split("=", 1) for pair in where)
    found = [row[field] for row in rows(results, name, **wanted) if row[field] is not None]
    if not found:
        raise ValueError(f"{name}.json has no row with {wanted}.")
    unit = digits.lstrip("0123456789")
    factor = {"": 1, "ms": 1e3, "%": 100}[unit]
    shown = list(dict.fromkeys(f"{factor * one:.{digits.removesuffix(unit)}f}" for one in (min(found), max(found))))
    return " to ".join(shown) + (f" {unit}" if unit else "")


def where(results: Path, name: str) -> str:
    """Return the command that made a file, and the machine: `where FILE`."""
    made = content(results, name)["environment"]
    command, torch = made["command"].replace(" -W ignore", ""), made["torch"].partition("+")[0]
    machine = ", ".join([made["device"]] * (made["device"] != "cpu") + [made["processor"]])
    return f"`{command}`, {made['date']}, {machine}, kfs {made['kfs']}, PyTorch {torch}"


def setting(results: Path, name: str, digits: str, *keys: str) -> str:
    """Return a number of a whole run, which is not in a row: `setting FILE DIGITS KEY ...`.

    For a list of numbers, return the mean with its standard error. Digits may be preceded by a minus sign, which
    negates the number.
    """
    found = content(results, name)["environment"]
    for key in keys:
        found = found[int(key)] if isinstance(found, list) else found[key]
    factor, places = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    numbers = [factor * one for one in (found if isinstance(found, list) else [found])]
    return with_error(numbers, int(places))


TABLES: dict[str, Callable[..., str]] = {made.__name__: made for made in (value, where, setting)}
