r"""KFAC-expand is exact for a deep linear net that treats the elements of a sequence independently.

Weight sharing `expand` treats every position like a further datum: $A = R \sum_{n,s} x_{n,s} x_{n,s}^\top$ and $B =
\tfrac{1}{NS} \sum_{n,s,c} g_{n,s,c} g_{n,s,c}^\top$ (Eschenhagen et al., 2023). That is right if each position has a
prediction and a loss term of its own, and wrong if positions are averaged later.
"""

if __name__ == "__main__":
    import torch
    from torch.nn import Conv1d, Linear, MSELoss, Sequential

    from kfs.kfac_tests._claims import claim_exact

    torch.manual_seed(0)
    X, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 5, 2, dtype=torch.float64)
    for bias in (True, False):
        for reduction in ("mean", "sum"):
            model = Sequential(Linear(3, 4, bias=bias), Linear(4, 3, bias=bias), Linear(3, 2, bias=bias)).double()
            case = f"independent sequence, {reduction}{'' if bias else ', no bias'}"
            claim_exact(model, MSELoss(reduction=reduction), X, y, case, mc=bias)
            pointwise = Sequential(Conv1d(3, 4, 1, bias=bias), Conv1d(4, 2, 1, bias=bias)).double()
            case = f"convolutions of size one, {reduction}{'' if bias else ', no bias'}"
            claim_exact(pointwise, MSELoss(reduction=reduction), X.transpose(1, 2), y.transpose(1, 2), case, mc=False)
