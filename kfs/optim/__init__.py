"""Optimizers that use curvature."""

from kfs.optim.kfac import KFAC
from kfs.optim.preconditioner import Preconditioner

__all__ = ["KFAC", "Preconditioner"]
