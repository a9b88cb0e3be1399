"""Exact curvature blocks, computed from the definitions in `kfs.basics`. They are the oracle of the kit."""

from collections.abc import Sequence

from torch import Tensor, cat
from torch.nn import Module

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.flattening import Vec, rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.reduction_factors import Loss


def exact_ggn(model: Module, loss: Loss, X: Tensor, y: Tensor, names: Sequence[str], vec: Vec = rvec) -> Tensor:
    """Return the block of the GGN, which is also the type-II Fisher, for some parameters."""
    params = [model.get_parameter(name) for name in names]
    f = model(X)
    risk = loss(f, y)
    return cat([cat([vec_ggn(risk, f, p, q, vec=vec) for q in params], dim=1) for p in params])


def exact_empirical_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, names: Sequence[str], vec: Vec = rvec
) -> Tensor:
    """Return the block of the empirical Fisher for some parameters."""
    params = [model.get_parameter(name) for name in names]
    return cat([cat([vec_empirical_fisher(model, loss, X, y, (p, q), vec=vec) for q in params], dim=1) for p in params])
