"""Eigenvalues that are zero up to round-off: they are recognized, and others are not changed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs import EKFAC, KFAC, EmpiricalRisk
from kfs.errors import KfsWarning, SolverError, StorageError
from kfs.factors.blocks import BlockError, Dense, Eigenbasis, Structure
from kfs.factors.blocks.factor import Factor
from tests.factors.test_kronecker import of_structure
from tests.operators.contract import close

EPS = torch.finfo(torch.float64).eps
WIDE = 50


def rank_one(side: str) -> KFAC:
    """A block with a wide factor that has one nonzero eigenvalue, and a single number on the other side."""
    torch.manual_seed(0)
    wide, narrow = ((1, WIDE), (WIDE, 1)) if side == "B" else ((WIDE, 1), (1, 1))
    model = nn.Sequential(nn.Linear(*wide, bias=False), nn.Linear(*narrow, bias=False)).double()
    data = torch.randn(1, wide[0], dtype=torch.float64), torch.randn(1, 1, dtype=torch.float64)
    return KFAC(EmpiricalRisk(model, nn.MSELoss(), data, params=["0.weight"]))


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, -1e-20])
def test_what_is_zero_up_to_round_off(side: str, scale: float) -> None:
    """Eigenvalues of a matrix with `d` rows are accurate to `d` eps times the largest one.

    The other side has one row, so only the wide factor's size matters. Damping must be larger.
    """
    K = rank_one(side)
    largest = float(K.eigenvalues().max())
    assert K.blocks["0.weight"].A.shape == ((WIDE, WIDE) if side == "A" else (1, 1))
    sign = -1.0 if scale < 0 else 1.0
    too_small: Any = sign * (scale * K.shift(0.4 * WIDE * EPS * largest))
    with pytest.raises(SolverError, match="singular"):
        too_small.inverse()
    enough: Any = sign * (scale * K.shift(3 * WIDE * EPS * largest))
    assert enough.inverse().to_dense().isfinite().all()
    damped: Any = sign * (scale * K.shift(0.1))
    dense = K.to_dense() + 0.1 * torch.eye(WIDE, dtype=torch.float64)
    close(abs(scale) * damped.inverse().to_dense(), torch.linalg.inv(dense))


def test_a_singular_matrix_does_not_change_others() -> None:
    """Among matrices that are inverted together, singular ones are shifted, and the others are exact."""
    ones = torch.ones(2, 2, dtype=torch.float64)
    small = torch.tensor([1.0, 1e-13], dtype=torch.float64)  # a shift by round-off would change its inverse by 1 %
    with pytest.warns(KfsWarning, match="1 of 2 factors are singular"):
        inverse = Factor.dense(torch.stack([ones, small.diag()])).inverse()
    torch.testing.assert_close(inverse.values[1].diagonal(), 1 / small, rtol=1e-12, atol=0.0)
    assert inverse.values[1][0, 1] == inverse.values[1][1, 0] == 0
    assert inverse.values[0].isfinite().all()


def singular() -> Any:
    """KFAC of a layer with six inputs and five examples: its input-based factor has an eigenvalue of zero.

    Round-off makes it positive here. A negative one would never be inverted, for any noise level.
    """
    for seed in range(100):
        torch.manual_seed(seed)
        data = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        K = KFAC(EmpiricalRisk(nn.Linear(6, 2, bias=False).double(), nn.MSELoss(), data))
        if K.eigenvalues().min() > 0:
            return K
    pytest.fail("no such data were found")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_the_last_layer_of_a_classifier_is_singular(seed: int, dtype: torch.dtype) -> None:
    """Adding a number to all logits changes nothing, despite round-off, and corrected eigenvalues show it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(dtype)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randn(12, 4, dtype=dtype), torch.arange(12) % 3))
    with pytest.warns(KfsWarning, match="1 of 1 factors are singular"):
        inverse = KFAC(risk).inverse()
    assert inverse.to_dense().isfinite().all()
    E = EKFAC(risk)
    for invert in (E.inverse, lambda: E.power(-0.5), lambda: E.sample(1)):
        with pytest.raises(SolverError, match="'2' is singular, up to round-off"):
            invert()
    assert E.inverse(1e-3).to_dense().abs().max() < 1001
    first: Any = E.submatrix(["0.weight", "0.bias"])
    back = first.inverse().inverse().to_dense()
    torch.testing.assert_close(back, E.to_dense()[:15, :15])


def as_matrices(K: Any) -> Any:
    """Convert the operator to a dense matrix."""
    return K._with_structures([Dense(K.to_dense().unsqueeze(0), 2, 6)])


SINGULAR: dict[str, Callable[[Any], Any]] = {
    "shifted by zero": lambda K: K.shift(0.0),
    "times a large multiple of the identity": lambda K: K.shift(0.0) @ K.shift(1e9),
    "a large multiple of the identity times it": lambda K: K.shift(1e9) @ K.shift(0.0),
    "scaled up": lambda K: 1e30 * (K.shift(0.0) @ K.shift(1e9)),
    "scaled down": lambda K: K.shift(0.0) @ (1e-30 * K.shift(1e-9)),
    "squared": lambda K: K.shift(0.0) @ K.shift(0.0),
    "times its damped inverse": lambda K: K.shift(0.0) @ K.inverse(1e-9),
    "times three others": lambda K: K.shift(3.0) @ K.shift(0.0) @ K.shift(1e9) @ K.inverse(1e-6),
    "root": lambda K: K.shift(0.0).power(0.5),
    "third power": lambda K: K.shift(0.0).power(3.0),
    "power of a product": lambda K: (K.shift(0.0) @ K.shift(1e9)).power(0.3),
    "twice itself": lambda K: K.shift(0.0) + K.shift(0.0),
    "sum of multiples": lambda K: 1e9 * K.shift(0.0) + 1e-9 * K.shift(0.0),
    "a large shift that is undone": lambda K: K.shift(1e9).shift(-1e9),
    "a large sum that is undone": lambda K: (K.shift(1e9) + K.shift(1e9)).shift(-2e9),
    "a power that is undone": lambda K: K.power(2.0, 1e3).shift(-1e6),
    "a difference": lambda K: K.shift(1e9) + -1.0 * K.shift(1e9),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_what_is_made_of_singular_blocks_is_singular(name: str) -> None:
    made = SINGULAR[name](singular())
    assert made.to_dense().isfinite().all()
    for invert in (made.inverse, lambda: made.power(-0.5)):
        with pytest.raises(SolverError, match="'weight' is singular, up to round-off"):
            invert()


def test_products_of_matrices_are_singular_too() -> None:
    """Such products are not symmetric, so there are no eigenvalues to check."""
    K = singular()
    matrices = as_matrices(K)
    for made in (K @ K, (K @ K).T, 1e9 * (K @ K), matrices @ matrices, matrices @ matrices.shift(1e9), K @ matrices):
        with pytest.raises(SolverError, match="is singular, up to round-off"):
            made.inverse()
    exactly = of_structure(Dense(torch.ones(1, 2, 2, dtype=torch.float64), 1, 2, symmetric=False), (1, 2))
    with pytest.raises(SolverError, match="'W' is singular, up to round-off"):
        exactly.inverse()
    bad = of_structure(Dense(torch.full((1, 2, 2), torch.nan), 1, 2, symmetric=False), (1, 2))
    with pytest.raises(SolverError, match="'W' contains NaN"):
        bad.inverse()
    regular = matrices.shift(0.1) @ matrices.shift(1e9)
    close(1e9 * regular.inverse().to_dense(), 1e9 * torch.linalg.inv(regular.to_dense()))


@pytest.mark.parametrize("kind", ["dense", "diagonal"])
def test_products_and_sums_keep_the_precision_of_their_parts(kind: Any) -> None:
    """Numbers that were stored in half precision are singular if eigenvalues are as small as its round-off."""
    values = torch.tensor([[1.0, 1e-3]], dtype=torch.float64)
    precise = Factor(values.diag_embed() if kind == "dense" else values, torch.ones(1).double(), kind)
    rough = replace(precise, eps=torch.finfo(torch.bfloat16).eps)
    regular = Factor.dense(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]], dtype=torch.float64))
    for result in (precise.compose(regular), regular.compose(precise)):
        close(result.inverse().to_dense(), torch.linalg.inv(result.to_dense()))
    close(precise.plus(precise).power(-1.0).to_dense(), torch.linalg.inv(2 * precise.to_dense()))
    calls: list[Callable[[], Any]] = [
        rough.compose(regular).inverse,
        regular.compose(rough).inverse,
        lambda: rough.compose(rough).power(-1.0) if kind == "diagonal" else rough.compose(rough).inverse(),
        lambda: rough.plus(precise).power(-1.0),
        lambda: precise.plus(rough).power(-1.0),
    ]
    for call in calls:
        with pytest.raises(BlockError, match="is singular, up to round-off"):
            call()


def test_regular_products_are_inverted() -> None:
    K = singular()
    for made, scale in (
        (K.shift(1.0) @ K.shift(1e9), 1e9),
        (K.shift(1e-3).power(2.0), 1e-6),
        (K.shift(0.0) + K.shift(1e-6), 1e-6),
        (K.inverse(1e-3) @ K.shift(1e-3), 1.0),
        (K.shift(1e-3).inverse().inverse(), 1e-3),
        (K.inverse(1e-3).shift(1.0), 1.0),
    ):
        # Condition numbers are up to 1e6 and 1e7.
        expected = scale * torch.linalg.inv(made.to_dense())
        torch.testing.assert_close(scale * made.inverse().to_dense(), expected, rtol=1e-6, atol=1e-9)


NOISE = 1e-12


def diagonal(*values: float, noise: float = NOISE) -> Eigenbasis:
    """Eigenvalues with a known noise."""
    basis = Eigenbasis.of_diagonal(torch.tensor([[values]], dtype=torch.float64))
    return Eigenbasis(basis.Q_A, basis.Q_B, basis.values, torch.tensor([noise], dtype=torch.float64))


def test_small_eigenvalues_that_are_known_well_are_inverted() -> None:
    """Products have relative errors of 1e-6 and 1e-3 here. One noise level for a block would refuse them."""
    small = diagonal(1.0, 1e-6, noise=1e-12)
    for made, values in (
        (small.product(small), [1.0, 1e-12]),
        (small.power(2.0), [1.0, 1e-12]),
        (small.product(diagonal(1e-3, 1e-9)), [1e-3, 1e-15]),
    ):
        assert isinstance(made, Eigenbasis)
        assert (made.noise.amax() > values[1]).all()
        torch.testing.assert_close(made.inverse().to_dense()[0].diagonal(), 1 / torch.tensor(values).double())


NOISY: dict[str, tuple[Callable[..., Structure | None], Callable[..., Tensor]]] = {
    "product": (lambda v, w: v.product(w), lambda v, w: v * w),
    "sum": (lambda v, w: v.plus(w), lambda v, w: v + w),
    "scaled": (lambda v, _: v.scaled(-3.0), lambda v, _: -3.0 * v),
    "shifted": (lambda v, _: v.shift(0.3), lambda v, _: v + 0.3),
    "square": (lambda v, _: v.power(2.0), lambda v, _: v**2),
    "root": (lambda v, _: v.power(0.5), lambda v, _: v**0.5),
    "damped root": (lambda v, _: v.power(0.5, v.values.new_full((1,), 0.2)), lambda v, _: (v + 0.2) ** 0.5),
    "product of a product": (lambda v, w: v.product(w).product(v), lambda v, w: v * w * v),
    "sum of a product": (lambda v, w: v.product(w).plus(w), lambda v, w: v * w + w),
}


@pytest.mark.parametrize("name", NOISY)
def test_noise_bounds_what_errors_change(name: str) -> None:
    """Eigenvalues are moved up and down by as much as their noise, in all combinations."""
    operation, formula = NOISY[name]
    v, w = diagonal(1.0, 0.3, 1e-4, noise=1e-6), diagonal(2.0, 1e-3, 50.0, noise=1e-5)
    made = operation(v, w)
    assert isinstance(made, Eigenbasis)
    base = formula(v.values, w.values)
    torch.testing.assert_close(made.values, base)
    change = torch.zeros_like(base)
    for up, other in product((-1.0, 0.0, 1.0), repeat=2):
        moved = formula(v.values + up * v.noise, w.values + other * w.noise)
        change = torch.maximum(change, (moved - base).abs())
    noise = made.noise.reshape(1, 1, -1).expand_as(base)
    round_off = 1e-15 * base.abs().max()
    assert (noise >= change - round_off).all()
    assert (noise <= 1.001 * change + round_off).all()  # and not much more than that: second orders are 1e-3 at most


def test_sums_are_rounded() -> None:
    """One tenth and two tenths are a bit more than three tenths, in floating point."""
    zero, tenth, two_tenths, three_tenths = (diagonal(value, 1.0, noise=0.0) for value in (0.0, 0.1, 0.2, 0.3))
    shifted = zero.shift(0.1).shift(0.2).shift(-0.3)
    difference = tenth.plus(two_tenths).plus(three_tenths.scaled(-1.0))  # type: ignore[union-attr]
    for made in (shifted, difference):
        assert isinstance(made, Eigenbasis)
        assert made.values[0, 0, 0] > 0
        with pytest.raises(BlockError, match="is singular, up to round-off"):
            made.inverse()


def test_noise_is_stored(tmp_path: Path) -> None:
    for name in ("shifted by zero", "squared"):
        SINGULAR[name](singular()).save(tmp_path / "k")
        loaded = kfs.load(tmp_path / "k")
        with pytest.raises(SolverError, match="singular"):
            loaded.inverse()
    basis = diagonal(1.0, 2.0)
    for noise in (torch.zeros(2), torch.zeros(1, 2, 2), torch.zeros(1, 2)):
        wrong = of_structure(Eigenbasis(basis.Q_A, basis.Q_B, basis.values, noise), (1, 2))
        wrong.save(tmp_path / "k")
        with pytest.raises(StorageError, match="a tensor has shape"):
            kfs.load(tmp_path / "k")
