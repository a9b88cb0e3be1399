"""Multi-process tools on `torch.distributed`: agreement between ranks, sharded data, sums over ranks.

Nothing here depends on KFAC, so that all other packages can use it.
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
    largest,
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
    "largest",
    "plan",
    "shard",
]
# These names are imported on first use, since their modules import this package.
_LATER = {
    "Plan": "kfs.planning",
    "plan": "kfs.planning",
    "Shard": "kfs.problem.data_shards",
    "shard": "kfs.problem.data_shards",
}


def __getattr__(name: str) -> Any:
    """Import a name of a higher layer on first use."""
    if name in _LATER:
        globals()[name] = value = getattr(import_module(_LATER[name]), name)
        return value
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", suggest([name], __all__))
