"""Layouts: positions of a block's entries in its parameters."""

import pytest
import torch

from kfs.factors import KFAC
from tests.factors.test_ekfac import SHARED, risk_of


@pytest.mark.parametrize("name", ["attention", "groups", "transposed", "positions", "tied", "few positions"])
def test_flat_indices_are_those_of_the_parameters(name: str) -> None:
    """Parts of a weight with parts of its bias, groups of channels, and other orders of axes."""
    K = KFAC(risk_of(*SHARED[name]))
    for block in K.blocks.values():
        layout = block.layout
        params = {n: torch.randn(1, *K.domain.shapes[n]) for n in layout.params}
        flat = torch.cat([p.flatten() for p in params.values()])
        index = layout.flat_index()
        assert index.shape == layout.matrix_shape
        assert torch.equal(flat[index], layout.matrix(params).squeeze(0))
