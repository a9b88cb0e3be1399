"""The search index: a JavaScript file, since pages opened from a disk may load scripts but not data."""

import json
import re
from pathlib import Path
from typing import TypedDict

from docs.markup import plain

PREFIX, SUFFIX = "window.KFS_INDEX = ", ";\n"
MAX_TEXT = 300


class Entry(TypedDict):
    """A page, or a public name in one: what is searched, and where a result leads."""

    title: str
    url: str
    headings: list[str]
    names: list[str]
    text: str


def page_entry(title: str, url: str, body: str, names: list[str]) -> Entry:
    """Describe a page: its headings, and the first sentences of its first paragraphs."""
    prose = body.partition('<div class="about">')[0]
    headings = [plain(heading) for heading in re.findall(r"<h[23][^>]*>(.*?)</h[23]>", body, flags=re.DOTALL)]
    paragraphs = (plain(paragraph) for paragraph in re.findall(r"<p>(.*?)</p>", prose, flags=re.DOTALL))
    return Entry(title=title, url=url, headings=headings, names=names, text=shorten(" ".join(paragraphs)))


def shorten(text: str) -> str:
    """Return the first sentences of a text."""
    if len(text) <= MAX_TEXT:
        return text
    start = text[:MAX_TEXT]
    end = start.rfind(". ")
    return start[: end + 1] if end > 0 else f"{start.rpartition(' ')[0]} ..."


def write_index(entries: list[Entry], file: Path) -> None:
    """Write the index as a script."""
    text = json.dumps(entries, ensure_ascii=False, indent=0)
    file.write_text(PREFIX + text + SUFFIX, encoding="utf-8")


def read_index(file: Path) -> list[Entry]:
    """Read the index back."""
    entries: list[Entry] = json.loads(file.read_text(encoding="utf-8").removeprefix(PREFIX).removesuffix(SUFFIX))
    return entries
