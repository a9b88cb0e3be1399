r"""The Gauss-Newton matrix of the Rosenbrock function, by hand.

The banana-shaped valley $f(x) = (1 - x_1)^2 + \alpha (x_2 - x_1^2)^2$ is a convex
function of a non-convex one,

$$
f = g \circ h, \qquad
g(h) = h^\top h, \qquad
h(x) = \begin{pmatrix} 1 - x_1 \\ \sqrt{\alpha}\,(x_2 - x_1^2) \end{pmatrix},
$$

where the inner function has the Jacobian

$$
\mathrm{J}_x h = \begin{pmatrix}
  -1 & 0 \\
  -2 \sqrt{\alpha}\, x_1 & \sqrt{\alpha}
\end{pmatrix}.
$$

**Linearize, then differentiate.** With $h$ replaced by its tangent at $\hat{x}$ the
function becomes a convex quadratic,

$$
\bar{f}(x) = 1 - 2 x_1 + x_1^2
  + \alpha \big[ \hat{x}_1^4 - 4 \hat{x}_1^3 x_1 + 4 \hat{x}_1^2 x_1^2
  + 2 \hat{x}_1^2 x_2 - 4 \hat{x}_1 x_1 x_2 + x_2^2 \big],
$$

and its Hessian is the generalized Gauss-Newton matrix

$$
\mathrm{G}
  = 2 \begin{pmatrix}
    1 + 4 \alpha \hat{x}_1^2 & -2 \alpha \hat{x}_1 \\
    -2 \alpha \hat{x}_1 & \alpha
  \end{pmatrix}.
$$

**Differentiate, then linearize.** Dropping the second derivative of $h$ from the chain
rule leaves
$(\mathrm{J}_x h)^\top (\mathrm{H}_h g)\, \mathrm{J}_x h
= 2\, (\mathrm{J}_x h)^\top \mathrm{J}_x h$,
the same matrix. It is positive semi-definite everywhere. The full Hessian is not,

$$
\mathrm{H}
  = 2 \begin{pmatrix}
    1 + 6 \alpha x_1^2 - 2 \alpha x_2 & -2 \alpha x_1 \\
    -2 \alpha x_1 & \alpha
  \end{pmatrix}.
$$

Implements: GGN for the Rosenbrock function (chapter 2, "Partial Linearization, GGNs,
GGNVPs"). The paper's expansion of the linearized function has two slips: its constant
is $\alpha \hat{x}_1^4$, not twice that, and the term $2 \hat{x}_1^2 x_2$ has a plus
sign.
"""

from math import sqrt

from torch import Tensor, full_like, stack

from kfs.errors import ShapeError


def rosenbrock_inner(x: Tensor, alpha: float) -> Tensor:
    """Evaluate the non-convex inner function `h`. Shape `[2]` in, shape `[2]` out."""
    x1, x2 = _coordinates(x, alpha)
    return stack([1 - x1, sqrt(alpha) * (x2 - x1**2)])


def rosenbrock_outer(h: Tensor) -> Tensor:
    """Evaluate the convex outer function `g`. Shape `[2]` in, a scalar out."""
    return h @ h


def linearized_rosenbrock(x: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Evaluate the Rosenbrock function, partially linearized: a convex quadratic.

    Args:
        x: Where to evaluate it, shape `[2]`.
        anchor: Where the inner function is linearized, shape `[2]`.
        alpha: The valley's steepness.

    Returns:
        A scalar.
    """
    x1, x2 = _coordinates(x, alpha)
    a1, _ = _coordinates(anchor, alpha)
    inside = (
        a1**4
        - 4 * a1**3 * x1
        + 4 * a1**2 * x1**2
        + 2 * a1**2 * x2
        - 4 * a1 * x1 * x2
        + x2**2
    )
    return 1 - 2 * x1 + x1**2 + alpha * inside


def rosenbrock_ggn(x: Tensor, alpha: float) -> Tensor:
    """Return the Gauss-Newton matrix in closed form. Shape `[2]` in, `[2, 2]` out."""
    x1, _ = _coordinates(x.detach(), alpha)
    first, corner = 1 + 4 * alpha * x1**2, -2 * alpha * x1
    last = full_like(x1, alpha)
    return 2 * stack([first, corner, corner, last]).reshape(2, 2)


def rosenbrock_hessian(x: Tensor, alpha: float) -> Tensor:
    """Return the Hessian in closed form. Shape `[2]` in, `[2, 2]` out."""
    x1, x2 = _coordinates(x.detach(), alpha)
    first, corner = 1 + 6 * alpha * x1**2 - 2 * alpha * x2, -2 * alpha * x1
    last = full_like(x1, alpha)
    return 2 * stack([first, corner, corner, last]).reshape(2, 2)


def _coordinates(x: Tensor, alpha: float) -> tuple[Tensor, ...]:
    """Return both coordinates of a point; raise an error if it is invalid."""
    if x.shape != (2,) or alpha <= 0:
        raise ShapeError(
            f"The point has shape {list(x.shape)} and alpha is {alpha}.",
            "Pass a point of shape [2] and alpha > 0.",
        )
    return x.unbind()


if __name__ == "__main__":
    import torch

    from kfs.basics.hessians import hessian
    from kfs.basics.jacobians import jacobian
    from kfs.basics.linearization import linearize
    from kfs.verification import verify, verify_differs, verify_psd, verify_that

    alpha = 10.0
    anchor = torch.tensor([-0.5, 1.5], dtype=torch.float64, requires_grad=True)
    h_lin = linearize(lambda x: rosenbrock_inner(x, alpha), anchor)

    torch.manual_seed(0)
    x = torch.randn(2, dtype=torch.float64, requires_grad=True)
    f_lin = rosenbrock_outer(h_lin(x))
    verify(
        "the partially linearized function is the stated quadratic",
        linearized_rosenbrock(x, anchor, alpha),
        f_lin,
    )
    verify(
        "linearize, then differentiate: its Hessian is G",
        hessian(f_lin, x),
        rosenbrock_ggn(anchor, alpha),
    )

    h = rosenbrock_inner(anchor, alpha)
    f = rosenbrock_outer(h)
    J, H_outer = jacobian(h, anchor), hessian(f, h)
    verify(
        "differentiate, then linearize: J^T H J is G",
        J.T @ H_outer @ J,
        rosenbrock_ggn(anchor, alpha),
    )

    verify(
        "the Hessian has the stated closed form",
        hessian(f, anchor),
        rosenbrock_hessian(anchor, alpha),
    )
    verify_differs(
        "Hessian and Gauss-Newton matrix differ",
        hessian(f, anchor),
        rosenbrock_ggn(anchor, alpha),
    )
    negative = torch.linalg.eigvalsh(rosenbrock_hessian(anchor, alpha)).min().item()
    verify_that("here the Hessian has a negative eigenvalue", negative < -1)
    verify_psd("the Gauss-Newton matrix has none", rosenbrock_ggn(anchor, alpha))
