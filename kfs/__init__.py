"""kfs, KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations.

The definitions live in `kfs.basics`, one file each. Every file runs and checks itself.
"""

from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.risk import EmpiricalRisk

__version__ = "0.1.0"

__all__ = [
    "GGN",
    "EmpiricalRisk",
    "Fisher",
    "Hessian",
    "Jacobian",
    "__version__",
]
