"""Running sums over data: outer products, and statistics of per-datum gradients."""

from kfs.kfac.sums.block_sums import BlockSums, settle_counts
from kfs.kfac.sums.factor_sums import FactorSums
from kfs.kfac.sums.inputs import Use
from kfs.kfac.sums.interface import Adder, PlannedUse, Receiver, Sums
from kfs.kfac.sums.owners import Owners
from kfs.kfac.sums.per_datum import PerDatumSums, Squares, Statistic
from kfs.kfac.sums.placement import Placement

__all__ = [
    "Adder",
    "BlockSums",
    "FactorSums",
    "Owners",
    "PerDatumSums",
    "Placement",
    "PlannedUse",
    "Receiver",
    "Squares",
    "Statistic",
    "Sums",
    "Use",
    "settle_counts",
]
