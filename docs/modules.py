"""Modules as pages: a file becomes Markdown with its prose beside its code.

Files are parsed by `ast`; no code is imported or run here. Verified claims come from `runs`.
"""

import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.drawings import Figure, figures_of

ROOT = Path(__file__).parent.parent
MANY_CASES = 8  # from here on a claim's cases share a row
# Claim, case and error of a check.
Verified = Sequence[tuple[str, str, float | None]]


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Attributes:
        path: Path of the file in the repository.
        title: First line of the docstring.
        prose: The rest of the docstring, Markdown with LaTeX between dollar signs.
        code: The source without the docstring.
        first_line: The first line of the code.
        imports: Dotted names of its imports from kfs.
    """

    path: str
    title: str
    prose: str
    code: str
    first_line: int
    imports: frozenset[str]

    @property
    def docname(self) -> str:
        """Name of its page in Sphinx."""
        return self.path.removesuffix(".py")

    @property
    def dotted(self) -> str:
        """Dotted name in Python."""
        return self.docname.removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """Dotted name of the package that contains it; a package contains itself."""
        return self.dotted if self.path.endswith("__init__.py") else self.dotted.rpartition(".")[0]


def read_module(source: str, path: str) -> Module:
    """Split a source into title, prose and code.

    Raises:
        ValueError: If it has no docstring.
    """
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if not docstring:
        raise ValueError(f"{path} has no module docstring, so its page would be empty. Write one.")
    title, _, prose = docstring.partition("\n")
    lines = source.splitlines()
    first = tree.body[0].end_lineno or 0
    while first < len(lines) and not lines[first].strip():
        first += 1
    code = "\n".join(lines[first:])
    return Module(path, title.rstrip("."), prose.strip(), code, first + 1, frozenset(_imports(tree)))


def _imports(tree: ast.Module) -> Iterable[str]:
    """Yield dotted names of a module's imports from kfs."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kfs":
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def all_modules() -> tuple[Module, ...]:
    """Return all modules of the library that have a page."""
    files = sorted(file for file in (ROOT / "kfs").rglob("*.py") if file.name != "__main__.py")
    paths = {file: file.relative_to(ROOT).as_posix() for file in files}
    return tuple(read_module(file.read_text(encoding="utf-8"), path) for file, path in paths.items())


def tests_of(path: str) -> list[str]:
    """Return the test file that is named after a module; tests of a subfolder may be in the folder of its package."""
    inner = Path(path).relative_to("kfs")
    folders = [inner.parent, *inner.parent.parents]
    # A name at the top, such as tests/test_state.py, belongs to the module kfs.problem.isolation and to no other one.
    inside = [folder for folder in folders if folder.parts] or folders
    candidates = [f"{Path('tests') / folder}/test_{inner.stem.lower()}.py" for folder in inside]
    return [name for name in candidates if (ROOT / name).is_file()][:1]


def toctree(paths: Iterable[str]) -> str:
    """Return a table of contents of modules, as Markdown."""
    return "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(f"/{path.removesuffix('.py')}" for path in paths) + "\n```"


def module_page(module: Module, verified: Verified | None, elsewhere: Collection[str] = ()) -> str:
    """Return a module's page as Markdown: prose, figures, verified checks, related pages; and its code.

    Args:
        module: The module.
        verified: The claims that running it verified; `None` if it is not a definition.
        elsewhere: Paths of modules in other tables of contents. A package lists the others inside it.
    """
    parts = [module.prose, *(show_figure(figure) for figure in figures_of(module.docname))]
    if verified is not None:
        parts.append(_verified(module, verified))
    parts.append(_relations(module))
    prose = "\n\n".join(part for part in parts if part)
    code = "" if not module.code else f"::::{{div}} code\n`{module.path}`\n```{{module-code}} {module.path}\n```\n::::"
    inside = [path for path in _inside(module) if path not in elsewhere]
    below = f"\n{toctree(inside)}\n" if inside else ""
    return (
        f"---\nhide-toc: true\n---\n# {module.title}\n\n"
        f":::::{{div}} module\n::::{{div}} prose\n{prose}\n::::\n{code}\n:::::\n{below}"
    )


def _inside(package: Module) -> list[str]:
    """Return the paths of modules and packages in a package; none for a module."""
    if not package.path.endswith("__init__.py"):
        return []
    depth = package.dotted.count(".") + 1
    others = (module for module in all_modules() if module.dotted.startswith(f"{package.dotted}."))
    return [module.path for module in others if module.dotted.count(".") == depth]


def show_figure(figure: Figure) -> str:
    """Return a figure with its caption, which names its origin, as Markdown."""
    return (
        f":::{{figure}} /docs/figures/{figure.name}.svg\n:alt: {figure.caption}\n\n{figure.origin} {figure.caption} "
        f"{figure.name}, drawn by `{figure.plot}`.\n:::"
    )


def _verified(module: Module, checks: Verified) -> str:
    """Return the checks that running a definition verified, as a table."""
    by_claim: dict[str, list[tuple[str, float | None]]] = {}
    for claim, case, error in checks:
        by_claim.setdefault(claim, []).append((case, error))
    rows = ["| claim | case | largest error |", "|---|---|---:|"]
    for claim, found in by_claim.items():
        cases = found
        if len(found) > MANY_CASES:
            errors = [error for _, error in found if error is not None]
            cases = [(f"{len(found)} cases", max(errors) if errors else None)]
        rows += [f"| {cell(claim)} | {cell(case)} | {_error(error)} |" for case, error in cases]
    return (
        "```{rubric} What running it verified\n:heading-level: 2\n```\n\n"
        f"```console\n$ python {module.path}\n```\n\n" + "\n".join(rows)
    )


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def cell(text: str) -> str:
    """Escape plain text for a cell of a Markdown table."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<|$~" else letter for letter in text)


def _relations(module: Module) -> str:
    """Return the source of a module, its tests, and related pages."""
    others = [other for other in all_modules() if other.path != module.path]
    uses = [other for other in others if other.dotted in module.imports]
    used_by = [other for other in others if module.dotted in other.imports]
    lines = [] if module.code else [f"Source: `{module.path}`"]
    lines += [f"Tests: `{name}`" for name in tests_of(module.path)]
    for title, found in (("Uses", uses), ("Used by", used_by)):
        if found:
            lines.append(f"{title}: " + ", ".join(f"[{_short(other)}](/{other.path})" for other in found))
    return ":::{div} about\n" + "\n\n".join(lines) + "\n:::" if lines else ""


def _short(module: Module) -> str:
    return module.dotted.removeprefix("kfs.")
