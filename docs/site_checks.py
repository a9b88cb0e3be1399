"""Checks of a finished site: valid HTML, links with a target, pictures with a description.

Run it: `python -m docs.site_checks docs/site`.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element

import html5lib

# Elements that load a file, and the attribute with its address. Links to other sites are not loaded.
LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
# Mistakes that every theme makes and every browser accepts.
FORGIVEN = {"unexpected-self-closing-flag"}


class Page:
    """A page, parsed once."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        parser = html5lib.HTMLParser(namespaceHTMLElements=False)
        # Highlighted code is most of a page, has no links, and is known to be well-formed.
        root: Any = parser.parse(re.sub(r"(<pre\b[^>]*>).*?(</pre>)", r"\1\2", text, flags=re.DOTALL))
        self.elements: list[Element] = [element for element in root.iter() if isinstance(element.tag, str)]
        self.errors = [(place, code) for place, code, _ in parser.errors if code not in FORGIVEN]
        self.ids = Counter(re.findall(r'<[^>]*\sid="([^"]+)"', text))


@cache
def _read(file: Path, changed: int) -> Page:  # noqa: ARG001 (a part of the key)
    return Page(file)


def read(file: Path) -> Page:
    """Return a page, parsed."""
    return _read(file, file.stat().st_mtime_ns)


def check(site: Path) -> None:
    """Read all pages of a site.

    Raises:
        RuntimeError: If there is a problem. The message lists all problems, by page.
    """
    problems = [
        f"{file.relative_to(site)} {problem}" for file in sorted(site.rglob("*.html")) for problem in problems_of(file)
    ]
    if problems:
        raise RuntimeError("The book has mistakes:\n" + "\n".join(problems) + "\nMend the sources of these pages.")


def problems_of(file: Path) -> Iterator[str]:
    """Yield the problems of a page."""
    page = read(file)
    yield from (f"is not valid HTML: {code} at {place}" for place, code in page.errors)
    yield from (f"has two places called {name}" for name, count in page.ids.items() if count > 1)
    for element in page.elements:
        if element.tag == "img" and not element.attrib.get("alt"):
            yield f"shows {element.attrib.get('src')} without saying what it is"
        loaded = element.attrib.get(LOADING.get(str(element.tag), ""), "")
        if re.match(r"(https?:)?//", loaded):
            yield f"loads {loaded}"
        for link in (element.attrib.get("href"), element.attrib.get("src")):
            if link is not None and not leads_somewhere(file, link):
                yield f"links to {link}"
    yield from (f"shows LaTeX: {text}" for text in unrendered(page))


def leads_somewhere(file: Path, link: str) -> bool:
    """Whether a link points to another site, a file of this one, or, with `#`, an anchor in one."""
    if re.match(r"(https?|mailto|data):", link):
        return True
    name, _, place = unquote(link).partition("#")
    target = file.parent / name.partition("?")[0] if name else file
    if not target.is_file():
        return False
    return not place or target.suffix != ".html" or place in read(target).ids


def unrendered(page: Page) -> Iterator[str]:
    """Yield formulas in prose that MathJax will not process, as dollars or commands."""
    for element in page.elements:
        if element.tag in {"p", "li", "td", "h1", "h2", "h3", "figcaption"}:
            for text in (element.text, *(child.tail for child in element)):
                yield from re.findall(r"\$[^$]+\$|\\[a-zA-Z]{3,}", text or "")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
    print(f"The book is in {Path(sys.argv[1]) / 'index.html'}.")
