r"""Sum of Kronecker products: the exact curvature of a linear layer inside a net.

Let a linear layer map inputs $x_n$ to $z_n = W x_n$, and let $g_{n,c}$ be the vectors
that are sent back to its output. Its Jacobian is $x_n^\top \otimes I$
(`jacobians_linear_layer`), so that in the layer's parameters each vector becomes
$(x_n \otimes I)\, g_{n,c} = x_n \otimes g_{n,c}$. Their outer products are Kronecker
products, and the layer's block of the curvature matrix is the sum of them:

$$
C(\mathrm{cvec}\, W)
= R \sum_{n,c} (x_n \otimes g_{n,c}) (x_n \otimes g_{n,c})^\top
= R \sum_{n,c} x_n x_n^\top \otimes g_{n,c} g_{n,c}^\top .
$$

In `rvec`, the two sides change places. This holds for any net around the layer, and it
is no approximation. But it is a *sum*, not a single product. To see that, rearrange the
entries of $C$ such that every Kronecker product $A \otimes B$ becomes a matrix of rank
one, $\mathrm{vec}(A)\, \mathrm{vec}(B)^\top$ (Van Loan and Pitsianis, 1993). The rank
of the rearranged $C$ is the least number of Kronecker products that add up to $C$. It
is one for a single example. For several examples it is larger, and then KFAC is an
approximation (`expectation_approximation`).

Implements: curvature matrix of a linear layer as sum of Kronecker products (chapter
"KFAC: An Overview", "Kronecker Products Naturally Emerge in Curvature Matrices").
"""

from torch import Tensor, kron, outer

from kfs.basics.flattening import Vec, check_vec, cvec
from kfs.basics.jacobians_linear_layer import append_one


def curvature_block(
    x: Tensor, g: Tensor, reduction_factor: float, vec: Vec, bias: bool = False
) -> Tensor:
    """Compute the exact block of a linear layer without weight sharing.

    Args:
        x: Inputs of the layer, `[batch, d_in]`. A bias appends a one to each of them.
        g: Vectors at the layer's output, `[columns, batch, d_out]`.
        reduction_factor: Scale of the loss.
        vec: The flattening of the weight, `cvec` or `rvec`.
        bias: Whether the layer has a bias.

    Returns:
        A matrix with as many rows as the layer has parameters.
    """
    vec = check_vec(vec)
    C, N, d_out = g.shape
    d = (x.shape[1] + bias) * d_out
    total = x.new_zeros(d, d)
    for n in range(N):
        x_n = append_one(x[n]) if bias else x[n]
        for c in range(C):
            A_n, B_nc = outer(x_n, x_n), outer(g[c, n], g[c, n])
            total += kron(A_n, B_nc) if vec is cvec else kron(B_nc, A_n)
    return reduction_factor * total


def rearranged(block: Tensor, d_in: int, d_out: int) -> Tensor:
    """Rearrange a block in `cvec`, so that products `A (x) B` become `vec(A) vec(B)^T`.

    Args:
        block: A matrix `[d_in * d_out, d_in * d_out]`.
        d_in: Size of `A`.
        d_out: Size of `B`.

    Returns:
        A matrix of shape `[d_in**2, d_out**2]`.
    """
    entries = block.reshape(d_in, d_out, d_in, d_out)  # [row, row, column, column]
    return entries.transpose(1, 2).reshape(d_in**2, d_out**2)


if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.linalg import matrix_rank
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh
    from torch.nn.functional import linear

    from kfs.basics.emp_fishers import vec_empirical_fisher
    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.jacobians_linear_layer import linear_layer_jacobian
    from kfs.basics.reduction_factors import Loss, reduction_factor
    from kfs.kfac.backpropagated_vectors import (
        backpropagated_vectors,
        empirical_vectors,
        send_back,
    )
    from kfs.verification import one_row_per_claim, verify, verify_that

    def check(loss: Loss, y: Tensor) -> None:
        """Compare the sum with the definitions, for a layer between two others."""
        case = f"{len(y)} examples, {loss}, {loss.reduction}"
        R, x = reduction_factor(loss, y), before(X[: len(y)])
        W = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1)  # (W b)
        z = linear(x, W[:, :-1], W[:, -1])
        f = after(z)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        V = backpropagated_vectors(loss, f, y, empirical_vectors)
        (g_empirical,) = send_back(V, f, [z])
        for vec in (cvec, rvec):
            here = f"{case}, {vec.__name__}"
            J = linear_layer_jacobian(x[0], 4, vec)
            a, b = (x[0], g[0, 0]) if vec is cvec else (g[0, 0], x[0])
            claim = "a vector in the layer's parameters is a Kronecker product"
            verify(claim, J.T @ g[0, 0], kron(a, b), case=here)
            claim = "the GGN's block is a sum of Kronecker products"
            G = vec_ggn(loss(f, y), f, W, vec=vec)
            verify(claim, curvature_block(x, g, R, vec, bias=True), G, case=here)
            claim = "without the bias, likewise"
            G = vec_ggn(loss(f, y), f, layer.weight, vec=vec)
            verify(claim, curvature_block(x, g, R, vec), G, case=here)
            claim = "the empirical Fisher's block is such a sum, too"
            net = Sequential(before, layer, after)
            E = vec_empirical_fisher(net, loss, X[: len(y)], y, layer.weight, vec=vec)
            verify(claim, curvature_block(x, g_empirical, R, vec), E, case=here)

        # Round-off leaves singular values of about 1e-16, relative to the largest one.
        G = vec_ggn(loss(f, y), f, layer.weight, vec=cvec)
        rank = int(matrix_rank(rearranged(G, 3, 4), rtol=1e-10))
        if len(y) == 1:
            verify_that("for one example, one product suffices", rank == 1, case)
        else:
            claim = "for N examples, it takes N Kronecker products"
            verify_that(claim, rank == len(y), case)

    torch.manual_seed(0)
    X = torch.randn(4, 5, dtype=torch.float64)
    before = Sequential(Linear(5, 3), Tanh()).double()
    layer = Linear(3, 4).double()
    after = Sequential(Tanh(), Linear(4, 3), Tanh()).double()
    values, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 2])
    A, B = (
        torch.randn(3, 3, dtype=torch.float64),
        torch.randn(4, 4, dtype=torch.float64),
    )
    with one_row_per_claim():
        claim = "rearranged, a Kronecker product has rank one"
        verify(claim, rearranged(kron(A, B), 3, 4), outer(A.flatten(), B.flatten()))
        for reduction, N in product(("mean", "sum"), (1, 4)):
            check(MSELoss(reduction=reduction), values[:N])
            check(CrossEntropyLoss(reduction=reduction), labels[:N])
