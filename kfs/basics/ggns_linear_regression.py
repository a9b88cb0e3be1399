r"""The GGN of linear regression: a Kronecker product, exactly.

Least squares with a linear model scores $f_n = W x_n$ by
$\tfrac12 \lVert f_n - y_n \rVert^2$. Insert the layer's Jacobian (a Kronecker product)
and the criterion's Hessian (the identity) into the GGN of their sum ($R = 1$), and it
simplifies to

$$
\mathrm{G}^{\mathrm{cvec}}_W = \Big( \sum_n x_n x_n^\top \Big) \otimes I
\qquad\qquad
\mathrm{G}^{\mathrm{rvec}}_W = I \otimes \Big( \sum_n x_n x_n^\top \Big).
$$

One factor comes from the layer's inputs, the other one from the part of the network
behind the layer. KFAC assumes this form for every layer of every network. Here it is
exact. Again, the order of the factors depends on the flattening.

Implements: GGN of linear regression (chapter 2, "Partial Linearization, GGNs, GGNVPs").
"""

from torch import Tensor, eye, kron

from kfs.basics._checks import check_ndim
from kfs.basics.flattening import Vec, check_vec, cvec


def linear_regression_ggn(X: Tensor, d_out: int, vec: Vec) -> Tensor:
    """Return the GGN of `sum_n 1/2 |W x_n - y_n|^2` with respect to `W` in closed form.

    Args:
        X: The inputs, shape `[N, d_in]`.
        d_out: Number of rows of `W`.
        vec: The flattening of `W`, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[d_out * d_in, d_out * d_in]`.

    Raises:
        ShapeError: If `X` is no matrix.
    """
    vec = check_vec(vec)
    check_ndim("X", X, 2, "Pass inputs as rows, shape [N, d_in].")
    A, B = X.T @ X, eye(d_out, dtype=X.dtype, device=X.device)
    return kron(A, B) if vec is cvec else kron(B, A)


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.hessians import vec_hessian
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    N, d_in, d_out = 10, 4, 3
    W = torch.randn(d_out, d_in, dtype=torch.float64, requires_grad=True)
    X, Y = (
        torch.randn(N, d_in, dtype=torch.float64),
        torch.randn(N, d_out, dtype=torch.float64),
    )
    predictions = X @ W.T
    loss = 0.5 * ((predictions - Y) ** 2).sum()

    for vec in (cvec, rvec):
        closed_form = linear_regression_ggn(X, d_out, vec)
        G, H = vec_ggn(loss, predictions, W, vec=vec), vec_hessian(loss, W, vec=vec)
        verify("the GGN is a Kronecker product", G, closed_form, case=vec.__name__)
        verify(
            "the Hessian too: the model is linear", H, closed_form, case=vec.__name__
        )
    verify_differs(
        "the flattenings have the Kronecker factors in opposite order",
        linear_regression_ggn(X, d_out, cvec),
        linear_regression_ggn(X, d_out, rvec),
    )
