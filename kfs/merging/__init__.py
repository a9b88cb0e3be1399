"""Merging models of the same architecture into one, using their curvature.

The package is called `merging` because `kfs.merge` is the function.
"""

from kfs.merging.models import merge
from kfs.merging.systems import MergedBlock, MergeReport

__all__ = ["MergeReport", "MergedBlock", "merge"]
