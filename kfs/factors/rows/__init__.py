"""Rows: which example a row of an activation belongs to, and which rows count.

An activation has one row for every vector of features; its leading axes, flattened, count the rows.
"""

from kfs.factors.rows.counted import BatchMasks
from kfs.factors.rows.row_map import AuditResult, RowMap

__all__ = ["AuditResult", "BatchMasks", "RowMap"]
