import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfs.basics.flattening import Vec, cvec, rvec
from kfs.basics.kronecker_algebra import (
    kronecker_inverse,
    kronecker_matmul,
    kronecker_product,
    kronecker_transpose,
    kronecker_vp,
)
from kfs.errors import DtypeError, FlatteningError, ShapeError
from tests.basics.cases import assert_close

sizes = st.tuples(*[st.integers(1, 4)] * 4)


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64)


def numpys(A: Tensor, B: Tensor) -> Tensor:
    """Compute the product with NumPy, as an independent reference."""
    return torch.from_numpy(np.kron(A.numpy(), B.numpy()))


@given(sizes=sizes)
def test_products_are_numpys(sizes: tuple[int, int, int, int]) -> None:
    n1, n2, m1, m2 = sizes
    A, B = matrix(n1, n2), matrix(m1, m2)
    K = numpys(A, B)
    assert_close(kronecker_product(A, B), K)
    assert_close(numpys(*kronecker_transpose(A, B)), K.T)
    v = torch.randn(n2 * m2, dtype=torch.float64)
    for vec in (cvec, rvec, "cvec", "rvec"):
        assert_close(kronecker_vp(A, B, v, vec), K @ v)
    C, D = matrix(n2, 2), matrix(m2, 3)
    assert_close(numpys(*kronecker_matmul(A, B, C, D)), K @ numpys(C, D))


def test_the_inverse() -> None:
    A, B = (matrix(n, n) + 3 * torch.eye(n) for n in (2, 3))
    inverse = numpys(*kronecker_inverse(A, B))
    assert_close(inverse, torch.from_numpy(np.linalg.inv(numpys(A, B).numpy())))
    with pytest.raises(RuntimeError, match="singular"):
        kronecker_inverse(A, torch.zeros(2, 2))


@pytest.mark.parametrize("vec", [cvec, rvec])
def test_the_order_of_factors_matters(vec: Vec) -> None:
    A, B, v = matrix(2, 2), matrix(3, 3), torch.randn(6, dtype=torch.float64)
    assert not torch.allclose(kronecker_vp(B, A, v, vec), numpys(A, B) @ v)


def test_bad_input_is_refused() -> None:
    A, B = matrix(2, 3), matrix(4, 5)
    with pytest.raises(ShapeError, match=r"A has shape .* expected a matrix"):
        kronecker_product(A[0], B)
    with pytest.raises(DtypeError, match="B is a list"):
        kronecker_transpose(A, [1])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"v has shape \[14\], but the Kronecker product has 15 columns"):
        kronecker_vp(A, B, torch.zeros(14))
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        kronecker_vp(A, B, torch.zeros(15), torch.flatten)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="only square matrices have an inverse"):
        kronecker_inverse(A @ A.T, B)
    with pytest.raises(ShapeError, match=r"B has shape \[4, 5\] and D has shape \[4, 5\], so B @ D does not exist"):
        kronecker_matmul(A, B, A.T, B)
