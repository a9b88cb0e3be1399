"""Everything that a plan depends on: two calls that differ in one respect must not share a plan.

Unless stated otherwise, the oracle is the exact matrix: for any uses, EKFAC's trace is that of the GGN.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk
from tests.factors.models import Function
from tests.operators.contract import close


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def trace_is_exact(model: nn.Module, data: Any, *names: str) -> None:
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    found, exact = EKFAC(risk), GGN(risk)
    for name in names:
        close(found.submatrix([name]).to_dense().trace(), exact.submatrix([name]).to_dense().trace())


def test_number_of_data() -> None:
    """Equal numbers of rows, from fewer examples with more positions each."""
    model = Function(
        lambda m, x: F.linear(x.flatten(0, 1), m.W).tanh().unflatten(0, x.shape[:2]).mean(1),
        W=normal(2, 3),
    )
    trace_is_exact(model, [(normal(2, 6, 3), normal(2, 2)), (normal(4, 3, 3), normal(4, 2))], "W")


def test_batch_axis() -> None:
    """Attention's output projection is applied to `[sequence * batch, features]`, the call below to another order."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.attention(x, x, x, need_weights=False)[0].tanh()
            h = F.linear(h.flatten(0, 1), self.attention.out_proj.weight, None)  # in the same way as attention
            out: Tensor = h.unflatten(0, x.shape[:2]).mean(1)
            return out

    trace_is_exact(Twice().double(), (normal(3, 5, 4), normal(3, 4)), "attention.out_proj.weight")


@pytest.mark.parametrize("constant_first", [False, True])
def test_data_and_constants_of_the_same_shape(constant_first: bool) -> None:
    constant = normal(4, 3)

    def compute(m: Any, x: Tensor) -> Tensor:
        early = F.linear(constant, m.W).mean(0) if constant_first else 0.0
        h = F.linear(x, m.W)
        late = 0.0 if constant_first else F.linear(constant, m.W).mean(0)
        return (h + (early + late)).tanh()

    trace_is_exact(Function(compute, W=normal(2, 3)), (normal(4, 3), normal(4, 2)), "W")


def test_keyword_arguments() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (4,), weight=m.s, eps=1e-5)
        return F.layer_norm(h.tanh(), (4,), weight=m.s, eps=1.0)

    trace_is_exact(Function(compute, s=normal(4)), (normal(5, 4), normal(5, 4)), "s")


def test_strides_of_views() -> None:
    """The first rows of a weight, and their transpose, have the same first element and the same shape."""
    model = Function(lambda m, x: F.linear(F.linear(x, m.W[:3]).tanh(), m.W[:3].T), W=normal(4, 3))
    trace_is_exact(model, (normal(5, 3), normal(5, 3)), "W")


def test_constants_that_take_their_type_from_data() -> None:
    constant = torch.randn(6, 3)

    def compute(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            converted = constant.type_as(x)
        return x * F.linear(converted, m.W).tanh().mean(0)

    model = Function(compute, W=normal(2, 3))
    trace_is_exact(model, (normal(5, 2), normal(5, 2)), "W")


def test_precision_of_autocast() -> None:
    """Inputs are rounded in the precision of the operation, even if it differs from that of an earlier batch."""

    def compute(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16 if float(x.detach()[0, 0]) > 0 else torch.float16):
            return F.linear(x, m.W).float()

    model = Function(compute, W=torch.randn(2, 3))
    X = torch.rand(4, 3)
    data = [(X, torch.randn(4, 2)), (-X, torch.randn(4, 2))]
    A = KFAC(EmpiricalRisk(model, nn.MSELoss(), data)).blocks["W"].A
    rounded = torch.cat([X.bfloat16().double(), -X.half().double()])
    expected = sum((torch.outer(x, x) for x in rounded), torch.zeros(3, 3, dtype=torch.float64))
    # Up to a common factor, and to the sums' precision of 1e-7; bfloat16 rounds by 4e-3.
    torch.testing.assert_close(A.double() / A.double().trace(), expected / expected.trace(), rtol=0, atol=1e-6)


def test_copies_of_two_parameters() -> None:
    model = Function(lambda m, x: (x @ m.W.clone()).tanh() @ m.V.clone(), W=normal(3, 3), V=normal(3, 3))
    trace_is_exact(model, (normal(5, 3), normal(5, 3)), "W", "V")


def test_the_same_function_of_two_parameters() -> None:
    model = Function(lambda m, x: (x * torch.sigmoid(m.p)).tanh() * torch.sigmoid(m.q), p=normal(3), q=normal(3))
    trace_is_exact(model, (normal(5, 3), normal(5, 3)), "p", "q")


def test_results_of_one_function_with_different_shapes() -> None:
    model = Function(lambda m, x: (x * m.p.sum()).tanh() * m.p.sum(0), p=normal(3, 4))
    trace_is_exact(model, (normal(5, 4), normal(5, 4)), "p")


def test_a_bias_that_only_some_batches_use() -> None:
    """The trace over weight and bias is exact, since a product without bias has no gradient there."""
    model = Function(
        lambda m, x: F.linear(x, m.W, m.b if float(x.detach()[0, 0]) > 0 else None).tanh(),
        W=normal(2, 3),
        b=normal(2),
    )
    X = torch.rand(4, 3, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, normal(4, 2)), (-X, normal(4, 2))])
    close(EKFAC(risk).to_dense().trace(), GGN(risk).to_dense().trace())


def test_convolutions_that_crop() -> None:
    """A transposed convolution with more padding than its kernel crops pixels."""
    model = nn.Sequential(nn.ConvTranspose1d(2, 4, 1, padding=1, bias=False), nn.Tanh(), nn.Flatten()).double()
    trace_is_exact(model, (normal(3, 2, 5), normal(3, 12)), "0.weight")
