"""Kronecker algebra: all methods of an operator with structured blocks, against its dense matrix."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import DtypeError, KfsWarning, ModelError, SolverError
from kfs.factors import EKFAC, KFAC, blocks, exact_blocks
from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import KroneckerSum
from kfs.factors.blocks.stack import Stack
from kfs.factors.layout import Layout
from kfs.operators import LinearOperator
from kfs.operators.space import Space
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import check_contract, close


class Mixed(nn.Module):
    """Dense, diagonal and one-dimensional factors, groups of channels, and two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 2, groups=2)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        result: Tensor = self.head(self.conv(x.transpose(1, 2)).mean(2))
        return result


def kfac(**settings: Any) -> KFAC:
    torch.manual_seed(0)
    model = Mixed().double().eval()
    data = torch.randint(5, (40, 3)), torch.randint(3, (40,))
    return KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), **settings)


def one_block(A: Tensor, B: Tensor, diagonal: bool = False) -> BlockDiagonal:
    """A parameter `W` with given factors."""
    make = Factor.diagonal if diagonal else Factor.dense
    structure = Kronecker(make(A.unsqueeze(0)), make(B.unsqueeze(0)))
    return of_structure(structure, (structure.rows, structure.columns))


def of_structure(structure: Any, shape: tuple[int, int]) -> BlockDiagonal:
    space = Space({"W": shape}, torch.float64, torch.device("cpu"))
    return BlockDiagonal(space, [Stack((Layout("W", shape, (0, shape[0]), (0, 1), 1),), structure)])


def product_by_product(A: LinearOperator) -> Tensor:
    """Compute the dense matrix by products with the identity."""
    return A @ torch.eye(A.shape[1], dtype=A.dtype)


def definite(size: int, seed: int = 0) -> Tensor:
    X = torch.randn(2 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return X.T @ X


OPERATORS: dict[str, Callable[[], BlockDiagonal]] = {
    "KFAC": kfac,
    "KFAC, reduce": lambda: kfac(sharing="reduce"),
    "KFAC, separate bias, diagonals": lambda: kfac(joint_bias=False, max_dim=3),
    "forward-only": lambda: kfac(fisher="forward-only"),
    "damped inverse": lambda: kfac().inverse(0.1),
    "factored inverse": lambda: kfac().inverse(0.1, "factored"),
    "per-factor inverse": lambda: kfac().inverse(0.1, "per-factor"),
    "root": lambda: kfac().power(0.5),
    "diagonal": lambda: one_block(torch.rand(3).double(), torch.rand(2).double(), diagonal=True),
    "not symmetric": lambda: one_block(definite(3), definite(2)) @ one_block(definite(3, 1), definite(2, 1)),  # type: ignore[dict-item,return-value]
    "dense": lambda: of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)),
}


@pytest.mark.filterwarnings("ignore:Factors wider")
@pytest.mark.parametrize("name", OPERATORS)
def test_contract(name: str) -> None:
    torch.manual_seed(0)
    K = OPERATORS[name]()
    check_contract(K, product_by_product(K))


@pytest.mark.filterwarnings("ignore:Factors wider")
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    K = OPERATORS[name]()
    dense = product_by_product(K)
    close(K.trace(), dense.trace())
    close(K.diagonal(), dense.diagonal())
    close(K.squared_frobenius_norm(), dense.square().sum())
    close(K.frobenius_norm(), dense.norm())
    assert K.nbytes > 0
    if not K.symmetric:
        for question in (K.eigenvalues, K.eigh, lambda: K.power(2.0), lambda: K.inverse(1.0)):
            with pytest.raises(ModelError, match="not symmetric"):
                question()
        close(K.inverse().to_dense(), torch.linalg.inv(dense))
        return
    close(K.eigenvalues(), torch.linalg.eigvalsh(dense))
    values, Q = K.eigh()
    v = torch.randn(len(dense), dtype=torch.float64)
    close(Q @ (values * (Q.T @ v)), K @ v)
    close(product_by_product(Q.T @ Q), torch.eye(len(dense), dtype=torch.float64))
    damped = dense + 0.3 * torch.eye(len(dense), dtype=torch.float64)
    shifted = K.shift(0.3)
    close(product_by_product(shifted), damped)
    assert isinstance(shifted, BlockDiagonal)
    close(shifted.logdet(), damped.logdet())
    torch.testing.assert_close(shifted.det(), torch.linalg.det(damped), rtol=1e-9, atol=0.0)
    close(K.inverse(0.3).to_dense(), torch.linalg.inv(damped))
    close(K.inverse(0.3).logdet(), -damped.logdet())
    close(K.power(-0.5, 0.3).to_dense() @ K.power(-0.5, 0.3).to_dense(), torch.linalg.inv(damped))
    close(K.power(2.0).to_dense(), dense @ dense)


def test_inverse_without_damping_is_a_kronecker_product() -> None:
    K = one_block(definite(3), definite(2))
    inverse = K.inverse()
    assert isinstance(inverse.structures["W"], Kronecker)
    close((inverse @ K).to_dense(), torch.eye(6, dtype=torch.float64))
    assert isinstance((inverse @ K), BlockDiagonal)
    close(K.power(-1.0).to_dense(), inverse.to_dense())
    assert isinstance(K.power(0.5).structures["W"], Kronecker)


def test_products_and_sums_stay_structured_when_they_can() -> None:
    A, B, C = definite(3), definite(2), definite(3, 5)
    one, same_B, same_A = one_block(A, B), one_block(C, B), one_block(A, definite(2, 7))
    other = one_block(C, definite(2, 9))
    for first, second, kind in (
        (one, same_B, Kronecker),
        (one, same_A, Kronecker),
        (one, other, KroneckerSum),
        (one.inverse(0.1), one.inverse(0.2), Eigenbasis),
        (of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)), one, Dense),
        (one, of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)), Dense),
    ):
        total = first + 2.0 * second
        assert isinstance(total, BlockDiagonal)
        assert isinstance(total.structures["W"], kind)
        close(total.to_dense(), first.to_dense() + 2 * second.to_dense())
        difference = first - second
        close(difference.to_dense(), first.to_dense() - second.to_dense())
        product = first @ second
        assert isinstance(product, BlockDiagonal)
        close(product.to_dense(), first.to_dense() @ second.to_dense())
    for first, second in ((one, one.inverse(0.1)), (one.inverse(0.1), one), (one.inverse(0.1), other)):
        total = first + second
        assert not isinstance(total, BlockDiagonal)
        close(total.to_dense(), first.to_dense() + second.to_dense())
    dense = of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)) @ one
    assert isinstance(dense, BlockDiagonal)
    close((dense.inverse() @ dense).to_dense(), torch.eye(6, dtype=torch.float64))
    for symmetric in (of_structure(Dense(definite(6).unsqueeze(0), 2, 3), (2, 3)), one.inverse(0.1)):
        close(symmetric.inverse().to_dense(), torch.linalg.inv(symmetric.to_dense()))
    close((other @ one.inverse(0.1)).to_dense(), other.to_dense() @ one.inverse(0.1).to_dense())
    close((one.inverse(0.1) @ other).to_dense(), one.inverse(0.1).to_dense() @ other.to_dense())
    mixed = one_block(torch.rand(3).double(), torch.rand(2).double(), diagonal=True)
    twice = mixed + one_block(torch.rand(3).double(), torch.rand(2).double(), diagonal=True)
    assert isinstance(twice, BlockDiagonal)
    assert isinstance(twice.structures["W"], Eigenbasis)
    another = one_block(torch.rand(2).double(), torch.rand(3).double(), diagonal=True)
    with pytest.raises(Exception, match="cannot be added"):
        mixed + another


@pytest.mark.parametrize("kinds", [(a, b) for a in ("dense", "diagonal", "identity") for b in ("dense", "diagonal")])
def test_factors_of_all_kinds_multiply_and_add(kinds: tuple[str, str]) -> None:
    def make(kind: str, seed: int) -> Factor:
        scale = torch.tensor([2.0, 0.5], dtype=torch.float64)
        matrices = torch.stack([definite(3, seed), definite(3, seed + 1)])
        if kind == "dense":
            return Factor.dense(matrices, scale)
        if kind == "diagonal":
            return Factor.diagonal(matrices.diagonal(dim1=1, dim2=2).contiguous(), scale)
        return Factor.identity(3, scale)

    for left, right in ((make(kinds[0], 0), make(kinds[1], 5)), (make(kinds[1], 0), make(kinds[0], 5))):
        close(left.compose(right).to_dense(), left.to_dense() @ right.to_dense())
        close(left.compose(right).T.to_dense(), (left.to_dense() @ right.to_dense()).transpose(1, 2))
        close(left.plus(right).to_dense(), left.to_dense() + right.to_dense())
        assert not left.equals(right) or kinds[0] == kinds[1]
    single = make(kinds[0], 0)
    close(single.inverse().to_dense(), torch.linalg.inv(single.to_dense()))
    close(single.power(0.5).compose(single.power(0.5)).to_dense(), single.to_dense())
    close(single.slogdet()[1], single.to_dense().logdet())
    close(single.squared_norm(), single.to_dense().square().sum((1, 2)))
    close(single.plus(single).to_dense(), 2 * single.to_dense())
    assert single.nbytes == (0 if kinds[0] == "identity" else single.values.numel() * 8)


@pytest.mark.parametrize("damping", [1e-3, 0.5])
def test_samples_have_the_inverse_as_covariance(damping: float) -> None:
    """Samples multiplied with a root of the matrix have the identity as covariance, in every direction."""
    K, number = kfac(), 5_000
    samples = K.sample(number, damping=damping, seed=3)
    dense = K.to_dense() + damping * torch.eye(K.shape[0], dtype=torch.float64)
    white = torch.linalg.cholesky(dense).T @ samples
    excess = white @ white.T / number - torch.eye(len(dense), dtype=torch.float64)
    # Standard errors: 1 / sqrt(number) of a mean or a covariance, sqrt(2) times that of a variance, and a tenth of it
    # for the mean of 100 variances. The tolerance is five standard errors.
    error = 1 / number**0.5
    assert len(dense) == 100
    assert white.mean(1).abs().max() < 5 * error
    assert excess.abs().max() < 5 * 2**0.5 * error
    assert excess.diagonal().mean().abs() < 5 * 2**0.5 * error / 10
    close(K.sample(2, damping=damping, seed=3), K.sample(2, damping=damping, seed=3))
    assert (K.sample(2, damping=damping, seed=4) - K.sample(2, damping=damping, seed=3)).abs().max() > 0.1


def test_singular_and_bad_factors_are_named() -> None:
    singular = one_block(torch.ones(3, 3, dtype=torch.float64), definite(2))
    with pytest.warns(KfsWarning, match="1 of 1 factors are singular"):
        singular.inverse()
    with pytest.raises(SolverError, match="'W' is singular"):
        singular.power(-0.5)
    with pytest.warns(KfsWarning, match="is singular, up to round-off"):
        assert singular.logdet() == -torch.inf
    assert singular.det() == 0
    diagonal = one_block(torch.tensor([1.0, 0.0]).double(), torch.ones(2).double(), diagonal=True)
    with pytest.raises(SolverError, match="'W' is singular"):
        diagonal.inverse()
    negative = one_block(-definite(3), definite(2))
    even = -1.0 * one_block(definite(3), definite(2))
    assert isinstance(even, BlockDiagonal)
    assert even.logdet().isfinite()  # an even number of negative eigenvalues
    calls: list[Callable[[], Any]] = [negative.inverse, lambda: negative.power(0.5)]
    calls.append(lambda: negative.inverse(0.1, "factored"))
    for call in calls:
        with pytest.raises(SolverError, match="'W' has a negative eigenvalue"):
            call()
    with pytest.raises(SolverError, match="'W' has a negative eigenvalue"):
        of_structure(Eigenbasis.of_diagonal(torch.tensor([[[1.0, -1.0]]]).double()), (1, 2)).inverse(0.1)
    assert of_structure(Eigenbasis.of_diagonal(torch.tensor([[[1.0, -1.0]]]).double()), (1, 2)).logdet().isnan()
    broken = definite(3)
    broken[0, 0] = torch.nan
    methods: tuple[Any, ...] = ("exact", "factored", "per-factor")
    for method in methods:
        with pytest.raises(SolverError, match="'W' contains NaN"):
            one_block(broken, definite(2)).inverse(0.1, method)


def test_zero_scales() -> None:
    K = one_block(definite(3), definite(2))
    zero = 0.0 * K
    assert isinstance(zero, BlockDiagonal)
    close((zero + K).to_dense(), K.to_dense())
    close((K + zero).to_dense(), K.to_dense())
    close((zero - zero).to_dense(), torch.zeros(6, 6, dtype=torch.float64))
    with pytest.raises(SolverError, match="'W' is singular: its scale is zero"):
        zero.inverse()


def test_float32_that_fails_is_tried_in_float64() -> None:
    """A matrix that is positive definite, though not in float32, is inverted without jitter or warning."""
    for seed in range(1000):
        X = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        X[3] = X[:3].sum(0) * (1 + 1e-4 * X[3])
        A = X @ X.T
        if torch.linalg.cholesky_ex(A)[1] > 0 and torch.linalg.cholesky_ex(A.double())[1] == 0:
            break
    else:
        pytest.fail("no such matrix was found")
    inverse = Factor.dense(A.unsqueeze(0)).inverse()
    assert inverse.values.dtype == torch.float32
    expected = torch.linalg.inv(A.double())
    # Rounded to float32 twice, with a condition number that only float64 can handle.
    assert (inverse.values[0] - expected).norm() < 1e-2 * expected.norm()


def test_eigenvectors_are_tried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.linalg.eigh

    def raises(A: Tensor) -> Any:
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        return original(A)

    def returns_nan(A: Tensor) -> Any:
        values, vectors = original(A)
        return (torch.full_like(values, torch.nan) if A.dtype == torch.float32 else values), vectors

    for eigh in (raises, returns_nan):
        monkeypatch.setattr(torch.linalg, "eigh", eigh)
        A = definite(3).float()
        values, vectors = Factor.dense(A.unsqueeze(0)).eigh()
        assert values.dtype == vectors.values.dtype == torch.float32
        torch.testing.assert_close(vectors.values[0] @ torch.diag(values[0]) @ vectors.values[0].T, A)


def test_bad_arguments() -> None:
    K = kfac()
    with pytest.raises(ModelError, match="method is 'exakt'"):
        K.inverse(0.1, "exakt")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"damping lacks the blocks .* and has 'nothing' too many"):
        K.inverse({"one": 0.1, "nothing": 1.0})
    for bad in (-1.0, float("nan"), float("inf"), "much"):
        with pytest.raises(DtypeError, match="A damping is"):
            K.inverse(bad)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="cannot have factored damping"):
        K.inverse(0.1).inverse(0.1, "factored")
    with pytest.raises(DtypeError, match="subtracted from it"):
        K - 1.0  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [KFAC, EKFAC, exact_blocks])
def test_determinants_of_singular_operators_are_zero(make: Any, dtype: torch.dtype) -> None:
    """Logits have a direction without curvature, and there are fewer examples than features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    data = torch.randn(8, 5, dtype=dtype), torch.arange(8) % 3
    K = make(EmpiricalRisk(model, nn.CrossEntropyLoss(), data))
    with pytest.warns(KfsWarning, match=r"is singular.*minus infinity.*shift"):
        assert K.logdet() == -torch.inf
    assert K.det() == 0
    damped = K.to_dense().double() + 1e-3 * torch.eye(K.shape[0], dtype=torch.float64)
    # In float32, a damping of 1e-3 has an error of eps times the largest eigenvalue, about one: four digits are right.
    torch.testing.assert_close(K.shift(1e-3).logdet().double(), damped.logdet(), rtol=1e-3, atol=0.0)
    # Small numbers are not zero: a definite operator of any scale has a finite log-determinant.
    small = K.shift(1e-3) * 1e-9
    scaled = float(K.shift(1e-3).logdet()) + K.shape[0] * math.log(1e-9)
    assert float(small.logdet()) == pytest.approx(scaled, rel=1e-5)


# Words of communication between processes, which only the distribution of an operator knows.
COMMUNICATION = {"Ranks", "add_up", "agreed", "are_several", "check_same", "dist", "gather", "group", "joined", "ranks"}
# An operator shows its ranks, and files are read by several.
EXEMPT = {"ranks", "_ranks", "_from_state"}


def words_of(node: ast.AST) -> set[str]:
    """Return the names and attributes in code, without the bodies of exempt functions."""
    if isinstance(node, ast.FunctionDef) and node.name in EXEMPT:
        return set()
    if isinstance(node, ast.Name | ast.Attribute):
        own = {node.id if isinstance(node, ast.Name) else node.attr}
    else:
        own = {node.arg} if isinstance(node, ast.arg) else set()
    return own.union(*map(words_of, ast.iter_child_nodes(node)))


@pytest.mark.parametrize("file", sorted(Path(blocks.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_algebra_does_not_mention_ranks(file: Path) -> None:
    assert not words_of(ast.parse(file.read_text("utf-8"))) & COMMUNICATION
