r"""KFAC-reduce is exact for a deep linear net that sums or averages over positions.

Weight sharing `reduce` sums over positions before it takes outer products:
$A = R \sum_n (\sum_s x_{n,s}) (\sum_s x_{n,s})^\top$ and
$B = \tfrac{1}{NS^2} \sum_{n,c} (\sum_s g_{n,s,c}) (\sum_s g_{n,s,c})^\top$ (Eschenhagen
et al., 2023). That is right if predictions depend on positions through their sum only,
as in a linear convolutional net with global average pooling. The net may sum or average
at its end or in its middle. For every layer, and for both flattenings, KFAC-reduce
equals the GGN here, and KFAC-reduce of the Monte Carlo Fisher converges to it. For the
first layer, which is used at every position, KFAC-expand does not equal it.

All this is tested for the KFAC of `scaffold`, and then for the engine's, which has
convolutions, too.
"""

if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import torch
    from torch import Tensor, kron
    from torch.nn import Conv2d, Linear, Module, MSELoss, Sequential

    from kfs.basics.flattening import Vec, cvec, rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.conformance.models import Pool
    from kfs.kfac.backpropagated_vectors import mc_vectors
    from kfs.kfac.scaffold import kfac
    from kfs.kfac_tests._checks import JointWeight, verify_engine, verify_rate
    from kfs.verification import one_row_per_claim, verify, verify_differs

    def block(A: Tensor, B: Tensor, vec: Vec = cvec) -> Tensor:
        """Return KFAC's approximation of a layer's block."""
        return kron(A, B) if vec is cvec else kron(B, A)

    def check(model: Module, loss: MSELoss, case: str, draws: bool) -> None:
        """Compare both variants of KFAC with the GGN, for all layers."""
        reduce = kfac(model, loss, X, y, sharing="reduce")
        expand = kfac(model, loss, X, y, sharing="expand")
        limits = {}
        for layer, vec in product(reduce, (rvec, cvec)):
            here = f"{case}, layer {layer}, {vec.__name__}"
            net = JointWeight(model, layer)
            f = net(X)
            limits[layer] = G = vec_ggn(loss(f, y), f, net.W, vec=vec)  # cvec is last
            K = block(*reduce[layer], vec)
            verify("KFAC-reduce equals the GGN", K, G, case=here)
            if layer == "0":
                claim = "KFAC-expand does not, for the first layer"
                verify_differs(claim, block(*expand[layer], vec), G, case=here)

        def drawn(M: int) -> dict[str, Tensor]:
            vectors = partial(mc_vectors, mc_samples=M)
            factors = kfac(model, loss, X, y, vectors, "reduce")
            return {layer: block(A, B) for layer, (A, B) in factors.items()}

        if draws:
            verify_rate(drawn, limits, case)
        verify_engine(model, loss, X, y, case, "reduce", wrong="expand", draws=draws)

    torch.manual_seed(0)
    X, y = torch.randn(3, 3, 3).double(), torch.randn(3, 3).double()
    images = torch.randn(3, 2, 5, 5).double()
    losses = MSELoss(), MSELoss(reduction="sum")
    with one_row_per_claim():
        for kind, bias, loss in product(("sum", "mean"), (True, False), losses):
            case = f"{kind}, {bias=}, {loss.reduction}"
            first, last, pool = Linear(3, 4, bias), Linear(4, 3, bias), Pool(kind, (1,))
            draws = (kind, bias, loss) == ("mean", True, losses[0])  # they take long
            at_end = Sequential(first, last, pool).double()
            check(at_end, loss, f"at the end, {case}", draws)
            check(Sequential(first, pool, last), loss, f"in the middle, {case}", False)
            convolution = Conv2d(2, 4, 3, padding=1, bias=bias)
            model = Sequential(convolution, Pool(kind, (2, 3)), last).double()
            verify_engine(model, loss, images, y, f"image, {case}", "reduce", "expand")
