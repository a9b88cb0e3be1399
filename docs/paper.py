"""The pages about the paper, listing by listing: the items in `paper.toml` become tables.

In the book's page, `paper.md`, a claim is shown only if the program verifies it. The data name claims; the results of
runs contain those that were verified. `paper_table.md` needs no runs, and is committed for readers of a clone: `python
-m docs.paper` checks whether it is up to date, and `--write` updates it.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.drawings import FIGURES
from docs.modules import ROOT, cell, read_module

DOCS = ROOT / "docs"
TABLE = DOCS / "paper_table.md"
# Folders whose files are programs that verify or draw something; other modules are only read.
PROGRAMS = ("kfs/basics/", "kfs/kfac/", "kfs/kfac_tests/", "kfs/plots/")
# Text for kinds without claims of their own.
NOTES = {"setup": "Notation for what follows."}
UNPRINTED = "The source of the paper has it, commented out. It is not printed."
# From the path of a definition to the claims that running it verified, in order.
Claims = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Entry:
    """An item that the paper names.

    Attributes:
        kind: `"listing"`, `"figure"`, `"definition"`, `"test"`, `"example"`, `"setup"`, `"caveat"`, or `"topic"`:
            text without a heading of its own.
        name: Its name in the paper; Markdown.
        page: The page of the book that shows it, a path in the repository.
        number: Its printed number; `None` if it has none.
        unprinted: Whether the paper's source comments it out.
        claims: The claims about it that the page's file verifies; `None` for all claims of the file.
        pictures: Names of our figures that show it.
        errata: Titles of errata.
        note: The text if no program runs.
    """

    kind: str
    name: str
    page: str
    number: int | None = None
    claims: tuple[str, ...] | None = None
    pictures: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()
    note: str = ""
    unprinted: bool = False

    @property
    def title(self) -> str:
        """Its title on the page."""
        if self.kind == "topic":
            return self.name
        if self.kind == "listing":
            return f"Listing `{self.name}.py`"
        number = "" if self.number is None else f" {self.number}"
        return f"{self.kind.capitalize()}{number}: {self.name}"

    @property
    def command(self) -> str | None:
        """The command that runs it; `None` if there is none."""
        if not self.page.startswith(PROGRAMS):
            return None
        return f"python {self.page}" + (" figures" if self.page.startswith("kfs/plots/") else "")


@dataclass(frozen=True)
class Section:
    """A section of the paper.

    Attributes:
        number: Its printed number; empty if it has none.
        title: Its title; empty at the start of a chapter.
        chapter: Title of the chapter that starts here; empty if none does.
        page: The page of the book about the whole chapter; empty if there is none.
        errata: Titles of errata in its text.
        entries: Its items.
    """

    number: str
    title: str
    chapter: str
    page: str
    errata: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def heading(self) -> str:
        """Its number and its title in the paper."""
        return f"{self.number} {self.chapter or self.title}".lstrip()


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the paper's order."""
    data = tomllib.loads((DOCS / "paper.toml").read_text(encoding="utf-8"))
    return tuple(
        Section(
            number=section.get("number", ""),
            title=section.get("title", ""),
            chapter=section.get("chapter", ""),
            page=section.get("page", ""),
            errata=tuple(section.get("errata", ())),
            entries=tuple(_entry(**entry) for entry in section.get("entries", ())),
        )
        for section in data["section"]
    )


def _entry(kind: str, name: str, file: str | None = None, page: str | None = None, **others: Any) -> Entry:
    """Make an entry. The file of a listing is its name."""
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in others.items()}
    return Entry(kind, name, page or file or f"kfs/{name}.py", **lists)


def entries() -> list[Entry]:
    """Return all entries, in the paper's order."""
    return [entry for section in sections() for entry in section.entries]


def errata() -> list[str]:
    """Return titles of all errata, in the order of their page."""
    return re.findall(r"^## (.+)$", (DOCS / "errata.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def markdown(claims_of: Claims) -> str:
    """Return the page's tables.

    Args:
        claims_of: Returns the claims that running a definition verified.

    Raises:
        ValueError: If an entry has a claim that its program does not verify.
    """
    return "\n\n".join(_section(section, claims_of) for section in sections())


def _section(section: Section, claims_of: Claims) -> str:
    parts = []
    parts.append(f"{'###' if '.' in section.number else '##'} {section.heading}")
    if section.page:
        parts.append(f"This chapter, here: [{_page_title(section.page)}](/{section.page}).")
    if section.errata:
        parts.append(_errata(section.errata))
    if section.entries:
        rows = [_row(entry, claims_of) for entry in section.entries]
        head = ("| in the paper | in this book | verified by running it |", "|---|---|---|")
        parts.append("\n".join([":::{div} paper", *head, *rows, ":::"]))
    return "\n\n".join(parts)


def _row(entry: Entry, claims_of: Claims) -> str:
    here = f"[{_page_title(entry.page)}](/{entry.page})"
    if entry.command is not None:
        here += f"<br>`{entry.command}`"
    lines = _notes(entry)
    claims = _claims(entry, claims_of)
    lines += [f"{'• ' if len(claims) > 1 else ''}{cell(claim)}" for claim in claims]
    lines += [f"Draws: {next(f.caption for f in FIGURES if f.name == picture)}" for picture in entry.pictures]
    if entry.errata:
        lines.append(_errata(entry.errata))
    return f"| {entry.title} | {here} | {'<br>'.join(lines)} |"


def _notes(entry: Entry) -> list[str]:
    """Return the text about an entry besides claims."""
    notes = [entry.note or NOTES[entry.kind]] if entry.note or entry.kind in NOTES else []
    return [*notes, UNPRINTED] if entry.unprinted else notes


def _claims(entry: Entry, claims_of: Claims) -> Sequence[str]:
    """Return the verified claims of an entry."""
    if entry.pictures or entry.command is None:
        return ()
    made = list(dict.fromkeys(claims_of(entry.page)))
    if entry.claims is None:
        return made
    missing = [claim for claim in entry.claims if claim not in made]
    if missing:
        raise ValueError(
            f"docs/paper.toml says of {entry.title!r} that {entry.page} verifies {missing}, which it does not. "
            f"Choose from {made}."
        )
    return entry.claims


def _errata(titles: Iterable[str]) -> str:
    links = [f"[{title}](/docs/errata.md#{anchor(title)})" for title in titles]
    return f"{'Erratum' if len(links) == 1 else 'Errata'}: {', '.join(links)}."


def anchor(title: str) -> str:
    """Return the anchor of a heading on its page, as made by MyST."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def _page_title(page: str) -> str:
    """Return the short title of a page: its title, up to a colon."""
    source = (ROOT / page).read_text(encoding="utf-8")
    title = read_module(source, page).title if page.endswith(".py") else source.partition("\n")[0].removeprefix("# ")
    return title.partition(":")[0].replace("|", r"\|")


HEAD = """# The paper by numbers

This table leads from each number of the paper to a file. The paper is *Kronecker-factored Approximate Curvature (KFAC)
From Scratch* ([arXiv 2507.05127](https://arxiv.org/abs/2507.05127), version 1.0.0). Run files in a clone of this
repository: `python kfs/basics/forward_pass.py` prints what it verifies, and
`python kfs/plots/synthetic_fisher.py figures` draws figures. Functions have other names here than in the printed
listings; [a table](paper.md#names-in-the-printed-listings) leads from one to the other.

Numbers are those that the paper prints. Its source has one more example, between Examples 6 and 7, which is commented
out. With that one, the numbers of later examples would be larger by one, up to 17.

<!-- Written by docs/paper.py from docs/paper.toml. -->
"""


def table() -> str:
    """Return the page that leads from the paper's numbers to files."""
    rows = ["| section | in the paper | here | remarks |", "|---|---|---|---|"]
    for section in sections():
        remarks = _errata(section.errata) if section.errata else ""
        here = f"[{_page_title(section.page)}](/{section.page})" if section.page else ""
        name = f"**{section.chapter or section.title}**"
        rows.append(f"| {section.number} | {name} | {here} | {remarks} |")
        for entry in section.entries:
            shown = entry.page if entry.page.endswith(".py") else _page_title(entry.page)
            lines = [*_notes(entry), *([_errata(entry.errata)] if entry.errata else [])]
            rows.append(f"| {section.number} | {entry.title} | [{shown}](/{entry.page}) | {' '.join(lines)} |")
    # Paths from the folder of the page, which GitHub and the book both understand.
    relative = re.sub(r"\]\(/(docs/)?", lambda match: "](" if match[1] else "](../", "\n".join(rows))
    return f"{HEAD}\n{relative}\n"


def main(arguments: Sequence[str]) -> int:
    """Compare the committed table with a new one, or write it; return 1 if it is out of date."""
    if "--write" in arguments:
        TABLE.write_text(table(), encoding="utf-8")
    current = TABLE.is_file() and TABLE.read_text(encoding="utf-8") == table()
    print(f"{TABLE.relative_to(ROOT)} is {'up to date' if current else 'out of date: python -m docs.paper --write'}.")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
