r"""Jacobians of a linear layer: where the K of KFAC comes from.

An affine map $z = W x + b$ is one matrix-vector product if the bias becomes a column of
the weight and a one is appended to the input,

$$
z = W x + b
  = \begin{pmatrix} W & b \end{pmatrix} \begin{pmatrix} x \\ 1 \end{pmatrix}
  = \tilde{W} \tilde{x}.
$$

Its Jacobian with respect to the parameters is a Kronecker product of the input and an
identity matrix,

$$
\mathrm{J}^{\mathrm{cvec}}_{\tilde{W}} z = \tilde{x}^\top \otimes I
\qquad\qquad
\mathrm{J}^{\mathrm{rvec}}_{\tilde{W}} z = I \otimes \tilde{x}^\top.
$$

KFAC is based on this structure. Note that the two flattenings have the factors in
*opposite order*.

Implements: Jacobians of a linear layer with respect to its weights (chapter 2,
"Jacobians, JVP, VJPs").
"""

from torch import Tensor, cat, eye, kron, ones

from kfs.basics._checks import check_ndim, check_tensor
from kfs.basics.flattening import Vec, check_vec, cvec
from kfs.errors import ShapeError


def append_one(x: Tensor) -> Tensor:
    """Append a row of ones to an input, so that a joint weight `(W b)` acts on it.

    Args:
        x: One input `[d_in]`, or several as columns `[d_in, S]`.

    Returns:
        Shape `[d_in + 1]` or `[d_in + 1, S]`.
    """
    check_tensor("x", x)
    if x.ndim == 0:
        raise ShapeError(
            "x is a scalar.", "Pass one input [d_in], or several as columns [d_in, S]."
        )
    return cat([x, ones(1, *x.shape[1:], dtype=x.dtype, device=x.device)])


def linear_layer_jacobian(x: Tensor, d_out: int, vec: Vec) -> Tensor:
    """Return the Jacobian of `W x` with respect to `W` in closed form.

    Args:
        x: The layer's input, shape `[d_in]`.
        d_out: Number of rows of `W`.
        vec: The flattening of `W`, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[d_out, d_out * d_in]`.

    Raises:
        ShapeError: If `x` is no vector.
    """
    vec = check_vec(vec)
    check_ndim("x", x, 1, "Pass the input of one example.")
    identity = eye(d_out, dtype=x.dtype, device=x.device)
    row = x.unsqueeze(0)
    return kron(row, identity) if vec is cvec else kron(identity, row)


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import rvec
    from kfs.basics.jacobians import vec_jacobian
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    d_in, d_out = 4, 3
    W_joint = torch.randn(d_out, d_in + 1, dtype=torch.float64, requires_grad=True)
    W, b = W_joint[:, :d_in], W_joint[:, d_in]
    x = torch.randn(d_in, dtype=torch.float64)
    z = W @ x + b

    x_joint = append_one(x)
    for vec in (cvec, rvec):
        closed_form = linear_layer_jacobian(x_joint, d_out, vec)
        verify(
            "the Jacobian with respect to (W b) is a Kronecker product",
            vec_jacobian(z, W_joint, vec),
            closed_form,
            case=vec.__name__,
        )
        verify(
            "the Jacobian with respect to W alone, likewise",
            vec_jacobian(z, W, vec),
            linear_layer_jacobian(x, d_out, vec),
            case=vec.__name__,
        )
    verify(
        "the Jacobian with respect to b is the identity",
        vec_jacobian(z, b),
        torch.eye(d_out),
    )
    verify_differs(
        "the flattenings have the Kronecker factors in opposite order",
        linear_layer_jacobian(x_joint, d_out, cvec),
        linear_layer_jacobian(x_joint, d_out, rvec),
    )
