"""Parameters of sharded models are gathered layer by layer: the same factors and scores, and less memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kfs
from kfs.errors import ModelError
from kfs.problem.layer_by_layer import Layers
from tests.distributed import sharded_problems as problems
from tests.distributed.pool import Pool
from tests.distributed.problems import CUTS, batches, bits, is_first
from tests.distributed.sharded_problems import Shard, model_and_data, plain_risk

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def every_linear(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module)
    fully_shard(model)
    return model


def risk_by_layer(name: str, shard: Shard) -> kfs.EmpiricalRisk:
    model, loss, X, y = model_and_data(name)
    cuts = CUTS[dist.get_world_size()]
    own = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    data = batches(X[own], y[own], 4)
    return kfs.EmpiricalRisk(shard(model), loss, data, group=dist.group.WORLD, by_layer=True)


def filled(counts: list[int]) -> Any:
    """Return a replacement of `Layers.enter` that counts the numbers that all layers have at a time."""
    enter = Layers.enter

    def counted(self: Layers, module: nn.Module) -> None:
        enter(self, module)
        counts.append(sum(w.untyped_storage().nbytes() // w.element_size() for _, w in self.pairs.values()))

    return counted


def compare(name: str, shard: Shard, settings: dict[str, Any]) -> tuple[str, int]:
    risk = risk_by_layer(name, shard)
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "enter", filled(counts))
        E = kfs.EKFAC(risk, **settings)
    model, loss, X, y = model_and_data(name)
    meshes = shard is not problems.both_ways  # whose queries need a group
    queries = kfs.EmpiricalRisk(risk.model, loss, (X[:3], y[:3]), by_layer=meshes)
    found = [E.inverse(0.1).to_dense(), kfs.Influence(E, 0.1).scores(queries, risk)]
    if is_first():
        one = plain_risk(name)
        expected = kfs.EKFAC(one, **settings)
        queries = kfs.EmpiricalRisk(model, loss, (X[:3], y[:3]))
        scores = kfs.Influence(expected, 0.1).scores(queries, one)
        torch.testing.assert_close(found, [expected.inverse(0.1).to_dense(), scores], **CLOSE)
    return bits(found), max(counts, default=0)


@pytest.mark.parametrize(
    ("name", "shard", "size", "settings", "largest"),
    [
        ("mlp", problems.kept_after_forward, 2, {"columns_at_once": 2}, 25),
        ("mlp", problems.both_ways, 4, {}, 25 + 18),  # split by tensor parallelism, and one layer
        ("tokens", problems.every_layer, 4, {"fisher": "mc"}, 49),  # a rank has no data
        ("experts", every_linear, 2, {"factor_memory": 1500}, 25),  # batches use one expert, or both
    ],
)
def test_same_results(ranks: Pool, name: str, shard: Shard, size: int, settings: dict[str, Any], largest: int) -> None:
    found = ranks(size, compare, name, shard, {"placement": "owner", **settings})
    assert len({text for text, _ in found}) == 1
    assert max(numbers for _, numbers in found) == largest


def refused() -> None:
    risk = risk_by_layer("mlp", problems.every_layer)
    with pytest.raises(ModelError, match=r"needs all parameters at once.* Use a risk without by_layer="):
        risk.gradient()
    with pytest.raises(ModelError, match=r"runs again in the backward pass.* Disable checkpointing of activations"):
        kfs.KFAC(risk_by_layer("tied", problems.whole_blocks), uncovered="skip")
    model, loss, X, y = model_and_data("mlp")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ModelError, match="the risk has no group to gather layers in"):
        kfs.KFAC(kfs.EmpiricalRisk(model, loss, (X, y), by_layer=True))
    owned = kfs.Influence(kfs.EKFAC(risk, placement="owner"), 0.1)
    with pytest.raises(ModelError, match="not supported if blocks have owners and parameters are gathered layer by"):
        owned.self_scores(risk)
    with pytest.raises(ModelError, match="Use a curvature with placement='replicated'"):
        owned.scores(kfs.EmpiricalRisk(risk.model, loss, (X[:3], y[:3]), by_layer=True), risk, normalize="cosine")
    assert kfs.KFAC(risk).num_data == 23
    own = list(risk.model.parameters())  # type: ignore[union-attr]
    assert all(p is q for p, q in zip(risk.params.values(), own, strict=True))


def test_what_is_refused(ranks: Pool) -> None:
    ranks(2, refused)
