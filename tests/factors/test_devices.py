"""Factors agree between an accelerator and the CPU: up to round-off in float64, and roughly in half precision."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN
from kfs.factors import EKFAC, KFAC, exact_blocks, load, optimal_kronecker
from kfs.factors.accumulate.outer_products import OuterProductSum, add_gram, mirror
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_replay import padded_risk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Mixed(nn.Module):
    """Has tokens, positions, attention, a normalization and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 8, padding_idx=0), nn.Parameter(torch.randn(1, 6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.conv, self.head = nn.Conv1d(8, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.tokens(x) + self.positions)
        result: Tensor = self.head(self.conv(h.transpose(1, 2)).relu().mean(2))
        return result


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_same_factors(fisher: Any, sharing: Any) -> None:
    model = Mixed().double().eval()
    X, y = torch.randint(7, (5, 6)), torch.randint(3, (5,))
    there = copy.deepcopy(model).cuda()
    K, L = (KFAC(EmpiricalRisk(m, nn.CrossEntropyLoss(), (X, y)), fisher, sharing) for m in (model, there))
    for name, block in K.blocks.items():
        torch.testing.assert_close(L.blocks[name].A.cpu(), block.A, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(L.blocks[name].B.cpu(), block.B, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_padded_rows(fisher: Any, sharing: Any, packed: bool) -> None:
    K, L = (KFAC(padded_risk(device, packed), fisher, sharing) for device in ("cpu", "cuda"))
    for name, block in K.blocks.items():
        assert block.sums.terms == L.blocks[name].sums.terms
        torch.testing.assert_close(L.blocks[name].A.cpu(), block.A, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(L.blocks[name].B.cpu(), block.B, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [100, 700, 1700])
def test_strips(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, size, device="cuda", dtype=dtype)
    total = torch.zeros(size, size, device="cuda")
    for _ in range(3):
        add_gram(total, x)
    mirror(total)
    expected = 3 * torch.einsum("npi,npj->ij", x.double(), x.double())
    # Sums of 240 products of size one in float32, without TF32.
    torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("others", [[], [(40, torch.bfloat16)], [(2000, torch.float32)]])
def test_rough_symmetry(others: list[tuple[int, torch.dtype]]) -> None:
    """All entries below the diagonal are filled in, for products by strips, in one piece, or by other strips."""
    sums = [OuterProductSum.zeros(1700, 1, False, True, torch.float32, "cuda") for _ in range(2)]
    torch.manual_seed(0)
    for rows, dtype in [(2000, torch.bfloat16), *others]:
        x = torch.randn(rows, 1700, device="cuda", dtype=dtype)
        for one in sums:
            one.add(x, ones=True)
    assert sums[0].computed is not None
    assert len(sums[0].computed) == 1 + len(others)
    incomplete = sums[0].total.clone()
    sums[0].complete(roughly=True)
    sums[1].complete()
    # Both triangles are sums of up to 4,000 products of size one in float32: round-off is about 1e-3.
    torch.testing.assert_close(sums[0].total, sums[1].total, rtol=1e-5, atol=1e-2)
    assert (incomplete - sums[1].total).norm() > 0.1 * sums[1].total.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("products", ["auto", "float32", "tf32", "bf16"])
@pytest.mark.parametrize(("size", "groups"), [(30, 1), (1700, 1), (30, 2)])
def test_products(size: int, groups: int, products: Any, dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, size * groups, device="cuda", dtype=dtype)
    multiplied = x.bfloat16() if products == "bf16" else x
    # Rounding to TF32's eleven bits is off by 2^-11 twice. In addition, there is round-off of 80 products in float32.
    tolerance = 2**-9 if products == "tf32" and dtype == torch.float32 else 2**-16
    before = torch.backends.cuda.matmul.allow_tf32
    total = OuterProductSum.zeros(size, groups, False, True, torch.float32, "cuda", products)
    total.add(x, ones=True)
    total.complete()
    assert torch.backends.cuda.matmul.allow_tf32 == before
    for group, found in enumerate(total.total.double()):
        vectors = multiplied.double().flatten(0, 1).unflatten(1, (groups, size))[:, group]
        vectors = torch.cat([vectors, torch.ones_like(vectors[:, :1])], 1)
        assert ((found - vectors.T @ vectors).abs() <= tolerance * (vectors.abs().T @ vectors.abs())).all()


@pytest.mark.parametrize("products", ["float32", "tf32", "bf16"])
def test_factors_by_products(products: Any) -> None:
    model = Mixed().cuda().eval()
    X, y = torch.randint(7, (64, 6)), torch.randint(3, (64,))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    expected, found = (KFAC(risk, "empirical", products=one) for one in ("auto", products))
    for name, block in found.blocks.items():
        # Rounding to bfloat16 changes a product by a factor of 1 + 2^-7; sums may cancel, but none exceeds these norms.
        for mine, theirs in ((block.A, expected.blocks[name].A), (block.B, expected.blocks[name].B)):
            assert (mine - theirs).norm() <= 2**-6 * theirs.norm()


def test_autocast() -> None:
    model = Mixed().cuda().eval()
    X, y = torch.randint(7, (64, 6)), torch.randint(3, (64,))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    plain = KFAC(risk, "empirical")
    with torch.autocast("cuda", torch.bfloat16):
        narrow = KFAC(risk, "empirical")
    # bfloat16 has 8 bits; errors of several consecutive operations are a few percent of the largest entry.
    for name, block in narrow.blocks.items():
        assert block.A.dtype == block.B.dtype == torch.float32
        scale = plain.blocks[name].B.abs().max()
        torch.testing.assert_close(block.B / scale, plain.blocks[name].B / scale, rtol=0.1, atol=0.05)


# With reduce, gradients of keys sum to zero, so EKFAC's eigenvectors for them are round-off.
@pytest.mark.parametrize(("make", "sharing"), [(KFAC, "expand"), (KFAC, "reduce"), (EKFAC, "expand")])
def test_factors_may_live_elsewhere(make: Any, sharing: Any, tmp_path: Path) -> None:
    model = Mixed().double().eval()
    X, y = torch.randint(7, (40, 6)), torch.randint(3, (40,))  # fewer would not determine all eigenvectors
    there = EmpiricalRisk(copy.deepcopy(model).cuda(), nn.CrossEntropyLoss(), (X, y))
    here = make(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), sharing=sharing)
    dense = here.to_dense()
    inverse = here.inverse(0.1).to_dense()
    for device in ("cpu", None):
        checkpoint = tmp_path / f"checkpoint {device}"
        for _ in range(2):  # the second time, from the checkpoint
            K = make(there, sharing=sharing, factor_device=device, checkpoint=checkpoint)
            assert {block.A.device.type for block in K.blocks.values()} == {device or "cuda"}
            assert K.device.type == "cuda"
            torch.testing.assert_close(K.to_dense().cpu(), dense, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(K.inverse(0.1).to_dense().cpu(), inverse, rtol=1e-9, atol=1e-9)
            v = torch.randn(len(dense), dtype=torch.float64)
            torch.testing.assert_close((K @ v.cuda()).cpu(), dense @ v, rtol=1e-9, atol=1e-9)
    K.save(tmp_path / "k")
    for device in ("cpu", "cuda"):
        loaded = load(tmp_path / "k", device)
        assert loaded.device.type == device
        torch.testing.assert_close((loaded @ v.to(device)).cpu(), dense @ v, rtol=1e-9, atol=1e-9)
    assert K.to("cpu").device.type == "cpu"
    torch.testing.assert_close(K @ v, dense @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [exact_blocks, optimal_kronecker])
def test_other_structures(make: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    here, there = (make(EmpiricalRisk(m, nn.CrossEntropyLoss(), (X, y))) for m in (model, copy.deepcopy(model).cuda()))
    torch.testing.assert_close(there.to_dense().cpu(), here.to_dense(), rtol=1e-7, atol=1e-9)


def test_parameters_on_two_devices() -> None:
    """Predictions and flat vectors are on the device of the first parameter; tensors in dictionaries stay in place."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            where = self.second.weight.device
            result: Tensor = self.second(self.first(x).tanh().to(where))
            return result

    torch.manual_seed(0)
    plain = Split().double()
    split = copy.deepcopy(plain)
    split.second.cuda()
    data = torch.randn(6, 4).double(), torch.randint(3, (6,))
    risk, oracle = (EmpiricalRisk(m, nn.CrossEntropyLoss(), data) for m in (split, plain))
    g, expected = risk.gradient(), oracle.gradient()
    assert {name: t.device.type for name, t in g.items()} == {
        name: "cuda" if name.startswith("second") else "cpu" for name in g
    }
    K, L = KFAC(risk), KFAC(oracle)
    assert {block.A.device.type for block in K.blocks.values()} == {"cpu", "cuda"}
    for found, right in (
        (g, expected),
        (GGN(risk) @ g, GGN(oracle) @ expected),
        (K.inverse(0.1) @ g, L.inverse(0.1) @ expected),
        (EKFAC(risk) @ g, EKFAC(oracle) @ expected),
    ):
        for name, t in found.items():
            torch.testing.assert_close(t.cpu(), right[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(K.to_dense(), L.to_dense(), rtol=1e-9, atol=1e-9)
