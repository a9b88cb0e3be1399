"""kfs, KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations.

Start with `EmpiricalRisk` (model, loss, data), the linear operators on it, and `KFAC`. Solvers and estimators are in
`kfs.operators`, losses in `kfs.losses`, the optimizer in `kfs.optim`, and the definitions, one runnable file each, in
`kfs.basics`.
"""

import kfs.optim  # noqa: F401 (so that it is there)
from kfs.kfac import EKFAC, KFAC, Checkpoint, Relative, compare, inspect, load
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.risk import EmpiricalRisk
from kfs.version import __version__

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "Checkpoint",
    "EmpiricalRisk",
    "Fisher",
    "Hessian",
    "Jacobian",
    "Relative",
    "__version__",
    "compare",
    "inspect",
    "load",
]
