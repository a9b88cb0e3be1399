"""Kronecker-factored approximations of curvature matrices: the engine.

`scaffold` is the place to start reading.
"""

from kfs.kfac.alternatives import exact_blocks, exact_diagonal, optimal_kronecker, trace_scaled
from kfs.kfac.block import Block
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.comparison import Comparison, compare
from kfs.kfac.datum_gradients import GradientBatch, per_datum
from kfs.kfac.ekfac import EKFAC
from kfs.kfac.inspection import Inspection, inspect
from kfs.kfac.kfac import KFAC
from kfs.kfac.storage.checkpoint import Checkpoint
from kfs.kfac.storage.files import load
from kfs.kfac.structures.block_diagonal import BlockDiagonal
from kfs.kfac.structures.damping import Relative

__all__ = [
    "EKFAC",
    "KFAC",
    "Block",
    "BlockDiagonal",
    "BlockGradients",
    "Checkpoint",
    "Comparison",
    "GradientBatch",
    "Inspection",
    "Relative",
    "compare",
    "exact_blocks",
    "exact_diagonal",
    "inspect",
    "load",
    "optimal_kronecker",
    "per_datum",
    "trace_scaled",
]
