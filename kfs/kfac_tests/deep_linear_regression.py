r"""KFAC is exact for regression with a deep linear net, on any data set (Bernacchia et al., 2018).

With square loss the backpropagated vectors at the prediction do not depend on the datum, and without nonlinearity nor
do they anywhere else: the factor $\sum_c g_{n,c} g_{n,c}^\top$ is the same for all $n$. This catches wrong scales:
factors of the number of data, of the reduction, of the number of draws. The empirical Fisher sends residuals back,
which do depend on the datum, so there KFAC remains an approximation.

Implements: test "KFAC for regression with a deep linear net" (chapter 4); that the empirical version differs is
asserted.
"""

if __name__ == "__main__":
    from itertools import pairwise

    import torch
    from torch.nn import Linear, MSELoss, Sequential

    from kfs.kfac_tests._claims import claim_exact

    torch.manual_seed(0)
    X, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for bias in (True, False):
        for depth in (1, 2, 3):
            widths = [*[4, 3, 3][:depth], 2]
            layers = [Linear(i, o, bias=bias) for i, o in pairwise(widths)]
            for reduction in ("mean", "sum"):
                case = f"{depth} layers, {reduction}{'' if bias else ', no bias'}"
                mc = bias and depth == 2
                claim_exact(
                    Sequential(*layers).double(), MSELoss(reduction=reduction), X, y, case, empirical=False, mc=mc
                )
