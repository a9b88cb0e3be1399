"""Stacks: blocks of one size, stored and processed together, and operators with different blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors import KFAC
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.stack import layouts_of_unused_rows
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_kronecker import definite, kfac
from tests.operators.contract import close


@pytest.mark.parametrize("name", ["identity", "dense", "diagonal"])
def test_stacks_are_made_of_their_parts(name: str) -> None:
    """All structures are stacked, sliced, moved and stored field by field."""
    scale = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    matrices = torch.stack([definite(3, seed) for seed in range(3)])
    A = {
        "dense": Factor.dense(matrices, scale),
        "diagonal": Factor.diagonal(matrices.diagonal(dim1=1, dim2=2), scale),
        "identity": Factor.identity(3, scale),
    }[name]
    K = Kronecker(A, Factor.dense(matrices[:, :2, :2]))
    structures: list[Any] = [K, K.eigenbasis(), Dense(K.to_dense(), 2, 3)]
    for whole in structures:
        parts = [whole[place : place + 1] for place in range(3)]
        assert [len(part) for part in parts] == [1, 1, 1]
        again = type(whole).stack(parts)
        close(again.to_dense(), whole.to_dense())
        assert again.nbytes == whole.nbytes == sum(part.nbytes for part in parts)
        assert type(whole).stack([again]) is again
        assert whole.key == parts[0].key == again.to(dtype=torch.float32).key
        assert again.to(dtype=torch.float32).to_dense().dtype == torch.float32
        stored = type(whole).from_state(again.state(), 3, 2, 3)
        assert torch.equal(stored.to_dense(), again.to_dense())
    stacked = Factor.stack([A[:1], A[1:]])
    assert (stacked.values.untyped_storage().nbytes() == 8) == (name == "identity")  # its ones take no memory
    mixed = Dense.stack([Dense(matrices[:1], 1, 3), Dense(matrices[:1], 1, 3, symmetric=False)])
    assert not mixed.symmetric


def test_blocks_of_one_size_are_processed_together_and_stored_once() -> None:
    K = kfac()
    assert any({"one", "two"} <= {layout.name for layout in stack.layouts} for stack in K.stacks)
    for name in ("one", "two"):
        storages = {s.total.untyped_storage().data_ptr() for s in K.blocks[name].sums.sums}
        structure = K.structures[name]
        assert isinstance(structure, Kronecker)
        assert storages == {f.values.untyped_storage().data_ptr() for f in (structure.A, structure.B)}


def test_what_no_operation_uses_has_zero_curvature() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.W[1:3])

    torch.manual_seed(0)
    data = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    K = KFAC(EmpiricalRisk(Part(), nn.MSELoss(), data))
    assert [layout.rows for layout in layouts_of_unused_rows([K.blocks["W[1:3]"].layout], K.domain)] == [(0, 1), (3, 5)]
    close((K @ torch.ones(15, dtype=torch.float64))[[0, 1, 2, 9, 14]], torch.zeros(5, dtype=torch.float64))
    close((K.inverse(0.1) @ torch.ones(15, dtype=torch.float64))[[0, 9]], torch.full((2,), 10.0, dtype=torch.float64))


def test_operators_with_other_blocks_are_combined_as_operators() -> None:
    """(W b) as one block or as two blocks: no result has blocks, but sums and products exist as operators."""
    X, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    risk = EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), (X, y))
    joint, separate = KFAC(risk), KFAC(risk, joint_bias=False)
    close((joint + separate).to_dense(), joint.to_dense() + separate.to_dense())
    close((joint @ separate).to_dense(), joint.to_dense() @ separate.to_dense())
