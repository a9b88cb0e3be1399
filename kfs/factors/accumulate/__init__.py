"""Running sums over data: outer products, and statistics of the gradients of every example."""

from kfs.factors.accumulate.across_ranks import add_up_totals, agreed_blocks
from kfs.factors.accumulate.block_sums import BlockMap, BlockSums, read_counts
from kfs.factors.accumulate.factor_sums import FactorSums
from kfs.factors.accumulate.gram import add_gram, mirror
from kfs.factors.accumulate.inputs import Use
from kfs.factors.accumulate.interface import Adder, PlannedUse, Receiver, Sums
from kfs.factors.accumulate.outer_products import full_precision
from kfs.factors.accumulate.per_example import Captured, KeptGradients, PerDatumSums, Squares, Statistic
from kfs.factors.accumulate.row_products import (
    PlainVectors,
    RowProducts,
    RowVectors,
    UnitVectors,
    at_a_time,
    cheaper,
    cheaper_within,
    joined_products,
    matrix_inner,
    matrix_inner_by_row,
)

__all__ = [
    "Adder",
    "BlockMap",
    "BlockSums",
    "Captured",
    "FactorSums",
    "KeptGradients",
    "PerDatumSums",
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
    "read_counts",
]
