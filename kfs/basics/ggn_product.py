r"""Gauss-Newton products: multiply with the GGN without forming it.

For a composition $A \mapsto B \mapsto c$ the generalized Gauss-Newton matrix is the
Hessian of $c$ with respect to $B$, pulled back to $A$ by the Jacobian of $B$.
Multiplication with it is therefore three products that we already have (Schraudolph,
2002),

$$
\mathrm{ggnvp}(v) =
  \underbrace{(\mathrm{J}_A B)^\top \Big(
  \overbrace{(\mathrm{H}_B c)
    \big( \underbrace{(\mathrm{J}_A B)\, v}_{\mathrm{JVP}} \big)}^{\mathrm{HVP}}
  \Big)}_{\mathrm{VJP}} .
$$

With two tensors, $A_1$ for the rows and $A_2$ for the columns, the first factor uses
$A_1$ and the last one $A_2$. These are the off-diagonal blocks of a network's GGN.

Implements: GGN-vector products (chapter 2, "Partial Linearization, GGNs, GGNVPs").
"""

from torch import Tensor

from kfs.basics._autograd import check_order
from kfs.basics.hessian_product import hvp
from kfs.basics.jacobian_products import jvp, vjp


def ggnvp(c: Tensor, b: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """Multiply the GGN of `a -> b -> c` with a tensor.

    Args:
        c: A scalar node of a computation graph.
        b: The node that splits the computation: `c` was computed from it.
        a: A node that `b` was computed from.
        v: A tensor like `a`.

    Returns:
        A tensor like `a`.

    Raises:
        GraphError: If `c` was not computed from `b`, or `b` not from `a`. The paper has
            another order.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> b = a**2
        >>> ggnvp((b**2).sum(), b, a, torch.tensor([1.0, 1.0]))
        tensor([ 8., 32.])
    """
    here = "ggnvp(loss, output, p, v) or mixed_ggnvp(loss, output, p1, p2, v)"
    check_order("ggnvp(loss, p, output, v)", here, b, a)
    return mixed_ggnvp(c, b, a, a, v)


def mixed_ggnvp(c: Tensor, b: Tensor, a1: Tensor, a2: Tensor, v: Tensor) -> Tensor:
    """Multiply the mixed GGN, rows from `a1` and columns from `a2`, with a tensor.

    Args:
        c: A scalar node of a computation graph.
        b: The node that splits the computation: `c` was computed from it.
        a1: A node that `b` was computed from.
        a2: Another one, or the same.
        v: A tensor like `a2`.

    Returns:
        A tensor like `a1`.

    Raises:
        GraphError: If `c` was not computed from `b`, or `b` not from `a1` and `a2`.
    """
    return vjp(b, a1, hvp(c, b, jvp(b, a2, v)))


if __name__ == "__main__":
    import torch

    from kfs.basics.hessians import hessian
    from kfs.basics.linearization import linearize
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    M = torch.randn(4, 3, dtype=torch.float64)
    a = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(3, 2, dtype=torch.float64)

    def inner(a: Tensor) -> Tensor:
        """Map a matrix to a matrix, not linearly."""
        return torch.tanh(M @ a)

    def outer(b: Tensor) -> Tensor:
        """Map a matrix to a scalar, convexly."""
        return b.logsumexp(0).sum()

    b = inner(a)
    c = outer(b)

    linear = linearize(inner, a)
    G = hessian(
        outer(linear(a)), a
    )  # the definition: the Hessian of the partially linearized function
    verify(
        "GGNVP multiplies with the linearized function's Hessian",
        ggnvp(c, b, a, v),
        torch.tensordot(G, v),
    )
    verify_differs(
        "it does not multiply with the Hessian",
        ggnvp(c, b, a, v),
        torch.tensordot(hessian(c, a), v),
    )

    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    b = torch.tanh(M @ a) * (M @ w).unsqueeze(1)
    c = outer(b)
    u = torch.randn(3, dtype=torch.float64)
    one, other = (
        (mixed_ggnvp(c, b, a, w, u) * v).sum(),
        (mixed_ggnvp(c, b, w, a, v) * u).sum(),
    )
    verify("off-diagonal blocks are transposes of each other", one, other)
