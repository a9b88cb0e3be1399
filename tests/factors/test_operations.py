"""One example and one position: KFAC of every operation equals the exact curvature, for every Fisher and every loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import LossError
from kfs.factors import KFAC, inspect
from kfs.losses.draws import Draws
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import ONE_POSITION, Case, Function, between
from tests.losses.cases import CASES as LOSSES
from tests.operators.contract import close

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, about bilinear


def data(case: Case, num_data: int) -> tuple[Tensor, Tensor]:
    X = torch.randint(5, (num_data, 1)) if case.tokens else torch.randn(num_data, 3, dtype=torch.float64)
    return X, torch.randn(num_data, 2, dtype=torch.float64)


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ONE_POSITION, ids=str)
def test_one_datum(case: Case, sharing: Any) -> None:
    model = make(case)
    risk = EmpiricalRisk(model, nn.MSELoss(), data(case, 1))
    exact = {"type-2": GGN(risk), "empirical": Fisher(risk, "empirical"), "mc": Fisher(risk, "type-1", mc_samples=2)}
    for fisher, curvature in exact.items():
        K = KFAC(risk, fisher, sharing, mc_samples=2)  # type: ignore[arg-type]
        for block in K.blocks.values():
            expected = curvature.submatrix(block.layout.params).to_dense()
            actual = K.submatrix(block.layout.params).to_dense()
            if case.reduce_only and sharing == "expand":
                assert not torch.allclose(actual, expected)
            elif case.name == "rows":  # two independent blocks
                mask = torch.block_diag(torch.ones(8, 8), torch.ones(8, 8)).bool()
                close(actual, torch.where(mask, expected, 0))
            else:
                close(actual, expected)


@pytest.mark.parametrize("case", ONE_POSITION, ids=str)
def test_coverage_does_not_depend_on_the_number_of_data(case: Case) -> None:
    model = make(case)
    tables = [inspect(model, data(case, num_data)[0]) for num_data in (1, 3)]
    assert not tables[0].uncovered
    assert [(row.parameter, row.block, row.A, row.B) for row in tables[0].rows] == [
        (row.parameter, row.block, row.A, row.B) for row in tables[1].rows
    ]


@pytest.mark.parametrize("case", ONE_POSITION, ids=str)
def test_joint_and_separate_bias(case: Case) -> None:
    """Separate blocks equal the joint block without the blocks between weight and bias."""
    risk = EmpiricalRisk(make(case), nn.MSELoss(), data(case, 3))
    joint, separate = KFAC(risk), KFAC(risk, joint_bias=False)
    assert all(block.layout.bias is None for block in separate.blocks.values())
    for name in risk.params:
        close(separate.submatrix(name).to_dense(), joint.submatrix(name).to_dense())


class Around(nn.Module):
    """Predicts given numbers, at which a linear layer is applied."""

    def __init__(self, f: Tensor) -> None:
        super().__init__()
        self.f, self.layer = f, nn.Linear(3, f[0].numel()).double()
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.f + self.layer(x).reshape(-1, *self.f.shape[1:])
        return result


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_every_loss(case: Any) -> None:
    """With one example, KFAC equals the Fisher (or GGN) of any loss, and raises the same errors."""
    torch.manual_seed(0)
    loss, f, y = case.make()
    risk = EmpiricalRisk(Around(f[1:2]), loss, (torch.randn(1, 3, dtype=torch.float64), y[1:2]))
    operators: dict[str, Callable[[], Any]] = {
        "type-2": lambda: Fisher(risk, "type-2"),
        "ggn": lambda: GGN(risk),
        "mc": lambda: Fisher(risk, "type-1", mc_samples=3),
        "empirical": lambda: Fisher(risk, "empirical"),
    }
    factors: dict[str, Callable[[], Tensor]] = {
        "type-2": lambda: loss.fisher_factor(f[1:2], y[1:2]),
        "ggn": lambda: loss.hessian_factor(f[1:2], y[1:2]),
        "mc": lambda: loss.sampled_gradient(f[1:2], y[1:2], Draws(0, 0, 0)),
        "empirical": lambda: loss.gradient(f[1:2], y[1:2]),
    }
    for fisher, operator in operators.items():
        try:
            factors[fisher]()
        except LossError:
            assert fisher != "empirical" and (case.fisher != "equal" or not case.convex)  # noqa: PT018
            with pytest.raises(LossError):
                KFAC(risk, fisher, mc_samples=3)  # type: ignore[arg-type]
        else:
            close(KFAC(risk, fisher, mc_samples=3).to_dense(), operator().to_dense())  # type: ignore[arg-type]


def test_rules_and_what_they_leave_alone() -> None:
    """Operations that only resemble one with a rule return no plan, and are reported as not covered."""
    W = torch.randn(4, 4)
    uncovered = {
        "scaled addmm": lambda m, x: torch.addmm(x, x, m.W, beta=2.0),
        "vector": lambda m, x: x @ m.W[0].outer(m.W[1]),
        "trace einsum": lambda m, x: torch.einsum("ni,jj->ni", x, m.W),
        "ellipsis": lambda m, x: torch.einsum("...i,io->...o", x, m.W),
        "square": lambda m, x: x @ (m.W * m.W),
        "function": lambda m, x: x @ m.W.tanh(),
        "in place": lambda m, x: x @ m.W.clone().add_(x[:1]),
        "other copies": lambda m, x: x @ m.W[:, :2].contiguous().repeat(1, 2),
        "pair": lambda m, x: x @ torch.linalg.qr(m.W)[0],
    }
    X = torch.randn(3, 3)
    for name, function in uncovered.items():
        assert list(inspect(between(Function(function, W=W)), X, audit=False).uncovered) == ["2.W"], name
