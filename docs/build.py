"""Build the book: a static site in docs/site with a page per definition, prose and math beside the code that ran.

A page's prose is its module's docstring, its code is the module, and its last part is what running the module verified.
Pages in docs/*.md are added as they are. Nothing needs a network, neither to build nor to read.
"""

import ast
import html
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from rich.progress import track

from kfs import __version__
from kfs.plots import structure_errors
from kfs.tour import Report, by_claim, chapters, definitions, run_definition
from kfs.verification import Check

DOCS = Path(__file__).parent
SITE = DOCS / "site"
MANY_CASES = 8  # from here on a claim's cases share a row
PAGES = {"errata": "Errata", "test_your_kfac": "Test your KFAC"}
# Figures by the page that shows them: what draws it, and what to say about it.
FIGURES = {
    "alternatives": (
        structure_errors,
        "Relative errors of structures against the exact blocks of the GGN, for the layers of a small convolutional "
        "network. Drawn by <code>kfs/plots/structure_errors.py</code>; <code>kfs.compare(risk)</code> does the same "
        "for your model.",
    ),
}


@dataclass(frozen=True)
class Definition:
    """A definition file, taken apart for its page.

    Attributes:
        name: File name without ending.
        path: Where the file is in the repository.
        title: First line of the docstring.
        prose: The rest of the docstring, Markdown with LaTeX between dollar signs.
        code: The source without the docstring.
    """

    name: str
    path: str
    title: str
    prose: str
    code: str


def read_definition(file: Path) -> Definition:
    """Split a definition file into title, prose and code."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if not docstring:
        raise ValueError(f"{file} has no module docstring, so its page would be empty. Write one.")
    title, _, prose = docstring.partition("\n")
    end = tree.body[0].end_lineno or 0
    code = "\n".join(source.splitlines()[end:]).strip("\n")
    path = "/".join(file.parts[-3:])
    return Definition(file.stem, path, title.rstrip("."), prose.strip(), code)


def render_math(latex: str, options: dict[str, bool]) -> str:
    """Turn LaTeX into MathML, which browsers show without any script."""
    return str(convert(latex, display="block" if options["display_mode"] else "inline"))


def markdown() -> Callable[[str], str]:
    """Return a function that turns Markdown with LaTeX formulas into HTML."""
    return MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, renderer=render_math).render


def page(title: str, body: str) -> str:
    """Wrap a page's body into the frame that all pages share."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)} · kfs</title>
<link rel="stylesheet" href="style.css">
</head>
<body>
<header>
<a href="index.html">kfs: KFAC from scratch</a>
<span><a href="test_your_kfac.html">test your KFAC</a> · <a href="errata.html">errata</a> · {__version__}</span>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def claim_rows(claim: str, checks: list[Check]) -> list[str]:
    """Return a table's rows for one claim: a row per case, or one row for all if there are many."""
    shown = [(check.case, check.error) for check in checks]
    if len(shown) > MANY_CASES:
        errors = [error for _, error in shown if error is not None]
        shown = [(f"{len(shown)} cases", max(errors) if errors else None)]
    return [
        f"<tr><td>{html.escape(claim)}</td><td>{html.escape(case)}</td>"
        f"<td class=number>{'' if error is None else f'{error:.1e}'}</td></tr>"
        for case, error in shown
    ]


def definition_page(definition: Definition, report: Report, before: Definition | None, after: Definition | None) -> str:
    """Lay one definition out: prose left, code right, below what running it verified, and the way on."""
    code = highlight(definition.code, PythonLexer(), HtmlFormatter())
    rows = "\n".join(row for claim, checks in by_claim(report.checks).items() for row in claim_rows(claim, checks))
    previous_link = f'<a href="{before.name}.html">← {html.escape(before.title)}</a>' if before else "<span></span>"
    next_link = f'<a href="{after.name}.html">{html.escape(after.title)} →</a>' if after else "<span></span>"
    body = f"""<h1>{html.escape(definition.title)}</h1>
<div class="columns">
<article>
{markdown()(definition.prose)}
{figure(definition.name)}
<h2>What running it verified</h2>
<p><code>python {definition.path}</code></p>
<table><thead><tr><th>claim</th><th>case</th><th>largest error</th></tr></thead><tbody>
{rows}
</tbody></table>
</article>
<section class="code"><p class="file">{definition.path}</p>
{code}
</section>
</div>
<nav>{previous_link}{next_link}</nav>"""
    return page(definition.title, body)


def figure(name: str) -> str:
    """Return the figure of a page, if it has one."""
    if name not in FIGURES:
        return ""
    plot, caption = FIGURES[name]
    return (
        f'<figure><img src="{plot.__name__.rpartition(".")[2]}.svg" alt=""><figcaption>{caption}</figcaption></figure>'
    )


def index_page(by_name: dict[str, Definition]) -> str:
    """List all definitions in reading order."""
    sections = []
    for title, files in chapters().items():
        items = "\n".join(
            f'<li><a href="{file.stem}.html">{html.escape(by_name[file.stem].title)}</a> <code>{file.name}</code></li>'
            for file in files
        )
        sections.append(f"<h2>{html.escape(title)}</h2>\n<ol>\n{items}\n</ol>")
    intro = markdown()((DOCS / "index.md").read_text(encoding="utf-8"))
    return page("The book", f'<article class="single">{intro}{"".join(sections)}</article>')


def build(site: Path) -> int:
    """Write all pages into an empty folder and return how many there are.

    Raises:
        RuntimeError: If a definition fails: the book shows only what holds.
    """
    files = definitions()
    reports = [run_definition(file) for file in track(files, "Running the definitions", transient=True)]
    failed = [f"{report.name}: {report.failure}" for report in reports if report.failure is not None]
    if failed:
        raise RuntimeError(f"Definitions failed: {'; '.join(failed)} Mend them first; `make tour` shows them all.")
    chapter = [read_definition(file) for file in files]

    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    highlighting = HtmlFormatter(style="default").get_style_defs(".highlight")
    style = (DOCS / "assets" / "style.css").read_text(encoding="utf-8")
    (site / "style.css").write_text(f"{style}\n{highlighting}\n", encoding="utf-8")

    for before, definition, report, after in zip(
        [None, *chapter], chapter, reports, [*chapter[1:], None], strict=False
    ):
        text = definition_page(definition, report, before, after)
        (site / f"{definition.name}.html").write_text(text, encoding="utf-8")
    (site / "index.html").write_text(index_page({d.name: d for d in chapter}), encoding="utf-8")
    for plot, _ in FIGURES.values():
        plot.draw(site / f"{plot.__name__.rpartition('.')[2]}.svg")
    for name, title in PAGES.items():
        text = markdown()((DOCS / f"{name}.md").read_text(encoding="utf-8"))
        (site / f"{name}.html").write_text(page(title, f'<article class="single">{text}</article>'), encoding="utf-8")
    return len(list(site.glob("*.html")))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    print(f"{build(target)} pages: open {target / 'index.html'}")
