r"""KFAC-reduce is exact for a deep linear net that sums or averages over positions, at its end or in its middle.

Weight sharing `reduce` sums over positions before it takes outer products: $A = R \sum_n (\sum_s x_{n,s}) (\sum_s
x_{n,s})^\top$ and $B = \tfrac{1}{NS^2} \sum_{n,c} (\sum_s g_{n,s,c}) (\sum_s g_{n,s,c})^\top$ (Eschenhagen et al.,
2023). That is right if predictions depend on positions through their sum only, as in a linear convolutional net with
global average pooling.
"""

if __name__ == "__main__":
    import torch
    from torch.nn import Conv2d, Linear, MSELoss, Sequential

    from kfs.conformance.models import Pool
    from kfs.kfac_tests._claims import claim_exact

    torch.manual_seed(0)
    X, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    image = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    for bias in (True, False):
        for kind in ("sum", "mean"):
            for reduction in ("mean", "sum"):
                case = f"{kind}, {reduction}{'' if bias else ', no bias'}"
                loss, mc = MSELoss(reduction=reduction), bias and reduction == "mean"
                end = Sequential(Linear(3, 4, bias=bias), Linear(4, 2, bias=bias), Pool(kind, (1,))).double()
                claim_exact(end, loss, X, y, f"{case} at the end", sharing="reduce", mc=mc)
                middle = Sequential(Linear(3, 4, bias=bias), Pool(kind, (1,)), Linear(4, 2, bias=bias)).double()
                claim_exact(middle, loss, X, y, f"{case} in the middle", sharing="reduce", mc=mc)
                conv = Sequential(Conv2d(2, 3, 3, padding=1, bias=bias), Pool(kind, (2, 3)), Linear(3, 2, bias=bias))
                case += ", convolution"
                claim_exact(conv.double(), loss, image, y, case, sharing="reduce", mc=False)
