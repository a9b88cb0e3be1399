"""What the files here share: claims about KFAC's blocks, beside exact ones."""

import torch
from torch import Tensor
from torch.nn import Module

from kfs import KFAC, EmpiricalRisk
from kfs.basics.flattening import cvec, rvec
from kfs.basics.reduction_factors import Loss
from kfs.conformance.exact import exact_empirical_fisher, exact_ggn
from kfs.kfac.settings import Sharing
from kfs.verification import verify, verify_differs

# A Monte Carlo estimate errs by about sqrt(2 / 400) = 7 percent of its size. Four times that is allowed, which is still
# much less than what a wrong scale gives. More draws would take most of the tour's time.
MC_SAMPLES = 400
MC_TOLERANCE = 0.3


def claim_exact(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    case: str,
    *,
    sharing: Sharing = "expand",
    empirical: bool | None = None,
    mc: bool = True,
) -> None:
    """Verify that KFAC-type-II equals the GGN, that KFAC-MC converges to it, and what is true of KFAC-empirical.

    Args:
        model: The model.
        loss: The loss.
        X: Inputs.
        y: Targets.
        case: What to call this setting.
        sharing: The variant of weight sharing.
        empirical: Whether KFAC-empirical equals the empirical Fisher, or differs from it; nothing is claimed by
            default.
        mc: Whether to verify convergence; it takes most of the time.
    """
    risk = EmpiricalRisk(model, loss, (X, y))
    type2 = KFAC(risk, "type-2", sharing)
    for name, block in type2.blocks.items():
        names = block.layout.params
        for vec in (cvec, rvec):
            where = f"{case}, {name}, {vec.__name__}"
            actual = type2.submatrix(names).to_dense(vec.__name__)
            verify("KFAC-type-II equals the GGN", actual, exact_ggn(model, loss, X, y, names, vec), case=where)
    if X.ndim > 2:  # the first layer is used at many positions
        names = next(iter(type2.blocks.values())).layout.params
        other = KFAC(risk, "type-2", "reduce" if sharing == "expand" else "expand").submatrix(names).to_dense()
        G = exact_ggn(model, loss, X, y, names, rvec)
        verify_differs("the other weight sharing does not, for the first layer", other, G, case=case)
    if mc:
        estimate = KFAC(risk, "mc", sharing, mc_samples=MC_SAMPLES, columns_at_once=500)
        for name, block in type2.blocks.items():
            names = block.layout.params
            exact = type2.submatrix(names).to_dense()
            error = (estimate.submatrix(names).to_dense() - exact).norm() / exact.norm()
            verify("KFAC-MC converges to the GGN", error, torch.zeros_like(error), MC_TOLERANCE, f"{case}, {name}")
    if empirical is not None:
        K = KFAC(risk, "empirical", sharing)
        for name, block in K.blocks.items():
            names = block.layout.params
            actual, E = K.submatrix(names).to_dense(), exact_empirical_fisher(model, loss, X, y, names, rvec)
            if empirical:
                verify("KFAC-empirical equals the empirical Fisher", actual, E, case=f"{case}, {name}")
            else:
                verify_differs("KFAC-empirical differs from the empirical Fisher", actual, E, case=f"{case}, {name}")
