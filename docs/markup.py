"""Markdown with LaTeX to HTML: formulas as MathML, code in colours, names of pages as links."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from docs.sources import Module


class Links:
    """Knows which page a name in backticks means.

    Args:
        definitions: Modules that are definitions.
        modules: All other modules with a page.
        public: Where public names are explained, by name.
    """

    def __init__(self, definitions: Sequence[Module], modules: Iterable[Module], public: dict[str, str]) -> None:
        """Index all pages by their names."""
        self.all = [*definitions, *modules]
        self.by_dotted = {module.dotted: module for module in self.all}
        self.public = public
        self._definitions = {module.name for module in definitions}
        self._by_path = {module.path: module for module in self.all}

    def find(self, text: str, here: Module | None = None, bare: bool = True) -> str | None:
        """Return the address that a name stands for, or nothing.

        Args:
            text: What stands between backticks.
            here: The module whose docstring it is.
            bare: Whether a word without dot may be the name of a module.
        """
        if text in self.public:
            return self.public[text]
        found = self._by_path.get(text) or self.by_dotted.get(text)
        if found is None and re.fullmatch(r"\w+\.py" if not bare else r"\w+(\.py)?", text):
            found = self._by_stem(text.removesuffix(".py"), here)
        return None if found is None or found is here else f"{found.name}.html"

    def _by_stem(self, stem: str, here: Module | None) -> Module | None:
        """Return the module of this name: a neighbour first, then a definition, then another one of the package.

        Without `here`, only definitions are found.
        """
        same = [module for module in self.all if module.dotted.rpartition(".")[2] == stem]
        near = [module for module in same if here is not None and module.dotted == f"{here.package}.{stem}"]
        defined = [module for module in same if module.name in self._definitions]
        # Packages consist of rooms: `kfs.kfac.structures` may mention a module of `kfs.kfac.sums` by its name alone.
        family = [module for module in same if here is not None and _package(module) == _package(here)]
        return next(iter([*near, *defined, *family]), None)


def _package(module: Module) -> list[str]:
    """Return the package that a module belongs to with all its rooms, such as `kfs.kfac`, by its parts."""
    return module.dotted.split(".")[:2]


def render_math(latex: str, options: dict[str, bool]) -> str:
    """Turn LaTeX into MathML, which browsers show without any script."""
    return str(convert(latex, display="block" if options["display_mode"] else "inline"))


def coloured(code: str, language: str) -> str:
    """Return code as HTML."""
    return str(highlight(code, get_lexer_by_name(language or "text"), HtmlFormatter()))


class Markup:
    """Turns Markdown with LaTeX formulas into HTML.

    Args:
        links: Where names in backticks lead to.
    """

    def __init__(self, links: Links) -> None:
        """Set the rules up."""
        self.links = links
        self._markdown = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, renderer=render_math)
        self._markdown.use(anchors_plugin, min_level=2, max_level=3)
        self._markdown.add_render_rule("code_inline", lambda _, *rest: self._code(*rest))
        self._markdown.add_render_rule("fence", _fence)
        self._markdown.add_render_rule(
            "code_block", lambda _, tokens, place, *__: coloured(tokens[place].content, "python")
        )
        self._markdown.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
        self._markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
        self._markdown.add_render_rule("link_open", _link)
        self._markdown.add_render_rule("image", _image)

    def render(self, text: str, here: Module | None = None, bare: bool = True) -> str:
        """Return a text as HTML; for `here` and `bare` see `Links.find`."""
        return str(self._markdown.render(text, {"here": here, "bare": bare}))

    def inline(self, text: str) -> str:
        """Return one line as HTML, without links."""
        return re.sub(r"</?a\b[^>]*>", "", str(self._markdown.renderInline(text, {"here": None, "bare": False})))

    def _code(self, tokens: Sequence[Token], place: int, options: Any, env: dict[str, Any]) -> str:
        text = tokens[place].content
        code = f"<code>{html.escape(text)}</code>"
        inside = sum(token.nesting for token in tokens[:place] if token.type in {"link_open", "link_close"})
        address = None if inside else self.links.find(text, env.get("here"), env.get("bare", True))
        return f'<a href="{address}">{code}</a>' if address else code


def _fence(_: Any, tokens: Sequence[Token], place: int, *rest: Any) -> str:  # noqa: ARG001
    # Behind the language, a block may say which library it needs to run.
    language, *_ = tokens[place].info.split() or [""]
    return coloured(tokens[place].content, language)


def _link(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    """Markdown files link to each other by their own names, pages by theirs."""
    address = str(tokens[place].attrs["href"])
    tokens[place].attrs["href"] = re.sub(r"^([\w.]+)\.md(?=#|$)", r"\1.html", address)
    return str(renderer.renderToken(tokens, place, options, env))


def _image(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    """Drawings lie in a folder of their own, but beside the pages of the site. A wide one scrolls on small screens."""
    tokens[place].attrs["src"] = str(tokens[place].attrs["src"]).removeprefix("assets/")
    return f'<span class="drawing" tabindex="0">{renderer.image(tokens, place, options, env)}</span>'


def plain(text: str) -> str:
    """Return the words and symbols of some HTML, without code blocks."""
    text = re.sub(r"<pre\b.*?</pre>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())
