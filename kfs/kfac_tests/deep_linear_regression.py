r"""KFAC is exact for regression with a deep linear net, on any data set (Bernacchia et
al., 2018).

With square loss the backpropagated vectors at the prediction do not depend on the
example. Without nonlinearities, the same holds at all layers: the factor $\sum_c
g_{n,c} g_{n,c}^\top$ is the same for all $n$. So for every layer, with weight and bias
$\tilde{W} = (W\; b)$, and for both flattenings,

$$
\mathrm{KFAC}(G(\mathrm{vec}\, \tilde{W})) = G(\mathrm{vec}\, \tilde{W}),
\qquad
\mathrm{KFAC}(E(\mathrm{vec}\, \tilde{W})) \neq E(\mathrm{vec}\, \tilde{W}),
$$

and KFAC of the Monte Carlo Fisher converges to $G$. The empirical Fisher $E$ sends
residuals back, which do depend on the example, so there KFAC remains an approximation.

This catches wrong scales: factors of the number of examples, of the reduction, of the
number of draws.

Implements: test "KFAC for regression with a deep linear net" (chapter "KFAC for Linear
Layers").
"""

if __name__ == "__main__":
    from itertools import pairwise, product

    import torch
    from torch.nn import Linear, MSELoss, Sequential

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec, rvec
    from kfs.conformance.exact import exact_empirical_fisher, exact_ggn
    from kfs.kfac_tests import MC_SAMPLES, MC_TOLERANCE
    from kfs.verification import verify, verify_at_most, verify_differs

    torch.manual_seed(0)
    X, y = (
        torch.randn(6, 4, dtype=torch.float64),
        torch.randn(6, 2, dtype=torch.float64),
    )

    for widths, bias, reduction in product(
        ([4, 2], [4, 3, 2], [4, 3, 3, 2]), (True, False), ("mean", "sum")
    ):
        model = Sequential(
            *(Linear(d_in, d_out, bias) for d_in, d_out in pairwise(widths))
        ).double()
        loss = MSELoss(reduction=reduction)
        risk = EmpiricalRisk(model, loss, (X, y))
        type2 = KFAC(risk, "type-2")
        empirical = KFAC(risk, "empirical")
        with_mc = bias and reduction == "mean"  # drawing takes most of the time
        mc = (
            KFAC(risk, "mc", mc_samples=MC_SAMPLES, columns_at_once=MC_SAMPLES)
            if with_mc
            else None
        )

        for (layer, block), vec in product(type2.blocks.items(), (cvec, rvec)):
            W = block.layout.params  # names of weight and bias
            G = exact_ggn(model, loss, X, y, W, vec)
            E = exact_empirical_fisher(model, loss, X, y, W, vec)
            K_type2, K_empirical = (
                K.submatrix(W).to_dense(vec.__name__) for K in (type2, empirical)
            )
            case = f"{len(model)} layers, {reduction}, {bias=}, layer {layer}, {vec.__name__}"
            verify("KFAC-type-II equals the GGN", K_type2, G, case=case)
            if mc is not None:
                error = (mc.submatrix(W).to_dense(vec.__name__) - G).norm() / G.norm()
                verify_at_most(
                    "KFAC-MC converges to the GGN", error.item(), MC_TOLERANCE, case
                )
            verify_differs(
                "KFAC-empirical differs from the empirical Fisher",
                K_empirical,
                E,
                case=case,
            )
