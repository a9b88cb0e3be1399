"""Many processes: which of them owns which block, and what that takes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfs.errors import UnknownAttributeError
from kfs.names import near

if TYPE_CHECKING:
    from kfs.distributed.planning import Plan, plan

__all__ = ["Plan", "plan"]
# Where names come from. They are imported when they are used first: a plan needs all of KFAC, other modules do not.
_FROM = {"kfs.distributed.planning": ("Plan", "plan")}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first."""
    for module, names in _FROM.items():
        if name in names:
            globals()[name] = value = getattr(import_module(module), name)
            return value
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", near([name], __all__))
