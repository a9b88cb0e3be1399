"""The Laplace approximation: a normal distribution over parameters, from the curvature of a trained model's loss.

`posterior` and the functions beside it work for every model and loss that KFAC covers: `posterior(...).predict(X)`
returns mean and covariance of a regression, or probabilities of classes. `Backend` gives this library's curvature to
laplace-torch, which has other predictives and samplers.
"""

from typing import TYPE_CHECKING, Any

from kfs.display.suggestions import suggest
from kfs.errors import UnknownAttributeError
from kfs.laplace.backend import make_backend
from kfs.laplace.evidence import log_marginal_likelihood, tune_prior, tune_prior_and_noise
from kfs.laplace.posterior import Posterior, functional_variance, posterior

if TYPE_CHECKING:
    from kfs.laplace.backend import BackendMethods as Backend

__all__ = [
    "Backend",
    "Posterior",
    "functional_variance",
    "log_marginal_likelihood",
    "posterior",
    "tune_prior",
    "tune_prior_and_noise",
]


def __getattr__(name: str) -> Any:
    """Make the backend when it is used first: laplace-torch is needed for it, and takes seconds to import."""
    if name == "Backend":
        globals()[name] = made = make_backend()
        return made
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", suggest([name], __all__))
