"""Many processes on `torch.distributed`: ranks that agree before tensors travel, sharded data, sums over ranks.

Nothing here knows about KFAC, so that everything else may be built on it.
"""

from kfs.distributed.ranks import Group, Ranks
from kfs.distributed.sharding import Shard, part_of, shard
from kfs.distributed.summing import add_up, added_up, checksum

__all__ = ["Group", "Ranks", "Shard", "add_up", "added_up", "checksum", "part_of", "shard"]
