"""The order of search results: pages with instructions come before pages about files of the library.

Sphinx's own scores depend on whether a word is in a title, but not on how often a page uses it. Words are counted here,
when the book is built, and `search_scorer.js` adds their weights in the browser.
"""

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

from sphinx.search.en import SearchEnglish

DOCS = Path(__file__).parent
SCORER = DOCS / "search_scorer.js"
HEADING = 3  # a word of a heading counts this many times, and one of the page's title twice that
LEAST = 2  # rarer words are hardly relevant to a page


def pages() -> list[Path]:
    """Return all pages of prose."""
    return sorted(DOCS.glob("*.md"))


@cache
def _language() -> SearchEnglish:
    return SearchEnglish({})


@cache
def stem(word: str) -> str:
    """Return a word in the form of the search index: without its ending."""
    return _language().stem(word)


def counts(text: str) -> Counter[str]:
    r"""Count the words of a page of Markdown, by stem. Titles count more often than other text.

    Example:
        >>> counts("# Merge models\nMerging takes a model.")["merg"]
        7
    """
    found: Counter[str] = Counter()
    title = True
    for line in text.splitlines():
        weight = 1
        if re.match(r"#+ ", line):
            weight = 2 * HEADING if title else HEADING
            title = False
        for word in re.findall(r"\w+", line.lower()):
            # `plot_spectrum` is found by both of its words, too.
            for part in {word, *word.split("_")}:
                if _language().word_filter(part):
                    found[stem(part)] += weight
    return found


def points() -> dict[str, dict[str, int]]:
    """Return the weights of words: points by stem and page."""
    found: dict[str, dict[str, int]] = {}
    for page in pages():
        for word, count in counts(page.read_text(encoding="utf-8")).items():
            if count >= LEAST:
                found.setdefault(word, {})[f"docs/{page.stem}"] = round(10 * math.log2(count))
    return found


def write_scorer(folder: Path) -> Path:
    """Write the script that orders results, with all points, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SCORER.name
    code = SCORER.read_text(encoding="utf-8")
    file.write_text(code.replace("/* points */ {}", json.dumps(points(), separators=(",", ":"))), encoding="utf-8")
    return file
