r"""The generalized Gauss-Newton matrix (GGN).

Split a computation $A \mapsto B \mapsto c$ into an inner function $h$ and an outer
function $g$. In one dimension the chain rule gives
$(g \circ h)'' = h' \, g'' \, h' + g' \, h''$. In general, with $k$ running over the
entries of $B$,

$$
\mathrm{H}^{\mathrm{vec}}_A c =
  \underbrace{
    (\mathrm{J}^{\mathrm{vec}}_A B)^\top
    (\mathrm{H}^{\mathrm{vec}}_B c)\,
    (\mathrm{J}^{\mathrm{vec}}_A B)
  }_{\mathrm{G}^{\mathrm{vec}}_A c}
  + \sum_k \frac{\partial c}{\partial B_k}\, \mathrm{H}^{\mathrm{vec}}_A B_k .
$$

The GGN is the first term; it ignores the second derivatives of $h$. Equivalently,
linearize $h$ and take the Hessian of the resulting function, at the point of
linearization. If $g$ is convex then the GGN is positive semi-definite, for any $h$.

$$
\begin{array}{ccc}
g \circ h & \xrightarrow{\text{differentiate twice}} & \mathrm{H}_A c \\
\downarrow {\scriptstyle \text{linearize } h} & &
  \downarrow {\scriptstyle \text{ignore curvature of } h} \\
g \circ \mathrm{lin}_A(h) & \xrightarrow{\text{differentiate twice}} & \mathrm{G}_A c
\end{array}
$$

In deep learning $h$ is the network and $g$ the loss. Feed all data at once ($B$ holds
$N$ predictions and $c$ is the empirical risk) and the GGN is
$R \sum_n (\mathrm{J}_\theta f_n)^\top (\mathrm{H}_{f_n} c_n)\, \mathrm{J}_\theta f_n$.

Implements: GGN tensor, cvec- and rvec-GGN (chapter 2, "Partial Linearization, GGNs,
GGNVPs" and "The Generalized Gauss-Newton"); the diagram is figure 3 of the
paper. Version 1.0.0 of the paper has $g$ and $h$ swapped in the one-dimensional chain
rule; this has been fixed since.
"""

from torch import Tensor

from kfs.basics._autograd import check_order
from kfs.basics._checks import check_no_vec, check_nodes, check_same_kind
from kfs.basics.flattening import Vec, matricize, rvec
from kfs.basics.hessians import vec_hessian
from kfs.basics.jacobians import vec_jacobian


def ggn(c: Tensor, b: Tensor, a1: Tensor, a2: Tensor | None = None) -> Tensor:
    """Compute the GGN tensor of `a -> b -> c` with respect to `a1` and `a2`.

    Args:
        c: A scalar node of a computation graph.
        b: The node that splits the computation: `c` was computed from it.
        a1: A node that `b` was computed from; it indexes rows.
        a2: Another one; it indexes columns. `a1` by default.

    Returns:
        A tensor of shape `[*a1.shape, *a2.shape]`.

    Raises:
        GraphError: If `c` was not computed from `b`, or `b` not from `a1` and `a2`. The
            paper has another order.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> b = a**2
        >>> ggn((b**2).sum(), b, a)
        tensor([[ 8.,  0.],
                [ 0., 32.]])
    """
    a2 = a1 if a2 is None else a2
    here = "ggn(loss, output, p) or ggn(loss, output, p1, p2)"
    check_order("ggn(loss, p, output)", here, b, a1)
    check_nodes(a1=a1, a2=a2, b=b)
    check_same_kind("a1", a1, "b", b)
    check_same_kind("a2", a2, "b", b)
    H = vec_hessian(c, b)
    J1 = vec_jacobian(b, a1)
    J2 = J1 if a2 is a1 else vec_jacobian(b, a2)
    return (J1.T @ H @ J2).reshape((*a1.shape, *a2.shape))


def vec_ggn(
    c: Tensor, b: Tensor, a1: Tensor, a2: Tensor | None = None, vec: Vec = rvec
) -> Tensor:
    """Compute the GGN matrix of `a -> b -> c` with respect to flattened `a1` and `a2`.

    Args:
        c: A scalar node of a computation graph.
        b: The node that splits the computation: `c` was computed from it.
        a1: A node that `b` was computed from; it indexes rows.
        a2: Another one; it indexes columns. `a1` by default.
        vec: The flattening of both, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[a1.numel(), a2.numel()]`.

    Raises:
        DtypeError: If a flattening is passed as `a2`, as in the paper's order.
    """
    check_no_vec(a2)
    return matricize(ggn(c, b, a1, a2), a1.ndim, vec)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh
    from torch.nn.functional import linear

    from kfs.basics.flattening import cvec
    from kfs.basics.ggn_product import mixed_ggnvp
    from kfs.basics.hessians import hessian
    from kfs.basics.jacobian_products import vjp
    from kfs.basics.linearization import linearize
    from kfs.basics.reduction_factors import criterion, reduction_factor
    from kfs.verification import verify, verify_psd

    torch.manual_seed(0)
    N = 4
    first, last = Linear(3, 3), Linear(3, 2)
    model = Sequential(first, Tanh(), last).double()
    X, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N,))
    loss = CrossEntropyLoss()
    W, b = first.weight, first.bias

    predictions = model(X)
    risk = loss(predictions, y)
    G = ggn(risk, predictions, W)

    gradient = vjp(risk, predictions, torch.ones_like(risk))
    ignored = hessian(
        (gradient * predictions).sum(), W
    )  # the gradient is a constant here
    verify(
        "Hessian = GGN + gradient-weighted curvature of the net",
        hessian(risk, W),
        G + ignored,
    )
    tangent = linearize(lambda W: last(torch.tanh(linear(X, W, b))), W.detach())
    A = W.detach().clone().requires_grad_()
    verify(
        "linearize the net first, and the Hessian is the GGN",
        hessian(loss(tangent(A), y), A),
        G,
    )

    V = torch.randn_like(W)
    verify(
        "the GGN tensor acts as the GGN product",
        torch.tensordot(G, V),
        mixed_ggnvp(risk, predictions, W, W, V),
    )
    mixed, v = ggn(risk, predictions, W, b), torch.randn_like(b)
    verify(
        "so does an off-diagonal block",
        mixed @ v,
        mixed_ggnvp(risk, predictions, W, b, v),
    )

    c, R = criterion(loss), reduction_factor(loss, y)
    for vec in (cvec, rvec):
        total = torch.zeros(9, 9, dtype=torch.float64)
        for x_n, y_n in zip(X, y, strict=True):
            f_n = model(x_n)
            J_n, H_n = vec_jacobian(f_n, W, vec), vec_hessian(c(f_n, y_n), f_n)
            total += J_n.T @ H_n @ J_n
        matrix = vec_ggn(risk, predictions, W, vec=vec)
        verify(
            "the GGN of the risk is R times the sum over the data",
            matrix,
            R * total,
            case=vec.__name__,
        )
        verify_psd("the GGN has no negative eigenvalue", matrix, case=vec.__name__)
