"""Damping: the matrix that each method inverts, and cases in which methods agree."""

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import DtypeError, ModelError, SolverError
from kfs.factors import EKFAC, KFAC, exact_blocks, exact_diagonal
from kfs.factors.blocks import KroneckerSum, Method, Structure
from kfs.factors.blocks.damping import damped, damped_inverse, trace_norm_ratio
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import definition
from tests.factors.test_kronecker import definite, one_block, product_by_product
from tests.operators.contract import check_contract, close


@pytest.mark.parametrize("method", ["exact", "factored", "per-factor"])
def test_dampings_have_inverses_that_know_everything(method: Any) -> None:
    """Results solve the equation of each method, with factors from literal loops.

    Blocks may have dampings of their own.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y, loss = torch.randn(20, 3, dtype=torch.float64), torch.randint(2, (20,)), nn.CrossEntropyLoss()
    dampings = {"0": 0.1, "2": 0.02}
    inverse = KFAC(EmpiricalRisk(model, loss, (X, y))).inverse(dampings, method)
    V = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    M = inverse @ V
    for name, d in dampings.items():
        A, B = (
            factor[0]
            for factor in definition(model, loss, X, y, model.get_submodule(name), "expand", reduction_factor(loss, y))
        )
        I_A, I_B = torch.eye(len(A), dtype=torch.float64), torch.eye(len(B), dtype=torch.float64)
        m, v = (torch.cat([t[f"{name}.weight"], t[f"{name}.bias"].unsqueeze(1)], 1) for t in (M, V))
        if method == "exact":
            close(B @ m @ A + d * m, v)
        elif method == "per-factor":
            close((B + d * I_B) @ m @ (A + d * I_A), v)
        else:
            pi = best_split(A, B, d)
            actual = (B + d**0.5 / pi * I_B) @ m @ (A + d**0.5 * pi * I_A)
            # The minimum is accurate to the square root of the precision, 1e-8.
            torch.testing.assert_close(actual, v, rtol=1e-6, atol=1e-6)
    check_contract(inverse, product_by_product(inverse))
    close(inverse.trace(), inverse.to_dense().trace())
    close(inverse.logdet(), inverse.to_dense().logdet())


def number(*values: float) -> Factor:
    """A stack of factors that are single numbers."""
    return Factor.dense(torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1), torch.full((len(values),), 0.5))


@pytest.mark.parametrize("kind", ["dense", "diagonal", "identity", "number"])
@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("other", ["number", "identity"])
def test_factored_damping_of_multiples_of_the_identity_is_exact(kind: str, side: str, other: str) -> None:
    """Several blocks have different numbers and dampings; one number is zero."""
    scale = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    matrices = torch.stack([definite(4, seed) for seed in range(3)])
    wide = {
        "dense": Factor.dense(matrices, scale),
        "diagonal": Factor.diagonal(matrices.diagonal(dim1=1, dim2=2).contiguous(), scale),
        "identity": Factor.identity(4, scale),
        "number": number(1.0, 2.0, 5.0),
    }[kind]
    multiple = number(3.0, 0.0, 1e-3) if other == "number" else Factor.identity(3, 1.5 * scale)
    K = Kronecker(wide, multiple) if side == "B" else Kronecker(multiple, wide)
    damping = torch.tensor([0.1, 2.0, 1e-2], dtype=torch.float64)
    identity = torch.eye(K.rows * K.columns, dtype=torch.float64)
    exact = torch.linalg.inv(K.to_dense() + damping.reshape(-1, 1, 1) * identity)
    inverse = damped_inverse(K, damping, "factored")
    assert isinstance(inverse, Kronecker)
    torch.testing.assert_close(inverse.to_dense(), exact, rtol=1e-10, atol=0.0)
    # The formula for other blocks gives a very different result.
    pi = trace_norm_ratio(K)
    A, B = K.A.shift(pi * damping.sqrt()), K.B.shift(damping.sqrt() / pi)
    wrong = Kronecker(A.inverse(), B.inverse()).to_dense()
    assert ((wrong - exact).flatten(1).norm(dim=1) > 1e-3 * exact.flatten(1).norm(dim=1)).all()


def test_factored_damping_of_biases_and_scales() -> None:
    """For layers without inputs in a network, factored damping is exact; for other layers it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    K, d = KFAC(EmpiricalRisk(model, nn.MSELoss(), data), joint_bias=False), 0.05
    factored, exact = K.inverse(d, "factored"), K.inverse(d)
    for name in ("0.bias", "1.weight", "1.bias", "3.weight", "3.bias"):
        close(factored.submatrix([name]).to_dense(), exact.submatrix([name]).to_dense())
    difference = (factored.submatrix(["0.weight"]) - exact.submatrix(["0.weight"])).to_dense()
    assert difference.norm() > 0.1 * exact.submatrix(["0.weight"]).to_dense().norm()


def best_split(A: Tensor, B: Tensor, damping: float) -> float:
    """Find the `pi` for which factored damping adds least in the trace norm, by ternary search over its logarithm."""
    I_A, I_B = torch.eye(len(A), dtype=A.dtype), torch.eye(len(B), dtype=B.dtype)

    def added(log: float) -> float:
        pi = exp(log)
        damped = torch.kron(B + damping**0.5 / pi * I_B, A + damping**0.5 * pi * I_A)
        return float(torch.linalg.matrix_norm(damped - torch.kron(B, A), "nuc"))

    low, high = -10.0, 10.0
    while high - low > 1e-9:
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if added(left) < added(right) else (left, high)
    return exp(low)


def test_sums_over_many_data_in_float32_can_be_damped() -> None:
    """Their smallest eigenvalues are negative by more than the round-off of a decomposition."""
    torch.manual_seed(0)
    X = 0.3 + 1e-7 * torch.randn(1000, 1)
    risk = EmpiricalRisk(nn.Linear(1, 2), nn.MSELoss(), (X, torch.randn(1000, 2)))
    inverse = KFAC(risk).inverse(1e-3).to_dense().double()
    exact = KFAC(EmpiricalRisk(nn.Linear(1, 2).double(), nn.MSELoss(), (X.double(), torch.randn(1000, 2).double())))
    expected = exact.inverse(1e-3).to_dense()
    assert (inverse - expected).norm() < 1e-2 * expected.norm()  # 1e-3 above, float32 noise of 1e-6 below
    for dtype in (torch.bfloat16, torch.float16):
        wide = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))
        data = torch.randn(12, 40), torch.randint(3, (12,))
        K = KFAC(EmpiricalRisk(wide, nn.CrossEntropyLoss(), data), factor_dtype=dtype)
        assert K.inverse(1e-2).to_dense().isfinite().all()


def test_a_dead_layer_can_be_damped() -> None:
    dead = one_block(torch.zeros(3, 3, dtype=torch.float64), definite(2))
    close(dead.inverse(0.1).to_dense(), 10 * torch.eye(6, dtype=torch.float64))
    assert dead.inverse(0.1, "factored").to_dense().isfinite().all()


def mixed_sizes() -> tuple[nn.Module, EmpiricalRisk]:
    """Two layers of equal size whose curvature differs in scale, and groups of channels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 1), nn.Flatten()
    )
    model.append(nn.Unflatten(1, (2, 3))).append(nn.Conv1d(2, 2, 2, groups=2)).append(nn.Flatten())
    model = model.double()
    data = torch.randn(20, 3, dtype=torch.float64), torch.randint(4, (20,))
    return model, EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


@pytest.mark.parametrize("make", [KFAC, EKFAC, exact_blocks, exact_diagonal])
def test_relative_damping_is_in_units_of_mean_eigenvalues(make: Any) -> None:
    """The mean eigenvalue is that of the dense block of all parameters of a layer."""
    _, risk = mixed_sizes()
    K = make(risk)
    identity = torch.eye(K.shape[0], dtype=torch.float64)
    expected: dict[str, float] = {}
    for name in ("0", "2", "4", "7"):
        block = K.submatrix([f"{name}.weight", f"{name}.bias"]).to_dense()
        expected[name] = 0.1 * float(torch.linalg.eigvalsh(block).mean())
    assert max(expected.values()) > 1.5 * min(expected.values())
    absolute = K.inverse(expected)
    relative = K.inverse(kfs.Relative(0.1))
    close(relative.to_dense(), absolute.to_dense())
    close(product_by_product(relative), absolute.to_dense())
    wrong = K.inverse(0.1 * float(K.trace()) / K.shape[0])
    assert (wrong.to_dense() - relative.to_dense()).norm() > 0.01 * relative.to_dense().norm()
    close(K.power(0.5, kfs.Relative(0.1)).to_dense(), K.power(0.5, expected).to_dense())
    close(K.sample(2, damping=kfs.Relative(0.1)), K.sample(2, damping=expected))
    v = torch.randn(K.shape[0], dtype=torch.float64)
    close(K.solve(v, kfs.Relative(0.1)), absolute @ v)
    shifted = K.shift(kfs.Relative(0.1))
    close(product_by_product(shifted @ absolute), identity)
    close(shifted.logdet(), -absolute.logdet())
    both: dict[str, Any] = dict(expected) | {"2": kfs.Relative(0.1)}
    close(K.inverse(both).to_dense(), absolute.to_dense())
    close(K.inverse(kfs.Relative(0)).to_dense(), K.inverse().to_dense()) if make is EKFAC else None


@pytest.mark.parametrize("method", ["factored", "per-factor"])
def test_relative_damping_of_factors_and_sums(method: Any) -> None:
    K, other = one_block(definite(3), definite(2)), one_block(definite(3, 5), definite(2, 6))
    number = 0.1 * float(K.to_dense().trace()) / 6
    close(K.inverse(kfs.Relative(0.1), method).to_dense(), K.inverse(number, method).to_dense())
    total: Any = K + other
    number = 0.1 * float(total.to_dense().trace()) / 6
    close(total.inverse(kfs.Relative(0.1), method).to_dense(), total.inverse(number, method).to_dense())


class PartlyUsed(nn.Module):
    """Predictions depend on two of four layers, and not on a token, as with DINOv2 without masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(1, 5))
        self.first, self.unused, self.last = nn.Linear(4, 5), nn.Linear(4, 2), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.first(x).tanh())
        return hidden


def partly_used(model: PartlyUsed, only_used: bool = False) -> EmpiricalRisk:
    """A risk of all parameters, or of the used ones."""
    X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    used = ["first.weight", "first.bias", "last.weight", "last.bias"]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, torch.arange(12) % 3), params=used if only_used else None)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_relative_damping_of_parameters_that_are_not_used(make: Any) -> None:
    """It is in units of the mean eigenvalue of used parameters, whose inverse is that of a risk without the others."""
    model = PartlyUsed()
    K, alone = make(partly_used(model)), make(partly_used(model, only_used=True))
    used = list(alone.domain.shapes)
    unused = [name for name in K.domain.shapes if name not in used]
    for method in ("exact", "factored", "per-factor") if make is KFAC else ("exact",):
        inverse = K.inverse(kfs.Relative(0.1), method)
        close(inverse.submatrix(used).to_dense(), alone.inverse(kfs.Relative(0.1), method).to_dense())
        rest = inverse.submatrix(unused).to_dense()
        mean = alone.to_dense().diagonal().mean()
        close(rest, torch.eye(len(rest)).double() / (0.1 * mean))
    with pytest.raises(SolverError, match=r"has no curvature, and neither has any other block.*absolute number"):
        (0 * K).inverse(kfs.Relative(0.1))


def test_influence_and_merging_with_parameters_that_are_not_used() -> None:
    """Their gradients are zero, so scores do not depend on them; merging averages their values."""
    model, other = PartlyUsed(), PartlyUsed()
    risk, alone = partly_used(model), partly_used(model, only_used=True)
    close(kfs.Influence(EKFAC(risk)).scores(risk, risk), kfs.Influence(EKFAC(alone)).scores(alone, alone))
    with torch.no_grad():
        other.token.add_(1.0)
    merged = kfs.merge([model, other], [KFAC(risk), KFAC(partly_used(other))])
    close(merged["token"], other.token.detach() - 0.5)


def test_relative_damping_refuses() -> None:
    for bad in (-0.1, float("nan"), "much", None):
        with pytest.raises(DtypeError, match="A relative damping is"):
            kfs.Relative(bad)  # type: ignore[arg-type]
    zero = one_block(torch.zeros(3, 3).double(), definite(2))
    with pytest.raises(SolverError, match=r"block 'W' has no curvature.*absolute number"):
        zero.inverse(kfs.Relative(0.1))
    product: Any = one_block(definite(3), definite(2)) @ one_block(definite(3, 1), definite(2, 1))
    with pytest.raises(ModelError, match="not symmetric"):
        product.shift(kfs.Relative(0.1))


@pytest.mark.parametrize("method", [None, "exact", "factored", "per-factor"])
def test_damped_blocks_have_the_damped_inverse(method: Method | None) -> None:
    """This is true for any structure. The default method is factored if there is a dense factor."""
    d = torch.tensor([0.3, 0.2], dtype=torch.float64)
    factors = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    dense = [Factor.dense(F @ F.transpose(1, 2) + 0.1 * torch.eye(3)) for F in factors]
    diagonal = [Factor.diagonal(F.square().sum(2)) for F in factors]
    identity = Factor.identity(3, torch.ones(2, dtype=torch.float64))
    blocks: list[Structure] = [
        Kronecker(dense[0], dense[1]),
        Kronecker(dense[0], diagonal[1]),
        Kronecker(dense[0], identity),
        Kronecker(diagonal[0], diagonal[1]),
        KroneckerSum((Kronecker(dense[0], dense[1]), Kronecker(dense[2], dense[3]))),
    ]
    for block in blocks:
        both_diagonal = isinstance(block, Kronecker) and block.A.kind == block.B.kind == "diagonal"
        meant: Method = method or ("exact" if both_diagonal else "factored")
        expected = torch.linalg.inv(damped_inverse(block, d, meant).to_dense())
        torch.testing.assert_close(damped(block, d, method).to_dense(), expected)
        assert damped(block, torch.zeros_like(d), method) is block
    eigen = Kronecker(dense[0], dense[1]).eigenbasis()
    if method in {None, "exact"}:
        torch.testing.assert_close(damped(eigen, d, method).to_dense(), eigen.shift(d).to_dense())
    else:
        with pytest.raises(ModelError, match=f"cannot have {method} damping"):
            damped(eigen, d, method)
