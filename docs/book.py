"""Extensions of Sphinx: modules as pages, lists of modules, results of runs, interactive figures, notebooks."""

from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.sphinx_ import Parser as MystParser  # type: ignore[attr-defined]
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.util.docutils import SphinxDirective

from docs import api, blocks, links, notebooks, results, runs, search
from docs.modules import module_page, read_module, toctree
from docs.sidebar import use_sidebar
from kfs.tour import play
from kfs.tour.run import chapters

ROOT = Path(__file__).parent.parent


def definition_paths() -> dict[str, list[str]]:
    """Return paths of all definitions, by chapter."""
    return {title: [file.relative_to(ROOT).as_posix() for file in files] for title, files in chapters().items()}


class ModuleParser(MystParser):
    """Translates a module to Markdown, and parses that."""

    supported = ("module",)  # type: ignore[misc]

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse a page that is a module."""
        env = document.settings.env
        path = f"{env.docname}.py"
        verified = None
        defined = {path for paths in definition_paths().values() for path in paths}
        if path in defined:
            job = runs.definition_job(path)
            verified = runs.result(job)
            env.note_dependency(job.file)
        super().parse(module_page(read_module(inputstring, path), verified, defined), document)


class ModuleCode(SphinxDirective):
    """The code of a module, with a link target for each of its lines."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a block of code."""
        path = self.arguments[0]
        module = read_module((ROOT / path).read_text(encoding="utf-8"), path)
        block = nodes.literal_block(module.code, module.code, language="python")
        # An element around each line: a long one is wrapped, with an indent (see book.css), and can be linked to.
        block["highlight_args"] = {"linenostart": module.first_line, "linespans": "line"}
        return [block]


class MarkdownDirective(SphinxDirective):
    """A directive that produces Markdown."""

    def markdown(self, text: str) -> list[nodes.Node]:
        """Parse Markdown, which may have headings."""
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Chapters(MarkdownDirective):
    """All definitions in reading order, with a heading for each chapter."""

    def run(self) -> list[nodes.Node]:
        """Return sections."""
        parts = [f"## {title}\n\n{toctree(paths)}" for title, paths in definition_paths().items()]
        return self.markdown("\n\n".join(parts))


class Play(SphinxDirective):
    """Interactive figures."""

    def run(self) -> list[nodes.Node]:
        """Return all figures, as HTML."""
        job = runs.Job("play", "data")
        self.env.note_dependency(job.file)
        data = runs.result(job)
        parts: list[nodes.Node] = []
        for name, title in play.TITLES.items():
            section = nodes.section(ids=[f"play-{name}-title"], names=[])
            section += nodes.title(title, title)
            section += nodes.raw("", play.fragment(name, data[name], title=False), format="html")
            parts.append(section)
        return parts


class Results(MarkdownDirective):
    """Results of benchmarks: a section for each file of results."""

    def run(self) -> list[nodes.Node]:
        """Return sections."""
        for file in results.files():
            self.env.note_dependency(file)
        return self.markdown(results.markdown(results.RESULTS))


class Words(SearchEnglish):
    """English stemming for the search: each word loses its ending once, in prose and in the index."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._stem = cache(super().stem)

    def stem(self, word: str) -> str:
        """Return a word without its ending."""
        return self._stem(word)


def show_outputs(app: Sphinx, document: nodes.document) -> None:
    """Insert the output of a code block below it."""
    name = app.env.docname.removeprefix("docs/")
    job = runs.Job("page", name)
    if not app.env.docname.startswith("docs/") or not job.file.is_file() or not runs.page_file(name).is_file():
        return
    app.env.note_dependency(job.file)
    printed = {
        block.code.strip(): output
        for block, output in zip(blocks.blocks(runs.page_file(name)), runs.result(job), strict=True)
    }
    for block in list(document.findall(nodes.literal_block)):
        output = printed.get(block.astext().strip())
        if output:
            text = output.rstrip("\n")
            shown = nodes.container("", nodes.literal_block(text, text, language="text"), classes=["output"])
            block.parent.insert(block.parent.index(block) + 1, shown)


def offer_notebook(app: Sphinx, document: nodes.document) -> None:
    """Add a link to the page's notebook at the top of the page."""
    folder, _, name = app.env.docname.rpartition("/")
    texts = {page.stem: ("This page ", "as a notebook", ", with what it prints.") for page in notebooks.pages()}
    for page in (notebooks.TOUR, "paper"):
        texts[page] = ("All definitions ", "in one notebook", ", which runs from top to bottom.")
    if folder != "docs" or name not in texts:
        return
    before, linked, after = texts[name]
    file = notebooks.TOUR if name == "paper" else name
    link = nodes.reference("", linked, internal=True, refuri=f"{file}.ipynb")
    line = nodes.paragraph("", "", nodes.Text(before), link, nodes.Text(after), classes=["notebook"])
    title = next(iter(document.findall(nodes.title)))
    title.parent.insert(title.parent.index(title) + 1, line)


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    """Write notebooks beside their pages."""
    if exception is not None:
        return
    folder = Path(app.outdir) / "docs"
    for page in notebooks.pages():
        job = runs.Job("page", page.stem)
        outputs = runs.result(job) if job.file.is_file() else []
        drawn = {picture.name: picture.read_text(encoding="utf-8") for picture in job.drawn}
        notebook = notebooks.from_page(page.read_text(encoding="utf-8"), outputs, drawn)
        notebooks.write(notebook, folder / f"{page.stem}.ipynb")
    notebooks.write(notebooks.tour(chapters(), ROOT), folder / f"{notebooks.TOUR}.ipynb")


def add_play(app: Sphinx, pagename: str, *_: Any) -> None:
    """Load the scripts of interactive figures on the pages that have some."""
    if pagename == "docs/play":
        app.add_css_file("play.css")
        app.add_js_file("play.js")


def prepare(app: Sphinx, *_: Any) -> None:
    """Write pages of the reference, and run all jobs whose results pages show."""
    api.write_pages(runs.DOCS / "api")
    app.config.html_search_scorer = str(search.write_scorer(runs.RESULTS))
    runs.run_all(runs.all_jobs())
    app.kfs_modules = links.library()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all extensions in Sphinx."""
    app.add_source_suffix(".py", "module")
    app.add_source_parser(ModuleParser)
    for name, directive in {
        "chapters": Chapters,
        "module-code": ModuleCode,
        "play": Play,
        "results": Results,
    }.items():
        app.add_directive(name, directive)
    app.add_search_language(Words)
    app.add_post_transform(links.NamesBecomeLinks)
    app.connect("config-inited", prepare)
    app.connect("doctree-read", show_outputs)
    app.connect("doctree-read", offer_notebook)
    app.connect("autodoc-process-bases", api.show_public_bases)
    app.connect("autodoc-process-docstring", api.translate, priority=100)  # before napoleon
    app.connect("missing-reference", links.resolve_ours, priority=100)  # before intersphinx
    app.connect("missing-reference", links.resolve_pytorch, priority=100)
    app.connect("html-page-context", add_play)
    app.connect("html-page-context", use_sidebar, priority=400)  # before the theme draws it
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
