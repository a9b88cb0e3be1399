"""Many processes on `torch.distributed`: ranks that agree before tensors travel, sharded data, sums over ranks.

Nothing here knows about KFAC, so that everything else may be built on it.
"""

from kfs.distributed.ranks import Group, Ranks

__all__ = ["Group", "Ranks"]
