"""The reference: a page for every public name, written for Sphinx's autodoc, and links to sources.

Docstrings are Markdown in Google style; autodoc reads reStructuredText, so they are translated.
"""

import inspect
import re
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kfs.errors import ModelError
from kfs.losses import Loss
from kfs.operators import LinearOperator

# Packages whose `__all__` is public.
PACKAGES = (
    "kfs",
    "kfs.operators",
    "kfs.factors",
    "kfs.optim",
    "kfs.influence",
    "kfs.laplace",
    "kfs.merging",
    "kfs.pinn",
    "kfs.compress",
    "kfs.losses",
    "kfs.conformance",
    "kfs.errors",
)
# Purpose of packages, by the last part of their name.
TITLES = {
    "kfs": "Model, loss and data",
    "operators": "Exact matrices, and linear algebra with them",
    "factors": "KFAC and EKFAC",
    "kfac": "KFAC and EKFAC",
    "optim": "Train with natural gradients",
    "influence": "Influence of training data",
    "laplace": "Uncertainty",
    "merging": "Merge models",
    "pinn": "Solve differential equations",
    "compress": "Make models smaller",
    "losses": "Losses",
    "conformance": "Test an implementation of KFAC",
    "errors": "Errors",
}
# Members of classes by purpose. Others follow, in the order of their source.
USES = {
    "Solve, invert and sample": ("inverse", "solve", "sample", "power"),
    "Eigenvalues, trace and norms": (
        "eigenvalues",
        "eigh",
        "mean_eigenvalue",
        "trace",
        "logdet",
        "det",
        "frobenius_norm",
        "squared_frobenius_norm",
    ),
    "The matrix and its parts": (
        "to_dense",
        "diagonal",
        "submatrix",
        "T",
        "shift",
        "to_scipy",
        "structures",
        "each",
        "blocks",
        "fetch",
    ),
    "Evaluate the model": ("value", "gradient", "predict"),
    "Train": ("step", "zero_grad", "targets", "add_param_group", "close"),
    "More data": ("update", "merge", "from_factors", "from_kfac"),
    "Look": ("describe", "report", "plot", "plot_spectrum", "events", "damping_scale", "step_scale", "audit"),
    "Save, load and move": (
        "save",
        "state_dict",
        "load_state_dict",
        "consolidate_state_dict",
        "to",
        "gathered",
    ),
    "Size and type": (
        "shape",
        "dtype",
        "device",
        "nbytes",
        "num_data",
        "num_batches",
        "reduction_factor",
        "settings",
        "computed_at",
    ),
}
DEFINE, METHODS, VALUES = "What a subclass defines", "Methods", "Attributes"
# Classes that users subclass.
INTERFACES = (Loss, LinearOperator)
# Members without an underscore that other modules of kfs call, but users do not.
INTERNAL = frozenset({
    "about",
    "about_data",
    "batches",
    "block",
    "called",
    "check",
    "check_derivatives",
    "check_model",
    "check_state",
    "checking_later",
    "columns_at_once",
    "count",
    "evaluate",
    "evaluated",
    "factor",
    "finite",
    "formula",
    "in_step",
    "is_elsewhere",
    "learn",
    "leaves",
    "middle",
    "of",
    "own_stacks",
    "product",
    "products",
    "read_groups",
    "restore",
    "running",
    "shared",
    "stacks",
    "state",
    "sum_dtype",
    "summed_averages",
    "symmetric",
    "together",
    "untouched",
    "whole_averages",
    "will_cover",
})  # fmt: skip
ROOT = Path(__file__).parent.parent
_CODE = re.compile(r"(?<![`\\:])`([^`\n]+(?:\n\s*[^`\n]+)?)`(?![`_])")
_MATH = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])")


class Name(NamedTuple):
    """A public name.

    Attributes:
        full: The name with the package that exports it.
        value: The object.
        home: The name under which it is explained; an object that is exported twice is explained once.
    """

    full: str
    value: Any
    home: str

    @property
    def kind(self) -> str:
        """Its kind in autodoc."""
        if inspect.ismodule(self.value):
            return "module"
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"


def exported(package: ModuleType) -> list[str]:
    """Return the names that a package exports: `__all__`, or its own public classes and functions."""
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
            except ModelError:  # it needs a missing library; its module's page says so
                continue
            home = full if isinstance(value, str) else homes.setdefault(id(value), full)
            found.append(Name(full, value, home))
    return tuple(found)


@cache
def addresses() -> dict[str, str]:
    """Return the name under which each name is explained; classes are also found by their short name, if it is new."""
    found = {name.full: name.home for name in public_names() if name.kind != "module"}
    for name in public_names():
        if name.kind in {"class", "exception"}:
            found.setdefault(name.full.rpartition(".")[2], name.home)
    return found


def write_pages(folder: Path) -> None:
    """Write a page for every public name, and their list. Unchanged pages are kept, so that Sphinx skips them."""
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
    """Return the page of a name; for a class, an overview of its members by purpose, then each of them."""
    title = "# " + name.home.replace("_", r"\_")
    members = members_of(name.value) if name.kind == "class" else {}
    overview = [_overview(name, members)] if members else []
    bases = "   :show-inheritance:\n" if name.kind == "exception" or _public_bases(name.value) else ""
    if name.kind == "class" and issubclass(name.value, LinearOperator):
        overview.append("Multiply with `@`, and combine operators with `+`, `-`, `*` and `@`.")
    parts = [title, *overview, _directive(f".. auto{name.kind}:: {name.home}\n{bases}")]
    for use, found in members.items():
        directives = "\n".join(f".. auto{kind}:: {name.home}.{member}\n" for member, kind in found.items())
        parts += [f"## {use}", _directive(directives)]
    return "\n\n".join(parts) + "\n"


def _directive(text: str) -> str:
    return f"```{{eval-rst}}\n{text}```"


def _overview(name: Name, members: dict[str, dict[str, str]]) -> str:
    """Return the table at the top of a class's page."""
    rows = [
        f"   * - {use}\n     - {', '.join(f':py:obj:`{member} <{name.home}.{member}>`' for member in found)}\n"
        for use, found in members.items()
    ]
    return _directive(".. list-table::\n   :class: overview\n   :widths: 30 70\n\n" + "".join(rows))


def members_of(kind: type) -> dict[str, dict[str, str]]:
    """Return the members of a class that its page explains: by purpose, each with its kind in autodoc.

    Inherited members are included if a class of kfs defines them: for users of an object, it does not matter which
    class defines its methods.
    """
    known = {member: use for use, members in USES.items() for member in members}
    found: dict[str, dict[str, str]] = {}
    for member in sorted(dir(kind), key=_places(kind).__getitem__):
        owner = next(base for base in kind.__mro__ if member in vars(base))
        autodoc = _autodoc_kind(vars(owner)[member])
        if member.startswith("_") or autodoc is None or _internal(kind, owner, member):
            continue
        use = known.get(member, METHODS if autodoc == "method" else VALUES)
        found.setdefault(DEFINE if _abstract(kind, member) else use, {})[member] = autodoc
    return {use: found[use] for use in (DEFINE, METHODS, *USES, VALUES) if use in found}


def _places(kind: type) -> dict[str, tuple[int, int]]:
    """Return the position of members on a page: in the order of `USES`, then in the order of the source."""
    listed = [member for members in USES.values() for member in members]
    defined = {member: place for base in reversed(kind.__mro__) for place, member in enumerate(vars(base))}
    return {m: (listed.index(m), 0) if m in listed else (len(listed), defined.get(m, 0)) for m in dir(kind)}


def _autodoc_kind(value: Any) -> str | None:
    """Return the kind of a member in autodoc; `None` for numbers and the like, which the class's docstring explains."""
    if isinstance(value, property | cached_property):
        return "property"
    return "method" if inspect.isfunction(value) or isinstance(value, classmethod | staticmethod) else None


def _internal(kind: type, owner: type, member: str) -> bool:
    """Whether a member is irrelevant to readers of a class's page."""
    if not owner.__module__.startswith("kfs"):
        return True
    # Authors of a loss or an operator define its methods; the pages of other classes do not repeat them.
    if kind in INTERFACES:
        return member in INTERNAL and not _abstract(kind, member)
    if issubclass(kind, Loss):
        return True
    return member in INTERNAL or (issubclass(kind, LinearOperator) and _abstract(LinearOperator, member))


def _abstract(kind: type, member: str) -> bool:
    return member in getattr(kind, "__abstractmethods__", ())


def _public_bases(value: Any) -> list[type]:
    """Return the bases of a class that have a page."""
    known = {id(name.value) for name in public_names() if name.kind == "class"}
    return [base for base in getattr(value, "__bases__", ()) if id(base) in known]


def show_public_bases(app: Any, name: str, value: Any, options: Any, bases: list[Any]) -> None:  # noqa: ARG001
    """Remove internal bases, in place."""
    if not issubclass(value, BaseException):
        bases[:] = _public_bases(value)


def _index() -> str:
    """Return the list of all names, by purpose."""
    parts = ["# Reference\n\nAll public names by purpose, with a page each."]
    for package in map(import_module, PACKAGES):
        # An object that another package exports again is listed with its own package, as kfs.KFAC is.
        own = [name for name in public_names() if name.home == name.full and _package_of(name) == package.__name__]
        # Frequently used names come first: names of kfs itself, then functions.
        own.sort(key=lambda name: (name.full.count(".") > 1, name.kind != "function"))
        listed = [name.home for name in own if name.kind not in {"module", "data"}]
        hidden = [name.home for name in own if name.kind == "data"]
        if not listed:
            continue
        title = TITLES.get(package.__name__.rpartition(".")[2], package.__name__)
        table = "\n".join(f"   {name}" for name in listed)
        parts.append(f"## {title}")
        parts.append(f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{table}\n```")
        parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(listed + hidden) + "\n```")
    return "\n\n".join(parts) + "\n"


def _package_of(name: Name) -> str:
    """Return the package under which a name is listed: the one that exports it or, for `kfs`, the defining one."""
    exporter = name.full.rpartition(".")[0]
    if exporter != "kfs":
        return exporter
    defined = getattr(name.value, "__module__", "")
    return next((package for package in PACKAGES[1:] if f"{defined}.".startswith(f"{package}.")), exporter)


def translate(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Translate the Markdown of a docstring to reStructuredText, in place: code and formulas. Examples stay."""
    text = "\n".join(lines)
    blocks = re.split(r"(\n\s*\n)", text)
    lines[:] = "".join(part if ">>>" in part else _rst(part) for part in blocks).split("\n")


def _rst(text: str) -> str:
    code = _CODE.sub(lambda found: f"``{' '.join(found[1].split())}``", text)
    return _MATH.sub(lambda found: f":math:`{found[1]}`", code)


def source_address(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of a name's source, relative to a page of the reference: a line of its module's page."""
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
