"""Risks, factors and products of sharded models equal those of the plain model in one process."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Split

import kfs
from kfs.factors.kfac import KFAC
from tests.distributed import sharded_problems as problems
from tests.distributed.pool import Pool
from tests.distributed.problems import CUTS, bits, is_first
from tests.distributed.sharded_problems import Shard, model_and_data, plain_risk, sharded_risk

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}  # sums of 23 examples in another order
EVERY_WAY = [
    ("mlp", problems.kept_after_forward, 2),
    ("mlp", problems.freed_after_forward, 3),
    ("mlp", problems.tensor_parallel, 2),
    ("mlp", problems.both_ways, 4),
    ("tokens", problems.every_layer, 4),
    ("experts", problems.every_layer, 2),
    ("tied", problems.whole_blocks, 3),
    ("tied", problems.hybrid, 4),
]


def compare_risk(name: str, shard: Shard) -> str:
    risk = sharded_risk(name, shard)
    value, gradient = risk.value(), risk.gradient()
    assert all(type(g) is torch.Tensor for g in gradient.values())
    if is_first():
        one = plain_risk(name)
        assert value == pytest.approx(one.value(), rel=1e-13)
        torch.testing.assert_close(gradient, one.gradient(), **CLOSE)
        assert all(float(g.abs().max()) > 0 for g in gradient.values())  # they were zero before
    return bits(gradient.values())


@pytest.mark.parametrize(("name", "shard", "size"), EVERY_WAY)
def test_value_and_gradient(ranks: Pool, name: str, shard: Shard, size: int) -> None:
    """Some ranks have fewer batches than others, or none."""
    assert len(set(ranks(size, compare_risk, name, shard))) == 1


def compare_factors(name: str, shard: Shard, settings: dict[str, Any]) -> str:
    K = KFAC(sharded_risk(name, shard), **settings)
    if is_first():
        one = KFAC(plain_risk(name), **settings)
        assert list(K.blocks) == list(one.blocks)
        assert K.num_data == one.num_data
        for block, expected in zip(K.blocks.values(), one.blocks.values(), strict=True):
            torch.testing.assert_close(block.A, expected.A, **CLOSE)
            torch.testing.assert_close(block.B, expected.B, **CLOSE)
    return bits(s.total for block in K.blocks.values() for s in block.sums.sums)


@pytest.mark.parametrize(("name", "shard", "size"), EVERY_WAY)
def test_factors(ranks: Pool, name: str, shard: Shard, size: int) -> None:
    uncovered = {"uncovered": "skip"} if name == "tied" else {}
    assert len(set(ranks(size, compare_factors, name, shard, {"fisher": "mc", **uncovered}))) == 1


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "forward-only"])
def test_factors_of_other_fishers(ranks: Pool, fisher: str) -> None:
    settings = {"fisher": fisher, "sharing": "reduce"}
    assert len(set(ranks(3, compare_factors, "tokens", problems.every_layer, settings))) == 1


def compare_operators(name: str, shard: Shard) -> None:
    risk, one = sharded_risk(name, shard), plain_risk(name)
    for make in (kfs.Hessian, kfs.GGN, kfs.Fisher, kfs.Jacobian):
        found = make(risk).to_dense()
        torch.testing.assert_close(found, make(one).to_dense(), rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(kfs.GGN(risk).diagonal(), kfs.GGN(one).diagonal(), **CLOSE)
    u = torch.linspace(-1, 1, kfs.Jacobian(one).shape[0], dtype=torch.float64)
    torch.testing.assert_close(kfs.Jacobian(risk).T @ u, kfs.Jacobian(one).T @ u, **CLOSE)
    v = torch.linspace(-1, 1, kfs.GGN(one).shape[0], dtype=torch.float64)
    again = kfs.GGN(risk, reuse=True)
    for _ in range(2):
        torch.testing.assert_close(again @ v, kfs.GGN(one) @ v, **CLOSE)


@pytest.mark.parametrize("shard", [problems.freed_after_forward, problems.tensor_parallel])
def test_products(ranks: Pool, shard: Shard) -> None:
    ranks(2, compare_operators, "mlp", shard)


def compare_applications(folder: Path) -> None:
    """EKFAC with a checkpoint, influence, a posterior, and alternatives for uncovered parameters."""
    risk, one = sharded_risk("tokens", problems.every_layer), plain_risk("tokens")
    E = kfs.EKFAC(risk, fisher="type-2", checkpoint=folder / "factors")
    expected = kfs.EKFAC(one, fisher="type-2")
    torch.testing.assert_close(E.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-12)
    model, loss, X, y = model_and_data("tokens")
    queries = kfs.EmpiricalRisk(model, loss, (X[:3], y[:3]))
    own_queries = kfs.EmpiricalRisk(risk.model, loss, (X[:3], y[:3]))  # without group: the same in all processes
    scores = kfs.Influence(E).scores(own_queries, risk)
    torch.testing.assert_close(scores, kfs.Influence(expected).scores(queries, one), rtol=1e-8, atol=1e-10)
    index = kfs.Influence(E).index(own_queries, file=folder / f"index {dist.get_rank()}")
    torch.testing.assert_close(
        index.scores(own_queries), kfs.Influence(expected).scores(queries, queries), rtol=1e-5, atol=1e-7
    )
    posterior = kfs.laplace.posterior(E, risk, 1.0)
    torch.testing.assert_close(posterior.mean, {name: p.detach() for name, p in one.params.items()})
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(
        float(kfs.laplace.posterior(expected, one, 1.0).log_marginal_likelihood()), rel=1e-9
    )
    variance = posterior.functional_variance(X[:2])
    torch.testing.assert_close(
        variance, kfs.laplace.posterior(expected, one, 1.0).functional_variance(X[:2]), rtol=1e-8, atol=1e-10
    )
    diagonal = kfs.KFAC(risk, uncovered="diagonal").diagonal()
    torch.testing.assert_close(diagonal, kfs.KFAC(one, uncovered="diagonal").diagonal(), **CLOSE)
    found, expected_rows = kfs.inspect(risk.model, X).rows, kfs.inspect(model, X).rows
    assert [(row.parameter, row.A, row.B) for row in found] == [(row.parameter, row.A, row.B) for row in expected_rows]


def test_applications(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, compare_applications, tmp_path)


def compare_vectors() -> None:
    """Gradients of a training step can be multiplied without conversion."""
    risk, one = sharded_risk("mlp", problems.every_layer), plain_risk("mlp")
    inverse = kfs.KFAC(risk).inverse(damping=0.1)
    vectors = {name: (p.detach() + 1) for name, p in risk.params.items()}
    assert all(isinstance(v, DTensor) for v in vectors.values())
    expected = kfs.KFAC(one).inverse(damping=0.1) @ {name: p.detach() + 1 for name, p in one.params.items()}
    found = inverse @ vectors
    for name, t in found.items():
        assert isinstance(t, DTensor)
        assert t.placements == risk.params[name].placements  # type: ignore[attr-defined]
        torch.testing.assert_close(t.full_tensor(), expected[name], rtol=1e-11, atol=1e-13)
    in_order = inverse @ list(vectors.values())
    assert all(torch.equal(t.to_local(), found[name].to_local()) for t, name in zip(in_order, found, strict=True))  # type: ignore[attr-defined]
    mixed = vectors | {"0.bias": vectors["0.bias"].full_tensor()}  # type: ignore[attr-defined]
    assert type((inverse @ mixed)["0.bias"]) is torch.Tensor
    predictions: Any = kfs.Jacobian(risk) @ vectors
    assert type(predictions["prediction"]) is torch.Tensor
    with pytest.raises(kfs.errors.DtypeError, match=r"is a DTensor.*full_tensor"):
        inverse @ torch.distributed.tensor.ones(kfs.KFAC(one).shape[0], dtype=torch.float64, device_mesh=mesh_of(risk))


def mesh_of(risk: kfs.EmpiricalRisk) -> Any:
    return next(iter(risk.params.values())).device_mesh  # type: ignore[attr-defined]


def test_vectors_that_are_sharded(ranks: Pool) -> None:
    ranks(2, compare_vectors)


def compare_with_training(shard: Shard) -> None:
    """PyTorch's own passes of the sharded model are another oracle, and still work."""
    loss = nn.CrossEntropyLoss(reduction="sum")
    precise = shard is not problems.half_precision
    model, _, X, y = model_and_data("mlp")
    X = X if precise else X.float()
    shard(model)
    cuts = CUTS[2]
    own = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))  # noqa: ARG005
    hooks = [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()]
    predictions = model(X[own])
    risk = kfs.EmpiricalRisk(model, loss, [(X[own], y[own])], group=dist.group.WORLD)
    params = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in params.values())
    found = risk.gradient()
    K = kfs.KFAC(risk, fisher="empirical")
    assert {g.dtype for g in found.values()} == {X.dtype}
    value = loss(predictions, y[own])
    value.backward()  # of the previous pass: factors of a step may be computed in the middle of it
    size = dist.get_world_size()
    tolerance = CLOSE if precise else {"rtol": 0.05, "atol": 0.05}
    for name, p in model.named_parameters():
        assert p is params[name]
        torch.testing.assert_close(p.grad.full_tensor() * size, found[name], **tolerance)  # type: ignore[union-attr]
    torch.testing.assert_close(_predictions(risk), predictions.detach())
    assert [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()] == hooks
    assert set(seen) == {predictions.dtype}  # hooks of users run
    assert len(seen) > 3
    handle.remove()
    v = {name: torch.ones_like(g) for name, g in found.items()}
    assert {t.dtype for t in (K @ v).values()} == {X.dtype}
    for operator in (kfs.GGN(risk), kfs.Hessian(risk)):
        assert {t.dtype for t in (operator @ v).values()} == {X.dtype}
    J = kfs.Jacobian(risk)
    assert (J.T @ (J @ v))["0.weight"].dtype == X.dtype


def _predictions(risk: kfs.EmpiricalRisk) -> torch.Tensor:
    with risk.untouched():
        return torch.cat([risk.evaluate(batch) for batch in risk.batches()])


@pytest.mark.parametrize(
    "shard",
    [
        problems.freed_after_forward,
        problems.kept_after_forward,
        pytest.param(
            problems.half_precision,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.9", reason="PyTorch 2.8 adds up gradients in half precision, with gloo"
            ),
        ),
    ],
)
def test_passes_of_pytorch(ranks: Pool, shard: Shard) -> None:
    ranks(2, compare_with_training, shard)


def compare_half_precision() -> None:
    """The oracle is a plain model in bfloat16 with the same batches."""
    model, loss, X, y = model_and_data("mlp")
    plain = model_and_data("mlp")[0].bfloat16()
    problems.whole_blocks(model.float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    data = [(X[:8].float(), y[:8]), (X[8:16].float(), y[8:16])]
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard(data, dist.group.WORLD))
    one = kfs.EmpiricalRisk(plain, loss, [(x.bfloat16(), y) for x, y in data])
    K, expected = kfs.KFAC(risk, fisher="empirical"), kfs.KFAC(one, fisher="empirical")
    for block, other in zip(K.blocks.values(), expected.blocks.values(), strict=True):
        torch.testing.assert_close((block.A, block.B), (other.A, other.B), rtol=1e-5, atol=1e-6)
    assert K.dtype == torch.float32


def test_half_precision(ranks: Pool) -> None:
    ranks(2, compare_half_precision)


def compare_replicas() -> None:
    """`DistributedDataParallel` is replaced by the module inside it."""
    model, loss, X, y = model_and_data("mlp")
    own = slice(dist.get_rank() * 12, dist.get_rank() * 12 + 12)
    replica = nn.parallel.DistributedDataParallel(model)
    risk = kfs.EmpiricalRisk(replica, loss, (X[own], y[own]), group=dist.group.WORLD)
    one = plain_risk("mlp")
    torch.testing.assert_close(risk.gradient(), one.gradient(), **CLOSE)
    torch.testing.assert_close(kfs.KFAC(risk).to_dense(), kfs.KFAC(one).to_dense(), **CLOSE)
    loss(replica(X[own]), y[own]).backward()  # no pass is left unfinished
    assert model[0].weight.grad is not None  # type: ignore[index]


def test_replicas(ranks: Pool) -> None:
    ranks(2, compare_replicas)


def compare_other_values() -> None:
    """Parameters may differ from those of the model, and may be frozen."""
    model, loss, X, y = model_and_data("mlp")
    values = {name: p.detach() + 0.5 for name, p in model.named_parameters()}
    expected = kfs.EmpiricalRisk(model, loss, (X, y), params=values)
    sharded = problems.every_layer(model_and_data("mlp")[0].requires_grad_(False))
    parts = {name: (p.detach() + 0.5) for name, p in sharded.named_parameters()}
    for given in (values, parts):
        risk = kfs.EmpiricalRisk(sharded, loss, kfs.shard((X, y), dist.group.WORLD), params=given)
        torch.testing.assert_close(risk.gradient(), expected.gradient(), **CLOSE)
        torch.testing.assert_close(kfs.KFAC(risk).to_dense(), kfs.KFAC(expected).to_dense(), **CLOSE)
    assert not any(p.requires_grad for p in sharded.parameters())


def test_other_values(ranks: Pool) -> None:
    ranks(2, compare_other_values)


def compare_sharded_later() -> None:
    """A risk that was created before its model was sharded has the values of that time."""
    model, loss, X, y = model_and_data("mlp")
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    expected = plain_risk("mlp").gradient()
    fully_shard(model)
    torch.testing.assert_close(risk.gradient(), expected, **CLOSE)


def test_sharding_after_the_risk_was_made(ranks: Pool) -> None:
    ranks(1, compare_sharded_later)
    ranks(2, compare_sharded_later)


def compare_function() -> None:
    """Parameters of a function may be sharded, too."""
    _, loss, X, y = model_and_data("mlp")
    torch.manual_seed(3)
    params = {"W": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = {name: distribute_tensor(p, mesh, [Split(0)]) for name, p in params.items()}
    found, one = (
        kfs.EmpiricalRisk(lambda p, x: x @ p["W"] + p["b"], loss, data, params=given)
        for data, given in ((kfs.shard((X, y), dist.group.WORLD), parts), ((X, y), params))
    )
    torch.testing.assert_close(found.gradient(), one.gradient(), **CLOSE)
    torch.testing.assert_close(kfs.KFAC(found).to_dense(), kfs.KFAC(one).to_dense(), **CLOSE)


def test_functions(ranks: Pool) -> None:
    ranks(2, compare_function)


def compare_data_axis() -> None:
    """As in training, processes along the layers' axis have the same data, and those along the other axis do not."""
    model, loss, X, y = model_and_data("mlp")
    problems.both_ways(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), mesh["data"]))
    one = plain_risk("mlp")
    assert risk.num_data == one.num_data
    torch.testing.assert_close(risk.gradient(), one.gradient(), **CLOSE)
    torch.testing.assert_close(kfs.KFAC(risk).to_dense(), kfs.KFAC(one).to_dense(), **CLOSE)
    gradient = {name: p.detach() for name, p in risk.params.items()}  # sharded along both axes
    found = kfs.GGN(risk) @ gradient
    expected = kfs.GGN(one) @ {name: p.detach() for name, p in one.params.items()}
    for name, t in found.items():
        assert t.placements == gradient[name].placements  # type: ignore[attr-defined]
        torch.testing.assert_close(t.full_tensor(), expected[name], **CLOSE)  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older ones may shard along two axes in the wrong order")
def test_data_axis(ranks: Pool) -> None:
    ranks(4, compare_data_axis)


def compare_memory() -> None:
    """Whole parameters are freed afterwards, even if the risk and the results still exist."""
    risk = sharded_risk("tied", problems.whole_blocks)
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        assert not any(isinstance(p, DTensor) for p in module.parameters())
        seen.extend(map(weakref.ref, module.parameters()))

    assert isinstance(risk.model, nn.Module)
    handle = risk.model.register_forward_pre_hook(look)
    computed = [risk.gradient(), kfs.KFAC(risk, uncovered="skip"), kfs.GGN(risk) @ risk.gradient()]
    handle.remove()
    gc.collect()
    assert len(computed) == 3
    assert len(seen) >= 3 * len(risk.params)
    assert all(alive() is None for alive in seen)


def test_memory(ranks: Pool) -> None:
    ranks(2, compare_memory)


def test_without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that shard models are slow to import. If they are not imported, no model is sharded."""
    expected = plain_risk("mlp").gradient()
    monkeypatch.setattr("kfs.problem.whole_parameters.sys", SimpleNamespace(modules={}))
    torch.testing.assert_close(plain_risk("mlp").gradient(), expected)
