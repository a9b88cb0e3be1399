"""The Laplace approximation: a normal distribution over parameters, from the curvature of a trained model's loss.

`posterior` and the other functions work for every model and loss that KFAC covers. `posterior(...).predict(X)` returns
mean and covariance for regression, and class probabilities for classification. `Backend` provides this library's
curvature to laplace-torch, which has further predictive distributions and samplers.
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
    """Create `Backend` on first use, because it needs laplace-torch, which takes seconds to import."""
    if name == "Backend":
        globals()[name] = made = make_backend()
        return made
    raise UnknownAttributeError(f"{__name__} has no {name!r}.", suggest([name], __all__))
