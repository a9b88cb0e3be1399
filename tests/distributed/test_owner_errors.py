"""Errors about owned blocks are the same on all ranks."""

import pickle
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kfs
from kfs.errors import DataError, DistributedError, ModelError, SolverError
from kfs.factors.blocks import BlockDiagonal
from kfs.factors.kfac import KFAC
from tests.distributed.pool import Pool
from tests.distributed.problems import risk_of_own


def refused() -> list[str]:
    risk = risk_of_own("mlp")
    K = KFAC(risk, placement="owner")
    texts = []
    elsewhere = next((block for block in K.blocks.values() if not block.sums.is_local), None)
    assert elsewhere is not None
    with pytest.raises(DistributedError, match=r"Another process owns block .* Call K.fetch"):
        _ = elsewhere.A
    with pytest.raises(DistributedError, match=r"owned by 2 processes.* Call K.gathered\(\)"):
        _ = K.structures
    with pytest.raises(DistributedError, match="needs all of them"):
        K.plot_spectrum()
    with pytest.raises(DistributedError, match="The vectors to multiply with differ"):
        K @ torch.full((K.shape[0],), float(dist.get_rank()), dtype=torch.float64)
    rank = dist.get_rank()
    different: list[Any] = [
        lambda: K.inverse(-1.0 if rank else 1.0),
        lambda: K.inverse(1.0, "exact" if rank else "factored"),
        lambda: K.power(0.5, {"0": 1.0, "2": 2.0 + rank}),
        lambda: K.shift(float(rank)),
        lambda: float(rank) * K,
        lambda: K.sample(2, damping=0.1, seed=rank),
        lambda: K.fetch(list(K.blocks)[rank]),
    ]
    for call in different:
        with pytest.raises(DistributedError, match="The arguments for KFAC differ between processes"):
            call()
    dampings = [("0", 1.0), ("2", 2.0)]
    K.inverse(dict(dampings if rank else reversed(dampings)))
    with pytest.raises(SolverError) as singular:
        cast("BlockDiagonal", 0.0 * K).inverse()
    texts.append(str(singular.value))
    with pytest.raises(ModelError, match="damping lacks the blocks"):
        K.inverse({"0": 1.0})
    assert "Block '" in repr(elsewhere)
    return texts


def copied() -> None:
    """Copies share process groups and no other state; files of other programs cannot contain them."""
    K = KFAC(risk_of_own("mlp"), placement="owner")
    copy = deepcopy(K)
    assert copy.ranks is K.ranks
    expected = K.to_dense()
    for stack in K.own_stacks:
        stack.structure.like.zero_()
    assert not torch.equal(K.to_dense(), expected)
    assert torch.equal(copy.to_dense(), expected)
    with pytest.raises(DistributedError, match=r"2 processes cannot be pickled.* Use save\(path\)"):
        pickle.dumps(copy)
    assert torch.equal(pickle.loads(pickle.dumps(copy.gathered())).to_dense(), expected)


def test_copies(ranks: Pool) -> None:
    ranks(2, copied)


def test_errors(ranks: Pool) -> None:
    one, other = ranks(2, refused)
    assert one == other


def not_finite() -> str:
    """Rank 1 owns the block that is not finite."""
    first = nn.Linear(1, 2)
    model = nn.Sequential(first, nn.Linear(2, 30)).double()
    X = torch.full((4, 1), 1e200, dtype=torch.float64)
    with torch.no_grad():
        first.weight.zero_()
    y = torch.zeros(4, 30, dtype=torch.float64)
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), kfs.shard((X, y), dist.group.WORLD))
    with pytest.raises(DataError, match="The inputs of block '0' are not finite") as caught:
        KFAC(risk, placement="owner")
    return str(caught.value)


def test_factors_that_are_not_finite(ranks: Pool) -> None:
    one, other = ranks(2, not_finite)
    assert one == other
