"""Operators without a risk: the identity, matrices, and outer products, with frequently mistaken inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfs.errors import DtypeError
from kfs.operators import Dense, Identity, OuterProducts
from kfs.operators.space import Space


@pytest.mark.parametrize("form", [list, dict])
def test_a_product_with_the_identity_is_a_copy(form: type) -> None:
    """Changing the product in place does not change the input."""
    named = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    A = Identity(Space({name: t.shape for name, t in named.items()}, torch.float32, torch.device("cpu")))
    v: Any = named if form is dict else list(named.values())
    for product in (A @ v, A.T @ v, v @ A):
        tensors: list[Tensor] = list(product.values()) if form is dict else product
        for t in tensors:
            assert torch.equal(t, torch.ones_like(t))
            t.zero_()
    assert all(torch.equal(t, torch.ones_like(t)) for t in named.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_matrices_are_real(dtype: torch.dtype) -> None:
    """Integers have no precision to compare with, and transposes of complex matrices are not adjoints."""
    matrix = torch.eye(3, dtype=dtype)
    for make in (Dense, OuterProducts):
        with pytest.raises(DtypeError, match=r"Convert to real numbers first"):
            make(matrix)


def test_matrices_without_entries() -> None:
    """They are symmetric, and their results have no entries either."""
    A = Dense(torch.zeros(0, 0, dtype=torch.float64))
    assert A.symmetric
    assert A.shift(1.0).to_dense().shape == (0, 0)
    assert (A @ torch.zeros(0, 3, dtype=torch.float64)).shape == (0, 3)
