"""Matrix-free linear operators of an empirical risk: Jacobian, Hessian, GGN and Fisher, and what they are good for."""

from kfs.operators.curvature import GGN, Fisher, Hessian
from kfs.operators.estimators import diagonal, squared_frobenius_norm, trace
from kfs.operators.interface import Identity, LinearOperator
from kfs.operators.inverse import Inverse
from kfs.operators.jacobian import Jacobian
from kfs.operators.least_squares import lsmr
from kfs.operators.matrices import Dense, OuterProducts
from kfs.operators.solve import neumann, solve
from kfs.operators.spectrum import eigenvalues, spectral_density

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
