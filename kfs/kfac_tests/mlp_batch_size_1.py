r"""KFAC is exact for one example: all linear layers of a multi-layer perceptron, any
loss, any activation.

The approximation replaces a sum over data of Kronecker products by a product of sums.
With one example there is nothing to replace: $R\, x x^\top \otimes \sum_c g_c g_c^\top$
is the curvature itself. So for every layer, with weight and bias $\tilde{W} = (W\; b)$,
and for both flattenings,

$$
\mathrm{KFAC}(G(\mathrm{vec}\, \tilde{W})) = G(\mathrm{vec}\, \tilde{W}),
\qquad
\mathrm{KFAC}(E(\mathrm{vec}\, \tilde{W})) = E(\mathrm{vec}\, \tilde{W}),
$$

and KFAC of the Monte Carlo Fisher converges to $G$. Here $G$ is the GGN and $E$ the
empirical Fisher.

This catches errors in backpropagated vectors, in flattening and in the treatment of
biases. It does not catch wrong scales that depend on the number of examples; for those
see `deep_linear_regression`.

Implements: test "KFAC for linear layers in an MLP with one data point" (chapter "KFAC
for Linear Layers").
"""

if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.nn import (
        GELU,
        CrossEntropyLoss,
        Linear,
        MSELoss,
        ReLU,
        Sequential,
        Sigmoid,
        Tanh,
    )

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec, rvec
    from kfs.conformance.exact import exact_empirical_fisher, exact_ggn
    from kfs.kfac_tests import MC_SAMPLES, MC_TOLERANCE
    from kfs.verification import verify, verify_at_most

    torch.manual_seed(0)
    X = torch.randn(1, 4, dtype=torch.float64)
    targets = {
        MSELoss: torch.randn(1, 3, dtype=torch.float64),
        CrossEntropyLoss: torch.tensor([1]),
    }

    for phi, bias, Loss, reduction in product(
        (Tanh, ReLU, Sigmoid, GELU), (True, False), targets, ("mean", "sum")
    ):
        model = Sequential(
            Linear(4, 5, bias), phi(), Linear(5, 4, bias), phi(), Linear(4, 3, bias)
        ).double()
        loss, y = Loss(reduction=reduction), targets[Loss]
        risk = EmpiricalRisk(model, loss, (X, y))
        type2 = KFAC(risk, "type-2")
        empirical = KFAC(risk, "empirical")
        with_mc = (
            phi is Tanh and bias and reduction == "mean"
        )  # drawing takes most of the time
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
            case = f"{phi.__name__}, {Loss.__name__}, {reduction}, {bias=}, layer {layer}, {vec.__name__}"
            verify("KFAC-type-II equals the GGN", K_type2, G, case=case)
            if mc is not None:
                error = (mc.submatrix(W).to_dense(vec.__name__) - G).norm() / G.norm()
                verify_at_most(
                    "KFAC-MC converges to the GGN", error.item(), MC_TOLERANCE, case
                )
            verify(
                "KFAC-empirical equals the empirical Fisher", K_empirical, E, case=case
            )
