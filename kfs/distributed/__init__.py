"""Many processes on `torch.distributed`: ranks that agree before tensors travel, sharded data, sums over ranks.

Nothing here knows about KFAC, so that everything else may be built on it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kfs.display.suggestions import suggest
from kfs.distributed.collectives import (
    Same,
    add_up,
    add_up_at,
    added_up,
    all_true,
    check_same,
    checksum,
    checksums,
    copy_from,
)
from kfs.distributed.ranks import Group, Ranks
from kfs.errors import UnknownAttributeError

if TYPE_CHECKING:
    from kfs.planning import Plan, plan
    from kfs.problem.data_shards import Shard, shard

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
    "plan",
    "shard",
]
# They are imported when they are used first, since what they need imports this package.
_LATER = {
    "Plan": "kfs.planning",
    "plan": "kfs.planning",
    "Shard": "kfs.problem.data_shards",
    "shard": "kfs.problem.data_shards",
}


def __getattr__(name: str) -> Any:
    """Import a name of a higher layer when it is used first."""
    if name in _LATER:
        globals()[name] = value = getattr(import_module(_LATER[name]), name)
        return value
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", suggest([name], __all__))
