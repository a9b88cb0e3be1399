"""The modules that have a page, taken apart by `ast`: title, prose, code, public names and what they import.

Nothing is imported or run here. What a page looks like is in `pages`.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Engine modules by folder, as patterns under kfs/. Adapters of other libraries have no page.
ENGINE = {
    "Risk and losses": ("risk.py", "losses/*.py"),
    "Operators": ("operators/*.py",),
    "The KFAC engine": ("kfac/*.py",),
    "Rules by kind of operation": ("kfac/rules/*.py",),
    "Capture: seeing operations": ("kfac/capture/*.py",),
    "Sums over data": ("kfac/sums/*.py",),
    "Structures: algebra on blocks": ("kfac/structures/*.py",),
    "Not waiting for a GPU": ("waiting.py", "flags.py", "moving.py", "tf32.py"),
    "The optimizer": ("optim/*.py",),
    "Influence functions": ("influence/*.py",),
    "Merging models": ("merging/*.py",),
    "Smaller models": ("compress/*.py",),
    "The Laplace approximation": ("laplace/*.py",),
    "Many processes": ("distributed/*.py", "planning/*.py"),
    "The conformance kit": ("conformance/*.py", "conformance/adapters/kfs.py"),
    "Files and checkpoints": ("storage.py", "kfac/storage/*.py"),
}


@dataclass(frozen=True)
class Module:
    """A module, taken apart for its page.

    Attributes:
        name: Name of its page, without ending.
        dotted: Name by which Python imports it.
        path: Where the file is in the repository.
        title: First line of the docstring.
        prose: The rest of the docstring, Markdown with LaTeX between dollar signs.
        code: The source without the docstring.
        names: Public functions and classes.
        imports: Dotted names of what it imports from kfs.
    """

    name: str
    dotted: str
    path: str
    title: str
    prose: str
    code: str
    names: tuple[str, ...]
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """Dotted name of the package that it lies in; a package lies in itself."""
        return self.dotted if self.path.endswith("__init__.py") else self.dotted.rpartition(".")[0]


def read_definition(file: Path) -> Module:
    """Take a definition apart; its page has the name of its file."""
    return read_module(file, file.stem)


def read_module(file: Path, name: str | None = None) -> Module:
    """Split a file into title, prose and code.

    Raises:
        ValueError: If it has no docstring.
    """
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if not docstring:
        raise ValueError(f"{file} has no module docstring, so its page would be empty. Write one.")
    title, _, prose = docstring.partition("\n")
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno or 0 :]).strip("\n")
    path = file.relative_to(ROOT) if file.is_relative_to(ROOT) else Path(file.name)
    parts = path.with_suffix("").parts
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = tuple(node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))
    return Module(
        name or dotted.removeprefix("kfs."),
        dotted,
        path.as_posix(),
        title.rstrip("."),
        prose.strip(),
        code,
        names,
        frozenset(_imports(tree)),
    )


def _imports(tree: ast.Module) -> Iterable[str]:
    """Yield dotted names of what a module imports from kfs at its top."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kfs":
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def engine(taken: Iterable[Path]) -> dict[str, list[Module]]:
    """Return all engine modules with a docstring by section, without the files that have a page already."""
    sections, skip = {}, set(taken)
    for title, patterns in ENGINE.items():
        files = [file for pattern in patterns for file in sorted((ROOT / "kfs").glob(pattern)) if file not in skip]
        documented = [file for file in files if ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))]
        sections[title] = [read_module(file) for file in documented]
    return sections


def tests_of(module: Module) -> list[str]:
    """Return the test file that is named after a module; tests of a subfolder may lie beside those of its package."""
    path = Path(module.path).relative_to("kfs")
    folders = [path.parent, *path.parent.parents]
    # A name at the top, such as tests/test_state.py, is about the module kfs.state and no other one.
    inside = [folder for folder in folders if folder.parts] or folders
    candidates = [f"{Path('tests') / folder}/test_{path.stem.lower()}.py" for folder in inside]
    return [name for name in candidates if (ROOT / name).is_file()][:1]
