"""Merging models by their curvature: one model from several that have the same architecture.

The package is called `merging` because `kfs.merge` is the function.
"""

from kfs.merging.models import merge
from kfs.merging.systems import MergedBlock, MergeReport

__all__ = ["MergeReport", "MergedBlock", "merge"]
