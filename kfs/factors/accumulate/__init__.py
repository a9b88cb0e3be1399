"""Running sums over data: outer products of inputs and of gradients, and moments of the gradients of every example."""

from kfs.factors.accumulate.across_ranks import joined_blocks, parts_of, without_numbers
from kfs.factors.accumulate.block_sums import BlockSums, read_counts
from kfs.factors.accumulate.factor_sums import FactorSums
from kfs.factors.accumulate.inputs import Use
from kfs.factors.accumulate.outer_products import OuterProductSum, add_gram, mirror
from kfs.factors.accumulate.per_example import Captured, KeptGradients, Moment, PerDatumSums, Squares
from kfs.factors.accumulate.row_products import (
    PlainVectors,
    RowProducts,
    RowVectors,
    UnitVectors,
    at_a_time,
)
from kfs.factors.accumulate.statistic import (
    Adder,
    PlannedUse,
    Statistic,
    Total,
    add_up_totals,
    in_block,
    reset,
)
from kfs.factors.rows.row_map import Receiver

__all__ = [
    "Adder",
    "BlockSums",
    "Captured",
    "FactorSums",
    "KeptGradients",
    "Moment",
    "OuterProductSum",
    "PerDatumSums",
    "PlainVectors",
    "PlannedUse",
    "Receiver",
    "RowProducts",
    "RowVectors",
    "Squares",
    "Statistic",
    "Total",
    "UnitVectors",
    "Use",
    "add_gram",
    "add_up_totals",
    "at_a_time",
    "in_block",
    "joined_blocks",
    "mirror",
    "parts_of",
    "read_counts",
    "reset",
    "without_numbers",
]
