"""Blocks in host memory: copied to the device one after the other, and results back, without copies of eigenvectors."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.distributed import Ranks
from kfs.factors import compute
from kfs.factors.blocks import block_diagonal, decompositions
from kfs.factors.settings import Settings

KINDS: list[Any] = [kfs.KFAC, kfs.EKFAC]


def risk(part: slice = slice(0, 20)) -> kfs.EmpiricalRisk:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.LayerNorm(4), nn.Tanh(), layers[2]).double()
    X, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(4, (30,))
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[part], y[part]))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat blocks as if they were on another device than the operator; return the numbers of copied blocks."""
    copies: list[int] = []

    def copied(items: Any, _: torch.device, copy: Any) -> Iterator[Any]:
        for item in items:
            copies.append(len(item.layouts))
            yield copy(item, Tensor.clone)

    monkeypatch.setattr(block_diagonal.BlockDiagonal, "is_elsewhere", True)
    monkeypatch.setattr(block_diagonal, "copied", copied)
    return copies


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_same_results(kind: Any, elsewhere: list[int]) -> None:
    data = risk()
    K = kind(data, factor_device="cpu", factor_memory=500)
    expected = kind(data)
    assert len(expected.own_stacks) < len(K.own_stacks) == len(K.blocks)
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    queries = risk(slice(20, 30))
    for one, other in ((K, expected), (K.update(queries), expected.update(queries))):
        for found, wanted in ((one, other), (one.inverse(0.1), other.inverse(0.1)), (one + one, other + other)):
            close(found @ v, wanted @ v)
            close(found.to_dense(), wanted.to_dense())
        values, Q = one.eigh()
        close(Q @ (values * (Q.T @ v)), other @ v)
        influence, known = kfs.Influence(one), kfs.Influence(other)
        close(influence.scores(queries, data, normalize="cosine"), known.scores(queries, data, normalize="cosine"))
        close(influence.self_scores(data), known.self_scores(data))
        close(influence.index(data).scores(queries), known.index(data).scores(queries))
    assert 1 in elsewhere


def test_results_share_eigenvectors(elsewhere: list[int]) -> None:
    E = kfs.EKFAC(risk(), factor_device="cpu")
    for mine, theirs in zip(E.inverse(0.1).own_stacks, E.own_stacks, strict=True):
        for side in ("Q_A", "Q_B"):
            Q = getattr(theirs.structure, side)
            if Q.kind == "dense":
                assert getattr(mine.structure, side).values.data_ptr() == Q.values.data_ptr()
        assert mine.structure.like.data_ptr() != theirs.structure.like.data_ptr()
    assert elsewhere


def test_memory_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is a limit, sums have half of the free memory of a GPU if factors are moved elsewhere."""
    monkeypatch.setattr(compute, "free_memory", lambda _: 1000)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), ranks=Ranks())
    assert compute.memory_of_pass(on_gpu, Settings(factor_device="cpu")) == 500
    assert compute.memory_of_pass(on_gpu, Settings(factor_device="cpu", factor_memory=70)) == 70
    assert compute.memory_of_pass(on_gpu, Settings()) is None
    assert compute.memory_of_pass(risk(), Settings(factor_device="cpu")) is None


def test_large_matrices_are_decomposed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    matrices = x.mT @ x
    expected = decompositions.eigh(matrices)
    monkeypatch.setattr(decompositions, "_LARGE", 4)
    for found, wanted in zip(decompositions.eigh(matrices), expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.is_contiguous()
