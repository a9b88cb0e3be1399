"""Optimizers that use curvature."""

from kfs.optim.kfac import KFAC

__all__ = ["KFAC"]
