"""The page about the paper, listing by listing: what `paper.toml` names becomes tables, with what runs verified.

A claim is shown only if the program makes it. The data name claims; the results of runs say whether they were made.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.drawings import FIGURES
from docs.modules import ROOT, cell, read_module

DOCS = ROOT / "docs"
# What to say of kinds that claim nothing by themselves.
NOTES = {"setup": "Notation for what follows."}
# From the path of a definition to the claims that running it verified, in order.
Claims = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Entry:
    """Something that the paper names.

    Attributes:
        kind: `"listing"`, `"figure"`, `"definition"`, `"test"`, `"example"`, `"setup"`, `"caveat"` or
            `"outlook"`.
        name: What the paper calls it; Markdown.
        page: The page of the book that shows it, a path in the repository.
        number: Of a figure; `None` if it has none.
        claims: What running the page's file verifies of it; `None` for all claims that it makes.
        pictures: Names of our figures that show it.
        errata: Titles of errata.
        note: What to say if nothing runs.
    """

    kind: str
    name: str
    page: str
    number: int | None = None
    claims: tuple[str, ...] | None = None
    pictures: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()
    note: str = ""

    @property
    def title(self) -> str:
        """What the page calls it."""
        if self.kind == "listing":
            return f"Listing `{self.name}.py`"
        number = "" if self.number is None else f" {self.number}"
        return f"{self.kind.capitalize()}{number}: {self.name}"

    @property
    def command(self) -> str | None:
        """What runs it; `None` if nothing does."""
        if not self.page.endswith(".py"):
            return None
        return f"python {self.page}" + (" figures" if self.page.startswith("kfs/plots/") else "")


@dataclass(frozen=True)
class Section:
    """A section of the paper.

    Attributes:
        title: Of the section; empty if it is the start of a chapter.
        chapter: Of the chapter that starts here; empty if none does.
        page: The page of the book about the whole chapter; empty if there is none.
        errata: Titles of errata in its text.
        entries: What it names.
    """

    title: str
    chapter: str
    page: str
    errata: tuple[str, ...]
    entries: tuple[Entry, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the paper's order."""
    data = tomllib.loads((DOCS / "paper.toml").read_text(encoding="utf-8"))
    return tuple(
        Section(
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
        claims_of: Tells what running a definition verified.

    Raises:
        ValueError: If an entry names a claim that its program does not make.
    """
    return "\n\n".join(_section(section, claims_of) for section in sections())


def _section(section: Section, claims_of: Claims) -> str:
    parts = []
    if section.chapter:
        parts.append(f"## {section.chapter}")
    elif section.title:
        parts.append(f"### {section.title}" if section.entries[0].page.endswith(".py") else f"## {section.title}")
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
    lines = [entry.note or NOTES[entry.kind]] if entry.note or entry.kind in NOTES else []
    claims = _claims(entry, claims_of)
    lines += [f"{'• ' if len(claims) > 1 else ''}{cell(claim)}" for claim in claims]
    lines += [f"Draws: {next(f.caption for f in FIGURES if f.name == picture)}" for picture in entry.pictures]
    if entry.errata:
        lines.append(_errata(entry.errata))
    return f"| {entry.title} | {here} | {'<br>'.join(lines)} |"


def _claims(entry: Entry, claims_of: Claims) -> Sequence[str]:
    """Return what is verified of an entry."""
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
    """Return the name of a heading's place on its page, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def _page_title(page: str) -> str:
    """Return what to call a page: its title, up to a colon."""
    source = (ROOT / page).read_text(encoding="utf-8")
    title = read_module(source, page).title if page.endswith(".py") else source.partition("\n")[0].removeprefix("# ")
    return title.partition(":")[0].replace("|", r"\|")
