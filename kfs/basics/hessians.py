r"""Hessians: all second derivatives of a scalar.

The Hessian of a scalar $c$ with respect to a tensor $A$ has the indices of $A$ twice,

$$
[\mathsf{H}_A c]_{i_1, \dots, i_N, j_1, \dots, j_N}
  = \frac{\partial^2 c}{\partial A_{i_1, \dots, i_N}\, \partial A_{j_1, \dots, j_N}},
$$

and becomes a matrix by flattening rows and columns in the same way,

$$
[\mathrm{H}^{\mathrm{vec}}_A c]_{i,j}
  = \frac{\partial^2 c}{\partial\, \mathrm{vec}(A)_i\, \partial\, \mathrm{vec}(A)_j},
\qquad \mathrm{vec} \in \{\mathrm{cvec}, \mathrm{rvec}\}.
$$

The two matrices have the same entries in a different order. It does not matter whether
one flattens before or after:

$$
\begin{array}{ccc}
A \mapsto c & \xrightarrow{\text{differentiate twice}} & \mathsf{H}_A c \\
\downarrow {\scriptstyle \text{flatten}} & & \downarrow {\scriptstyle \text{flatten}} \\
\mathrm{vec}(A) \mapsto c & \xrightarrow{\text{differentiate twice}} &
  \mathrm{H}^{\mathrm{vec}}_A c
\end{array}
$$

For a network with parameters $\theta^{(1)}, \dots, \theta^{(L)}$ the Hessian has
$L \times L$ blocks; block $(k, l)$ takes the first derivative with respect to
$\theta^{(k)}$ and the second with respect to $\theta^{(l)}$.

Row by row: multiply with a one-hot tensor for every entry of $A$.

Implements: general Hessian, cvec- and rvec-Hessian (chapter 2, "Hessians, HVPs" and
"The Hessian"); the diagram is figure 2 of the paper.
"""

from itertools import product

from torch import Tensor, zeros, zeros_like

from kfs.basics._checks import check_nodes, check_scalar
from kfs.basics.flattening import Vec, matricize, rvec
from kfs.basics.hessian_product import mixed_hvp


def hessian(c: Tensor, a1: Tensor, a2: Tensor | None = None) -> Tensor:
    """Compute the Hessian tensor of `c` with respect to `a1` and `a2`.

    Args:
        c: A scalar node of a computation graph.
        a1: A node that `c` was computed from; it indexes rows.
        a2: Another one; it indexes columns. `a1` by default.

    Returns:
        A tensor of shape `[*a1.shape, *a2.shape]`.

    Raises:
        GraphError: If `c` was not computed from `a1` and `a2`.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian(a.prod() ** 2, a)
        tensor([[8., 8.],
                [8., 2.]])
    """
    a2 = a1 if a2 is None else a2
    check_nodes(c=c, a1=a1, a2=a2)
    check_scalar("c", c)
    H = zeros((*a1.shape, *a2.shape), dtype=a1.dtype, device=a1.device)
    for index in product(*map(range, a1.shape)):
        one_hot = zeros_like(a1)
        one_hot[index] = 1
        H[index] = mixed_hvp(c, a2, a1, one_hot)  # a row is a column of the transpose
    return H


def vec_hessian(
    c: Tensor, a1: Tensor, a2: Tensor | None = None, vec: Vec = rvec
) -> Tensor:
    """Compute the Hessian matrix of `c` with respect to flattened `a1` and `a2`.

    Args:
        c: A scalar node of a computation graph.
        a1: A node that `c` was computed from; it indexes rows.
        a2: Another one; it indexes columns. `a1` by default.
        vec: The flattening of both, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[a1.numel(), a2.numel()]`.
    """
    return matricize(hessian(c, a1, a2), a1.ndim, vec)


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import cvec, unflatten_cvec, unflatten_rvec
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    A = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, dtype=torch.float64, requires_grad=True)
    P, Q = (
        torch.randn(2, 2, dtype=torch.float64),
        torch.randn(3, 3, dtype=torch.float64),
    )
    c = (P @ A @ Q * A).sum() + (A @ b).sum()

    # By hand: c = sum P_ik A_kl Q_lj A_ij + sum A_ij b_j.
    H = torch.einsum("ik,lj->ijkl", P, Q)
    H = H + H.permute(2, 3, 0, 1)
    verify("entries are the second partial derivatives", hessian(c, A), H)
    verify(
        "second derivatives commute",
        hessian(c, A, b),
        hessian(c, b, A).permute(1, 2, 0),
    )
    verify("an off-diagonal block", hessian(c, A, b), torch.eye(3).expand(2, 3, 3))

    for vec, unflatten in ((cvec, unflatten_cvec), (rvec, unflatten_rvec)):
        a = vec(A).detach().requires_grad_()  # flatten the function, then differentiate
        matrix = unflatten(a, A.shape)
        flat_c = (P @ matrix @ Q * matrix).sum() + (matrix @ b).sum()
        verify(
            "flattening and differentiation commute",
            vec_hessian(c, A, vec=vec),
            hessian(flat_c, a),
            case=vec.__name__,
        )
    verify_differs(
        "cvec- and rvec-Hessian differ",
        vec_hessian(c, A, vec=cvec),
        vec_hessian(c, A, vec=rvec),
    )
