"""Many processes on `torch.distributed`: ranks that agree before tensors travel, sharded data, sums over ranks.

Nothing here knows about KFAC, so that everything else may be built on it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfs.distributed.owning import add_up_at, copy_from
from kfs.distributed.ranks import Group, Ranks
from kfs.distributed.sharding import Shard, part_of, shard
from kfs.distributed.summing import Same, add_up, added_up, all_true, check_same, checksum, checksums
from kfs.errors import UnknownAttributeError
from kfs.names import near

if TYPE_CHECKING:
    from kfs.planning import Plan, plan

__all__ = [
    "Group",
    "Plan",
    "Ranks",
    "Same",
    "Shard",
    "add_up",
    "add_up_at",
    "added_up",
    "all_true",
    "check_same",
    "checksum",
    "checksums",
    "copy_from",
    "part_of",
    "plan",
    "shard",
]
_PLANNING = ("Plan", "plan")


def __getattr__(name: str) -> Any:
    """Import what plans need when it is used first: that is all of KFAC, and KFAC itself imports this package."""
    if name in _PLANNING:
        globals()[name] = value = getattr(import_module("kfs.planning"), name)
        return value
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", near([name], __all__))
