"""Exact curvature blocks, entry by entry from the definitions in `kfs.basics`. They are the kit's oracle."""

from collections.abc import Sequence

from torch import Tensor, cat
from torch.nn import Module

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.flattening import Vec, rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.reduction_factors import Loss


def exact_ggn(model: Module, loss: Loss, X: Tensor, y: Tensor, names: Sequence[str], vec: Vec = rvec) -> Tensor:
    """Compute the GGN's block for some parameters, which is also the type-II Fisher's, from the definitions."""
    params = [model.get_parameter(name) for name in names]
    f = model(X)
    risk = loss(f, y)
    return cat([cat([vec_ggn(risk, f, p, q, vec=vec) for q in params], dim=1) for p in params])


def exact_empirical_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, names: Sequence[str], vec: Vec = rvec
) -> Tensor:
    """Compute the empirical Fisher's block for some parameters, from the definitions."""
    params = [model.get_parameter(name) for name in names]
    return cat([cat([vec_empirical_fisher(model, loss, X, y, (p, q), vec=vec) for q in params], dim=1) for p in params])
