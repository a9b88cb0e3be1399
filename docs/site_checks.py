"""What must hold for a finished site: links lead somewhere, and no formula is left as LaTeX."""

import html
import re
from functools import cache
from pathlib import Path


def check(site: Path) -> None:
    """Read all pages of a site.

    Raises:
        RuntimeError: If a link leads nowhere, or a formula was not rendered.
    """
    problems = [problem for page in sorted(site.glob("*.html")) for problem in _problems(page)]
    if problems:
        raise RuntimeError(f"The book has mistakes: {'; '.join(problems)}. Mend the sources of these pages.")


def _problems(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = [f"{page.name} links to {link}" for link in broken_links(page, text)]
    return found + [f"{page.name} shows LaTeX: {formula}" for formula in unrendered(text)]


def broken_links(page: Path, text: str) -> list[str]:
    """Return links and sources that are neither a file of the site nor, with `#`, a place in one."""
    broken = []
    for link in re.findall(r'(?:href|src)="([^"]*)"', text):
        name, _, place = html.unescape(link).partition("#")
        target = page.parent / name if name else page
        if not target.is_file() or (place and place not in _places(target)):
            broken.append(link)
    return broken


@cache
def _read_places(page: Path, changed: int) -> frozenset[str]:  # noqa: ARG001 (a part of the key)
    return frozenset(html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))


def _places(page: Path) -> frozenset[str]:
    return _read_places(page, page.stat().st_mtime_ns)


def unrendered(text: str) -> list[str]:
    """Return formulas of a page that readers would see as LaTeX."""
    formulas = [re.sub(r"<[^>]*>", "", formula) for formula in re.findall(r"<math.*?</math>", text, flags=re.DOTALL)]
    found = [formula for formula in formulas if "\\" in formula or "&amp;" in formula]
    main = text.partition("<main>")[2].partition("</main>")[0]
    prose = re.sub(r"<(math|pre|code)\b.*?</\1>", "", main, flags=re.DOTALL)
    return found + re.findall(r".{0,20}(?:\$|\\[a-zA-Z]+).{0,20}", prose)
