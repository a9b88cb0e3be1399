"""Directives of pages that connect the paper with this book: its list, its listings, its figures, drawings."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs import paper, runs
from docs.book import MarkdownDirective
from docs.drawings import FIGURES
from docs.modules import Verified, cell, read_module, show_figure

ROOT = Path(__file__).parent.parent
DRAWINGS = ROOT / "docs" / "assets"


class Paper(MarkdownDirective):
    """All items that the paper names, as tables."""

    def run(self) -> list[nodes.Node]:
        """Return sections."""
        self.env.note_dependency(str(paper.DOCS / "paper.toml"))
        return self.markdown(paper.markdown(self._claims))

    def _claims(self, path: str) -> list[str]:
        """Return the claims that running a definition verified."""
        job = runs.definition_job(path)
        self.env.note_dependency(job.file)
        return [claim for claim, _, _ in runs.result(job)]


class Listing(MarkdownDirective):
    """The functions of a definition, and the claims that running it verified."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a block of code, the command, and a table."""
        path = self.arguments[0]
        self.env.note_dependency(str(ROOT / path))
        job = runs.definition_job(path)
        self.env.note_dependency(job.file)
        code = functions((ROOT / path).read_text(encoding="utf-8"), path)
        block = nodes.literal_block(code, code, language="python")
        # As on the page of a module, so that long lines are wrapped; a page may have several listings.
        block["highlight_args"] = {"linespans": f"listing-{Path(path).stem}"}
        where = self.markdown(f"`{path}`")  # rendered as a link
        return [
            nodes.container("", *where, block, classes=["code", "listing"]),
            *self._verified(path, runs.result(job)),
        ]

    def _verified(self, path: str, checks: Verified) -> list[nodes.Node]:
        lines = [f"`python {path}` verifies", "", "| claim | cases | largest error |", "|---|---:|---:|"]
        for claim in dict.fromkeys(claim for claim, _, _ in checks):
            found = [error for other, _, error in checks if other == claim]
            errors = [error for error in found if error is not None]
            lines.append(f"| {cell(claim)} | {len(found)} | {f'{max(errors):.1e}' if errors else ''} |")
        return self.markdown("\n".join(lines))


def functions(source: str, path: str) -> str:
    """Return the code of a definition without docstring and checks; with checks, if there is no other code."""
    code = read_module(source, path).code
    listing, main, checks = code.partition('if __name__ == "__main__":')
    return listing.rstrip() or f"{main}{checks}".rstrip()


class Figures(MarkdownDirective):
    """All figures, with captions that name the paper's figure."""

    def run(self) -> list[nodes.Node]:
        """Return all figures, those of the paper first, in its order."""
        ordered = sorted(FIGURES, key=lambda figure: figure.document or (len(FIGURES) + 1,))
        return self.markdown("\n\n".join(map(show_figure, ordered)))


class Drawing(SphinxDirective):
    """A drawing of the repository, as a part of the page: its colors follow the theme."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the drawing. Its `aria-label` describes it."""
        file = DRAWINGS / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(file))
        return [nodes.raw("", f'<div class="drawing">{file.read_text(encoding="utf-8")}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives in Sphinx."""
    for name, directive in {"paper": Paper, "listing": Listing, "figures": Figures, "drawing": Drawing}.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
