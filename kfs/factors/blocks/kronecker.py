r"""Kronecker products $B \otimes A$, and operations on them that do not form them.

A block maps a matrix $M$ to $B M A^\top$; with `rvec`, by rows, this is a product with $B \otimes A$. Then

$$
\begin{aligned}
(B \otimes A)^\top &= B^\top \otimes A^\top &
(B_1 \otimes A_1)(B_2 \otimes A_2) &= B_1 B_2 \otimes A_1 A_2 \\
(B \otimes A)^{-1} &= B^{-1} \otimes A^{-1} &
(B \otimes A)^p &= B^p \otimes A^p \\
\mathrm{tr}(B \otimes A) &= \mathrm{tr}(B)\, \mathrm{tr}(A) &
\log\det(B \otimes A) &= d_A \log\det B + d_B \log\det A \\
\|B \otimes A\|_F &= \|B\|_F\, \|A\|_F &
\mathrm{eig}(B \otimes A) &= \{\lambda_B \lambda_A\}
\end{aligned}
$$

If $B = Q_B \Lambda_B Q_B^\top$ and $A = Q_A \Lambda_A Q_A^\top$, then the eigenvectors of $B \otimes A$ are the columns
of $Q_B \otimes Q_A$. This also gives functions of $B \otimes A + \delta I$, which is not a Kronecker product: see
`eigenbasis`. The sum of two Kronecker products that share a factor is a Kronecker product; for other sums, see
`kronecker_sum`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kfs.factors.blocks import decompositions
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor, kronecker_product
from kfs.factors.blocks.structure import Structure
from kfs.runtime.sync import side_by_side


@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Structure):
    """Blocks that are Kronecker products of two dense, diagonal or identity factors.

    Attributes:
        A: Input-based factors.
        B: Gradient-based factors.
    """

    A: Factor
    B: Factor
    field_shapes: ClassVar = {"A": ("columns",), "B": ("rows",)}

    @property
    def rows(self) -> int:  # type: ignore[override]
        """`d_B`."""
        return self.B.size

    @property
    def columns(self) -> int:  # type: ignore[override]
        """`d_A`."""
        return self.A.size

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether both factors are symmetric."""
        return self.A.symmetric and self.B.symmetric

    @property
    def like(self) -> Tensor:
        """The scales."""
        return self.A.scale

    def multiply(self, M: Tensor) -> Tensor:
        """Return `B M A^T`. Scales are applied last, to the small result instead of large factors."""
        scale = self.A.scale * self.B.scale
        # Plain matrix products are faster than batched ones with a batch of one.
        if M.shape[:2] == (1, 1) and self.A.kind == self.B.kind == "dense":
            product = self.B.values[0] @ M[0, 0] @ self.A.values[0].T
            return product.mul_(scale)[None, None]
        return self.B.left(self.A.right(M)) * scale.reshape(-1, 1, 1, 1)

    def transposed(self) -> "Kronecker":
        """Return the transposes: transposes of both factors."""
        return Kronecker(self.A.T, self.B.T)

    def scaled(self, factor: float) -> "Kronecker":
        """Return the blocks multiplied by a number."""
        return Kronecker(self.A.scaled(factor), self.B)

    def eigenbasis(self) -> Eigenbasis:
        """Return eigenvalues and eigenvectors, from those of both factors."""
        a, Q_A = self.A.eigh()
        b, Q_B = self.B.eigh()
        values = b.unsqueeze(2) * a.unsqueeze(1)
        # Round-off in an eigenvalue of one factor is multiplied by at most the largest eigenvalue of the other.
        noise_a = decompositions.round_off(a, self.A.eps) * b.abs().max(1).values
        noise_b = decompositions.round_off(b, self.B.eps) * a.abs().max(1).values
        return Eigenbasis(Q_A, Q_B, values, noise_a + noise_b)

    def to_dense(self) -> Tensor:
        """Return the blocks as matrices."""
        return kronecker_product(self.B, self.A)

    def diagonal(self) -> Tensor:
        """Return the products of the factors' diagonals."""
        return self.B.entries().unsqueeze(2) * self.A.entries().unsqueeze(1)

    def trace(self) -> Tensor:
        """Return the products of the factors' traces."""
        return self.A.trace() * self.B.trace()

    def squared_norm(self) -> Tensor:
        """Return the products of the factors' squared norms."""
        return self.A.squared_norm() * self.B.squared_norm()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of determinants, from those of both factors."""
        sign_a, log_a = self.A.slogdet()
        sign_b, log_b = self.B.slogdet()
        sign = sign_a**self.rows * sign_b**self.columns
        return sign, self.rows * log_a + self.columns * log_b

    def inverse(self) -> "Kronecker":
        """Return the inverses: Kronecker products of inverse factors."""
        return Kronecker(*side_by_side(self.A.inverse, self.B.inverse))

    def power(self, exponent: float, damping: Tensor | None = None) -> Structure:
        """Return powers: Kronecker products of powers, unless there is damping."""
        if damping is not None and not decompositions.is_zero(damping):
            return super().power(exponent, damping)
        return Kronecker(self.A.power(exponent), self.B.power(exponent))

    def product(self, other: Structure) -> Structure | None:
        """Return products: Kronecker products of products."""
        if isinstance(other, Dense):
            return replace(other, matrix=self.to_dense() @ other.matrix, symmetric=False)
        if not isinstance(other, Kronecker):
            return None
        return Kronecker(self.A.compose(other.A), self.B.compose(other.B))

    def shift(self, delta: float | Tensor) -> Eigenbasis:
        """Add a multiple of the identity. The result has the same eigenvectors."""
        return self.eigenbasis().shift(delta)

    def plus(self, other: Structure) -> Structure | None:
        """Return sums, if one factor is equal in both or all are diagonal; otherwise return `None`."""
        if isinstance(other, Dense):
            return other.plus(self)
        if not isinstance(other, Kronecker):
            return None
        if self.A.equals(other.A):
            return Kronecker(self.A.unscaled(), self.B.scaled(self.A.scale).plus(other.B.scaled(other.A.scale)))
        if self.B.equals(other.B):
            return Kronecker(self.A.scaled(self.B.scale).plus(other.A.scaled(other.B.scale)), self.B.unscaled())
        if "dense" not in {self.A.kind, self.B.kind, other.A.kind, other.B.kind}:
            return Eigenbasis.of_diagonal(self.diagonal() + other.diagonal())
        return None


if __name__ == "__main__":
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    d_A, d_B = 3, 2
    X, G = torch.randn(5, d_A, dtype=torch.float64), torch.randn(5, d_B, dtype=torch.float64)
    A, B = X.T @ X, G.T @ G
    K = Kronecker(Factor.dense(A.unsqueeze(0)), Factor.dense(B.unsqueeze(0)))
    dense = torch.kron(B, A)
    M = torch.randn(d_B, d_A, dtype=torch.float64)
    product = K.multiply(M[None, None]).flatten()
    verify("B M A is a product with B (x) A", product, dense @ M.flatten())
    verify_differs("but not with A (x) B", product, torch.kron(A, B) @ M.flatten())
    verify("the inverse", K.inverse().to_dense()[0], torch.linalg.inv(dense))
    root = K.power(-0.5).to_dense()[0]
    verify("the inverse square root, squared", root @ root, torch.linalg.inv(dense))
    verify("the trace", K.trace()[0], dense.trace())
    verify("the log-determinant", K.slogdet()[1][0], dense.logdet())
    verify("the squared Frobenius norm", K.squared_norm()[0], dense.square().sum())
    verify("the diagonal", K.diagonal()[0].flatten(), dense.diagonal())
    verify("the eigenvalues", K.eigenvalues()[0].sort().values, torch.linalg.eigvalsh(dense))
    damped = K.power(-1.0, torch.full((1,), 0.1, dtype=torch.float64)).to_dense()[0]
    identity = torch.eye(d_A * d_B, dtype=torch.float64)
    verify("the inverse after adding a multiple of the identity", damped, torch.linalg.inv(dense + 0.1 * identity))
