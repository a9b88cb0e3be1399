r"""Kronecker algebra: compute with two small matrices in place of a large one.

The Kronecker product of $A \in \mathbb{R}^{n_1 \times n_2}$ and
$B \in \mathbb{R}^{m_1 \times m_2}$ has a copy of $B$ for every entry of $A$,

$$
A \otimes B = \begin{pmatrix}
  a_{1,1} B & \dots & a_{1,n_2} B \\
  \vdots & \ddots & \vdots \\
  a_{n_1,1} B & \dots & a_{n_1,n_2} B
\end{pmatrix} \in \mathbb{R}^{n_1 m_1 \times n_2 m_2}.
$$

It is never formed. To store $A$ and $B$ takes $n_1 n_2 + m_1 m_2$ numbers, not their
product, and most operations act on the *factors*,

$$
\begin{aligned}
(A \otimes B)^\top &= A^\top \otimes B^\top \\
(A \otimes B)^{-1} &= A^{-1} \otimes B^{-1} \\
(A \otimes B)(C \otimes D) &= A C \otimes B D.
\end{aligned}
$$

To multiply with a vector, unflatten it. Either flattening can be used, each with its
own matrix $V$, and the result is the same,

$$
(A \otimes B)\, v = \mathrm{cvec}(B V A^\top),
\qquad V = \mathrm{cvec}^{-1}(v) \in \mathbb{R}^{m_2 \times n_2},
$$

$$
(A \otimes B)\, v = \mathrm{rvec}(A V B^\top),
\qquad V = \mathrm{rvec}^{-1}(v) \in \mathbb{R}^{n_2 \times m_2}.
$$

A weight that is flattened by cvec is therefore multiplied by $B V A^\top$, one that is
flattened by rvec by $A V B^\top$: this is why the order of KFAC's factors depends on
the flattening. A *sum* of Kronecker products is in general not a Kronecker product, and
neither is its inverse.

Implements: Kronecker products, their products with vectors and with each other,
transpose and inverse (chapter 4, "Kronecker Products Are Computationally Efficient").
The paper states both shapes of $V$ the other way round.
"""

from torch import Tensor, cat, linalg

from kfs.basics._checks import check_length, check_matrices, check_product, check_square
from kfs.basics.flattening import (
    Vec,
    check_vec,
    cvec,
    rvec,
    unflatten_cvec,
    unflatten_rvec,
)


def kronecker_product(A: Tensor, B: Tensor) -> Tensor:
    """Form a Kronecker product, block by block. This is what `torch.kron` returns.

    Args:
        A: A matrix, shape `[n1, n2]`.
        B: A matrix, shape `[m1, m2]`.

    Returns:
        A matrix of shape `[n1 * m1, n2 * m2]`.

    Raises:
        ShapeError: If one of the two is no matrix.

    Example:
        >>> import torch
        >>> kronecker_product(torch.eye(2), torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0., 0.],
                [0., 0., 1., 2.]])
    """
    check_matrices(A=A, B=B)
    return cat([cat([a_ij * B for a_ij in a_i], dim=1) for a_i in A], dim=0)


def kronecker_vp(A: Tensor, B: Tensor, v: Tensor, vec: Vec = rvec) -> Tensor:
    """Multiply a Kronecker product with a vector, without forming it.

    Args:
        A: A matrix, shape `[n1, n2]`.
        B: A matrix, shape `[m1, m2]`.
        v: A vector, shape `[n2 * m2]`.
        vec: The flattening that is used, `cvec` or `rvec`. The result is the same.

    Returns:
        A vector, shape `[n1 * m1]`.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    vec = check_vec(vec)
    check_matrices(A=A, B=B)
    n2, m2 = A.shape[1], B.shape[1]
    check_length("v", v, n2 * m2, "the Kronecker product")
    if vec is cvec:
        return cvec(B @ unflatten_cvec(v, (m2, n2)) @ A.T)
    return rvec(A @ unflatten_rvec(v, (n2, m2)) @ B.T)


def kronecker_transpose(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the transpose of a Kronecker product."""
    check_matrices(A=A, B=B)
    return A.T, B.T


def kronecker_inverse(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the inverse of a Kronecker product.

    Args:
        A: An invertible matrix, shape `[n, n]`.
        B: An invertible matrix, shape `[m, m]`.

    Returns:
        The factors. Their Kronecker product is the inverse.

    Raises:
        ShapeError: If one of the two is not square.
        torch.linalg.LinAlgError: If one of the two is singular.
    """
    check_square("A", A)
    check_square("B", B)
    return linalg.inv(A), linalg.inv(B)


def kronecker_matmul(
    A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the factors of the product of two Kronecker products.

    Args:
        A: First factor on the left, shape `[n1, n2]`.
        B: Second factor on the left, shape `[m1, m2]`.
        C: First factor on the right, shape `[n2, d1]`.
        D: Second factor on the right, shape `[m2, d2]`.

    Returns:
        The factors, shapes `[n1, d1]` and `[m1, d2]`.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    check_matrices(A=A, B=B, C=C, D=D)
    check_product(A=A, C=C)
    check_product(B=B, D=D)
    return A @ C, B @ D


if __name__ == "__main__":
    import torch

    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    (n1, n2), (m1, m2) = (2, 3), (4, 5)
    A = torch.randn(n1, n2, dtype=torch.float64)
    B = torch.randn(m1, m2, dtype=torch.float64)
    K = kronecker_product(A, B)
    verify("blocks are entries of A times B", K, torch.kron(A, B))

    v = torch.randn(n2 * m2, dtype=torch.float64)
    for vec in (cvec, rvec):
        product = kronecker_vp(A, B, v, vec)
        verify("factors multiply a vector", product, K @ v, case=vec.__name__)

    transposed = kronecker_product(*kronecker_transpose(A, B))
    verify("transpose both factors", transposed, K.T)

    C = torch.randn(n2, 2, dtype=torch.float64)
    D = torch.randn(m2, 6, dtype=torch.float64)
    multiplied = kronecker_product(*kronecker_matmul(A, B, C, D))
    verify("multiply the factors", multiplied, K @ kronecker_product(C, D))

    A, B = A @ A.T, B @ B.T
    K, identity = kronecker_product(A, B), torch.eye(n1 * m1, dtype=torch.float64)
    inverse = kronecker_product(*kronecker_inverse(A, B))
    # The condition number of K multiplies round-off.
    tolerance = 1e-15 * torch.linalg.cond(K).item()
    verify("invert both factors", inverse @ K, identity, tolerance)

    damped = torch.linalg.inv(K + identity)
    factors = kronecker_inverse(A + torch.eye(n1), B + torch.eye(m1))
    one_by_one = kronecker_product(*factors)
    verify_differs("but not if the identity is added to each", damped, one_by_one)
