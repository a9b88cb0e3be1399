"""Errors in the paper's formulas about KFAC itself, and the correct formulas."""

from functools import partial

import torch
from torch import Tensor, func, nn

from kfs.basics.flattening import cvec, rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.label_sampling import sample_label
from kfs.basics.reduction_factors import reduction_factor
from kfs.kfac.backpropagated_vectors import backpropagated_vectors, empirical_vectors, mc_vectors
from kfs.kfac.expand_Linear import gradient_factor, input_factor, kfac_block
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
    """It points from the target to the prediction; as printed, it has the opposite sign, and the same square."""
    f, y = torch.randn(2, 3, dtype=torch.float64)
    (vector,) = empirical_vectors(nn.MSELoss(), f, y)
    close(vector, f - y)
    assert not torch.allclose(vector, y - f)
    close(torch.outer(vector, vector), torch.outer(y - f, y - f))


def test_monte_carlo_vectors_are_divided_by_the_root_of_their_number() -> None:
    """With the factor, B is the middle matrix for any number M of draws; as printed, it is M times too large."""
    torch.manual_seed(0)
    loss, M = nn.CrossEntropyLoss(), 4000
    f, y = torch.randn(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    V = backpropagated_vectors(loss, f, y, partial(mc_vectors, mc_samples=M))
    H = func.hessian(lambda f: loss(f, y))(f)[0, :, 0, :]
    B = gradient_factor(V)  # the layer is the last one
    # The relative error of the mean of M draws is about sqrt(2 / M), 2 percent; five times that is allowed.
    assert (B - H).norm() < 0.1 * H.norm()
    printed = gradient_factor(M**0.5 * V)
    assert (printed / M - H).norm() < 0.1 * H.norm()
    assert printed.norm() > M / 2 * H.norm()


def test_kfac_is_not_the_curvature() -> None:
    """The printed equality of the curvature and the Kronecker product holds for one example, but not for several."""
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 3).double()
    loss = nn.MSELoss()
    for N in (1, 4):
        X, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
        z = first(X)
        f = last(torch.tanh(z))
        columns = [torch.zeros_like(f).index_fill_(1, torch.tensor([c]), 1.0) for c in range(3)]
        g = torch.stack([torch.autograd.grad(f, z, column, retain_graph=True)[0] for column in columns])
        A, B = input_factor(X, reduction_factor(loss, y)), gradient_factor(g)
        for vec in (cvec, rvec):
            G = vec_ggn(loss(f, y), f, first.weight, vec=vec)
            assert torch.allclose(kfac_block(A, B, vec), G) == (N == 1)


def test_one_example_is_exact_for_the_fisher_not_for_any_ggn() -> None:
    """A Poisson distribution whose rate is the prediction: the expected Hessian is not that at the data's label."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(3, 1, bias=False).double(), torch.rand(1, 3, dtype=torch.float64), torch.tensor([[5.0]])
    with torch.no_grad():
        layer.weight.abs_().add_(0.5)

    def c(f: Tensor, label: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(f, label, log_input=False, eps=0.0, reduction="sum")

    f = layer(x)
    ggn = vec_ggn(c(f, y), f, layer.weight)
    labels = torch.poisson(f.detach().expand(20_000, 1))
    g = 1 - labels[:, None] / f.detach()  # the criterion's gradients, [draws, 1, 1]
    close(g[0], func.grad(c)(f.detach(), labels[:1]))
    B = gradient_factor(g / len(labels) ** 0.5)
    K = kfac_block(input_factor(x, 1.0), B, rvec)
    fisher = x.T @ x / f.detach()  # the expected Hessian of the criterion is 1 / rate
    # The relative error of 20000 draws is about 1 percent.
    assert (K - fisher).norm() < 0.05 * fisher.norm()
    assert (K - ggn).norm() > 0.5 * ggn.norm()
    close(ggn, x.T @ x * y / f.detach() ** 2)


def test_monte_carlo_vector_of_the_square_loss() -> None:
    """It points from the drawn label to the prediction; as printed, it has the opposite sign, and the same square."""
    f, y = torch.randn(2, 3, dtype=torch.float64)
    (vector,) = mc_vectors(nn.MSELoss(), f, y, generator=torch.Generator().manual_seed(1))
    label = sample_label(nn.MSELoss(), f, torch.Generator().manual_seed(1))
    close(vector, f - label)
    assert not torch.allclose(vector, label - f)
    close(torch.outer(vector, vector), torch.outer(label - f, label - f))
