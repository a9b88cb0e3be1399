"""Sums of Kronecker products and their inverses, against dense matrices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import KfsWarning, SolverError
from kfs.factors import KFAC
from kfs.factors.blocks import (
    BlockDiagonal,
    Congruence,
    Dense,
    Factor,
    IterativeInverse,
    Kronecker,
    KroneckerSum,
    decompositions,
)
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_kronecker import Mixed, definite, of_structure, one_block, product_by_product
from tests.operators.contract import check_contract, close


def networks(num: int, **settings: Any) -> list[KFAC]:
    """KFAC of one model on several data sets. The second has a tenth of the weight, the third ten times the weight."""
    torch.manual_seed(0)
    model = Mixed().double().eval()
    datasets = [(torch.randint(5, (40, 3)), torch.randint(3, (40,))) for _ in range(num)]
    return [KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), **settings) for data in datasets]


def total(*operators: Any) -> BlockDiagonal:
    result = operators[0]
    for factor, operator in zip((0.1, 10.0), operators[1:], strict=False):
        result = result + factor * operator
    assert isinstance(result, BlockDiagonal)
    return result


def definite_blocks(num: int) -> list[BlockDiagonal]:
    return [one_block(definite(4, 10 * seed), definite(3, 10 * seed + 1)) for seed in range(num)]


def mixed_kinds() -> BlockDiagonal:
    """A term with a dense and a diagonal factor, and one with a diagonal and a dense factor."""
    diagonal = torch.rand(2, 4, dtype=torch.float64) + 0.5
    one = Kronecker(Factor.dense(definite(4)[None]), Factor.diagonal(diagonal[:1, :3].contiguous()))
    other = Kronecker(Factor.diagonal(diagonal[1:]), Factor.dense(definite(3, 7)[None]))
    return total(of_structure(one, (3, 4)), of_structure(other, (3, 4)))


SUMS: dict[str, Callable[[], BlockDiagonal]] = {
    "two": lambda: total(*definite_blocks(2)),
    "three": lambda: total(*definite_blocks(3)),
    "two networks": lambda: total(*networks(2)),
    "three networks": lambda: total(*networks(3)),
    "reduce and expand": lambda: total(networks(1)[0], networks(1, sharing="reduce")[0]),
    "diagonals": lambda: total(*networks(2, joint_bias=False, max_dim=3)),
    "mixed kinds": mixed_kinds,
    "a difference": lambda: definite_blocks(1)[0] - 0.01 * definite_blocks(2)[1],  # type: ignore[dict-item,return-value]
    "shifted": lambda: total(*definite_blocks(2)).shift(0.5),  # type: ignore[dict-item,return-value]
    "an inverse": lambda: total(*definite_blocks(2)).inverse(),
    "an inverse of three": lambda: total(*definite_blocks(3)).inverse(),
    "an inverse of diagonals and dense matrices": lambda: mixed_kinds().inverse(),
    "a damped inverse": lambda: total(*networks(2)).inverse(0.1),
    "a factored inverse": lambda: total(*networks(2)).inverse(0.1, "factored"),
}


@pytest.mark.filterwarnings("ignore:Factors wider")
@pytest.mark.parametrize("name", SUMS)
def test_contract_and_numbers(name: str) -> None:
    torch.manual_seed(0)
    K = SUMS[name]()
    dense = product_by_product(K)
    check_contract(K, dense)
    close(K.trace(), dense.trace())
    close(K.diagonal(), dense.diagonal())
    close(K.squared_frobenius_norm() / dense.square().sum(), torch.tensor(1.0, dtype=torch.float64))
    close(K.eigenvalues(), torch.linalg.eigvalsh(dense))
    assert K.nbytes > 0
    identity = torch.eye(len(dense), dtype=torch.float64)
    damped = dense + 0.3 * identity
    shifted = K.shift(0.3)
    assert isinstance(shifted, BlockDiagonal)
    close(product_by_product(shifted), damped)
    close(shifted.logdet(), damped.logdet())
    close(K.inverse(0.3).to_dense(), torch.linalg.inv(damped))
    close(product_by_product(K.inverse(0.3)), torch.linalg.inv(damped))
    close(product_by_product(K.inverse(0.3).inverse()), damped)
    close(K.inverse(0.3).logdet(), -damped.logdet())
    v = torch.randn(len(dense), dtype=torch.float64)
    close(K.solve(v, 0.3), torch.linalg.solve(damped, v))
    root = K.power(-0.5, 0.3).to_dense()
    close(root @ root, torch.linalg.inv(damped))
    nothing: Any = 0 * K.inverse(0.3)
    close(nothing.to_dense(), torch.zeros_like(dense))
    close(nothing @ v, torch.zeros_like(v))
    scaled: Any = -2 * K.inverse(0.3)
    close(scaled @ v, -2 * torch.linalg.solve(damped, v))
    close(scaled.det(), torch.linalg.det(-2 * torch.linalg.inv(damped)))
    if isinstance(K.structures.get("W"), KroneckerSum):
        close(scaled.inverse().to_dense(), -0.5 * damped)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 4)])
def test_determinants_of_negative_multiples(rows: int, columns: int) -> None:
    """The determinant is negative if the matrix has an odd number of rows."""
    blocks = [one_block(definite(columns, seed), definite(rows, 10 + seed)) for seed in range(3)]
    K = total(*blocks)
    assert isinstance(K.inverse().structures["W"], IterativeInverse)
    for operator in (blocks[0], total(*blocks[:2]), K, K.inverse()):
        negative: Any = -2 * operator
        dense = -2 * operator.to_dense()
        close(negative.det(), torch.linalg.det(dense))
        close(operator.logdet(), operator.to_dense().logdet())
        assert (float(negative.det()) < 0) == (rows * columns % 2 == 1)


@pytest.mark.parametrize("num", [2, 3])
def test_inverse_and_determinant_of_definite_sums(num: int) -> None:
    """Two terms have a closed form; the inverse of three is applied by conjugate gradients."""
    K = total(*definite_blocks(num))
    dense = sum(f * k.to_dense() for f, k in zip((1.0, 0.1, 10.0), definite_blocks(num), strict=False))
    assert isinstance(dense, Tensor)
    inverse = K.inverse()
    assert isinstance(inverse.structures["W"], Congruence if num == 2 else IterativeInverse)
    close(product_by_product(inverse), torch.linalg.inv(dense))
    close(K.power(-1.0).to_dense(), torch.linalg.inv(dense))
    close(K.logdet(), dense.logdet())
    torch.testing.assert_close(K.det(), torch.linalg.det(dense), rtol=1e-9, atol=0.0)
    close(inverse.logdet(), -dense.logdet())
    close(product_by_product(inverse.inverse()), dense)


def test_which_sums_stay_structured() -> None:
    one, other, third = definite_blocks(3)
    both = total(one, other)
    assert isinstance((both + third).structures["W"], KroneckerSum)  # type: ignore[attr-defined]
    assert len((third + both).structures["W"].terms) == 3  # type: ignore[attr-defined]
    # A term with a factor of another term is added to it.
    assert len((both + one).structures["W"].terms) == 2  # type: ignore[attr-defined]
    close((both + one).to_dense(), both.to_dense() + one.to_dense())
    assert isinstance((one + one + other - other - one).structures["W"], KroneckerSum)  # type: ignore[attr-defined]
    multiple = one_block(definite(4), torch.eye(3, dtype=torch.float64))
    identity = Kronecker(Factor.identity(4, torch.ones(1).double()), Factor.identity(3, torch.ones(1).double()))
    scalar = Kronecker(Factor.dense(definite(4)[None]), Factor.identity(3, torch.ones(1).double()))
    shifted = (of_structure(scalar, (3, 4)) + other).shift(0.5)
    # Damping is added to the factor beside an identity, so exact damping keeps a closed form.
    assert isinstance(shifted, BlockDiagonal)
    assert len(shifted.structures["W"].terms) == 2  # type: ignore[attr-defined]
    close(shifted.to_dense(), multiple.to_dense() + other.to_dense() + 0.5 * identity.to_dense()[0])
    product = both @ third
    assert isinstance(product, BlockDiagonal)
    assert isinstance(product.structures["W"], KroneckerSum)
    close(product.to_dense(), both.to_dense() @ third.to_dense())
    check_contract(product, product_by_product(product))
    close(product.inverse().to_dense(), torch.linalg.inv(product.to_dense()))
    close(product.logdet(), product.to_dense().logdet())
    close((third @ both).to_dense(), third.to_dense() @ both.to_dense())
    close((both @ both).to_dense(), both.to_dense() @ both.to_dense())
    block = of_structure(Dense(definite(12).unsqueeze(0), 3, 4), (3, 4))
    for result, expected in (
        (both + block, both.to_dense() + block.to_dense()),
        (block + both, both.to_dense() + block.to_dense()),
        (both @ block, both.to_dense() @ block.to_dense()),
        (block @ both, block.to_dense() @ both.to_dense()),
    ):
        assert isinstance(result, BlockDiagonal)
        close(result.to_dense(), expected)
    for operator in (one.inverse(0.1), both.inverse(), both.inverse(0.1)):
        for mine in (both, operator):
            close((mine + operator) @ torch.eye(12).double(), mine.to_dense() + operator.to_dense())
            close((mine @ operator) @ torch.eye(12).double(), mine.to_dense() @ operator.to_dense())
        assert not isinstance(both + operator, BlockDiagonal)
        assert not isinstance(operator + both, BlockDiagonal)
        assert not isinstance(operator @ both, BlockDiagonal)


@pytest.mark.parametrize("method", ["factored", "per-factor"])
def test_methods_damp_every_term(method: Any) -> None:
    """`"factored"` splits damping between terms, `"per-factor"` does not."""
    K1, K2 = definite_blocks(2)
    inverse = total(K1, K2).inverse(0.4, method)
    assert isinstance(inverse.structures["W"], Congruence)
    part = 0.2 if method == "factored" else 0.4
    terms = K1.inverse(part, method), (0.1 * K2).inverse(part, method)  # type: ignore[attr-defined]
    expected = torch.linalg.inv(sum(torch.linalg.inv(term.to_dense()) for term in terms))
    close(product_by_product(inverse), expected)


def test_two_singular_terms_can_have_a_sum_that_is_not() -> None:
    """Factors may be singular as long as their combinations are not."""
    low, high = torch.diag(torch.tensor([1.0, 2.0, 0.0])).double(), torch.diag(torch.tensor([0.0, 0.5, 1.0])).double()
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    low, high = rotation @ low @ rotation.T, rotation @ high @ rotation.T
    full = definite(3, 4)
    K = total(one_block(low, full), one_block(high, definite(3, 5)))
    assert torch.linalg.matrix_rank(one_block(low, full).to_dense()) == 6
    close(product_by_product(K.inverse()), torch.linalg.inv(K.to_dense()))
    # If both are zero in one direction, the sum is singular, and also if they are zero in two, on different sides.
    for singular in (
        total(one_block(low, full), one_block(low @ low, low)),
        one_block(low, high) + one_block(high, low),
    ):
        assert isinstance(singular, BlockDiagonal)
        with pytest.raises(SolverError, match="block 'W' is singular"):
            singular.inverse()
        assert singular.inverse(0.1).logdet().isfinite()
    nothing = total(one_block(low, full), one_block(low @ low, low))
    with pytest.warns(KfsWarning, match="is singular"):
        assert (float(nothing.logdet()), float(nothing.det())) == (float("-inf"), 0.0)
    with pytest.raises(SolverError, match="negative eigenvalue"):
        (K - 5 * one_block(full, full)).inverse()  # type: ignore[attr-defined]
    for factor, negative in ((20.0, True), (1e3, True), (1e-3, False)):
        difference: Any = K - factor * one_block(full, full)
        exact = torch.linalg.det(difference.to_dense())
        torch.testing.assert_close(difference.det(), exact, rtol=1e-9, atol=0.0)
        assert bool(difference.logdet().isnan()) == negative == (exact < 0)


def test_a_large_diagonal_stays_one() -> None:
    """The factor of a large vocabulary must not be turned into a dense matrix."""
    size = 5000
    table = Factor.diagonal(torch.rand(1, size, dtype=torch.float64) + 0.1)
    other = Factor.diagonal(torch.rand(1, size, dtype=torch.float64) + 0.1)
    terms = [Kronecker(Factor.dense(definite(3, seed)[None]), wide) for seed, wide in enumerate((table, other))]
    K = of_structure(terms[0], (size, 3)) + of_structure(terms[1], (size, 3))
    assert isinstance(K, BlockDiagonal)
    assert K.inverse().nbytes < 10 * size * 8
    v = torch.randn(3 * size, dtype=torch.float64)
    close(K.inverse() @ (K @ v), v)
    assert K.logdet().isfinite()
    for question in (K.eigenvalues, K.shift(0.1).logdet, K.inverse().eigenvalues, K.inverse(0.1).eigenvalues):  # type: ignore[attr-defined]
        with pytest.raises(SolverError, match=r"15000 rows.*no closed form.*spectral_density"):
            question()


def test_too_close_to_singular() -> None:
    ill = torch.diag(torch.logspace(0, -7, 6))
    Q = [torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))[0] for seed in range(6)]
    operators = []
    for seed in range(3):
        A, B = (Q[2 * seed + side] @ ill @ Q[2 * seed + side].T for side in range(2))
        operators.append(Kronecker(Factor.dense((A + A.T)[None] / 2), Factor.dense((B + B.T)[None] / 2)))
    K = KroneckerSum(tuple(operators[:2])).shift(1e-9).inverse()
    with pytest.raises(SolverError, match=r"3 Kronecker products is too close to singular.*more damping"):
        K.multiply(torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", ["two networks", "an inverse", "an inverse of three"])
def test_files_and_dtypes(name: str, tmp_path: Path) -> None:
    K = SUMS[name]()
    K.save(tmp_path / "sum.safetensors")
    loaded = kfs.load(tmp_path / "sum.safetensors")
    close(loaded.to_dense(), K.to_dense())
    v = torch.randn(K.shape[0], dtype=torch.float64)
    close(loaded @ v, K @ v)
    exact = K.to_dense()
    single = K.to(dtype=torch.float32)
    # Float32's eps, 1.2e-7, times a condition number of some hundred.
    torch.testing.assert_close(single.to_dense().double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_a_wrong_basis_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second eigenproblem, only one combination of factors is diagonal."""
    K = total(*definite_blocks(2))
    exact = torch.linalg.inv(K.to_dense())
    original = decompositions.eigh
    calls: list[int] = []

    def every_second(matrices: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(0)
        values, vectors = original(matrices)
        return (values, vectors) if len(calls) % 2 else (values, torch.eye(matrices.shape[1]).to(matrices)[None])

    monkeypatch.setattr(decompositions, "eigh", every_second)
    assert (K.inverse().to_dense() - exact).norm() > 0.01 * exact.norm()
    assert len(calls) == 4  # two symmetric eigenproblems on each side


def test_large_blocks_in_float32_are_not_taken_for_singular() -> None:
    """Round-off grows with the sizes of factors, not with their product."""
    torch.manual_seed(0)
    factors = [
        X @ X.T / len(X) + 1e-3 * torch.eye(len(X)) for X in map(torch.randn, (65, 64, 65, 64), (65, 64, 65, 64))
    ]
    A1, B1, A2, B2 = (Factor.dense(factor[None]) for factor in factors)
    K = KroneckerSum((Kronecker(A1, B1), Kronecker(A2, B2)))
    G = torch.randn(1, 1, 64, 65)
    for operator in (K, K.shift(1e-4)):
        residual = operator.multiply(operator.inverse().multiply(G)) - G
        # Float32's eps, 1.2e-7, times a condition number of some thousand.
        assert residual.norm() < 1e-3 * G.norm()


def test_logits_have_a_direction_without_curvature() -> None:
    """Adding a number to all logits changes nothing, so both terms are singular there, not negative by round-off."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    X, y = torch.randn(2, 30, 6, dtype=torch.float64), torch.randint(5, (2, 30))
    K1, K2 = (KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)) for data in zip(X, y, strict=True))
    total: Any = K1 + K2
    with pytest.raises(SolverError, match="block 'weight' is singular, up to round-off"):
        total.inverse()
    with pytest.warns(KfsWarning, match="is singular"):
        assert total.logdet() == -torch.inf
    close(total.inverse(0.1).to_dense(), torch.linalg.inv(total.to_dense() + 0.1 * torch.eye(35).double()))
