r"""KFAC is exact for regression with a deep linear net, on any data set.

With square loss the backpropagated vectors at the prediction do not depend on the
example. Without nonlinearities, the same holds at all layers: the factor
$\sum_c g_{n,c} g_{n,c}^\top$ is the same for all $n$ (Bernacchia et al., 2018). So for
every layer, with weight and bias $\tilde{W} = (W\; b)$, and for both flattenings,

$$
\mathrm{KFAC}(G(\mathrm{vec}\, \tilde{W})) = G(\mathrm{vec}\, \tilde{W}),
\qquad
\mathrm{KFAC}(E(\mathrm{vec}\, \tilde{W})) \neq E(\mathrm{vec}\, \tilde{W}),
$$

and KFAC of the Monte Carlo Fisher converges to $G$, with an error that falls like
$1 / \sqrt{M}$ for $M$ draws. The empirical Fisher $E$ sends residuals back, which do
depend on the example, so there KFAC remains an approximation. All this is tested for
the KFAC of `scaffold`, and then for the engine's.

This catches wrong scales: factors of the number of examples, of the reduction, of the
number of draws.

Implements: test "KFAC for regression with a deep linear net" (chapter "KFAC for Linear
Layers").
"""

if __name__ == "__main__":
    from functools import partial
    from itertools import pairwise, product

    import torch
    from torch import Tensor, kron
    from torch.nn import Linear, Module, MSELoss, Sequential

    from kfs.basics.emp_fishers import vec_empirical_fisher
    from kfs.basics.flattening import Vec, cvec, rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.kfac.backpropagated_vectors import empirical_vectors, mc_vectors
    from kfs.kfac.scaffold import kfac
    from kfs.kfac_tests._checks import JointWeight, verify_engine, verify_rate
    from kfs.verification import one_row_per_claim, verify, verify_differs

    def block(A: Tensor, B: Tensor, vec: Vec = cvec) -> Tensor:
        """Return KFAC's approximation of a layer's block."""
        return kron(A, B) if vec is cvec else kron(B, A)

    def check(model: Module, loss: MSELoss, case: str, draws: bool) -> None:
        """Compare KFAC of all layers with three matrices."""
        type2 = kfac(model, loss, X, y)
        empirical = kfac(model, loss, X, y, empirical_vectors)
        limits = {}
        for layer, vec in product(type2, (rvec, cvec)):
            here = f"{case}, layer {layer}, {vec.__name__}"
            net = JointWeight(model, layer)
            f = net(X)
            limits[layer] = G = vec_ggn(loss(f, y), f, net.W, vec=vec)  # cvec is last
            K = block(*type2[layer], vec)
            verify("KFAC-type-II equals the GGN", K, G, case=here)
            E = vec_empirical_fisher(net, loss, X, y, "W", vec=vec)
            claim = "KFAC-empirical differs from the empirical Fisher"
            verify_differs(claim, block(*empirical[layer], vec), E, case=here)

        def drawn(M: int) -> dict[str, Tensor]:
            factors = kfac(model, loss, X, y, partial(mc_vectors, mc_samples=M))
            return {layer: block(A, B) for layer, (A, B) in factors.items()}

        if draws:
            verify_rate(drawn, limits, case)
        verify_engine(model, loss, X, y, case, empirical_is_exact=False, draws=draws)

    torch.manual_seed(0)
    # Three outputs: R is 2 / (3 N) or 2, which is not 1 / N.
    X, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    nets, reductions = ([4, 3], [4, 5, 3], [4, 3, 5, 3]), ("mean", "sum")
    with one_row_per_claim():
        for widths, bias, reduction in product(nets, (True, False), reductions):
            layers = [Linear(d_in, d_out, bias) for d_in, d_out in pairwise(widths)]
            model, loss = Sequential(*layers).double(), MSELoss(reduction=reduction)
            case = f"{len(layers)} layers, {bias=}, {reduction}"
            draws = widths == nets[1] and bias and reduction == "mean"  # they take long
            check(model, loss, case, draws)
