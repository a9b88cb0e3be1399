r"""Jacobian products: multiply with derivatives that are never formed.

A function from a tensor $A$ to a tensor $B$ has one partial derivative per pair of
entries. This *Jacobian* is usually too large to store, but automatic differentiation
multiplies with it at about the cost of evaluating the function. A tensor $V$ shaped
like $B$ is pulled back, a **vector-Jacobian product**; a tensor $V$ shaped like $A$ is
pushed forward, a **Jacobian-vector product**:

$$
\mathrm{vjp}(V)_{j} = \sum_{i} V_{i} \frac{\partial B_{i}}{\partial A_{j}}
\qquad\qquad
\mathrm{jvp}(V)_{i} = \sum_{j} \frac{\partial B_{i}}{\partial A_{j}} V_{j}
$$

with $i$ and $j$ running over all index tuples of $B$ and $A$. For vectors these are
$J^\top v$ and $J v$.

Both functions take tensors of an *already evaluated* graph, not a function to be
traced. Backpropagation is a VJP, so `vjp` is one call of `torch.autograd.grad` (`grad`
is that function with errors that explain). `jvp` uses a trick (Townsend, 2017): the VJP
$u(w) = J^\top w$ is linear in $w$, therefore its own VJP with respect to $w$ is
multiplication with $(J^\top)^\top = J$.

Implements: VJPs and JVPs (chapter 2, "Jacobians, JVP, VJPs").
"""

from torch import Tensor, ones_like

from kfs.basics._autograd import connected, grad, zero_jvp
from kfs.basics._checks import check_like, check_nodes


def vjp(b: Tensor, a: Tensor, v: Tensor, create_graph: bool = False) -> Tensor:
    """Multiply the Jacobian of `b` with respect to `a` from the left: `v^T J`.

    The graph is kept, so that more derivatives can be taken.

    Args:
        b: A node of a computation graph.
        a: A node that `b` was computed from.
        v: A tensor like `b`.
        create_graph: Whether the result can be differentiated further.

    Returns:
        A tensor like `a`.

    Raises:
        GraphError: If `b` was not computed from `a`.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> vjp(a**2, a, torch.tensor([1.0, 10.0]))
        tensor([ 2., 40.])
    """
    check_nodes(b=b, a=a)
    check_like("v", v, "b", b)
    return connected(grad(b, a, v, create_graph), "b", "a")


def jvp(b: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """Multiply the Jacobian of `b` with respect to `a` with a tensor: `J v`.

    The graph is kept. The result can be differentiated with respect to `v` if `v`
    requires gradients.

    Args:
        b: A node of a computation graph.
        a: A node that `b` was computed from.
        v: A tensor like `a`.

    Returns:
        A tensor like `b`.

    Raises:
        GraphError: If `b` was not computed from `a`.

    Example:
        >>> import torch
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> jvp(a.prod(), a, torch.tensor([1.0, 10.0]))
        tensor(12.)
    """
    check_nodes(b=b, a=a)
    check_like("v", v, "a", a)
    # Any w will do; some backward passes have a pole at zero.
    w = ones_like(b, requires_grad=True)
    u = vjp(b, a, w, create_graph=True)
    product = grad(u, w, v, create_graph=v.requires_grad)
    return zero_jvp(b, a) if product is None else product


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    torch.manual_seed(0)
    A = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    M = torch.randn(4, 3, dtype=torch.float64)
    B = torch.tanh(M @ A)  # a matrix-to-matrix function

    # Independent route: the Jacobian's entries, written down by hand,
    # dB_ik/dA_jl = (1 - B_ik^2) M_ij delta_kl.
    J = torch.einsum(
        "ik,ij,kl->ikjl", 1 - B.detach() ** 2, M, torch.eye(2, dtype=torch.float64)
    )

    V = torch.randn_like(B)
    verify(
        "VJP contracts the Jacobian's output indices",
        vjp(B, A, V),
        torch.einsum("ik,ikjl->jl", V, J),
    )
    U = torch.randn_like(A)
    verify(
        "JVP contracts the Jacobian's input indices",
        jvp(B, A, U),
        torch.einsum("ikjl,jl->ik", J, U),
    )
    verify(
        "VJP and JVP are transposes: <V, JU> = <J^T V, U>",
        (V * jvp(B, A, U)).sum(),
        (vjp(B, A, V) * U).sum(),
    )
