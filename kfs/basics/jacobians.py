r"""Jacobians: all first derivatives of a tensor with respect to a tensor.

The Jacobian of a tensor-to-tensor function $A \mapsto B$ has the indices of the output
followed by those of the input,

$$
[\mathsf{J}_A B]_{i_1, \dots, i_M, j_1, \dots, j_N}
  = \frac{\partial B_{i_1, \dots, i_M}}{\partial A_{j_1, \dots, j_N}}.
$$

To make it a matrix we flatten the output indices into rows and the input indices into
columns. Equivalently we flatten the function's input and output and then take
derivatives; the order does not matter. But the *flattening* does:

$$
[\mathrm{J}^{\mathrm{vec}}_A B]_{i,j}
  = \frac{\partial\, \mathrm{vec}(B)_i}{\partial\, \mathrm{vec}(A)_j},
\qquad \mathrm{vec} \in \{\mathrm{cvec}, \mathrm{rvec}\}.
$$

$$
\begin{array}{ccc}
A \mapsto B & \xrightarrow{\text{differentiate}} & \mathsf{J}_A B \\
\downarrow {\scriptstyle \text{flatten}} & & \downarrow {\scriptstyle \text{flatten}} \\
\mathrm{vec}(A) \mapsto \mathrm{vec}(B) & \xrightarrow{\text{differentiate}} &
  \mathrm{J}^{\mathrm{vec}}_A B
\end{array}
$$

Row by row: pull a one-hot tensor back for every entry of $B$.

Implements: general Jacobian, cvec- and rvec-Jacobian (chapter 2, "Jacobians, JVP,
VJPs"); the diagram is figure 1 of the paper.
"""

from itertools import product

from torch import Tensor, zeros, zeros_like

from kfs.basics._checks import check_nodes
from kfs.basics.flattening import Vec, matricize, rvec
from kfs.basics.jacobian_products import vjp


def jacobian(b: Tensor, a: Tensor) -> Tensor:
    """Compute the Jacobian tensor of `b` with respect to `a`.

    Args:
        b: A node of a computation graph.
        a: A node that `b` was computed from.

    Returns:
        A tensor of shape `[*b.shape, *a.shape]`.

    Raises:
        GraphError: If `b` was not computed from `a`.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> jacobian(a**2, a)
        tensor([[2., 0.],
                [0., 4.]])
    """
    check_nodes(b=b, a=a)
    J = zeros((*b.shape, *a.shape), dtype=a.dtype, device=a.device)
    for index in product(*map(range, b.shape)):
        one_hot = zeros_like(b)
        one_hot[index] = 1
        J[index] = vjp(b, a, one_hot)
    return J


def vec_jacobian(b: Tensor, a: Tensor, vec: Vec = rvec) -> Tensor:
    """Compute the Jacobian matrix of flattened `b` with respect to flattened `a`.

    Args:
        b: A node of a computation graph.
        a: A node that `b` was computed from.
        vec: The flattening of both, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[b.numel(), a.numel()]`.
    """
    return matricize(jacobian(b, a), b.ndim, vec)


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import cvec, unflatten_cvec, unflatten_rvec
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    A = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    M = torch.randn(4, 3, dtype=torch.float64)
    B = torch.tanh(M @ A)

    J = torch.einsum(
        "ik,ij,kl->ikjl", 1 - B.detach() ** 2, M, torch.eye(2, dtype=torch.float64)
    )
    verify("entries are the partial derivatives", jacobian(B, A), J)

    for vec, unflatten in ((cvec, unflatten_cvec), (rvec, unflatten_rvec)):
        a = vec(A).detach().requires_grad_()  # flatten the function, then differentiate
        b = vec(torch.tanh(M @ unflatten(a, A.shape)))
        verify(
            "flattening and differentiation commute",
            vec_jacobian(B, A, vec),
            jacobian(b, a),
            case=vec.__name__,
        )
    verify_differs(
        "the cvec- and the rvec-Jacobian differ",
        vec_jacobian(B, A, cvec),
        vec_jacobian(B, A, rvec),
    )
