"""On a GPU, with NCCL: messages and tensors are sent from the GPU, even if factors are kept on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from tests.distributed.problems import problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def _nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("factor_device", [None, "cpu"])
def test_factors(factor_device: str | None) -> None:
    model, loss, X, y = problem("mlp")
    model = model.cuda()
    settings: dict[str, Any] = {"fisher": "mc", "factor_device": factor_device}
    found = kfs.EKFAC(kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD)), **settings)
    expected = kfs.EKFAC(kfs.EmpiricalRisk(model, loss, (X, y)), **settings)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)
