"""Compression of models using curvature: pruning and low-rank approximation.

The result is a model of plain `torch.nn` modules, which runs without kfs, and a report.
"""

from kfs.compress.factorization import low_rank
from kfs.compress.pruning import prune
from kfs.compress.report import Compressed, LayerRow, Report

__all__ = ["Compressed", "LayerRow", "Report", "low_rank", "prune"]
