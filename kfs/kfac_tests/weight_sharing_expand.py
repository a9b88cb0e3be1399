r"""KFAC-expand is exact for a deep linear net that treats the elements of a sequence
independently.

Weight sharing `expand` treats every position like a further example: $A = R \sum_{n,s}
x_{n,s} x_{n,s}^\top$ and $B = \tfrac{1}{NS} \sum_{n,s,c} g_{n,s,c} g_{n,s,c}^\top$
(Eschenhagen et al., 2023). That is right if each position has a prediction and a loss
term of its own, and wrong if positions are averaged later. For every layer, and for
both flattenings, KFAC-expand equals the GGN here. For the first layer, KFAC-reduce does
not.

Implements: the test of the deep linear net with an independent sequence axis (chapter
"KFAC for Linear Layers", at the end of "Regression with Deep Linear Nets").
"""

if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.nn import Conv1d, Linear, MSELoss, Sequential

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec, rvec
    from kfs.conformance.exact import exact_ggn
    from kfs.kfac_tests import MC_SAMPLES, MC_TOLERANCE
    from kfs.verification import verify, verify_at_most, verify_differs

    torch.manual_seed(0)
    X, y = (
        torch.randn(4, 5, 3, dtype=torch.float64),
        torch.randn(4, 5, 2, dtype=torch.float64),
    )

    for kind, bias, reduction in product(
        ("linear", "convolution"), (True, False), ("mean", "sum")
    ):
        loss = MSELoss(reduction=reduction)
        if kind == "linear":
            inputs, targets = X, y
            model = Sequential(
                Linear(3, 4, bias), Linear(4, 3, bias), Linear(3, 2, bias)
            ).double()
        else:  # of size one: a linear layer whose features stand before the positions
            inputs, targets = X.transpose(1, 2), y.transpose(1, 2)
            model = Sequential(
                Conv1d(3, 4, 1, bias=bias), Conv1d(4, 2, 1, bias=bias)
            ).double()
        risk = EmpiricalRisk(model, loss, (inputs, targets))
        expand = KFAC(risk, "type-2", "expand")
        reduce = KFAC(risk, "type-2", "reduce")
        with_mc = bias and reduction == "mean"  # drawing takes most of the time
        mc = (
            KFAC(
                risk, "mc", "expand", mc_samples=MC_SAMPLES, columns_at_once=MC_SAMPLES
            )
            if with_mc
            else None
        )

        for (layer, block), vec in product(expand.blocks.items(), (cvec, rvec)):
            W = block.layout.params  # names of weight and bias
            G = exact_ggn(model, loss, inputs, targets, W, vec)
            K_expand, K_reduce = (
                K.submatrix(W).to_dense(vec.__name__) for K in (expand, reduce)
            )
            case = f"{kind}, {reduction}, {bias=}, layer {layer}, {vec.__name__}"
            verify("KFAC-expand equals the GGN", K_expand, G, case=case)
            if mc is not None:
                error = (mc.submatrix(W).to_dense(vec.__name__) - G).norm() / G.norm()
                verify_at_most(
                    "KFAC-expand-MC converges to it", error.item(), MC_TOLERANCE, case
                )
            if "0.weight" in W:
                verify_differs(
                    "KFAC-reduce does not, for the first layer", K_reduce, G, case=case
                )
