"""The sidebar: all parts of the book, and pages close to the current one.

Sphinx's own complete list takes as long as the rest of the book, since it is made again for each of 400 pages.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.osutil import relative_uri

# A page, and its name in the sidebar if that is not its title.
Entry = tuple[str, str | None]


def parts(env: BuildEnvironment) -> list[tuple[str, list[Entry]]]:
    """Return captions and pages of the book's parts, as listed on the first page."""
    trees = env.get_doctree(env.config.root_doc).findall(addnodes.toctree)
    return [(str(tree.get("caption") or ""), [(page, title) for title, page in tree["entries"]]) for tree in trees]


def way_to(env: BuildEnvironment, page: str) -> list[str]:
    """Return a page and all pages above it."""
    above = {child: parent for parent, children in env.toctree_includes.items() for child in children}
    way = [page]
    while way[-1] in above:
        way.append(above[way[-1]])
    return way


def sidebar(app: Sphinx, page: str, all_parts: list[tuple[str, list[Entry]]]) -> str:
    """Return the sidebar of a page, in the HTML that Sphinx's themes expect."""
    env = app.env
    way = way_to(env, page)

    def entries(names: Iterable[Entry], level: int) -> str:
        return "<ul>\n" + "".join(entry(name, title, level) for name, title in names) + "</ul>\n"

    def entry(name: str, title: str | None, level: int) -> str:
        current = " current" if name in way else ""
        address = relative_uri(app.builder.get_target_uri(page), app.builder.get_target_uri(name)) or "#"
        shown = escape(title or short_title(env, name))
        link = f'<a class="reference internal{current}" href="{escape(address)}">{shown}</a>'
        children = [(child, None) for child in env.toctree_includes.get(name, [])]
        below = entries(children, level + 1) if children and current else ""
        return f'<li class="toctree-l{level}{current}">{link}{below}</li>\n'

    pieces = []
    for caption, names in all_parts:
        heading = f'<p class="caption" role="heading"><span class="caption-text">{escape(caption)}</span></p>\n'
        pieces.append(heading + entries(names, 1))
    return "".join(pieces)


def short_title(env: BuildEnvironment, page: str) -> str:
    """Return the name of a page in the sidebar: the start of a definition's title, the file name of other modules."""
    # Formulas are left out: in the sidebar, they would be LaTeX.
    title = "".join(part.astext() for part in env.titles[page].children if not isinstance(part, nodes.math))
    if page in env.toctree_includes.get("docs/chapters", []):
        return title.partition(":")[0]
    if not page.startswith("kfs/"):
        return title.removeprefix("kfs.") if page.startswith("docs/api/kfs.") else title
    folder, _, name = page.rpartition("/")
    return f"{folder.rpartition('/')[2]}/" if name == "__init__" else f"{name}.py"


def use_sidebar(app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Replace Sphinx's complete list by this sidebar."""
    if "toctree" in context:
        if not hasattr(app, "kfs_parts"):
            app.kfs_parts = parts(app.env)  # type: ignore[attr-defined]
        context["toctree"] = lambda **_: sidebar(app, page, app.kfs_parts)  # type: ignore[attr-defined]
