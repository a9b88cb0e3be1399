r"""Jacobians of a linear layer with weight sharing: one weight, many inputs.

Attention, convolution and recurrence apply one weight matrix to many vectors per
example. Put these as columns, $X = (x_1, \dots, x_S)$, and the layer is a matrix
product,

$$
Z = W X + b \mathbf{1}^\top
  = \begin{pmatrix} W & b \end{pmatrix}
    \begin{pmatrix} X \\ \mathbf{1}^\top \end{pmatrix}
  = \tilde{W} \tilde{X}.
$$

The Jacobian is still a Kronecker product. Instead of a row it now contains all $S$
shared inputs,

$$
\mathrm{J}^{\mathrm{cvec}}_{\tilde{W}} Z = \tilde{X}^\top \otimes I
\qquad\qquad
\mathrm{J}^{\mathrm{rvec}}_{\tilde{W}} Z = I \otimes \tilde{X}^\top.
$$

PyTorch stores the transpose, positions first: $Z^\top$ has shape
$[S, d_{\mathrm{out}}]$. Since $\mathrm{rvec}(Z^\top) = \mathrm{cvec}(Z)$, a Jacobian
whose rows come from PyTorch's layout and whose columns come from PyTorch's weight is
neither of the two matrices above. It is the cvec-Jacobian with permuted columns.

Implements: Jacobians of a linear layer with weight sharing (chapter 2, commented out
there).
"""

from torch import Tensor, eye, kron

from kfs.basics._checks import check_ndim
from kfs.basics.flattening import Vec, check_vec, cvec


def shared_linear_layer_jacobian(X: Tensor, d_out: int, vec: Vec) -> Tensor:
    """Return the Jacobian of `W X` with respect to `W` in closed form.

    Args:
        X: The layer's inputs for one example as columns, shape `[d_in, S]`.
        d_out: Number of rows of `W`.
        vec: The flattening of `W` and of `W X`, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[d_out * S, d_out * d_in]`.

    Raises:
        ShapeError: If `X` is no matrix.
    """
    vec = check_vec(vec)
    check_ndim("X", X, 2, "Pass one example's inputs as columns.")
    identity = eye(d_out, dtype=X.dtype, device=X.device)
    rows = X.T.contiguous()
    return kron(rows, identity) if vec is cvec else kron(identity, rows)


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import matricize, rvec, unflatten_cvec
    from kfs.basics.jacobians import jacobian, vec_jacobian
    from kfs.basics.jacobians_linear_layer import append_one, linear_layer_jacobian
    from kfs.verification import verify

    torch.manual_seed(0)
    d_in, d_out, S = 4, 3, 5
    W_joint = torch.randn(d_out, d_in + 1, dtype=torch.float64, requires_grad=True)
    W, b = W_joint[:, :d_in], W_joint[:, d_in]
    X = torch.randn(d_in, S, dtype=torch.float64)
    Z = W @ X + b.unsqueeze(1)

    X_joint = append_one(X)
    for vec in (cvec, rvec):
        verify(
            "the Jacobian with respect to (W b) is a Kronecker product",
            vec_jacobian(Z, W_joint, vec),
            shared_linear_layer_jacobian(X_joint, d_out, vec),
            case=vec.__name__,
        )
        verify(
            "the Jacobian with respect to W alone, likewise",
            vec_jacobian(Z, W, vec),
            shared_linear_layer_jacobian(X, d_out, vec),
            case=vec.__name__,
        )
    verify(
        "one shared position is the layer without weight sharing",
        shared_linear_layer_jacobian(X[:, :1], d_out, cvec),
        linear_layer_jacobian(X[:, 0], d_out, cvec),
    )

    mixed = matricize(
        jacobian(torch.nn.functional.linear(X.T, W, b), W_joint), 2, rvec
    )  # PyTorch's layout
    closed_form = shared_linear_layer_jacobian(X_joint, d_out, cvec)
    columns = rvec(unflatten_cvec(torch.arange(W_joint.numel()), W_joint.shape))
    verify(
        "PyTorch's layout: the cvec-Jacobian with its columns in rvec order",
        mixed,
        closed_form[:, columns],
    )
