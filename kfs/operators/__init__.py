"""Matrix-free linear operators (Jacobian, Hessian, GGN, Fisher), and estimators and solvers that use their products."""

from kfs.operators.curvature import GGN, Fisher, Hessian, Jacobian
from kfs.operators.estimate import diagonal, eigenvalues, spectral_density, squared_frobenius_norm, trace
from kfs.operators.linear_operator import Identity, LinearOperator
from kfs.operators.matrices import Dense, OuterProducts
from kfs.operators.solve import Inverse, lsmr, neumann, solve

__all__ = [
    # operators
    "GGN",
    "Dense",
    "Fisher",
    "Hessian",
    "Identity",
    "Inverse",
    "Jacobian",
    "LinearOperator",
    "OuterProducts",
    # estimators and solvers that need matrix-vector products only
    "diagonal",
    "eigenvalues",
    "lsmr",
    "neumann",
    "solve",
    "spectral_density",
    "squared_frobenius_norm",
    "trace",
]
