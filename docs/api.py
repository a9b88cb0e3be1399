"""The reference: a page for every public name, written for Sphinx's autodoc, and links to sources.

Docstrings are Markdown and Google style; autodoc reads reStructuredText, so that signs are translated on the way.
"""

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kfs.errors import ModelError

# Packages whose `__all__` is public.
PACKAGES = (
    "kfs",
    "kfs.operators",
    "kfs.factors",
    "kfs.optim",
    "kfs.influence",
    "kfs.laplace",
    "kfs.merging",
    "kfs.compress",
    "kfs.losses",
    "kfs.conformance",
    "kfs.errors",
)
ROOT = Path(__file__).parent.parent
_CODE = re.compile(r"(?<![`\\:])`([^`\n]+(?:\n\s*[^`\n]+)?)`(?![`_])")
_MATH = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])")


class Name(NamedTuple):
    """A public name.

    Attributes:
        full: The name with the package that exports it.
        value: What it is.
        home: The name under which it is explained; what is exported twice is explained once.
    """

    full: str
    value: Any
    home: str

    @property
    def kind(self) -> str:
        """What autodoc calls it."""
        if inspect.ismodule(self.value):
            return "module"
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"


def exported(package: ModuleType) -> list[str]:
    """Return what a package exports: `__all__`, or its own public classes and functions."""
    if hasattr(package, "__all__"):
        return list(package.__all__)
    return [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == package.__name__
    ]


@cache
def public_names() -> tuple[Name, ...]:
    """Return all public names, package by package."""
    found: list[Name] = []
    homes: dict[int, str] = {}
    for package in map(import_module, PACKAGES):
        for name in exported(package):
            full = f"{package.__name__}.{name}"
            try:
                value = getattr(package, name)
            except ModelError:  # it needs a library that is not here; its module's page tells
                continue
            home = full if isinstance(value, str) else homes.setdefault(id(value), full)
            found.append(Name(full, value, home))
    return tuple(found)


@cache
def addresses() -> dict[str, str]:
    """Return under which name a name is explained; classes are found by their short name, too, the first such."""
    found = {name.full: name.home for name in public_names() if name.kind != "module"}
    for name in public_names():
        if name.kind in {"class", "exception"}:
            found.setdefault(name.full.rpartition(".")[2], name.home)
    return found


def write_pages(folder: Path) -> None:
    """Write a page for every public name, and their list. Pages that are right are left alone, for Sphinx's sake."""
    folder.mkdir(exist_ok=True)
    pages = {f"{name.home}.md": _page(name) for name in public_names() if name.kind != "module"}
    pages["index.md"] = _index()
    for file in folder.iterdir():
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        file = folder / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _page(name: Name) -> str:
    options = {"class": "   :members:\n   :show-inheritance:\n", "exception": "   :show-inheritance:\n"}
    directive = f".. auto{name.kind}:: {name.home}\n{options.get(name.kind, '')}"
    title = name.home.replace("_", r"\_")
    return f"# {title}\n\n```{{eval-rst}}\n{directive}```\n"


def _index() -> str:
    parts = ["# Reference\n\nAll public names, with a page each. What is exported twice is explained once."]
    for package in map(import_module, PACKAGES):
        names = [name for name in public_names() if name.full.rpartition(".")[0] == package.__name__]
        summary = (inspect.getdoc(package) or "").partition("\n")[0]
        own = [name.home for name in names if name.home == name.full and name.kind != "module"]
        others = [f"`{name.home}`" for name in names if name.home != name.full]
        parts.append(f"## {package.__name__}\n\n{summary}")
        if own:
            table = "\n".join(f"   {name}" for name in own)
            parts.append(f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{table}\n```")
            parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(own) + "\n```")
        if others:
            parts.append(f"Also: {', '.join(others)}")
    return "\n\n".join(parts) + "\n"


def translate(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Turn the Markdown of a docstring into reStructuredText, in place: code and formulas. Examples stay."""
    text = "\n".join(lines)
    blocks = re.split(r"(\n\s*\n)", text)
    lines[:] = "".join(part if ">>>" in part else _rst(part) for part in blocks).split("\n")


def _rst(text: str) -> str:
    code = _CODE.sub(lambda found: f"``{' '.join(found[1].split())}``", text)
    return _MATH.sub(lambda found: f":math:`{found[1]}`", code)


def source_address(domain: str, info: dict[str, str]) -> str | None:
    """Return where the source of a name is, seen from a page of the reference: a line of its module's page."""
    if domain != "py" or not info["fullname"]:
        return None
    value: Any = import_module(info["module"])
    for part in info["fullname"].split("."):
        value = inspect.getattr_static(value, part, None) if inspect.isclass(value) else getattr(value, part, None)
    value = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", None) or value
    try:
        file, (_, line) = Path(inspect.getsourcefile(value) or ""), inspect.getsourcelines(value)
    except (TypeError, OSError):  # a number, or a field of a class
        return None
    if not file.is_relative_to(ROOT / "kfs"):
        return None
    return f"../../{file.relative_to(ROOT).with_suffix('.html').as_posix()}#line-{line}"
