"""Physics-informed networks: derivatives of networks, problems made of residuals, and optimizers for them."""

from kfs.pinn.natural_gradient import EnergyNaturalGradient
from kfs.pinn.problem import Problem, Term
from kfs.pinn.taylor import Taylor, taylor
from kfs.pinn.termwise import TermwiseKFAC

__all__ = ["EnergyNaturalGradient", "Problem", "Taylor", "Term", "TermwiseKFAC", "taylor"]
