import torch

from kfs.basics.flattening import cvec, rvec
from kfs.kfac.expand_Linear import gradient_factor, input_factor, kfac_block
from tests.operators.contract import close


def test_bias_and_flattenings() -> None:
    x, g = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    A, B = input_factor(x, 0.5, bias=True), gradient_factor(g)
    assert A[-1, -1] == 2.5
    close(A[:3, :3], input_factor(x, 0.5))
    close(A[-1, :3], 0.5 * x.sum(0))
    close(kfac_block(A, B, cvec), torch.kron(A, B))
    close(kfac_block(A, B, rvec), torch.kron(B, A))
