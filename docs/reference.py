"""The reference: every public name with its signature and docstring, read from the sources by `ast`."""

import ast
import html
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import kfs.compress
import kfs.conformance
import kfs.kfac
import kfs.losses
import kfs.operators
import kfs.optim
from docs.docstrings import to_markdown
from docs.markup import Markup, coloured, plain
from docs.search import Entry, shorten

PACKAGES: tuple[ModuleType, ...] = (kfs, kfs.operators, kfs.kfac, kfs.optim, kfs.compress, kfs.losses, kfs.conformance)
WIDTH = 88  # signatures that are longer have a line per argument
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """A public name.

    Attributes:
        package: Where it is exported.
        name: What it is called there.
        value: What it is.
        home: `package.name` under which it is explained; names that are exported twice are explained once.
    """

    package: str
    name: str
    value: Any
    home: str

    @property
    def full(self) -> str:
        """The name with its package."""
        return f"{self.package}.{self.name}"


def public_names() -> list[Name]:
    """Return all public names, package by package."""
    found: list[Name] = []
    homes: dict[int, str] = {}
    for package in PACKAGES:
        for name in package.__all__:
            value, full = getattr(package, name), f"{package.__name__}.{name}"
            found.append(Name(package.__name__, name, value, homes.setdefault(id(value), full)))
    return found


def addresses(names: list[Name]) -> dict[str, str]:
    """Return where names are explained: by full name, and classes by their short name, too, if it is the first such."""
    found: dict[str, str] = {}
    for name in names:
        found[name.full] = f"api.html#{name.home}"
        if inspect.isclass(name.value):
            found.setdefault(name.name, f"api.html#{name.home}")
    return found


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _node(value: Any) -> Function | ast.ClassDef | None:
    """Return where a class or function is defined, if that is a source of ours."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__.partition(".")[0] != "kfs" or module.__file__ is None:
        return None
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = (node for node in _tree(module.__file__).body if isinstance(node, kinds))
    return next((node for node in nodes if node.name == value.__name__), None)


def signature(name: str, node: Function, *, method: bool = False) -> str:
    """Return a function's signature, as Python code."""
    arguments = node.args
    if method and (arguments.posonlyargs or arguments.args) and not _decorated(node, "staticmethod"):
        first = (arguments.posonlyargs or arguments.args)[0]
        arguments = ast.arguments(
            posonlyargs=[a for a in arguments.posonlyargs if a is not first],
            args=[a for a in arguments.args if a is not first],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return _wrapped(name, _split(ast.unparse(arguments)), returns)


def _split(arguments: str) -> list[str]:
    """Split at commas outside brackets and strings."""
    items, depth, quoted, current = [], 0, "", ""
    for letter in arguments:
        if quoted or letter in "'\"":
            quoted = "" if letter == quoted else quoted or letter
        depth += (not quoted) * ((letter in "([{") - (letter in ")]}"))
        if letter == "," and not depth and not quoted:
            items.append(current.strip())
            current = ""
        else:
            current += letter
    items += [current.strip()] if current.strip() else []
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", item) for item in items]


def _wrapped(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def _decorated(node: Function | ast.ClassDef, name: str) -> bool:
    return any(ast.unparse(d).partition("(")[0].rpartition(".")[2] == name for d in node.decorator_list)


def _class_signature(name: str, value: type) -> str:
    """Return how objects are made: by `__init__`, its own or an inherited one, or from a dataclass's fields."""
    for base in value.__mro__:
        node = _node(base)
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return signature(name, member, method=True)
        if _decorated(node, "dataclass"):
            fields = (m for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name))
            return _wrapped(name, [ast.unparse(m) for m in fields], "")
    return f"{name}"


def _bases(node: ast.ClassDef, value: type, markup: Markup) -> list[str]:
    """Return the names of direct base classes, and of all others that are explained somewhere."""
    direct = [ast.unparse(base).partition("[")[0] for base in node.bases]
    explained = [base.__name__ for base in value.__mro__[1:] if base.__name__ in markup.links.public]
    return list(dict.fromkeys(direct + explained))


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    for member in node.body:
        if (
            isinstance(member, ast.FunctionDef)
            and not member.name.startswith("_")
            and not _decorated(member, "overload")
        ):
            yield member


def _method(owner: str, node: Function, markup: Markup) -> str:
    """Return a method: its signature, which opens to its docstring."""
    is_property = _decorated(node, "property") or _decorated(node, "cached_property")
    line = node.name if is_property else signature(node.name, node, method=True)
    text = ast.get_docstring(node) or ""
    first = text.partition("\n")[0]
    more = markup.render(to_markdown(text.partition("\n")[2].strip("\n")), bare=False)
    head = f'<code class="signature">{html.escape(line)}</code>'
    place = f'id="{owner}.{node.name}"'
    if not more:
        return f"<li {place}>{head}<br>{markup.inline(first)}</li>"
    return f"<li {place}><details><summary>{head}<br>{markup.inline(first)}</summary>{more}</details></li>"


def _section(name: Name, markup: Markup) -> str:
    """Return everything about one public name."""
    title = f'<h3 id="{name.full}">{html.escape(name.full)}</h3>'
    if inspect.ismodule(name.value):
        page = markup.links.find(name.value.__name__)
        docstring = markup.render(inspect.getdoc(name.value) or "", bare=False)
        return f'{title}<p class="about">A module, <a href="{page}">explained on its page</a>.</p>{docstring}'
    node = _node(name.value)
    if node is None:
        return f"{title}<p>A {type(name.value).__name__}: <code>{html.escape(str(name.value))}</code></p>"
    page = markup.links.find(name.value.__module__)
    about = f'Defined in <a href="{page}"><code>{name.value.__module__}</code></a>.' if page else ""
    methods = ""
    if isinstance(node, ast.ClassDef):
        code = f"class {_class_signature(name.name, name.value)}"
        bases = [f"`{base}`" for base in _bases(node, name.value, markup)]
        about += f" Inherits from {markup.render(', '.join(bases), bare=False).strip()[3:-4]}." if bases else ""
        items = "\n".join(_method(name.full, member, markup) for member in _methods(node))
        methods = f'<p><strong>Methods and properties</strong></p><ul class="methods">{items}</ul>' if items else ""
    else:
        code = signature(name.name, node)
    text = markup.render(to_markdown(ast.get_docstring(node) or ""), bare=False)
    return f'{title}{coloured(code, "python")}<p class="about">{about}</p>{text}{methods}'


def api_body(markup: Markup) -> str:
    """Return the body of the reference page."""
    names = public_names()
    parts = ["<h1>Reference</h1>\n<p>All public names. A click on a method opens what it takes and returns.</p>"]
    for package in PACKAGES:
        own = [name for name in names if name.package == package.__name__]
        contents = ", ".join(f'<a href="#{name.home}"><code>{name.name}</code></a>' for name in own)
        docstring = (inspect.getdoc(package) or "").partition("\n")[0]
        parts.append(f'<h2 id="{package.__name__}">{package.__name__}</h2>\n<p>{markup.inline(docstring)}</p>')
        parts.append(f'<p class="contents">{contents}</p>')
        parts += [_section(name, markup) for name in own if name.home == name.full]
    return "\n".join(parts)


def entries() -> list[Entry]:
    """Return what the search index knows about public names, methods of classes included."""
    found = []
    for name in public_names():
        node = _node(name.value)
        if name.home != name.full or node is None:
            continue
        methods = [member.name for member in _methods(node)] if isinstance(node, ast.ClassDef) else []
        text = shorten(plain((ast.get_docstring(node) or "").partition("\n\n")[0]).replace("`", ""))
        found.append(
            Entry(title=name.full, url=f"api.html#{name.home}", headings=[], names=[name.name, *methods], text=text)
        )
    return found
