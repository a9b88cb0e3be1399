"""Descriptions of objects: a title, facts and tables, as text in a terminal and as HTML in a notebook.

The content of a description lives with the object. Nothing here synchronizes with an accelerator: for tensors that are
not on a CPU, only shape, dtype and device are shown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

_WIDTH = 60  # maximum width of a cell; longer text is wrapped
_SHOWN = 4  # rows and columns shown of a large matrix


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: Title of the table; may be empty.
        columns: Names of columns.
        rows: Cells, row by row.
        numbers: Names of right-aligned columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table as text. Columns in which all cells are empty are left out."""
        shown = self._shown()
        cells = [[wrap(row[place], _WIDTH) or [""] for place in shown] for row in (self.columns, *self.rows)]
        widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(shown))]
        right = [self.columns[place] in self.numbers for place in shown]
        lines = []
        for row in cells:
            for number in range(max(map(len, row))):
                parts = [cell[number] if number < len(cell) else "" for cell in row]
                aligned = [
                    part.rjust(width) if to_right else part.ljust(width)
                    for part, width, to_right in zip(parts, widths, right, strict=True)
                ]
                lines.append("  ".join(aligned).rstrip())
        lines.insert(len(lines) - sum(max(map(len, row)) for row in cells[1:]), "  ".join("-" * w for w in widths))
        return "\n".join([*([self.title] if self.title else []), *lines])

    def html(self) -> str:
        """Return the table as HTML."""
        shown = self._shown()
        head = self._html_row(self.columns, shown, "th")
        body = "".join(self._html_row(row, shown, "td") for row in self.rows)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"

    def _shown(self) -> list[int]:
        """Return the indices of columns with a non-empty cell, or all indices if there are no rows."""
        places = range(len(self.columns))
        return [place for place in places if not self.rows or any(row[place] for row in self.rows)]

    def _html_row(self, row: Sequence[str], shown: Iterable[int], tag: str) -> str:
        cells = []
        for place in shown:
            style = "right" if self.columns[place] in self.numbers else "left"
            cells.append(f'<{tag} style="text-align: {style}">{escape(row[place])}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"


@dataclass(frozen=True)
class Description:
    """The description of an object.

    Attributes:
        title: First line of the description.
        facts: Further lines.
        tables: Tables, shown by `str` and in notebooks.
        notes: Sentences below the tables.
    """

    title: str
    facts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the title and the facts as text."""
        return "\n".join([self.title, *(f"  {line}" for fact in self.facts for line in fact.splitlines())])

    def text(self) -> str:
        """Return the whole description as text."""
        return "\n".join([self.summary(), *(table.text() for table in self.tables), *self.notes])

    def html(self) -> str:
        """Return the whole description as HTML."""
        facts = "\n".join(self.facts)
        parts = [f"<p><b>{escape(self.title)}</b></p>"]
        parts += [f"<pre>{escape(facts)}</pre>"] if facts else []
        parts += [table.html() for table in self.tables]
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        return f"<div>{''.join(parts)}</div>"


class Described:
    """Base class of objects with a description: short in `repr`, with tables in `str`, and as HTML in a notebook."""

    def describe(self) -> Description:
        """Return the description of the object, without a pass over data and without synchronization."""
        return Description(type(self).__name__)

    def __repr__(self) -> str:
        return self.describe().summary()

    def __str__(self) -> str:
        return self.describe().text()

    def _repr_html_(self) -> str:
        """Return the description as HTML for a notebook."""
        return self.describe().html()


class DescribedByTables(Described):
    """Base class of objects that consist of tables: `repr` includes the tables."""

    def __repr__(self) -> str:
        return self.describe().text()


def times(sizes: Iterable[int]) -> str:
    """Return sizes as text such as `"3 x 4"`, or `"scalar"` if there are none."""
    return " x ".join(f"{size:,}" for size in sizes) or "scalar"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, such as `"1 block"` or `"1,200 blocks"`."""
    if number == 1:
        return f"{number:,} {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def kind(dtype: torch.dtype, device: torch.device) -> str:
    """Return dtype and device, such as `"float32 on cpu"`."""
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def shaped(t: Tensor) -> str:
    """Describe a tensor by shape, dtype and device, without reading its entries."""
    return f"{times(t.shape)}, {kind(t.dtype, t.device)}"


def vector(v: Any, noun: str = "tensor") -> str:
    """Describe a vector, given as a tensor, or as a dictionary or list of tensors."""
    if isinstance(v, Tensor):
        return shaped(v)
    tensors = list(v.values() if isinstance(v, Mapping) else v)
    total = sum(t.numel() for t in tensors)
    return f"{counted(len(tensors), noun)}, {counted(total, 'number')}, {kind(tensors[0].dtype, tensors[0].device)}"


def batches_and_data(num_batches: int | None, num_data: int | None) -> str:
    """Describe the numbers of batches and examples, as far as they are known."""
    batches = "batches" if num_batches is None else counted(num_batches, "batch")
    return f"{batches}, {'not counted yet' if num_data is None else counted(num_data, 'example')}"


def number(value: Any) -> str:
    """Format a number with four digits. A tensor on an accelerator is not read; its shape is shown instead."""
    if isinstance(value, Tensor):
        return f"{value.item():.4g}" if value.device.type == "cpu" else f"({shaped(value)})"
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def matrix(name: str, t: Tensor) -> str:
    """Show the first entries of a matrix or vector on a CPU; show only the shape of other tensors."""
    title = f"{name}: {shaped(t)}"
    if t.device.type != "cpu" or t.ndim not in {1, 2}:
        return title
    rows = [t] if t.ndim == 1 else list(t[: _SHOWN + 1])
    lines = []
    for row in rows[:_SHOWN]:
        more = " ..." if len(row) > _SHOWN + 1 else ""
        first = row[:_SHOWN] if more else row
        lines.append(f"  {' '.join(f'{value:9.2e}' for value in first.tolist())}{more}")
    if len(rows) > _SHOWN:
        lines.append("  ...")
    return "\n".join([title, *lines])


def readable_size(nbytes: float) -> str:
    """Format a number of bytes with a unit, such as `"12 KiB"`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def readable_count(number: float) -> str:
    """Format a number of operations with a unit, such as `"1.2 M"`."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"
