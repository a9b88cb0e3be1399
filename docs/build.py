"""Build the book: a static site in docs/site with a page per module, prose and math beside the code.

A page's prose is its module's docstring and its code is the module; a definition's last part is what running it
verified. Pages in docs/*.md are added as they are, then a reference of public names, benchmarks, and a search index.
Nothing needs a network, neither to build nor to read.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pygments.formatters import HtmlFormatter
from rich.progress import track

from docs import reference, site_checks
from docs.blocks import draw_pictures
from docs.markup import Links, Markup, plain
from docs.pages import draw_figures, index_body, module_body, page, play_body, single, verified
from docs.results import benchmarks_body
from docs.search import Entry, page_entry, write_index
from docs.sources import Module, engine, read_definition
from kfs.report import play
from kfs.tour import Report, chapters, definitions, run_definition

DOCS = Path(__file__).parent
SITE = DOCS / "site"
PAGES = {
    "cheatsheet_shapes": "Cheatsheet: symbols and shapes",
    "cheatsheet_kfac": "Cheatsheet: which KFAC",
    "howto_natural_gradient": "How to take a natural gradient step",
    "howto_train": "How to train with natural gradients",
    "howto_influence": "How to find the training data behind a prediction",
    "howto_merge": "How to merge models",
    "howto_laplace": "How to say how sure a model is",
    "howto_looking": "Looking at results",
    "howto_compare": "How to compare structures",
    "howto_compress": "How to make a model smaller",
    "howto_checkpoints": "How to save, load and resume",
    "many_processes_plan": "A plan for many processes",
    "howto_many_processes": "How to compute with many processes",
    "coming_from": "Coming from another library",
    "right": "How do I know that it is right?",
    "gpu": "At the speed of the GPU",
    "engine": "How the engine works",
    "test_your_kfac": "Test your KFAC",
    "errata": "Errata",
}
GENERATED = ("index", "api", "play", "benchmarks")


def run_all(files: list[Path]) -> list[Report]:
    """Run all definitions.

    Raises:
        RuntimeError: If one fails: the book shows only what holds.
    """
    reports = [run_definition(file) for file in track(files, "Running the definitions", transient=True)]
    failed = [f"{report.name}: {report.failure}" for report in reports if report.failure is not None]
    if failed:
        raise RuntimeError(f"Definitions failed: {'; '.join(failed)} Mend them first; `make tour` shows them all.")
    return reports


def module_pages(
    chapter: list[Module], reports: list[Report], modules: list[Module], markup: Markup
) -> Iterator[tuple[Module, str]]:
    """Yield the bodies of all modules' pages; definitions and engine are two chains of previous and next."""
    extras = [verified(module, report) for module, report in zip(chapter, reports, strict=True)]
    for chain, below in ((chapter, extras), (modules, [""] * len(modules))):
        neighbours = zip([None, *chain[:-1]], chain, [*chain[1:], None], below, strict=True)
        for before, module, after, extra in neighbours:
            yield module, module_body(module, markup, (before, after), extra)


def build(site: Path) -> int:
    """Write all pages into an empty folder and return how many there are.

    Raises:
        RuntimeError: If a definition fails, two pages have one name, a link leads nowhere or a formula is not rendered.
    """
    files = definitions()
    reports = run_all(files)
    chapter = [read_definition(file) for file in files]
    sections = engine(files)
    modules = [module for section in sections.values() for module in section]
    check_names([module.name for module in (*chapter, *modules)] + [*PAGES, *GENERATED])
    markup = Markup(Links(chapter, modules, reference.addresses(reference.public_names())))

    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    write_assets(site)
    entries: list[Entry] = []

    def write(name: str, title: str, body: str, names: tuple[str, ...] = ()) -> None:
        (site / f"{name}.html").write_text(page(title, body), encoding="utf-8")
        entries.append(page_entry(title, f"{name}.html", body, [name, *names]))

    by_path = dict(zip(files, chapter, strict=True))
    contents = {title: [by_path[f] for f in found if f in by_path] for title, found in chapters().items()}
    write("index", "The book", index_body(markup.render(read("index")), contents, sections, markup))
    for module, body in module_pages(chapter, reports, modules, markup):
        write(module.name, plain(markup.inline(module.title)), body, module.names)
    for name, title in PAGES.items():
        write(name, title, single(markup.render(read(name))))
    write("api", "Reference", single(reference.api_body(markup)))
    write("play", "Play", single(play_body()))
    write("benchmarks", "Benchmarks", single(benchmarks_body()))
    write_index([*entries, *reference.entries()], site / "search_index.js")
    site_checks.check(site)
    return len(list(site.glob("*.html")))


def read(name: str) -> str:
    """Return a Markdown page. A line `<!-- CONTRIBUTING: title -->` stands for a section of CONTRIBUTING.md."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return re.sub(r"^<!-- CONTRIBUTING: (.+) -->$", lambda line: contributing(line[1]), text, flags=re.MULTILINE)


def contributing(title: str) -> str:
    """Return a section of CONTRIBUTING.md with its title.

    Raises:
        RuntimeError: If there is no such section.
    """
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {title}\n")
    if not found:
        raise RuntimeError(f"CONTRIBUTING.md has no section {title!r}. Mend the page that shows it.")
    return found + rest.partition("\n## ")[0]


def check_names(names: list[str]) -> None:
    """Refuse two pages with one name, also where upper and lower case are the same."""
    lower = [name.lower() for name in names]
    double = sorted({name for name in names if lower.count(name.lower()) > 1})
    if double:
        raise RuntimeError(f"Several pages are called {', '.join(double)}. Rename a file, or its page.")


def write_assets(site: Path) -> None:
    """Write style, script, drawings and figures."""
    highlighting = HtmlFormatter(style="default").get_style_defs(".highlight")
    style = (DOCS / "assets" / "style.css").read_text(encoding="utf-8")
    (site / "style.css").write_text(f"{highlighting}\n{style}\n", encoding="utf-8")
    pictures = sorted((DOCS / "assets").glob("*.svg")) + sorted((DOCS / "assets").glob("*.png"))
    for asset in (DOCS / "assets" / "search.js", *pictures):
        shutil.copy(asset, site)
    for name in ("play.js", "play.css"):
        (site / name).write_text(play.asset(name), encoding="utf-8")
    draw_figures(site)
    draw_pictures(DOCS / "howto_looking.md", site)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    print(f"{build(target)} pages: open {target / 'index.html'}")
