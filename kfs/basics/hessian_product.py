r"""Hessian products: multiply with second derivatives that are never formed.

The Hessian of a scalar $c$ with respect to a tensor $A$ has two sets of indices of $A$.
Multiplying it with a tensor $V$ shaped like $A$ contracts one of them,

$$
\mathrm{hvp}(V)_{i} = \sum_{j} \frac{\partial^2 c}{\partial A_{i} \partial A_{j}} V_{j}
                    = \frac{\partial}{\partial A_{i}}
  \Big( \sum_{j} \frac{\partial c}{\partial A_{j}} V_{j} \Big).
$$

The right-hand side (Pearlmutter, 1994) needs first derivatives only: take the gradient,
then its VJP with $V$. Two backward passes, no matrix. Nothing requires both derivatives
to be with respect to the *same* tensor. With two, $A_1$ for the rows and $A_2$ for the
columns, we get the off-diagonal blocks of a network's Hessian. The two must be
independent variables: neither may be computed from the other.

All of this needs backward passes that can be differentiated themselves. A custom
`autograd.Function` with a backward pass that hides its dependence on the input (by
detaching it) looks like a function without curvature.

Implements: Hessian-vector products (chapter 2, "Hessians, HVPs").
"""

from torch import Tensor, ones_like

from kfs.basics._autograd import check_independent, connected, grad, zero_hvp
from kfs.basics._checks import check_like, check_nodes, check_scalar


def hvp(c: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """Multiply the Hessian of `c` with respect to `a` with a tensor.

    Args:
        c: A scalar node of a computation graph.
        a: A node that `c` was computed from.
        v: A tensor like `a`.

    Returns:
        A tensor like `a`.

    Raises:
        GraphError: If `c` was not computed from `a`.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hvp((a**3).sum(), a, torch.tensor([1.0, 10.0]))
        tensor([  6., 120.])
    """
    return mixed_hvp(c, a, a, v)


def mixed_hvp(c: Tensor, a1: Tensor, a2: Tensor, v: Tensor) -> Tensor:
    """Multiply the mixed Hessian of `c`, rows from `a1`, columns from `a2`.

    Args:
        c: A scalar node of a computation graph.
        a1: A node that `c` was computed from.
        a2: Another one, or the same.
        v: A tensor like `a2`.

    Returns:
        A tensor like `a1`.

    Raises:
        GraphError: If `c` was not computed from `a1` and `a2`.
    """
    check_nodes(c=c, a1=a1, a2=a2)
    check_scalar("c", c)
    check_like("v", v, "a2", a2)
    check_independent(a1, a2)
    gradient = connected(grad(c, a2, ones_like(c), create_graph=True), "c", "a2")
    product = grad(gradient, a1, v)
    return zero_hvp(c, a1) if product is None else product


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    torch.manual_seed(0)
    x, y = torch.randn(2, 4, dtype=torch.float64).requires_grad_().unbind()
    Q = torch.randn(4, 4, dtype=torch.float64)
    c = (
        x**3
    ).sum() + x @ Q @ y  # Hessian: diag(6x) for (x, x), Q for (x, y), 0 for (y, y)
    v = torch.randn(4, dtype=torch.float64)

    verify("HVP multiplies with the Hessian", hvp(c, x, v), 6 * x * v)
    verify(
        "the Hessian with respect to a linear argument is zero",
        hvp(c, y, v),
        torch.zeros(4),
    )
    verify(
        "mixed HVP multiplies with an off-diagonal block", mixed_hvp(c, x, y, v), Q @ v
    )
    verify(
        "and with its transpose when rows and columns swap",
        mixed_hvp(c, y, x, v),
        Q.T @ v,
    )
