"""Eigenvalues that are zero up to round-off: which ones these are, and that others are left alone."""

from typing import Any

import pytest
import torch
from torch import nn

from kfs import KFAC, EmpiricalRisk
from kfs.errors import KfsWarning, SolverError
from kfs.kfac.structures.factor import Factor
from tests.operators.contract import close

EPS = torch.finfo(torch.float64).eps
WIDE = 50


def rank_one(side: str) -> KFAC:
    """A block whose factor on one side is wide and has one eigenvalue that is not zero; the other one is a number."""
    torch.manual_seed(0)
    wide, narrow = ((1, WIDE), (WIDE, 1)) if side == "B" else ((WIDE, 1), (1, 1))
    model = nn.Sequential(nn.Linear(*wide, bias=False), nn.Linear(*narrow, bias=False)).double()
    data = torch.randn(1, wide[0], dtype=torch.float64), torch.randn(1, 1, dtype=torch.float64)
    return KFAC(EmpiricalRisk(model, nn.MSELoss(), data, params=["0.weight"]))


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, -1e-20])
def test_what_is_zero_up_to_round_off(side: str, scale: float) -> None:
    """Eigenvalues of a matrix with `d` rows are known up to `d` times its precision times the largest one.

    On the other side there is one row, so that only the wide factor's size can tell. What is added must be more.
    """
    K = rank_one(side)
    largest = float(K.eigenvalues().max())
    assert K.blocks["0.weight"].A.shape == ((WIDE, WIDE) if side == "A" else (1, 1))
    sign = -1.0 if scale < 0 else 1.0
    too_small: Any = sign * (scale * K.shift(0.4 * WIDE * EPS * largest))
    with pytest.raises(SolverError, match="singular"):
        too_small.inverse()
    enough: Any = sign * (scale * K.shift(3 * WIDE * EPS * largest))
    assert enough.inverse().to_dense().isfinite().all()
    damped: Any = sign * (scale * K.shift(0.1))
    dense = K.to_dense() + 0.1 * torch.eye(WIDE, dtype=torch.float64)
    close(abs(scale) * damped.inverse().to_dense(), torch.linalg.inv(dense))


def test_a_singular_matrix_does_not_change_others() -> None:
    """Of matrices that are inverted together, the singular ones are shifted, and the others are exact."""
    ones = torch.ones(2, 2, dtype=torch.float64)
    small = torch.tensor([1.0, 1e-13], dtype=torch.float64)  # a shift by round-off would change its inverse by 1 %
    with pytest.warns(KfsWarning, match="1 of 2 factors are singular"):
        inverse = Factor.dense(torch.stack([ones, small.diag()])).inverse()
    torch.testing.assert_close(inverse.values[1].diagonal(), 1 / small, rtol=1e-12, atol=0.0)
    assert inverse.values[1][0, 1] == inverse.values[1][1, 0] == 0
    assert inverse.values[0].isfinite().all()
