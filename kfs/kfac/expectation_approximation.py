r"""KFAC's expectation approximation: one Kronecker product, in place of a sum of them.

The curvature of a linear layer is a sum of Kronecker products
(`sum_of_kronecker_products`). KFAC sums, independently, both sides of the products, and
divides by the number of examples:

$$
\sum_n x_n x_n^\top \otimes \sum_c g_{n,c} g_{n,c}^\top
\;\approx\;
\Big( \sum_n x_n x_n^\top \Big)
\otimes
\Big( \frac{1}{N} \sum_{n,c} g_{n,c} g_{n,c}^\top \Big) .
$$

In expectations over $n$: the expectation of the products becomes the product of the
expectations. That is exact if one side is the same for all examples.

In which sense is this $B$ optimal? Stack the inputs as columns of a matrix $X$. With
blocks $M_n = \sum_c g_{n,c} g_{n,c}^\top$ of a block-diagonal matrix in the middle,

$$
C = R\, (X \otimes I)\,
\begin{pmatrix} M_1 & & \\ & \ddots & \\ & & M_N \end{pmatrix}
(X \otimes I)^\top .
$$

If the blocks were the same, so that the middle were $I_N \otimes B$, then $C$ would be
a single Kronecker product, $R\, X X^\top \otimes B$. The closest middle of this kind
minimizes the residual

$$
\sum_n \lVert M_n - B \rVert_F^2 ,
$$

and is the mean, $B = \tfrac{1}{N} \sum_n M_n$. With any other matrix, $B + D$, the
residual is larger by $N \lVert D \rVert_F^2$. The mean is optimal for the matrix in the
middle. For $C$ itself, another Kronecker product is closer.

Implements: motivation for KFAC's expectation approximation, and its definition (chapter
"KFAC for Linear Layers (No Weight Sharing)", "Derivation of KFAC"). The paper has one
vector per example, and prints a middle $\mathrm{cvec}(G)\, \mathrm{cvec}(G)^\top$ for
the matrix $G$ of all vectors. That has blocks beside the diagonal, too. It leads to the
same $B$, since they do not depend on it, but it does not equal the curvature.
"""

from torch import Tensor, block_diag, eye, kron, outer


def product_of_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both sides of KFAC's product, without the loss's reduction factor.

    Args:
        x: Inputs, `[batch, d_in]`.
        g: Vectors at the output, `[columns, batch, d_out]`.

    Returns:
        Matrices `[d_in, d_in]` and `[d_out, d_out]`.
    """
    N = len(x)
    A = x.new_zeros(x.shape[1], x.shape[1])
    for n in range(N):
        A += outer(x[n], x[n])
    B = sum(blocks(g), start=g.new_zeros(())) / N
    return A, B


def blocks(g: Tensor) -> list[Tensor]:
    """Sum the outer products of each example's vectors."""
    C, N, d_out = g.shape
    M = [g.new_zeros(d_out, d_out) for _ in range(N)]
    for n in range(N):
        for c in range(C):
            M[n] += outer(g[c, n], g[c, n])
    return M


def middle_matrix(g: Tensor) -> Tensor:
    """Compute the matrix in the middle, `[batch * d_out, batch * d_out]`."""
    middle: Tensor = block_diag(*blocks(g))
    return middle


def residual(middle: Tensor, B: Tensor) -> Tensor:
    """Compute the squared Frobenius distance of a matrix in the middle to `I (x) B`."""
    identity = eye(len(middle) // len(B), dtype=B.dtype)
    return (middle - kron(identity, B)).square().sum()


if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.autograd import grad
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.emp_fishers import vec_empirical_fisher
    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import Loss, reduction_factor
    from kfs.kfac.backpropagated_vectors import (
        backpropagated_vectors,
        empirical_vectors,
        send_back,
        type2_vectors,
    )
    from kfs.kfac.sum_of_kronecker_products import rearranged
    from kfs.verification import one_row_per_claim, verify, verify_differs, verify_that

    def sum_of_products(x: Tensor, g: Tensor) -> Tensor:
        """The sum that is approximated."""
        terms = product(range(len(g)), range(len(x)))
        return sum(
            (kron(outer(x[n], x[n]), outer(g[c, n], g[c, n])) for c, n in terms),
            start=x.new_zeros(()),
        )

    def check_minimum(middle: Tensor, B: Tensor, case: str) -> None:
        """Verify that no other matrix has a smaller residual than the mean."""
        least, N = residual(middle, B), len(X)
        variable = B.detach().requires_grad_()
        (slope,) = grad(residual(middle, variable), variable)
        claim = "the residual's gradient is zero at the mean"
        verify(claim, slope, torch.zeros_like(B), case=case)
        for size in (1e-2, 1.0):
            D = size * torch.randn_like(B)
            claim = "at B + D, the residual is larger by N |D|^2"
            verify(
                claim, residual(middle, B + D), least + N * D.square().sum(), case=case
            )
        others = (N / (N - 1) * B, N * B, middle[: len(B), : len(B)])
        claim = "other scales, and one example alone, have a larger residual"
        verify_that(claim, all(residual(middle, B_) > least for B_ in others), case)

    def check(loss: Loss, y: Tensor) -> None:
        """Compare the GGN's block, its form with the middle, and KFAC."""
        case, R, x = f"{loss}, {loss.reduction}", reduction_factor(loss, y), before(X)
        z = layer(x)
        f = torch.tanh(z)
        V = backpropagated_vectors(loss, f, y, type2_vectors)
        V_empirical = backpropagated_vectors(loss, f, y, empirical_vectors)
        (g,), (g_n,) = send_back(V, f, [z]), send_back(V_empirical, f, [z])
        A, B = product_of_sums(x, g)
        G = vec_ggn(loss(f, y), f, layer.weight, vec=cvec)
        X_I = kron(x.T.contiguous(), torch.eye(3, dtype=torch.float64))
        claim = "the GGN's block is R (X (x) I) middle (X (x) I)^T"
        verify(claim, R * X_I @ middle_matrix(g) @ X_I.T, G, case=case)
        I_B = kron(torch.eye(len(x), dtype=torch.float64), B)
        claim = "with I (x) B in the middle, it is a Kronecker product"
        verify(claim, R * X_I @ I_B @ X_I.T, R * kron(A, B), case=case)
        check_minimum(middle_matrix(g), B, f"{case}, type-2")

        # As printed: one vector per example, and products of different examples.
        E = vec_empirical_fisher(net, loss, X, y, layer.weight, vec=cvec)
        printed = outer(
            g_n.flatten(), g_n.flatten()
        )  # cvec(G) has one g_n after another
        claim = "products of different examples do not belong into the middle"
        verify_differs(claim, R * X_I @ printed @ X_I.T, E, case=case)
        check_minimum(printed, product_of_sums(x, g_n)[1], f"{case}, as printed")
        check_minimum(
            middle_matrix(g_n), product_of_sums(x, g_n)[1], f"{case}, empirical"
        )

        block = KFAC(EmpiricalRisk(net, loss, (X, y))).blocks["2.weight"]
        verify("the engine computes the same A", block.A, R * A, case=case)
        verify("the engine computes the same B", block.B, B, case=case)

        # The best product is the best approximation of rank one.
        singular_values = torch.linalg.svdvals(rearranged(G, 4, 3))
        best = singular_values[1:].square().sum()
        claim = "for C itself, another Kronecker product is closer"
        verify_that(
            claim, bool((R * kron(A, B) - G).square().sum() > 1.01 * best), case
        )

        same_g = g[:, :1].expand_as(g)
        claim = "it is exact if vectors are the same for all examples"
        verify(claim, kron(*product_of_sums(x, same_g)), sum_of_products(x, same_g))
        same_x = x[:1].expand_as(x)
        claim = "it is exact if inputs are the same for all examples"
        verify(claim, kron(*product_of_sums(same_x, g)), sum_of_products(same_x, g))

    torch.manual_seed(0)
    X = torch.randn(5, 6, dtype=torch.float64)
    before = Sequential(Linear(6, 4), Tanh()).double()
    layer = Linear(4, 3, bias=False).double()
    net = Sequential(*before, layer, Tanh())
    values, labels = (
        torch.randn(5, 3, dtype=torch.float64),
        torch.tensor([0, 1, 1, 2, 0]),
    )
    with one_row_per_claim():
        for reduction in ("mean", "sum"):
            check(MSELoss(reduction=reduction), values)
            check(CrossEntropyLoss(reduction=reduction), labels)
