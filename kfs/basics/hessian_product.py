r"""Hessian products: multiply with second derivatives that are never formed.

The Hessian of a scalar $c$ with respect to a tensor $A$ has two sets of indices of $A$. Multiplying it with a
tensor $V$ shaped like $A$ contracts one of them,

$$
\mathrm{hvp}(V)_{i} = \sum_{j} \frac{\partial^2 c}{\partial A_{i} \partial A_{j}} V_{j}
                    = \frac{\partial}{\partial A_{i}} \Big( \sum_{j} \frac{\partial c}{\partial A_{j}} V_{j} \Big).
$$

The right-hand side (Pearlmutter, 1994) needs first derivatives only: take the gradient, then its VJP with $V$. Two
backward passes, no matrix. Nothing requires both derivatives to be with respect to the *same* tensor. With
two, $A_1$ for the rows and $A_2$ for the columns, we get the off-diagonal blocks of a network's Hessian. The two must
be independent variables: neither may be computed from the other.

All of this needs backward passes that can be differentiated themselves. A custom `autograd.Function` with a backward
pass that hides its dependence on the input (by detaching it) looks like a function without curvature.

Implements: Hessian-vector products (chapter 2, "Hessians, HVPs").
"""

from torch import Tensor, ones_like, zeros_like

from kfs.basics._checks import check_like, check_node, check_scalar
from kfs.basics.jacobian_products import no_path, pull_back
from kfs.errors import GraphError


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
    """Multiply the mixed Hessian of `c`, rows from `a1` and columns from `a2`, with a tensor.

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
    check_node("c", c)
    check_scalar("c", c)
    check_node("a1", a1)
    check_node("a2", a2)
    check_like("v", v, "a2", a2)
    if a1 is not a2 and (_depends(a1, a2) or _depends(a2, a1)):
        raise GraphError(
            "One of a1 and a2 was computed from the other, so they cannot be varied independently.",
            "Choose two tensors of which neither enters the computation of the other.",
        )
    gradient = pull_back(c, a2, ones_like(c), create_graph=True)
    if gradient is None:
        raise no_path("c", "a2")
    product = pull_back(gradient, a1, v, create_graph=False)
    if product is None:  # the gradient does not change with a1; make sure that c does
        if not _depends(c, a1):
            raise no_path("c", "a1")
        return zeros_like(a1)
    return product


def _depends(b: Tensor, a: Tensor) -> bool:
    """Return whether `b` was computed from `a`."""
    return not b.is_leaf and pull_back(b, a, ones_like(b), create_graph=False) is not None


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    torch.manual_seed(0)
    x, y = torch.randn(2, 4, dtype=torch.float64).requires_grad_().unbind()
    Q = torch.randn(4, 4, dtype=torch.float64)
    c = (x**3).sum() + x @ Q @ y  # Hessian: diag(6x) for (x, x), Q for (x, y), 0 for (y, y)
    v = torch.randn(4, dtype=torch.float64)

    verify("HVP multiplies with the Hessian", hvp(c, x, v), 6 * x * v)
    verify("the Hessian with respect to a linear argument is zero", hvp(c, y, v), torch.zeros(4))
    verify("mixed HVP multiplies with an off-diagonal block", mixed_hvp(c, x, y, v), Q @ v)
    verify("and with its transpose when rows and columns swap", mixed_hvp(c, y, x, v), Q.T @ v)
