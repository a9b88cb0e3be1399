r"""KFAC-reduce is exact for a deep linear net that sums or averages over positions, at
its end or in its middle.

Weight sharing `reduce` sums over positions before it takes outer products: $A = R
\sum_n (\sum_s x_{n,s}) (\sum_s x_{n,s})^\top$ and $B = \tfrac{1}{NS^2} \sum_{n,c}
(\sum_s g_{n,s,c}) (\sum_s g_{n,s,c})^\top$ (Eschenhagen et al., 2023). That is right if
predictions depend on positions through their sum only, as in a linear convolutional net
with global average pooling. For every layer, and for both flattenings, KFAC-reduce
equals the GGN here. For the first layer, which is used at every position, KFAC-expand
does not.
"""

if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.nn import Conv2d, Linear, MSELoss, Sequential

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec, rvec
    from kfs.conformance.exact import exact_ggn
    from kfs.conformance.models import Pool
    from kfs.kfac_tests import MC_SAMPLES, MC_TOLERANCE
    from kfs.verification import verify, verify_at_most, verify_differs

    torch.manual_seed(0)
    sequences, images = (
        torch.randn(4, 5, 3, dtype=torch.float64),
        torch.randn(4, 2, 5, 5, dtype=torch.float64),
    )
    y = torch.randn(4, 2, dtype=torch.float64)

    for pool, bias, reduction in product(
        ("sum", "mean"), (True, False), ("mean", "sum")
    ):
        models = {
            "at the end": Sequential(
                Linear(3, 4, bias), Linear(4, 2, bias), Pool(pool, (1,))
            ),
            "in the middle": Sequential(
                Linear(3, 4, bias), Pool(pool, (1,)), Linear(4, 2, bias)
            ),
            "of an image": Sequential(
                Conv2d(2, 3, 3, padding=1, bias=bias),
                Pool(pool, (2, 3)),
                Linear(3, 2, bias),
            ),
        }
        for where, model in models.items():
            X, loss = (
                images if where == "of an image" else sequences,
                MSELoss(reduction=reduction),
            )
            risk = EmpiricalRisk(model.double(), loss, (X, y))
            reduce = KFAC(risk, "type-2", "reduce")
            expand = KFAC(risk, "type-2", "expand")
            with_mc = bias and reduction == "mean"  # drawing takes most of the time
            mc = (
                KFAC(
                    risk,
                    "mc",
                    "reduce",
                    mc_samples=MC_SAMPLES,
                    columns_at_once=MC_SAMPLES,
                )
                if with_mc
                else None
            )

            for (layer, block), vec in product(reduce.blocks.items(), (cvec, rvec)):
                W = block.layout.params  # names of weight and bias
                G = exact_ggn(model, loss, X, y, W, vec)
                K_reduce, K_expand = (
                    K.submatrix(W).to_dense(vec.__name__) for K in (reduce, expand)
                )
                case = f"{pool} {where}, {reduction}, {bias=}, layer {layer}, {vec.__name__}"
                verify("KFAC-reduce equals the GGN", K_reduce, G, case=case)
                if mc is not None:
                    error = (
                        mc.submatrix(W).to_dense(vec.__name__) - G
                    ).norm() / G.norm()
                    verify_at_most(
                        "KFAC-reduce-MC converges to it",
                        error.item(),
                        MC_TOLERANCE,
                        case,
                    )
                if "0.weight" in W:
                    verify_differs(
                        "KFAC-expand does not, for the first layer",
                        K_expand,
                        G,
                        case=case,
                    )
