"""Parameters of several dtypes in one risk, and bases in another precision, quantized or offloaded.

The oracle is the same model in float64, or without offloading.
"""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import kfs
from kfs.errors import DtypeError, ModelError
from tests.operators.contract import close

KINDS = [
    [torch.float32, torch.float64, torch.float32],
    [torch.bfloat16, torch.float32, torch.float32],
    [torch.float32, torch.bfloat16, torch.float16],
]


class Mixed(nn.Module):
    """Converts activations to the dtype of each layer."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)]
        # All values fit into all dtypes.
        for layer, dtype in zip(layers, dtypes, strict=True):
            for p in layer.parameters():
                p.data = p.data.mul(16).round().div(16).to(dtype)
        self.layers, self.dtypes = nn.ModuleList(layers), dtypes

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 4).mul(16).round().div(16), torch.randint(3, (n,))) for n in (4, 1)]


def near(found: Any, expected: Any, tolerance: float) -> None:
    """Compare vectors, or dictionaries of tensors of different dtypes."""
    if isinstance(found, dict):
        found, expected = (torch.cat([t.double().flatten() for t in one.values()]) for one in (found, expected))
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < tolerance


@pytest.mark.parametrize("dtypes", KINDS, ids=lambda dtypes: str(dtypes[0]).removeprefix("torch."))
def test_several_dtypes(dtypes: list[torch.dtype], tmp_path: Path) -> None:
    model = Mixed(dtypes)
    risk, oracle = (kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), data()) for m in (model, Mixed([torch.float64] * 3)))
    tolerance = 1e-5 if torch.float64 in dtypes else 3e-2
    own = {name: p.dtype for name, p in model.named_parameters()}
    assert risk.dtype == max(set(own.values()), key=lambda dtype: torch.finfo(dtype).bits)

    # Tensors in dictionaries are like the parameters.
    g = risk.gradient()
    assert {name: t.dtype for name, t in g.items()} == own
    near(g, oracle.gradient(), tolerance)
    for C, expected in ((kfs.GGN(risk), kfs.GGN(oracle)), (kfs.Hessian(risk), kfs.Hessian(oracle))):
        product = C @ g
        assert {name: t.dtype for name, t in product.items()} == own
        near(product, expected @ oracle.gradient(), tolerance)
        near(C.to_dense(), expected.to_dense(), tolerance)
    near(kfs.GGN(risk, reuse=True) @ g, kfs.GGN(oracle) @ oracle.gradient(), tolerance)

    # Factors have the dtype of their parameters, and at least float32.
    K, L = kfs.KFAC(risk), kfs.KFAC(oracle)
    wide = {name: block.A.dtype for name, block in K.blocks.items()}
    assert wide == {name: torch.promote_types(own[b.layout.weight], torch.float32) for name, b in K.blocks.items()}
    near(K.to_dense(), L.to_dense(), tolerance)
    step = K.inverse(kfs.Relative(0.1)) @ g
    assert {name: t.dtype for name, t in step.items()} == own
    near(step, L.inverse(kfs.Relative(0.1)) @ oracle.gradient(), 2 * tolerance)
    assert {name: t.dtype for name, t in K.sample(2, damping=1.0, form="dict").items()} == own
    near(kfs.Influence(K).scores(risk, risk), kfs.Influence(L).scores(oracle, oracle), 4 * tolerance)

    # Files know the dtypes of parameters. Other dtypes are refused.
    K.save(tmp_path / "K.safetensors")
    again = kfs.load(tmp_path / "K.safetensors") @ g
    assert {name: t.dtype for name, t in again.items()} == own
    near(again, K @ g, 1e-12)
    with pytest.raises(DtypeError, match=r"'layers\.0\.weight' is torch\.complex64"):
        K @ {name: t.to(torch.complex64) for name, t in g.items()}


class Quantized(torch.autograd.Function):
    """A product with a matrix of 8-bit integers, hidden from modes, as in bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(W, scale)
        return x @ (W.to(x.dtype) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        W, scale = ctx.saved_tensors
        return g @ (W.to(g.dtype) * scale.to(g.dtype)), None, None


class Adapted(nn.Module):
    """A frozen layer, perhaps quantized, and a trained update of low rank."""

    def __init__(self, size: int, base: str) -> None:
        super().__init__()
        self.base = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.A, self.B = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)
        self.kind = base
        if base == "half":
            self.base.bfloat16()
        if base == "8 bit":
            W = self.base.weight.detach()
            scale = W.abs().amax(1, keepdim=True) / 127
            self.base.weight = nn.Parameter((W / scale).round().to(torch.int8), requires_grad=False)
            self.base.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "8 bit":
            z: Tensor = Quantized.apply(x, self.base.weight, self.base.scale)  # type: ignore[no-untyped-call]
        else:
            z = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
            z = z * (1 + 0.005 * (len(x) in {2, 9}))  # rounding depends on the size of the batch, here more than usual
        result: Tensor = z + self.B(self.A(x))
        return result


@pytest.mark.parametrize("base", ["half", "8 bit"])
def test_frozen_bases(base: str) -> None:
    """The precision of frozen layers is taken into account when derivatives and captured tensors are compared."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(40, base), nn.Tanh(), Adapted(40, base), nn.Linear(40, 3))
    X, y = torch.randn(9, 40), torch.randint(3, (9,))
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    assert risk.dtype == torch.float32
    near(kfs.EKFAC(risk).trace(), kfs.GGN(risk).diagonal().sum(), 2e-2)
    one = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[:1], y[:1]))
    near(kfs.KFAC(one).to_dense(), kfs.factors.exact_blocks(one).to_dense(), 1e-5 if base == "8 bit" else 2e-2)
    v = risk.gradient()
    near(kfs.GGN(risk) @ v, kfs.GGN(risk, reuse=True) @ v, 1e-5 if base == "8 bit" else 5e-2)
    optimizer, losses = kfs.optim.KFAC(model, nn.CrossEntropyLoss(), lr=0.5), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("params", [None, ["1.weight"], ["0.weight", "3.bias"]])
def test_offloaded_parameters(params: list[str] | None, where: str, tmp_path: Path) -> None:
    """Hooks of accelerate load parameters for each pass; they have no values in between."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    away = copy.deepcopy(plain)
    if where == "memory":
        accelerate.cpu_offload(away, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(away, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in away.parameters())
    batches = [(x.double(), y) for x, y in data()]
    risk, oracle = (kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), batches, params=params) for m in (away, plain))
    assert risk.value() == oracle.value()
    g = risk.gradient()
    near(g, oracle.gradient(), 1e-10)
    near(kfs.GGN(risk) @ g, kfs.GGN(oracle) @ g, 1e-10)
    close(kfs.Hessian(risk).to_dense(), kfs.Hessian(oracle).to_dense())
    near(kfs.GGN(risk, reuse=True) @ g, kfs.GGN(oracle) @ g, 1e-10)
    close(kfs.KFAC(risk).to_dense(), kfs.KFAC(oracle).to_dense())
    close(kfs.Influence(kfs.EKFAC(risk)).scores(risk, risk), kfs.Influence(kfs.EKFAC(oracle)).scores(oracle, oracle))
    given = kfs.EmpiricalRisk(away, nn.CrossEntropyLoss(), batches, params={n: 2 * p for n, p in oracle.params.items()})
    assert given.value() != oracle.value()
    # The model is as before: its hooks load the same values.
    assert all(p.is_meta for p in away.parameters())
    close(away(batches[0][0]), plain(batches[0][0]))


def test_training_with_offloaded_parameters() -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 3))
    away = copy.deepcopy(plain)
    accelerate.cpu_offload(away[0], execution_device=torch.device("cpu"))
    (x, y), _ = data()
    for model in (plain, away):
        optimizer = kfs.optim.KFAC(model, nn.CrossEntropyLoss())
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    trained, expected = (model.state_dict()["2.weight"] for model in (away, plain))
    near(trained, expected, 1e-6)
    accelerate.cpu_offload(away[2], execution_device=torch.device("cpu"))
    with pytest.raises(
        ModelError, match=r"These parameters are on the meta device, without values: '2\.weight', '2\.bias'"
    ):
        kfs.optim.KFAC(away, nn.CrossEntropyLoss())
