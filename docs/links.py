"""Names in backticks become links: public names, modules, and names of PyTorch."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

from docs.api import addresses
from docs.modules import Module, all_modules
from kfs.tour.run import definitions

# Modules of PyTorch that define names which other modules export.
PYTORCH = {
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.parameter.Parameter": "torch.nn.Parameter",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.utils.data.dataset.Dataset": "torch.utils.data.Dataset",
    "torch._C.Generator": "torch.Generator",
}
_SHORT = {"nn": "torch.nn", "F": "torch.nn.functional"}


class Modules:
    """Finds the module that a name refers to.

    Args:
        modules: All modules with a page.
        defined: Paths of the definitions among them.
    """

    def __init__(self, modules: Iterable[Module], defined: Iterable[str]) -> None:
        self.all = list(modules)
        self._defined = set(defined)
        self._by_name = {m.dotted: m for m in self.all} | {m.path: m for m in self.all}

    def find(self, text: str, here: str = "") -> Module | None:
        """Return the module that a name refers to.

        Args:
            text: The text between backticks.
            here: Path of the module with the docstring; empty on other pages, where only definitions, and names with an
                extension, are found by their last part.
        """
        found = self._by_name.get(text)
        if found is None and re.fullmatch(r"\w+(\.py)?", text):
            found = self._by_stem(text.removesuffix(".py"), here)
        return None if found is None or found.path == here else found

    def _by_stem(self, stem: str, here: str) -> Module | None:
        """Return the module of this name: first one in the same folder, then a definition, then one of the package."""
        same = [module for module in self.all if module.dotted.rpartition(".")[2] == stem]
        folder = here.rpartition("/")[0]
        near = [
            module for module in same if here and module.path in {f"{folder}/{stem}.py", f"{folder}/{stem}/__init__.py"}
        ]
        defined = [module for module in same if module.path in self._defined]
        # Packages consist of rooms: `kfs.factors.blocks` may refer to a module of `kfs.factors.rows` by its name alone.
        family = [module for module in same if here and module.path.split("/")[:2] == here.split("/")[:2]]
        return next(iter([*near, *defined, *family]), None)


def library() -> Modules:
    """Return all modules of the library."""
    root = definitions()[0].parents[2]
    return Modules(all_modules(), [file.relative_to(root).as_posix() for file in definitions()])


class NamesBecomeLinks(SphinxPostTransform):
    """Replaces names in backticks by links."""

    default_priority = 20  # after references are resolved
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Process all inline code that is not part of a link or a heading."""
        docname = self.env.docname
        here = f"{docname}.py" if docname.startswith("kfs/") else ""
        modules: Modules = self.app.kfs_modules  # type: ignore[attr-defined]
        for literal in list(self.document.findall(nodes.literal)):
            if isinstance(literal.parent, nodes.reference | nodes.title | nodes.rubric):
                continue
            link = self._public(literal) or self._module(literal, modules, here) or self._pytorch(literal)
            if link is not None:
                literal.replace_self(link)

    def _public(self, literal: nodes.literal) -> nodes.Node | None:
        name = addresses().get(literal.astext().removesuffix("()"))
        page = f"docs/api/{name}"
        if name is None or page == self.env.docname:
            return None
        return make_refnode(self.app.builder, self.env.docname, page, name, literal.deepcopy(), name)

    def _module(self, literal: nodes.literal, modules: Modules, here: str) -> nodes.Node | None:
        text = literal.astext()
        # Words of prose are not modules; names such as those of arguments are, on pages of the reference.
        if self.env.docname.startswith("docs/api/") and not re.search(r"[./]", text):
            return None
        found = modules.find(text, here)
        if found is None:
            return None
        return make_refnode(self.app.builder, self.env.docname, found.docname, None, literal.deepcopy(), found.title)

    def _pytorch(self, literal: nodes.literal) -> nodes.Node | None:
        text = literal.astext().removesuffix("()")
        first, dot, rest = text.partition(".")
        address = pytorch_address(self.env, f"{_SHORT.get(first, first)}{dot}{rest}")
        if address is None:
            return None
        return nodes.reference("", "", literal.deepcopy(), internal=False, refuri=address)


def pytorch_address(env: Any, name: str) -> str | None:
    """Return the address of PyTorch's page about a name, if `torch.inv.txt` has it."""
    inventory: Mapping[str, Mapping[str, Any]] = getattr(env, "intersphinx_inventory", {})
    for kind in ("py:class", "py:function", "py:method", "py:module"):
        if name in inventory.get(kind, {}):
            return str(inventory[kind][name].uri)
    return None


def resolve_pytorch(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Node | None:  # noqa: ARG001
    """Resolve a type of PyTorch in a signature, which autodoc names by the module that defines it."""
    address = pytorch_address(env, PYTORCH.get(node.get("reftarget", ""), ""))
    return None if address is None else nodes.reference("", "", content, internal=False, refuri=address)


def resolve_ours(app: Any, _env: Any, node: Any, content: nodes.Element) -> nodes.Node | None:
    """Resolve a type of kfs in a signature: `kfs.factors.kfac.KFAC` is explained as `kfs.KFAC`."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    names = addresses()
    home = names.get(target) or (names.get(target.rpartition(".")[2]) if target.startswith("kfs.") else None)
    if home is None:
        return None
    return make_refnode(app.builder, node["refdoc"], f"docs/api/{home}", home, content, home)
