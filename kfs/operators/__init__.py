"""Matrix-free linear operators of an empirical risk: Jacobian, Hessian, GGN and Fisher, and what they are good for."""

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
    # what is computed from products with them
    "diagonal",
    "eigenvalues",
    "lsmr",
    "neumann",
    "solve",
    "spectral_density",
    "squared_frobenius_norm",
    "trace",
]
