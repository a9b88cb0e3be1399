"""Other structures, and how they compare: against exact blocks, for all kinds of layers, and with one another."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import ModelError
from kfs.factors import (
    EKFAC,
    KFAC,
    BlockDiagonal,
    exact_blocks,
    exact_diagonal,
    optimal_kronecker,
    trace_scaled,
)
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_ekfac import SHARED, risk_of, uncovered_model
from tests.factors.test_kronecker import product_by_product
from tests.operators.contract import check_contract, close


def blockwise(risk: EmpiricalRisk, C: Tensor) -> Tensor:
    """Keep the entries within the blocks of KFAC: a parameter with its bias, or rows of it."""
    inside = torch.zeros_like(C, dtype=torch.bool)
    K = KFAC(risk)
    places = K.domain.unflatten(torch.arange(len(C)).unsqueeze(0))
    for block in K.blocks.values():
        index = block.layout.matrix(places).flatten()
        inside[index.unsqueeze(1), index] = True
    return torch.where(inside, C, 0)


@pytest.mark.parametrize("name", SHARED)
def test_against_the_exact_matrix(name: str) -> None:
    risk = risk_of(*SHARED[name])
    C = blockwise(risk, GGN(risk).to_dense())
    close(exact_blocks(risk).to_dense(), C)
    close(exact_diagonal(risk).to_dense(), torch.diag(C.diagonal()))
    scaled = trace_scaled(risk)
    close(scaled.trace(), C.trace())
    best, K = optimal_kronecker(risk, steps=3), KFAC(risk)
    errors = {label: (op.to_dense() - C).norm() for label, op in (("best", best), ("K", K), ("scaled", scaled))}
    assert errors["best"] <= errors["K"] + 1e-12 * C.norm()
    assert errors["best"] <= errors["scaled"] * 1.05 + 1e-12 * C.norm()  # three steps are not convergence
    if name != "no bias":  # where KFAC expand is exact
        assert errors["best"] < 0.9999 * errors["K"]


def test_partial_traces_are_those_of_the_exact_block() -> None:
    """The factors' ratios, from the dense block."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    risk = EmpiricalRisk(
        model, nn.CrossEntropyLoss(), (3 * torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,)))
    )
    C = GGN(risk).to_dense().reshape(2, 3, 2, 3)
    A, B = torch.einsum("iaib->ab", C), torch.einsum("iaja->ij", C)
    close(trace_scaled(risk).to_dense(), torch.kron(B, A) / A.trace())
    assert (KFAC(risk).to_dense() - trace_scaled(risk).to_dense()).norm() > 1e-3


@pytest.mark.parametrize("make", [exact_blocks, exact_diagonal, trace_scaled, optimal_kronecker])
def test_they_are_operators_like_others(make: Any) -> None:
    operator = make(risk_of(*SHARED["convolution"]))
    check_contract(operator, product_by_product(operator))
    inverse = operator.inverse(0.1)
    close((inverse @ operator.shift(0.1)).to_dense(), torch.eye(operator.shape[0], dtype=torch.float64))


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_other_fishers(fisher: Any) -> None:
    risk = risk_of(*SHARED["few positions"])
    exact = Fisher(risk, "type-1", mc_samples=2) if fisher == "mc" else Fisher(risk, "empirical")
    close(exact_blocks(risk, fisher=fisher, mc_samples=2).to_dense(), blockwise(risk, exact.to_dense()))


@pytest.mark.filterwarnings("ignore:Factors wider")
def test_one_position_needs_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors from `x` and `g` alone equal those from per-example gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,))))

    def both(max_dim: int | None) -> list[Tensor]:
        best, scaled = optimal_kronecker(risk, steps=2, max_dim=max_dim), trace_scaled(risk, max_dim=max_dim)
        return [best.to_dense(), scaled.to_dense()]

    for max_dim in (None, 3):
        fast = both(max_dim)
        with monkeypatch.context() as patch:
            patch.setattr("kfs.factors.alternatives.Vectors", nn.Linear)  # nothing is one
            slow = both(max_dim)
        close(torch.stack(fast), torch.stack(slow))


def test_what_is_refused() -> None:
    risk = risk_of(*SHARED["convolution"])
    with pytest.raises(ModelError, match=r"has 57 parameters, so its matrix has 57\^2 entries"):
        exact_blocks(risk, max_size=56)
    with pytest.raises(ModelError, match="steps is 0"):
        optimal_kronecker(risk, steps=0)
    with pytest.raises(ModelError, match="forward-only"):
        exact_diagonal(risk, fisher="forward-only")
    data = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    with pytest.raises(ModelError, match="only diagonals"):
        exact_diagonal(EmpiricalRisk(uncovered_model(), nn.MSELoss(), data), uncovered="diagonal")


def test_comparison() -> None:
    risk = risk_of(*SHARED["groups"])
    comparison = kfs.compare(risk, mc_samples=1)
    C = {name: exact_blocks(risk).submatrix(b.layout.params).to_dense() for name, b in KFAC(risk).blocks.items()}
    operators = {"KFAC": KFAC(risk), "EKFAC": EKFAC(risk), "diagonal": exact_diagonal(risk)}
    assert len(comparison.rows) == 6 * len(C)
    for row in comparison.rows:
        if row.structure in operators:
            params = KFAC(risk).blocks[row.layer].layout.params
            difference = operators[row.structure].submatrix(params).to_dense() - C[row.layer]
            assert row.frobenius == pytest.approx(float(difference.norm() / C[row.layer].norm()), rel=1e-9)
            spectral = torch.linalg.matrix_norm(difference, 2) / torch.linalg.matrix_norm(C[row.layer], 2)
            assert row.spectral == pytest.approx(float(spectral), rel=1e-9)
        if row.structure == "exact blocks":
            assert row.frobenius < 1e-12
            assert row.nbytes == 8 * len(C[row.layer]) ** 2
    assert all(cost > 0 for cost in comparison.costs.values())
    assert "optimal Kronecker" in str(comparison)


def test_large_layers_are_left_out_of_comparisons() -> None:
    risk = risk_of(*SHARED["convolution"])
    comparison = kfs.compare(risk, max_size=56)
    assert comparison.left_out == ("1",)
    assert {row.layer for row in comparison.rows} == {"4"}
    assert "exact blocks" not in comparison.costs
    assert "Too large for exact blocks: 1" in str(comparison)
    with pytest.raises(ModelError, match="All layers have more than 3 parameters"):
        kfs.compare(risk, max_size=3)


def test_structures_of_ones_own() -> None:
    risk = risk_of(*SHARED["no bias"])

    def half(risk: EmpiricalRisk, **settings: Any) -> BlockDiagonal:
        result = 0.5 * exact_blocks(risk, **settings)
        assert isinstance(result, BlockDiagonal)
        return result

    comparison = kfs.compare(risk, {"half": half})
    assert [row.frobenius for row in comparison.rows] == pytest.approx([0.5])
    assert [row.structure for row in kfs.compare(risk, "EKFAC").rows] == ["EKFAC"]
    with pytest.raises(ModelError, match="no structures"):
        kfs.compare(risk, ["KFAK"])
    with pytest.raises(ModelError, match="no structures"):
        kfs.compare(risk, [])


def test_a_layer_without_curvature() -> None:
    risk = risk_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.Threshold(1e9, 0.0), nn.Linear(3, 2)), "4")
    rows = {(row.layer, row.structure): row for row in kfs.compare(risk).rows}
    assert all(row.frobenius == 0 for (layer, _), row in rows.items() if layer == "0")
