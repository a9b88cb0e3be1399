r"""KFAC is exact for one datum: all linear layers of a multi-layer perceptron, any loss, any activation.

The approximation replaces a sum over data of Kronecker products by a product of sums. With one datum there is nothing
to replace: $R\, x x^\top \otimes \sum_c g_c g_c^\top$ is the curvature itself. This catches errors in backpropagated
vectors, in flattening and in the treatment of biases. It does not catch wrong scales that depend on the number of
data; for those see `deep_linear_regression`.

Implements: test "KFAC for linear layers in an MLP with one data point" (chapter 4).
"""

if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.nn import GELU, CrossEntropyLoss, Linear, MSELoss, ReLU, Sequential, Sigmoid, Tanh

    from kfs.kfac_tests._claims import claim_exact

    torch.manual_seed(0)
    X = torch.randn(1, 4, dtype=torch.float64)
    labels, numbers = torch.tensor([1]), torch.randn(1, 3, dtype=torch.float64)
    settings = product((Tanh(), ReLU(), Sigmoid(), GELU()), (True, False), (MSELoss, CrossEntropyLoss), ("mean", "sum"))
    for activation, bias, loss, reduction in settings:
        layers = [Linear(4, 3, bias=bias), activation, Linear(3, 3, bias=bias), activation, Linear(3, 3, bias=bias)]
        model, y = Sequential(*layers).double(), labels if loss is CrossEntropyLoss else numbers
        case = f"{type(activation).__name__}, {loss.__name__}, {reduction}{'' if bias else ', no bias'}"
        mc = isinstance(activation, Tanh) and bias and reduction == "mean"
        claim_exact(model, loss(reduction=reduction), X, y, case, empirical=True, mc=mc)
