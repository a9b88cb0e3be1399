"""Running sums over data: outer products, and statistics of per-datum gradients."""

from kfs.kfac.sums.across_ranks import add_up_totals, agreed_blocks
from kfs.kfac.sums.block_sums import BlockSums, settle_counts
from kfs.kfac.sums.factor_sums import FactorSums
from kfs.kfac.sums.gram import add_gram, mirror
from kfs.kfac.sums.inputs import Use
from kfs.kfac.sums.interface import Adder, PlannedUse, Receiver, Sums
from kfs.kfac.sums.kept import Captured, KeptGradients
from kfs.kfac.sums.outer_products import full_precision
from kfs.kfac.sums.owners import Owners
from kfs.kfac.sums.per_datum import PerDatumSums, Squares, Statistic
from kfs.kfac.sums.placement import Placement
from kfs.kfac.sums.row_products import (
    RowProducts,
    cheaper,
    cheaper_within,
    joined_products,
    matrix_inner,
    matrix_inner_by_row,
)
from kfs.kfac.sums.row_vectors import PlainVectors, RowVectors, UnitVectors, at_a_time

__all__ = [
    "Adder",
    "BlockSums",
    "Captured",
    "FactorSums",
    "KeptGradients",
    "Owners",
    "PerDatumSums",
    "Placement",
    "PlainVectors",
    "PlannedUse",
    "Receiver",
    "RowProducts",
    "RowVectors",
    "Squares",
    "Statistic",
    "Sums",
    "UnitVectors",
    "Use",
    "add_gram",
    "add_up_totals",
    "agreed_blocks",
    "at_a_time",
    "cheaper",
    "cheaper_within",
    "full_precision",
    "joined_products",
    "matrix_inner",
    "matrix_inner_by_row",
    "mirror",
    "settle_counts",
]
