"""Physics-informed networks."""

from kfs.pinn.taylor import Taylor, taylor

__all__ = ["Taylor", "taylor"]
