r"""KFAC-expand is exact for a deep linear net whose positions are independent.

Weight sharing `expand` treats every position like a further example:
$A = R \sum_{n,s} x_{n,s} x_{n,s}^\top$ and
$B = \tfrac{1}{NS} \sum_{n,s,c} g_{n,s,c} g_{n,s,c}^\top$ (Eschenhagen et al., 2023).
That is right if each position has a prediction and a loss term of its own, and wrong if
positions are averaged later. For every layer, and for both flattenings, KFAC-expand
equals the GGN here, and KFAC-expand of the Monte Carlo Fisher converges to it. For the
first layer, KFAC-reduce does not equal it.

All this is tested for the KFAC of `scaffold`, and then for the engine's, which has
convolutions, too.

Implements: the test of the deep linear net with an independent sequence axis (chapter
"KFAC for Linear Layers", at the end of "Regression with Deep Linear Nets").
"""

if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import torch
    from torch import Tensor, kron
    from torch.nn import Conv1d, Linear, Module, MSELoss, Sequential

    from kfs.basics.flattening import Vec, cvec, rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.kfac.backpropagated_vectors import mc_vectors
    from kfs.kfac.scaffold import kfac
    from kfs.kfac_tests._checks import JointWeight, verify_engine, verify_rate
    from kfs.verification import one_row_per_claim, verify, verify_differs

    def block(A: Tensor, B: Tensor, vec: Vec = cvec) -> Tensor:
        """Return KFAC's approximation of a layer's block."""
        return kron(A, B) if vec is cvec else kron(B, A)

    def check(model: Module, loss: MSELoss, case: str, draws: bool) -> None:
        """Compare both variants of KFAC with the GGN, for all layers."""
        expand = kfac(model, loss, X, y, sharing="expand")
        reduce = kfac(model, loss, X, y, sharing="reduce")
        limits = {}
        for layer, vec in product(expand, (rvec, cvec)):
            here = f"{case}, layer {layer}, {vec.__name__}"
            net = JointWeight(model, layer)
            f = net(X)
            limits[layer] = G = vec_ggn(loss(f, y), f, net.W, vec=vec)  # cvec is last
            K = block(*expand[layer], vec)
            verify("KFAC-expand equals the GGN", K, G, case=here)
            if layer == "0":
                claim = "KFAC-reduce does not, for the first layer"
                verify_differs(claim, block(*reduce[layer], vec), G, case=here)

        def drawn(M: int) -> dict[str, Tensor]:
            factors = kfac(model, loss, X, y, partial(mc_vectors, mc_samples=M))
            return {layer: block(A, B) for layer, (A, B) in factors.items()}

        if draws:
            verify_rate(drawn, limits, case)
        verify_engine(model, loss, X, y, case, "expand", wrong="reduce", draws=draws)

    torch.manual_seed(0)
    X, y = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 3).double()
    losses = MSELoss(), MSELoss(reduction="sum")
    with one_row_per_claim():
        for bias, loss in product((True, False), losses):
            case = f"{bias=}, {loss.reduction}"
            layers = Linear(4, 5, bias), Linear(5, 4, bias), Linear(4, 3, bias)
            draws = bias and loss.reduction == "mean"  # they take long
            check(Sequential(*layers).double(), loss, case, draws)
            # Convolutions of size one: linear layers, with features before positions.
            convolutions = Conv1d(4, 5, 1, bias=bias), Conv1d(5, 3, 1, bias=bias)
            model, case = Sequential(*convolutions).double(), f"convolution, {case}"
            data = X.transpose(1, 2), y.transpose(1, 2)
            verify_engine(model, loss, *data, case, "expand", wrong="reduce")
