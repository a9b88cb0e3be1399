"""The engine: Kronecker-factored approximations of curvature matrices for any model and size of data.

To read the code, start with `kfs.kfac.scaffold`, which takes the same steps in the simplest way.
"""

from kfs.factors.alternatives import exact_blocks, exact_diagonal, optimal_kronecker, trace_scaled
from kfs.factors.block import Block
from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.blocks.damping import Relative
from kfs.factors.checkpoint import Checkpoint
from kfs.factors.comparison import Comparison, compare
from kfs.factors.ekfac import EKFAC
from kfs.factors.inspection import Inspection, inspect
from kfs.factors.kfac import KFAC
from kfs.factors.loading import load
from kfs.factors.per_example import BlockGradients, GradientBatch, per_datum

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
