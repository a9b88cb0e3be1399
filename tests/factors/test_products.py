"""The precision of outer products as an option. `test_devices` tests its effect on a GPU."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError, StorageError
from kfs.factors import EKFAC, KFAC, load
from kfs.factors.accumulate import outer_products as products_module
from kfs.factors.accumulate.inputs import Inputs, Vectors
from kfs.factors.accumulate.outer_products import OuterProductSum, check_products, multiplying, rounded
from kfs.factors.accumulate.patches import Patches
from kfs.factors.checkpoint import Checkpoint
from kfs.factors.settings import Settings
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.precision import uses_tf32

# bfloat16 has eight significant bits: a rounded number is off by at most 2^-8 of it, and a product of two of them
# by 2^-7 + 2^-16. Sums of a few hundred products in float32 add less than 2^-12.
BFLOAT16 = 2**-7 + 2**-12
FLOAT32 = 2**-16  # a few hundred times the unit roundoff of float32


def risk_of(part: slice = slice(0, 30), dtype: torch.dtype = torch.float32) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    X, y = torch.randn(30, 3), torch.randint(2, (30,))
    return EmpiricalRisk(model.to(dtype), nn.CrossEntropyLoss(), (X[part].to(dtype), y[part]))


def outer_products(vectors: Tensor) -> Tensor:
    """Sum outer products in a loop, in float64."""
    total = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64)
    for v in vectors.double():
        total += torch.outer(v, v)
    return total


def patches(x: Tensor, stride: int) -> Tensor:
    """Cut images `[images, channels, width]` into patches of width three, in a loop."""
    starts = range(0, x.shape[2] - 2, stride)
    return torch.stack([x[image, :, start : start + 3].flatten() for image in range(len(x)) for start in starts])


def convolution(stride: int) -> Patches:
    return Patches((5, 4, 9), (3,), (stride,), ((0, 0),), (1,), 1)


# Inputs, their shape, and the way in which vectors are read from them.
CASES: dict[str, tuple[Inputs, tuple[int, ...], Any]] = {
    "vectors": (Vectors(5), (40, 5), lambda x: x),
    "one vector": (Vectors(5), (5,), lambda x: x.unsqueeze(0)),
    "wide vectors": (Vectors(150), (2, 20, 150), lambda x: x.flatten(0, 1)),
    "channels first": (Vectors(4), (4, 20, 4), lambda x: x.flatten(0, 1)),
    "convolution": (convolution(1), (5, 4, 9), lambda x: patches(x, 1)),
    "strided convolution": (convolution(2), (5, 4, 9), lambda x: patches(x, 2)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rounded_inputs(case: str, bias: bool) -> None:
    """With bf16, vectors are rounded, and all other operations are in float32."""
    inputs, shape, read = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if case == "channels first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    vectors = read(x)
    if bias:
        vectors = torch.cat([vectors, torch.ones(len(vectors), 1)], 1)
    exact, rounded, sizes = outer_products(vectors), outer_products(vectors.bfloat16()), outer_products(vectors.abs())
    found = {}
    for products in ("auto", "float32", "bf16"):
        total = OuterProductSum.zeros(inputs.size, 1, False, bias, torch.float32, "cpu", products)
        inputs.add_to(total, x, bias)
        total.complete()
        assert total.total.dtype == torch.float32
        found[products] = total.total[0].double()
    assert torch.equal(found["auto"], found["float32"])
    assert ((found["auto"] - exact).abs() <= FLOAT32 * sizes).all()
    assert ((found["bf16"] - rounded).abs() <= FLOAT32 * sizes).all()
    assert ((found["bf16"] - exact).abs() <= BFLOAT16 * sizes).all()
    # Vectors that were not rounded, or rounded sums, would fail.
    for wrong in (exact, rounded.bfloat16().double()):
        assert not ((wrong - rounded).abs() <= FLOAT32 * sizes).all()


@pytest.mark.parametrize("whole", [False, True])
def test_groups(whole: bool) -> None:
    x = torch.randn(20, 2, 3)
    total = OuterProductSum.zeros(3, 2, False, False, torch.float32, "cpu", "bf16")
    if whole:
        total.add_whole(x)
    else:
        total.add(x.flatten(1))
    total.complete()
    for group in range(2):
        sizes = outer_products(x[:, group].abs())
        assert ((total.total[group] - outer_products(x[:, group].bfloat16())).abs() <= FLOAT32 * sizes).all()


def test_diagonals_are_not_rounded() -> None:
    x = torch.randn(20, 3)
    sums = [OuterProductSum.zeros(3, 1, True, False, torch.float32, "cpu", products) for products in ("auto", "bf16")]
    for total in sums:
        total.add(x)
        total.add_whole(x.unsqueeze(1))
    assert torch.equal(sums[0].total, sums[1].total)


def test_half_precision() -> None:
    """Vectors in half precision are not rounded again; with float32, they are converted."""
    x = torch.randn(20, 3).half()
    for products in ("auto", "float32", "bf16"):
        total = OuterProductSum.zeros(3, 1, False, False, torch.float16, "cpu", products)
        total.add(x)
        total.complete()
        assert ((total.total[0] - outer_products(x)).abs() <= FLOAT32 * outer_products(x.abs())).all()
        assert rounded(x, total.products).dtype == (torch.float32 if products == "float32" else torch.float16)


def test_no_negative_eigenvalues() -> None:
    """A feature that is nearly constant correlates with the bias coordinate; rounding only one of them is noticed."""
    x = 1 + 1e-3 * torch.rand(50, 2)
    total = OuterProductSum.zeros(2, 1, False, True, torch.float32, "cpu", "bf16")
    total.add(x, ones=True)
    total.complete()
    eigenvalues = torch.linalg.eigvalsh(total.total[0].double())
    assert eigenvalues[0] > -FLOAT32 * eigenvalues[-1]
    wrong = total.total[0].double()
    wrong[2, :2] = wrong[:2, 2] = x.double().sum(0)
    assert torch.linalg.eigvalsh(wrong)[0] < -FLOAT32 * eigenvalues[-1]


@pytest.mark.parametrize(("make", "sharing"), list(product((KFAC, EKFAC), ("expand", "reduce"))))
def test_factors(make: Any, sharing: Any) -> None:
    expected, found = (make(risk_of(), sharing=sharing, products=products) for products in ("auto", "bf16"))
    for name, block in found.blocks.items():
        exact = expected.blocks[name]
        assert block.A.dtype == block.B.dtype == torch.float32
        for mine, theirs in ((block.A, exact.A), (block.B, exact.B)):
            assert not torch.equal(mine, theirs)
            # Entries of |x|^T |x| are at most the product of norms, which are the roots of diagonal entries.
            roots = theirs.diagonal().sqrt()
            assert ((mine - theirs).abs() <= BFLOAT16 * torch.outer(roots, roots)).all()
    same = make(risk_of(), sharing=sharing, products="float32")
    assert torch.equal(same.to_dense(), expected.to_dense())


def test_autocast() -> None:
    """With float32, gradients in float32 stay in float32, also under autocast."""
    risk = risk_of()
    with torch.autocast("cpu", torch.bfloat16):
        narrow, wide = (KFAC(risk, "empirical", products=products) for products in ("auto", "float32"))
    for name, block in wide.blocks.items():
        close_to = narrow.blocks[name].B
        assert (block.B - close_to).norm() <= 4 * BFLOAT16 * close_to.norm()


def test_files(tmp_path: Path) -> None:
    K = KFAC(risk_of(), products="bf16")
    K.save(tmp_path / "k")
    again = load(tmp_path / "k")
    assert isinstance(again, KFAC)
    assert again.settings == K.settings == Settings(products="bf16")
    assert torch.equal(again.to_dense(), K.to_dense())
    assert "products" not in Settings().state()
    assert Settings.from_state(Settings().state()).products == "auto"


def test_more_data(tmp_path: Path) -> None:
    parts = slice(0, 10), slice(10, 30)
    whole = KFAC(risk_of(), products="bf16")
    updated = KFAC(risk_of(parts[0]), products="bf16").update(risk_of(parts[1]))
    torch.testing.assert_close(updated.to_dense(), whole.to_dense(), rtol=1e-5, atol=1e-7)
    with pytest.raises(ModelError, match="The settings differ"):
        KFAC(risk_of(parts[0])).merge(KFAC(risk_of(parts[1]), products="bf16"))
    # The sums of a checkpoint are resumed in the same precision.
    X, y = torch.randn(8, 3), torch.randint(2, (8,))
    model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
    expected = KFAC(EmpiricalRisk(model, loss, [(X[:4], y[:4]), (X[4:], y[4:])]), products="bf16")

    def interrupted() -> Any:
        yield X[:4], y[:4]
        raise KeyboardInterrupt

    class Interrupted:
        __iter__ = staticmethod(interrupted)

    checkpoint = Checkpoint(tmp_path / "c", batches=1)
    with pytest.raises(KeyboardInterrupt):
        KFAC(EmpiricalRisk(model, loss, Interrupted()), products="bf16", checkpoint=checkpoint)
    whole_data = EmpiricalRisk(model, loss, [(X[:4], y[:4]), (X[4:], y[4:])])
    with pytest.raises(StorageError, match="settings differ"):
        KFAC(whole_data, checkpoint=checkpoint)
    resumed = KFAC(whole_data, products="bf16", checkpoint=checkpoint)
    assert torch.equal(resumed.to_dense(), expected.to_dense())


def test_bad_choices() -> None:
    with pytest.raises(ModelError, match=r"products is 'half'\. Choose from 'auto', 'float32', 'tf32', 'bf16'"):
        KFAC(risk_of(), products="half")  # type: ignore[arg-type]
    for products in ("float32", "tf32", "bf16"):
        with pytest.raises(ModelError, match="'0' are summed in float64"):
            KFAC(risk_of(dtype=torch.float64), products=products)
    with pytest.raises(ModelError, match="summed in float64"):
        KFAC(risk_of(), products="bf16", factor_dtype=torch.float64)
    with pytest.raises(ModelError, match="has no TF32"):
        KFAC(risk_of(), products="tf32")
    for device in ("meta", "cuda"):
        check_products("tf32", torch.float32, torch.device(device), "0")


def test_tf32_is_switched_around_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is set while products are computed, and restored afterwards, also after errors."""
    seen: list[bool] = []
    add_product = products_module._add_product

    def noted(total: Tensor, left: Tensor, right: Tensor) -> None:
        seen.append(uses_tf32())
        add_product(total, left, right)

    monkeypatch.setattr(products_module, "_add_product", noted)
    precision = torch.get_float32_matmul_precision()
    try:
        for before in ("highest", "high"):
            torch.set_float32_matmul_precision(before)
            default = uses_tf32()
            assert default == (before == "high")
            for products, expected in {"auto": default, "float32": False, "tf32": True, "bf16": default}.items():
                products_module.add_gram(torch.zeros(3, 3), torch.randn(5, 3), products)  # type: ignore[arg-type]
                assert seen.pop() == expected
                with pytest.raises(ZeroDivisionError), multiplying(products):  # type: ignore[arg-type]
                    _ = 1 / 0
                assert uses_tf32() == default
                assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(precision)
