r"""Linearization: replace a function by its tangent.

The first-order Taylor expansion of a tensor-to-tensor function $f$ at an anchor $A_0$
is

$$
\mathrm{lin}_{A_0}(f)(A) = f(A_0)
  + \sum_{j} \frac{\partial f(A_0)}{\partial [A_0]_{j}} [A - A_0]_{j},
$$

the value at the anchor plus a Jacobian-vector product with the distance to the anchor.
At the anchor it has the same value *and the same Jacobian* as $f$, but it is affine in
$A$, so its second derivative is zero.

This is how a non-convex composition becomes convex: in $g(h(A))$ with convex $g$,
linearize $h$ only. What remains is a convex function whose Hessian at the anchor is the
generalized Gauss-Newton matrix.

Implements: linearization, vector and tensor case (chapter 2, "Partial Linearization,
GGNs, GGNVPs").
"""

from collections.abc import Callable

from torch import Tensor, enable_grad

from kfs.basics._checks import check_floating, check_like, check_node
from kfs.basics.jacobian_products import jvp


def linearize(
    f: Callable[[Tensor], Tensor], anchor: Tensor
) -> Callable[[Tensor], Tensor]:
    """Linearize a function at an anchor.

    Args:
        f: A differentiable function of one tensor that returns a tensor.
        anchor: The point of linearization, a tensor of any shape.

    Returns:
        The affine function `a -> f(anchor) + J (a - anchor)`, with the Jacobian `J` of
        `f` at the anchor. It can be differentiated with respect to its argument.

    Raises:
        GraphError: If the value of `f` does not depend on its argument.

    Example:
        >>> import torch
        >>> tangent = linearize(lambda x: x**2, torch.tensor(3.0))
        >>> tangent(torch.tensor(4.0))
        tensor(15.)
    """
    check_floating("anchor", anchor)
    with enable_grad():
        a0 = anchor.detach().clone().requires_grad_()
        b0 = f(a0)
    check_node("The function's value", b0)

    def linearized(a: Tensor) -> Tensor:
        check_like("a", a, "anchor", a0)
        return b0.detach() + jvp(b0, a0, a - a0.detach())

    return linearized


if __name__ == "__main__":
    import torch

    from kfs.basics.hessians import hessian
    from kfs.basics.jacobians import jacobian
    from kfs.verification import verify, verify_at_most

    torch.manual_seed(0)
    M = torch.randn(4, 3, dtype=torch.float64)
    anchor = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def f(a: Tensor) -> Tensor:
        """Map a matrix to a matrix, not linearly."""
        return torch.tanh(M @ a)

    f_lin = linearize(f, anchor)
    verify("at the anchor, the values agree", f_lin(anchor), f(anchor))
    verify(
        "at the anchor, the Jacobians agree",
        jacobian(f_lin(anchor), anchor),
        jacobian(f(anchor), anchor),
    )

    far = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    verify(
        "the Jacobian is the same everywhere",
        jacobian(f_lin(far), far),
        jacobian(f(anchor), anchor),
    )
    verify(
        "the second derivative is zero",
        hessian(f_lin(far).sum(), far),
        torch.zeros(3, 2, 3, 2),
    )

    step = torch.randn(3, 2, dtype=torch.float64)
    errors = [
        (f(anchor + t * step) - f_lin(anchor + t * step)).norm().item()
        for t in (1e-3, 5e-4)
    ]
    # The remainder is a t^2 + O(t^3): halving t divides it by 4, up to a relative O(t).
    verify_at_most(
        "halving the distance quarters the error",
        abs(errors[0] / errors[1] - 4),
        tolerance=0.01,
    )
