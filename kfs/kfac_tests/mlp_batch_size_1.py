r"""KFAC is exact for one example: all linear layers of an MLP, any loss and activation.

The approximation replaces a sum over data of Kronecker products by a product of sums.
With one example there is nothing to replace: $R\, x x^\top \otimes \sum_c g_c g_c^\top$
is the curvature itself. The net is a chain of linear layers, each with an activation,

$$
f = \phi^{(L)} \circ f^{(L)} \circ \dots \circ \phi^{(1)} \circ f^{(1)} .
$$

For every layer, with weight and bias $\tilde{W} = (W\; b)$, and for both flattenings,

$$
\mathrm{KFAC}(G(\mathrm{vec}\, \tilde{W})) = G(\mathrm{vec}\, \tilde{W}),
\qquad
\mathrm{KFAC}(E(\mathrm{vec}\, \tilde{W})) = E(\mathrm{vec}\, \tilde{W}),
$$

and KFAC of the Monte Carlo Fisher converges to $G$, with an error that falls like
$1 / \sqrt{M}$ for $M$ draws. Here $G$ is the GGN and $E$ the empirical Fisher. All this
is tested for the KFAC of `scaffold`, and then for the engine's.

This catches errors in backpropagated vectors, in flattening and in the treatment of
biases. It does not catch wrong scales that depend on the number of examples; for those
see `deep_linear_regression`.

Implements: test "KFAC for linear layers in an MLP with one data point" (chapter "KFAC
for Linear Layers").
"""

if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import torch
    from torch import Tensor, kron, nn

    from kfs.basics.emp_fishers import vec_empirical_fisher
    from kfs.basics.flattening import Vec, cvec, rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import Loss
    from kfs.kfac.backpropagated_vectors import empirical_vectors, mc_vectors
    from kfs.kfac.scaffold import kfac
    from kfs.kfac_tests._checks import JointWeight, verify_engine, verify_rate
    from kfs.verification import one_row_per_claim, verify

    def block(A: Tensor, B: Tensor, vec: Vec = cvec) -> Tensor:
        """Return KFAC's approximation of a layer's block."""
        return kron(A, B) if vec is cvec else kron(B, A)

    def check(model: nn.Module, loss: Loss, y: Tensor, case: str, draws: bool) -> None:
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
            claim = "KFAC-empirical equals the empirical Fisher"
            verify(claim, block(*empirical[layer], vec), E, case=here)

        def drawn(M: int) -> dict[str, Tensor]:
            factors = kfac(model, loss, X, y, partial(mc_vectors, mc_samples=M))
            return {layer: block(A, B) for layer, (A, B) in factors.items()}

        if draws:
            verify_rate(drawn, limits, case)
        verify_engine(model, loss, X, y, case, empirical_is_exact=True, draws=draws)

    torch.manual_seed(0)
    X = torch.randn(1, 4, dtype=torch.float64)
    values, label = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    activations, reductions = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU), ("mean", "sum")
    with one_row_per_claim():
        for phi, bias, reduction in product(activations, (True, False), reductions):
            first, second = nn.Linear(4, 5, bias), nn.Linear(5, 4, bias)
            layers = first, phi(), second, phi(), nn.Linear(4, 3, bias), phi()
            model = nn.Sequential(*layers).double()
            case = f"{phi.__name__}, {bias=}, {reduction}"
            draws = phi is nn.Tanh and bias and reduction == "mean"  # they take long
            check(model, nn.MSELoss(reduction=reduction), values, case, draws)
            check(model, nn.CrossEntropyLoss(reduction=reduction), label, case, draws)
