"""Many processes: which of them owns which block, and what that takes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfs.errors import UnknownAttributeError
from kfs.names import near

if TYPE_CHECKING:
    from kfs.planning import Plan, plan

__all__ = ["Plan", "plan"]
_PLANNING = ("Plan", "plan")


def __getattr__(name: str) -> Any:
    """Import what plans need when it is used first: that is all of KFAC, and KFAC itself imports this package."""
    if name in _PLANNING:
        globals()[name] = value = getattr(import_module("kfs.planning"), name)
        return value
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", near([name], __all__))
