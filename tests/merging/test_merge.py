"""Merged parameters minimize a sum of quadratic functions: dense systems, and formulas of the literature as loops."""

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import KfsWarning
from kfs.factors import exact_blocks, exact_diagonal
from kfs.factors.blocks import BlockDiagonal, Damping, Method
from kfs.operators import Dense, LinearOperator, solve
from tests.merging.models import Make, Tied, cnn, dense_merge, family, flat, mlp, risks_of

WEIGHTS = [1.0, 2.5, 0.5]
EXACTLY = 1e-13  # tolerance of conjugate gradients such that only round-off of the oracle remains
CURVATURES: dict[str, Callable[[kfs.EmpiricalRisk], LinearOperator]] = {
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "forward-only": lambda risk: kfs.KFAC(risk, "forward-only"),
    "diagonal": exact_diagonal,
    "exact blocks": exact_blocks,
    "diagonal factors": lambda risk: kfs.KFAC(risk, max_dim=1),
}


@pytest.fixture(autouse=True)
def _wide_factors() -> Iterator[None]:
    """These tests allow factors to become diagonal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*keep their diagonal only", category=KfsWarning)
        yield


def identity_times(number: float, C: LinearOperator) -> Tensor:
    return number * torch.eye(C.shape[0], dtype=torch.float64)


def factored(K: kfs.KFAC, damping: float) -> Tensor:
    """Return the matrix with factored damping. The inverse is tested elsewhere, so it is inverted here."""
    matrix: Tensor = torch.linalg.inv(K.inverse(damping, "factored").to_dense())
    return matrix


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [mlp, cnn, Tied])
@pytest.mark.parametrize("name", CURVATURES)
def test_exact_damping_is_a_dense_system(name: str, make: Make, count: int) -> None:
    models = family(make, count)
    curvatures = [CURVATURES[name](risk) for risk in risks_of(models, make)]
    state, report = kfs.merge(models, curvatures, 0.03, WEIGHTS[:count], method="exact", tolerance=EXACTLY, report=True)
    dense = [C.to_dense() + identity_times(0.03, C) for C in curvatures]
    expected = dense_merge(models, dense, curvatures[0], WEIGHTS[:count])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    assert report.residual <= EXACTLY
    assert all(damping == 0.03 for block in report.blocks for damping in block.damping.values())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [mlp, Tied])
def test_factored_damping_is_what_the_inverse_has(make: Make, count: int) -> None:
    models = family(make, count)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models, make)]
    state, report = kfs.merge(models, curvatures, 0.03, method="factored", tolerance=EXACTLY, report=True)
    expected = dense_merge(models, [factored(K, 0.03) for K in curvatures], curvatures[0], [1.0] * count)
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    assert all(block.closed_form for block in report.blocks) == (count == 2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [mlp, Tied])
def test_the_default_is_the_formula(make: Make, count: int) -> None:
    """Without a method, a multiple of the identity is added, as in the docstring's formula. The report names it."""
    models = family(make, count)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models, make)]
    state, report = kfs.merge(models, curvatures, 0.03, tolerance=EXACTLY, report=True)
    expected = dense_merge(
        models, [K.to_dense() + identity_times(0.03, K) for K in curvatures], curvatures[0], [1.0] * count
    )
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    assert report.method == "exact"
    assert "damping: exact" in repr(report)
    other, report = kfs.merge(models, curvatures, 0.03, method="factored", tolerance=EXACTLY, report=True)
    assert "damping: factored" in repr(report)
    change = flat(other, curvatures[0]) - expected
    average = sum((flat(dict(m.named_parameters()), curvatures[0]) for m in models), torch.zeros(())) / count
    assert change.norm() > 0.01 * (expected - average).norm()


@pytest.mark.parametrize("count", [2, 3])
def test_relative_damping_is_that_of_each_block_and_model(count: int) -> None:
    models = family(mlp, count)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    state, report = kfs.merge(models, curvatures, kfs.Relative(0.1), method="exact", tolerance=EXACTLY, report=True)
    dense = [K.shift(kfs.Relative(0.1)).to_dense() for K in curvatures]
    expected = dense_merge(models, dense, curvatures[0], [1.0] * count)
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    for block in report.blocks:
        for i, K in enumerate(curvatures):
            structure = K.structures[block.name]
            mean = float(structure.trace()) / (structure.rows * structure.columns)
            assert block.damping[i] == pytest.approx(0.1 * mean)
    by_name: Damping = {"0": 0.2, "2": kfs.Relative(0.1)}
    state = kfs.merge(models, curvatures, by_name, method="exact", tolerance=EXACTLY)
    dense = [K.inverse(by_name).inverse().to_dense() for K in curvatures]
    expected = dense_merge(models, dense, curvatures[0], [1.0] * count)
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)


def test_regmean() -> None:
    """With inputs alone, a layer is `(sum_i W_i A_i) (sum_i A_i)^-1`, a least-squares problem for each row."""
    models = family(mlp, 3)
    risks = risks_of(models)
    curvatures = [kfs.KFAC(risk, "forward-only") for risk in risks]
    state, report = kfs.merge(models, curvatures, kfs.Relative(0.01), report=True)
    assert report.iterations == 0
    for layer in ("0", "2"):
        products = []
        grams = []
        for model, K in zip(models, curvatures, strict=True):
            A = K.blocks[layer].A
            A = A + 0.01 * A.diagonal().mean() * torch.eye(len(A), dtype=A.dtype)
            linear = model.get_submodule(layer)
            W = torch.cat([linear.weight, linear.bias[:, None]], dim=1).detach()  # type: ignore[list-item, index]
            products.append(W @ A)
            grams.append(A)
        expected = sum(products, torch.zeros(())) @ torch.linalg.inv(sum(grams, torch.zeros(())))
        found = torch.cat([state[f"{layer}.weight"], state[f"{layer}.bias"][:, None]], dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_fisher_merging() -> None:
    """With diagonals, every entry is a mean weighted by its own curvature."""
    models = family(mlp, 3)
    curvatures = [exact_diagonal(risk) for risk in risks_of(models)]
    state, report = kfs.merge(models, curvatures, 1e-3, WEIGHTS, report=True)
    assert report.iterations == 0
    importances = [C.diagonal() for C in curvatures]
    vectors = [flat(dict(model.named_parameters()), curvatures[0]) for model in models]
    expected: list[Any] = []
    for place in range(len(vectors[0])):
        strengths = [weight * (d[place] + 1e-3) for weight, d in zip(WEIGHTS, importances, strict=True)]
        total = sum(s * v[place] for s, v in zip(strengths, vectors, strict=True))
        expected.append(total / sum(strengths))
    torch.testing.assert_close(flat(state, curvatures[0]), torch.stack(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("with_kfac", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_operators_without_blocks(count: int, with_kfac: bool) -> None:
    """The GGN couples layers; KFAC as a preconditioner changes the iterations but not the result."""
    models = family(mlp, count)
    risks = risks_of(models)
    curvatures = [kfs.GGN(risk) for risk in risks]
    near = [kfs.KFAC(risk) for risk in risks] if with_kfac else None
    state, report = kfs.merge(models, curvatures, 0.03, preconditioner=near, tolerance=1e-11, report=True)
    dense = [C.to_dense() + identity_times(0.03, C) for C in curvatures]
    expected = dense_merge(models, dense, curvatures[0], [1.0] * count)
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-7, atol=1e-9)
    assert [block.name for block in report.blocks] == ["all parameters"]
    assert not report.blocks[0].closed_form


def test_kfac_makes_conjugate_gradients_faster() -> None:
    """Blocks of three models have no closed form. If inputs differ much in scale, plain iterations converge slowly."""
    models = family(mlp, 3)
    sizes = torch.logspace(0, -2, 4, dtype=torch.float64)
    data = [(sizes * torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))) for _ in models]
    risks = [kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), pair) for m, pair in zip(models, data, strict=True)]
    curvatures = [kfs.KFAC(risk) for risk in risks]
    damping = kfs.Relative(1e-4)
    _, report = kfs.merge(models, curvatures, damping, method="factored", report=True)
    for block in report.blocks:
        damped = [K.inverse(damping, "factored").inverse().submatrix(block.params) for K in curvatures]
        total = damped[0] + damped[1] + damped[2]
        b = torch.randn(total.shape[0], dtype=torch.float64)
        assert block.iterations < 0.5 * solve(total, b).iterations


def test_relative_damping_of_operators_without_blocks() -> None:
    """One mean eigenvalue for all parameters. Sixty products suffice for the exact trace of a small operator."""
    models = family(mlp, 2)
    risks = risks_of(models)
    curvatures = [kfs.GGN(risks[0]), kfs.KFAC(risks[1])]  # a mixture counts as one block, too
    state, report = kfs.merge(models, curvatures, kfs.Relative(0.1), tolerance=1e-11, report=True)
    matrices = [C.to_dense() for C in curvatures]
    means = [float(matrix.trace()) / len(matrix) for matrix in matrices]
    assert list(report.blocks[0].damping.values()) == pytest.approx([0.1 * mean for mean in means], rel=0.2)
    added = report.blocks[0].damping
    dense = [M + identity_times(added[i], curvatures[0]) for i, M in enumerate(matrices)]
    expected = dense_merge(models, dense, curvatures[0], [1.0, 1.0])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-7, atol=1e-9)
    assert kfs.merge(models, curvatures, {"all parameters": 0.1}).keys() == state.keys()


def test_without_structure_the_diagonal_is_the_preconditioner() -> None:
    """Two eigenbases without factors have no structured sum."""
    models = family(mlp, 2)
    curvatures = [kfs.EKFAC(risk).shift(0.01) for risk in risks_of(models)]
    state, report = kfs.merge(models, curvatures, 0.02, tolerance=EXACTLY, report=True)
    expected = dense_merge(models, [C.to_dense() + identity_times(0.02, C) for C in curvatures], curvatures[0], [1, 1])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    assert report.iterations > 0


def test_blocks_that_differ_between_models() -> None:
    """A weight joint with its bias in one model, and separate in another, form one system, as do sums of curvatures."""
    models = family(mlp, 2)
    risks = risks_of(models)
    curvatures = [kfs.KFAC(risks[0]), kfs.KFAC(risks[1], joint_bias=False)]
    state, report = kfs.merge(models, curvatures, 0.02, method="exact", tolerance=EXACTLY, report=True)
    expected = dense_merge(models, [C.to_dense() + identity_times(0.02, C) for C in curvatures], curvatures[0], [1, 1])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    assert [block.name for block in report.blocks] == ["0.weight, 0.bias", "2.weight, 2.bias"]
    assert [block.params for block in report.blocks] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    _, report = kfs.merge(models, curvatures, kfs.Relative(0.1), report=True)
    weight, bias = (
        0.1 * curvatures[1].blocks[name].structure().trace()[0] / size
        for name, size in (("0.weight", 20), ("0.bias", 5))
    )
    assert report.blocks[0].damping[1] == pytest.approx(float(max(weight, bias)))
    assert weight != bias


def test_sums_of_curvatures() -> None:
    """The curvature of a model that is good at two tasks is a sum."""
    models = family(mlp, 2)
    both = [risks_of([model, model]) for model in models]
    curvatures = [kfs.KFAC(one) + kfs.KFAC(two) for one, two in both]
    state = kfs.merge(models, curvatures, 0.02, method="exact", tolerance=EXACTLY)
    expected = dense_merge(models, [C.to_dense() + identity_times(0.02, C) for C in curvatures], curvatures[0], [1, 1])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-8, atol=1e-10)
    methods: list[Method] = ["factored", "per-factor"]
    for method in methods:
        state = kfs.merge(models, curvatures, 0.02, method=method, tolerance=EXACTLY)
        dense = [torch.linalg.inv(C.inverse(0.02, method).to_dense()) for C in curvatures]  # type: ignore[attr-defined]
        expected = dense_merge(models, dense, curvatures[0], [1, 1])
        torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-7, atol=1e-9)


def test_without_damping() -> None:
    """Two models with regular curvature need no damping. A dense operator is treated as one block."""
    models = family(mlp, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    regular = [K.shift(0.1) + K for K in curvatures]
    with pytest.raises(kfs.errors.SolverError, match="is not damped"):
        kfs.merge(models, regular, 0.0)
    blocks = [exact_blocks(risk).shift(0.1) for risk in risks_of(models)]
    state = kfs.merge(models, blocks, 0.0)
    expected = dense_merge(models, [C.to_dense() for C in blocks], blocks[0], [1, 1])
    torch.testing.assert_close(flat(state, blocks[0]), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", CURVATURES)
def test_equal_models_stay_as_they_are(name: str) -> None:
    ancestor = family(mlp, 1)[0]
    models = [ancestor, deepcopy(ancestor)]
    curvatures = [CURVATURES[name](risk) for risk in risks_of(models)]
    state = kfs.merge(models, curvatures)
    for key, p in ancestor.named_parameters():
        torch.testing.assert_close(state[key], p.detach(), rtol=0, atol=1e-15)


def test_a_weight_of_zero_leaves_a_model_out() -> None:
    models = family(mlp, 3)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    two = [2.0, 0.0, 1.0]
    state, report = kfs.merge(models, curvatures, weights=torch.tensor(two), method="factored", report=True)
    expected = kfs.merge([models[0], models[2]], [curvatures[0], curvatures[2]], weights=[4, 2], method="factored")
    assert all(block.closed_form for block in report.blocks)
    assert set(report.blocks[0].damping) == {0, 2}
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    alone = kfs.merge(models, curvatures, weights=[0, 0, 1])
    for key, p in models[2].named_parameters():
        torch.testing.assert_close(alone[key], p.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Half precision is computed in float32. Results have the models' dtype, and are close to those in float64.

    Float32 stops at a residual of 3.5e-4. In bfloat16, models and data are rounded by up to 2^-9.
    """
    models = family(mlp, 3)
    risks = risks_of(models)
    exact = kfs.merge(models, [kfs.KFAC(risk) for risk in risks], kfs.Relative(0.1))
    low = [deepcopy(model).to(dtype) for model in models]
    batches = [next(iter(risk.batches())) for risk in risks]
    rounded = [
        kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (batch.x.to(dtype), batch.y), progress=False)
        for model, batch in zip(low, batches, strict=True)
    ]
    state = kfs.merge(low, [kfs.KFAC(risk) for risk in rounded], kfs.Relative(0.1))
    assert all(t.dtype == dtype for t in state.values())
    for name, value in exact.items():
        assert (state[name].double() - value).norm() <= tolerance * value.norm()


def test_wrong_merges_are_told_apart() -> None:
    """The oracle is so strict that other formulas fail: averages, swapped curvatures, other damping or weights."""
    models = family(mlp, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    dense = [K.to_dense() + identity_times(0.03, K) for K in curvatures]
    right = flat(kfs.merge(models, curvatures, 0.03, WEIGHTS[:2], method="exact"), curvatures[0])
    more = [D + identity_times(0.03, curvatures[0]) for D in dense]
    wrong = [
        dense_merge(models, dense[::-1], curvatures[0], WEIGHTS[:2]),
        dense_merge(models, more, curvatures[0], WEIGHTS[:2]),
        dense_merge(models, dense, curvatures[0], [1, 1]),
        dense_merge(models, [identity_times(1.0, curvatures[0])] * 2, curvatures[0], WEIGHTS[:2]),
    ]
    for other in wrong:
        assert (other - right).norm() > 1e-3 * right.norm()


def test_closed_forms_are_refined_if_they_are_not_close_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed form with too much round-off becomes the preconditioner and the starting point of the iteration."""
    models = family(mlp, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    expected = kfs.merge(models, curvatures, method="factored")
    exact = BlockDiagonal.inverse

    def inaccurate(self: BlockDiagonal, *args: Any) -> Any:
        return exact(self, *args) * 1.01

    monkeypatch.setattr(BlockDiagonal, "inverse", inaccurate)
    state, report = kfs.merge(models, curvatures, method="factored", report=True)
    assert all(block.closed_form and block.iterations > 0 for block in report.blocks)
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-8)


def test_dense_operators() -> None:
    """Any symmetric operator is supported."""
    models = family(mlp, 2)
    risks = risks_of(models)
    domain = kfs.GGN(risks[0]).domain
    roots = [torch.randn(domain.size, domain.size, dtype=torch.float64) for _ in models]
    curvatures = [Dense(R @ R.T, domain) for R in roots]
    state = kfs.merge(models, curvatures, 0.5, tolerance=1e-11)
    dense = [R @ R.T + identity_times(0.5, curvatures[0]) for R in roots]
    expected = dense_merge(models, dense, curvatures[0], [1, 1])
    torch.testing.assert_close(flat(state, curvatures[0]), expected, rtol=1e-6, atol=1e-8)
