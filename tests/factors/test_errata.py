"""Where the paper's formulas about KFAC itself are wrong, and what is right."""

import torch
from torch import nn

from kfs.kfac.backpropagated_vectors import empirical_vectors
from tests.operators.contract import close


def test_expectation_form_has_no_factor_n() -> None:
    """If all inputs are equal, the approximation is exact; with the paper's extra factor it is wrong."""
    N = 5
    x, g = torch.randn(1, 3, dtype=torch.float64).expand(N, 3), torch.randn(N, 2, dtype=torch.float64)
    xx, gg = torch.einsum("ni,nj->nij", x, x), torch.einsum("ni,nj->nij", g, g)
    exact = torch.stack([torch.kron(a, b) for a, b in zip(xx, gg, strict=True)]).mean(0)
    A, B = xx.mean(0), gg.mean(0)
    close(torch.kron(A, B), exact)
    assert not torch.allclose(N * torch.kron(A, B), exact)


def test_motivation_by_a_block_diagonal_middle() -> None:
    """The sum of Kronecker products has a middle matrix with blocks g g^T; one common block B makes it KFAC."""
    N, d_in, d_out = 4, 3, 2
    X, g = torch.randn(N, d_in, dtype=torch.float64), torch.randn(N, d_out, dtype=torch.float64)
    outer = torch.kron(X.T.contiguous(), torch.eye(d_out, dtype=torch.float64))  # [d_in d_out, N d_out]
    blocks = torch.einsum("ni,nj->nij", g, g)
    exact = torch.stack([torch.kron(torch.outer(x, x), b) for x, b in zip(X, blocks, strict=True)]).sum(0)
    close(outer @ torch.block_diag(*blocks) @ outer.T, exact)
    B = blocks.mean(0)
    close(outer @ torch.kron(torch.eye(N, dtype=torch.float64), B) @ outer.T, torch.kron(X.T @ X, B))


def test_gradient_of_the_square_loss() -> None:
    """It points from the target to the prediction; as printed, its sign is the other one, and its square the same."""
    f, y = torch.randn(2, 3, dtype=torch.float64)
    (vector,) = empirical_vectors(nn.MSELoss(), f, y)
    close(vector, f - y)
    assert not torch.allclose(vector, y - f)
    close(torch.outer(vector, vector), torch.outer(y - f, y - f))
